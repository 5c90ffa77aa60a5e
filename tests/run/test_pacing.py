"""Tests of I/O pacing: a rank asks the daemon for its rate limits and continues with any answer."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from typing import Any

import pytest

from infinity.run import pacing
from infinity.run.pacing import Pacing

FOLDERS = {"/drive/0": "/drive/0/run", "/drive/1": "/drive/1/run"}


class Answers:
    """Fake daemon that gives the answers in order and repeats the last one; `asked` counts the requests."""

    def __init__(self, *answers: dict[str, Any] | None) -> None:
        self._answers = list(answers)
        self.asked = 0
        self.ended = threading.Event()

    def ask(self, op: str, **values: object) -> dict[str, Any] | None:
        assert (op, values) == ("pace", {"run_id": "r", "paths": list(FOLDERS)})
        self.asked += 1
        if len(self._answers) > 1:
            return self._answers.pop(0)
        self.ended.set()
        return self._answers[0]


def applied_limits(monkeypatch: pytest.MonkeyPatch, *answers: dict[str, Any] | None) -> list[Mapping[str, float]]:
    """Return the limits that the engine received for these answers of a daemon."""
    monkeypatch.setattr(pacing, "_EVERY_SECONDS", 0.001)
    daemon, found = Answers(*answers), []
    it = Pacing(daemon, "r", list(FOLDERS), list(FOLDERS.values()), found.append)  # type: ignore[arg-type]
    assert daemon.ended.wait(300)
    it.close()
    return found


def rates(**values: object) -> dict[str, Any]:
    return {"ok": True, "rates": {f"/drive/{name[1:]}": value for name, value in values.items()}}


def test_limits_are_updated_when_the_answer_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits are set per folder; a drive without a rate is not limited."""
    found = applied_limits(monkeypatch, rates(), rates(d0=5e8), rates(d0=5e8), rates(d0=4e8, d1=1e8), rates(), rates())
    assert found == [{FOLDERS["/drive/0"]: 5e8}, {FOLDERS["/drive/0"]: 4e8, FOLDERS["/drive/1"]: 1e8}, {}]


def test_limits_end_after_three_unanswered_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer unanswered requests change nothing."""
    assert applied_limits(monkeypatch, rates(d0=5e8), None, rates(d0=5e8), None, None, rates(d0=5e8)) == [
        {FOLDERS["/drive/0"]: 5e8}
    ]
    assert applied_limits(monkeypatch, rates(d0=5e8), None, None, None, None) == [{FOLDERS["/drive/0"]: 5e8}, {}]


GARBAGE: list[dict[str, Any]] = [
        {"ok": True}, {"rates": 3}, {"rates": ["/drive/0"]}, {"rates": {"/drive/0": -1.0}}, {"rates": {"/drive/0": 0}},
        {"rates": {"/drive/0": math.nan}}, {"rates": {"/drive/0": math.inf}}, {"rates": {"/drive/0": True}},
        {"rates": {"/drive/0": "1e9"}}, {"rates": {"/other": 1.0}}, {"rates": {"/drive/0": 10**400}},
]  # fmt: skip


def test_invalid_answers_set_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    for garbage in GARBAGE:
        found = applied_limits(monkeypatch, garbage, garbage, rates(d1=2e8))
        assert found == [{FOLDERS["/drive/1"]: 2e8}], garbage


def test_tiny_rates_are_raised_to_a_minimum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests would time out at a lower rate, and training must not depend on the daemon."""
    assert applied_limits(monkeypatch, rates(d0=1e-300), rates(d0=1e-300)) == [{FOLDERS["/drive/0"]: float(1 << 20)}]
