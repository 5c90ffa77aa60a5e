"""Tests of docs/how-to/probe.md: its numbers, options and quoted output match the code."""

from __future__ import annotations

import re
from pathlib import Path

from infinity.io.probe.points import MARGIN
from infinity.io.probe.quick import QUICK_BYTES, QUICK_SECONDS
from infinity.io.probe.sustained import FALLEN, FLUSHED, MOST_BYTES, WINDOW
from infinity.units import format_size
from infinity_tools.probe.recommendation import ROUNDS
from support.command import run_here

PAGE = " ".join((Path(__file__).parents[2] / "docs" / "how-to" / "probe.md").read_text().split())


def test_numbers_match_the_code() -> None:
    assert (ROUNDS, QUICK_SECONDS) == (3, 0.5)
    for statement in (
        f"within {MARGIN * 100:.0f} % of the best",
        f"by more than {MARGIN * 100:.0f} % in three alternating rounds",
        f"half of the free space, {format_size(MOST_BYTES)} at most",
        f"the last {WINDOW} seconds is compared with the median of the first {WINDOW} seconds. Below {FALLEN} of it",
        f"writing ends {FLUSHED} seconds later",
        f"With less than {4 * WINDOW} seconds the windows are a quarter",
        f"for half a second with a file of {format_size(QUICK_BYTES)} in each folder",
    ):
        assert statement in PAGE


def test_options_and_quoted_output_exist(tmp_path: Path) -> None:
    known = run_here("probe", "-h").output
    for option in set(re.findall(r"`(--[a-z][a-z-]+)", PAGE)):
        assert option in known, option
    printed = " ".join(
        run_here("probe", tmp_path, "--size", "1MiB", "--block", "4KiB", "--depth", "1", "--seconds", "0.01",
                 "--sustained", "--sustained-bytes", "1MiB").output.split()
    )  # fmt: skip
    for text in ("block depth", "read write mixed p50 p95 p99 max", "too short to detect a drop"):
        assert text in printed
