"""Tests of all states that the files of a stopped run can be in: each command reports damage, and all agree."""

from __future__ import annotations

import re

import pytest

from support.ranks import RankPool
from support.states import BEGIN, END, PAGE, STATES, DamagedRuns, Results, report

UNDAMAGED = {"undamaged run", "marker `infinity.run`: flipped bit"}
"""States in which nothing is lost, because a marker is stored three times."""
NOT_READ_BY_EXPORT = {"data file: flipped bit in a page of the newest checkpoint"}
"""States that damage only computed weights: an export reads the master weights."""


@pytest.fixture(scope="module")
def results(pair: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[DamagedRuns, dict[str, Results]]:
    """Reports of all commands for every state."""
    runs = DamagedRuns(tmp_path_factory.mktemp("states"), pair)
    return runs, {state.name: runs.results(state) for state in STATES}


def test_commands_report_damage_and_agree(results: tuple[DamagedRuns, dict[str, Results]]) -> None:
    """A checkpoint that resume rejects is reported as damaged or ignored, and export rejects it as well."""
    _, by_state = results
    for name, found in by_state.items():
        if name in UNDAMAGED:
            assert (found.resumed, found.exported, found.verified) == (6, 6, 0), name
            assert "intact" in found.verify, name
            continue
        good = by_state["undamaged run"]
        assert found.verify != good.verify or found.gc != good.gc, f"{name}: not reported"
        assert re.sub("scrubbing|verifying", "", found.scrub) == found.verify, name
        if found.resumed < 0:
            nothing = "no checkpoint" in found.verify or "ignored" in found.verify
            assert found.verified == 1 or nothing, f"{name}: verify accepts what resume does not"
        if found.verified == 0 and "ignored" not in found.verify and "no checkpoint" not in found.verify:
            assert found.resumed == found.exported == 6, f"{name}: verify does not report it"
        if name not in NOT_READ_BY_EXPORT:
            assert found.exported == found.resumed, f"{name}: resume and export take different checkpoints"
        assert found.after_gc.split("; ")[0] == found.resume.split("; ")[0], (
            f"{name}: gc changed the resumed checkpoint"
        )


def test_resumed_state_depends_on_the_checkpoint_alone(results: tuple[DamagedRuns, dict[str, Results]]) -> None:
    """All states that resume from the same checkpoint have the same loss in the next step."""
    _, by_state = results
    seen: dict[tuple[int, int], float] = {}
    for state in STATES:
        found = by_state[state.name]
        if found.resumed >= 0:
            key = (state.ranks, found.resumed)
            assert seen.setdefault(key, found.loss) == found.loss, state.name
    assert {(1, 3), (1, 6), (2, 3)} <= seen.keys()


def test_failures_page_matches_the_results(results: tuple[DamagedRuns, dict[str, Results]]) -> None:
    """`PYTHONPATH=tests python -m support.states` updates docs/reference/failures.md."""
    runs, by_state = results
    assert PAGE.read_text().partition(BEGIN)[2].partition(END)[0] == report(runs, by_state)
