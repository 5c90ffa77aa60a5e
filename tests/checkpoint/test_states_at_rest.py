"""What is said of every state that files at rest can be in: never nothing, never one thing here and another there."""

from __future__ import annotations

import re

import pytest

from support.ranks import RankPool
from support.states import BEGIN, END, PAGE, STATES, Answer, Ground, report

WHOLE = {"undamaged run", "marker `infinity.run`: flipped bit"}
"""States in which nothing is lost: a marker is kept three times."""
NOT_READ_BY_EXPORT = {"data file: flipped bit in a page of the newest checkpoint"}
"""A page of weights that were computed from a master: an export reads the master."""


@pytest.fixture(scope="module")
def asked(pair: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Ground, dict[str, Answer]]:
    """Every state, and what was said of it."""
    ground = Ground(tmp_path_factory.mktemp("states"), pair)
    return ground, {state.name: ground.answer(state) for state in STATES}


def test_nobody_is_silent_and_nobody_contradicts(asked: tuple[Ground, dict[str, Answer]]) -> None:
    """What is not resumed from is bad or passed over with words; export takes what resume takes, or neither does."""
    _, answers = asked
    for name, found in answers.items():
        if name in WHOLE:
            assert (found.resumed, found.exported, found.verified) == (6, 6, 0), name
            assert "intact" in found.verify, name
            continue
        good = answers["undamaged run"]
        assert found.verify != good.verify or found.gc != good.gc, f"{name}: silent"
        assert re.sub("scrubbing|verifying", "", found.scrub) == found.verify, name
        if found.resumed < 0:
            nothing = "no checkpoint" in found.verify or "ignored" in found.verify
            assert found.verified == 1 or nothing, f"{name}: verify accepts what resume does not"
        if found.verified == 0 and "ignored" not in found.verify and "no checkpoint" not in found.verify:
            assert found.resumed == found.exported == 6, f"{name}: verify says nothing of it"
        if name not in NOT_READ_BY_EXPORT:
            assert found.exported == found.resumed, f"{name}: resume and export take different checkpoints"
        assert found.after_gc.split("; ")[0] == found.resume.split("; ")[0], f"{name}: gc has changed what is resumed"


def test_what_is_resumed_is_what_was_checkpointed(asked: tuple[Ground, dict[str, Answer]]) -> None:
    """The loss of the next step depends on the checkpoint alone, whatever lies beside it."""
    _, answers = asked
    seen: dict[tuple[int, int], float] = {}
    for state in STATES:
        found = answers[state.name]
        if found.resumed >= 0:
            key = (state.ranks, found.resumed)
            assert seen.setdefault(key, found.loss) == found.loss, state.name
    assert {(1, 3), (1, 6), (2, 3)} <= seen.keys()


def test_the_page_says_what_happens(asked: tuple[Ground, dict[str, Answer]]) -> None:
    """Compare results and messages with docs/reference/failures.md (`PYTHONPATH=tests python -m support.states`)."""
    ground, answers = asked
    assert PAGE.read_text().partition(BEGIN)[2].partition(END)[0] == report(ground, answers)
