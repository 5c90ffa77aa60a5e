"""Tests of docs/how-to/probe.md: its numbers, options and quoted output match the code."""

from __future__ import annotations

import re
from pathlib import Path

from support.command import run_here

PAGE = " ".join((Path(__file__).parents[2] / "docs" / "how-to" / "probe.md").read_text().split())


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
