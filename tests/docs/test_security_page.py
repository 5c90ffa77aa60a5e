"""docs/how-to/security.md names tests that there are."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_test_that_the_page_names_is_there() -> None:
    file, named = "", 0
    for given, test in re.findall(r"`((?:\w+/)*\w+\.py)?::(test_\w+)`", (ROOT / "docs/how-to/security.md").read_text()):
        file = given or file
        assert f"def {test}(" in (ROOT / "tests" / file).read_text(), f"{file}::{test}"
        named += 1
    assert named >= 20
