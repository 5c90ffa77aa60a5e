"""Tests of the test suite's structure: shared code is in `tests/support` only."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

from support.modules import imported

TESTS = Path(__file__).parents[1]
FILES = sorted(TESTS.rglob("*.py"))


def test_tests_import_only_support() -> None:
    """No test module imports another test module."""
    own = {path.stem for path in FILES if path.parent != TESTS / "support"}
    own |= {path.name for path in TESTS.iterdir() if path.is_dir()} - {"support"} - set(sys.stdlib_module_names)
    wrong = [
        f"{path.relative_to(TESTS)} imports {target}"
        for path in FILES
        for target in imported(path)
        if target.partition(".")[0] in own
    ]
    assert not wrong


def test_support_contains_no_tests() -> None:
    for path in (TESTS / "support").glob("*.py"):
        assert not path.name.startswith("test_"), path
        names = [node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
        assert not [name for name in names if name.startswith("test_")], path


def test_conftest_does_not_import_torch() -> None:
    """Tests of I/O, telemetry and the daemon do not need torch."""
    code = "import sys, conftest; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=TESTS)
    assert done.stdout.strip() == "False", done.stderr
