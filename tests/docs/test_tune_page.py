"""Tests of docs/how-to/tune.md: its settings, values, limits, options and files match `infinity tune`."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import typer

from infinity import Config
from infinity.units import GIB, format_size
from infinity_tools import trial_folders
from infinity_tools.cli import app
from infinity_tools.train.recipe import config_class
from infinity_tools.tune import search, trial
from infinity_tools.tune.search_space import ALLOWED, TUNED, Limits, candidate_of, is_size, make_space
from infinity_tools.tune.tune_report import result_lines
from infinity_tools.tune.tuning import FILES

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "tune.md").read_text()
WORDS = " ".join(PAGE.split())
SETTINGS = PAGE.partition("## Tuned settings")[2].partition("##")[0]
ROWS = dict(re.findall(r"^\| `(\w+\.\w+)` \| (.+) \|$", SETTINGS, re.MULTILINE))


def candidate_values(name: str, **limits: Any) -> tuple[Any, ...]:
    """Return the candidate values of a setting on a machine with ample resources."""
    wide = Limits(**{"host_bytes": 64 * GIB, "cores": 64, "formats": "any", **limits})
    space = make_space(candidate_of(Config(), wide.host_bytes), wide, {})
    return next(setting.values for setting in space.settings if setting.name == name)


def test_every_tuned_setting_is_listed_with_its_values() -> None:
    """The settings are listed in the order in which they are tuned."""
    assert tuple(ROWS) == TUNED
    for name in TUNED[:-1]:
        for value in candidate_values(name):
            shown = format_size(value) if is_size(name) else str(value)
            assert value in (0, -1, "auto") or re.search(rf"\b{re.escape(shown)}\b", ROWS[name]), (name, value)
    host = candidate_values("memory.host_bytes")
    assert host == (32 * GIB, 48 * GIB, 64 * GIB)
    assert "half and three quarters of `--host-memory`" in ROWS["memory.host_bytes"]
    assert max(candidate_values("memory.page_bytes", host_bytes=8 << 20)) == 1 << 20
    assert "an eighth of the host cache" in ROWS["memory.page_bytes"]


def test_options_and_their_values_exist() -> None:
    known = {name for command in ("tune", "train") for name in _options(command)}
    known |= {f"--{field.name}" for field in fields(config_class("sft"))}
    assert set(re.findall(r"--[a-z][a-z_-]+", PAGE)) <= known
    assert set(re.findall(r"--allow-format (\w+)", PAGE)) == set(ALLOWED) - {"same"}


def _options(command: str) -> set[str]:
    found = typer.main.get_command(app).commands[command]  # type: ignore[attr-defined]
    return {name for option in found.params for name in option.opts}


def test_numbers_match_the_code() -> None:
    assert (trial.WARM, trial._LEAST_STEPS, trial._LEAST_SECONDS, trial._MOST_STEPS) == (2, 3, 1.0, 20)
    assert "two warm-up steps, then at least three steps and one second, but at most twenty steps" in WORDS
    assert search.GAIN == 0.01
    assert "faster by more than 1 % and by more than half of the noise" in WORDS
    assert "A gain of less than 1 %, or of less than its spread, counts as no gain" in WORDS
    assert f"`{trial_folders.PREFIX}…`" in PAGE


def test_all_output_files_are_listed() -> None:
    table = PAGE.partition("## Output files")[2].partition("##")[0]
    assert tuple(re.findall(r"^\| `(\S+)` \|", table, re.MULTILINE)) == FILES


def test_example_result_lines_match_the_output() -> None:
    gain = {"over_start": 1.14, "min": 1.127, "max": 1.158, "rounds": 3, "over_worst": 1.76}
    found = {
        "gain": gain, "trials": {"measured": 11, "failed": 0}, "step_seconds": {"start": 0.0679, "best": 0.0603},
        "start_is_defaults": True, "faster": True, "changes": {"memory.page_bytes": 256 << 10}, "candidates": 3,
        "seconds": 22.0, "written_bytes": 1 << 30,
    }  # fmt: skip
    for line in result_lines(found, Path("tuned"))[:2]:
        assert f"\n    {line}\n" in PAGE
    none = {**found, "faster": False, "noise": 0.021, "step_seconds": {"start": 0.0513, "best": 0.0513}}
    assert f"\n    {result_lines(none, Path('tuned'))[0]}\n" in PAGE
    assert "the start is as fast" in result_lines({**none, "start_is_defaults": False}, Path("tuned"))[0]
