"""Tests of docs/how-to/security.md: every test that it cites exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_cited_test_exists() -> None:
    file, cited = "", 0
    for path, test in re.findall(r"`((?:\w+/)*\w+\.py)?::(test_\w+)`", (ROOT / "docs/how-to/security.md").read_text()):
        file = path or file
        assert f"def {test}(" in (ROOT / "tests" / file).read_text(), f"{file}::{test}"
        cited += 1
    assert cited >= 20
