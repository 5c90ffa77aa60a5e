"""Tests of docs/how-to/plan.md: its tables match the stored results, and its numbers the code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from infinity.estimate import advice, machine
from infinity.estimate.estimate import HIDDEN
from support.command import run_here
from support.plan_page import NODES, errors, paper, shardings

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "plan.md").read_text()
RESULTS = ROOT / "benchmarks" / "results"


def block(name: str) -> str:
    """Return the block after a named comment, up to the next blank line."""
    return PAGE.split(f"<!-- {name} -->\n")[1].strip().split("\n\n")[0]


def test_the_tables_match_the_results() -> None:
    """Run `PYTHONPATH=tests .venv/bin/python -m support.plan_page` to print them."""
    assert block("errors") == errors(json.loads((RESULTS / "plan.json").read_text()))
    assert block("paper") == paper(json.loads((RESULTS / "plan-paper.json").read_text()))


def test_the_comparison_of_shardings_is_that_of_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run `PYTHONPATH=tests .venv/bin/python -m support.plan_page` to update it."""
    monkeypatch.setenv("COLUMNS", "80")
    assert " ".join(NODES) in " ".join(PAGE.split())
    assert block("shardings") == f"```\n{shardings(run_here(*NODES, '--no-changes').output)}\n```"


def test_prediction_errors_are_within_the_goals() -> None:
    """The stored results cover at least twelve setups of models, batches, host caches and devices."""
    found = json.loads((RESULTS / "plan.json").read_text())
    for key, number in (("model", 2), ("tokens", 3), ("host_cache", 2), ("device", 2)):
        assert len({row[key] for row in found["setups"]}) == number
    assert len(found["setups"]) >= 12
    assert found["bytes_error_worst"] <= 0.01
    assert found["time_error_median"] <= 0.10
    assert found["time_error_worst"] <= 0.20


def test_update_costs_match_the_measurements() -> None:
    """Two digits are compared."""
    measured = json.loads((RESULTS / "plan.json").read_text())["update_nanoseconds"]
    assert {name: float(f"{value:.2g}") for name, value in measured.items()} == {
        name: pytest.approx(1e9 * each) for name, each in machine.UPDATE_SECONDS.items()
    }


def test_numbers_match_the_code() -> None:
    words = " ".join(PAGE.split())
    assert f"{machine.REACHED:.0%} of the peak".replace("%", " %") in words
    assert f"at least {advice.LEAST_GAIN:.0%}".replace("%", " %") in words
    assert f"at most {HIDDEN - 1:.0%}" in words
