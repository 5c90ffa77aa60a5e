"""Tests of README.md: its program runs as printed, and its badges match the metadata."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from infinity.checkpoint.manifest import published_in
from infinity.optional_dependencies import NEWEST_TORCH, OLDEST
from infinity.store.marker import look_for_runs
from support.processes import run_program

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"


def test_the_snippet_runs_in_an_empty_folder(tmp_path: Path) -> None:
    """The program needs no other files, prints a falling loss and writes a checkpoint."""
    snippet = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert snippet is not None
    (tmp_path / "snippet.py").write_text(snippet[1])
    done = run_program(tmp_path / "snippet.py", folder=tmp_path, environment={"XDG_RUNTIME_DIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    (run,) = look_for_runs([tmp_path / "run"])[0]
    assert published_in(run.roots[0] / "checkpoints")
    steps = re.findall(r"^step (\d+): loss (\d+\.\d+)$", done.stdout, re.MULTILINE)
    assert [int(step) for step, _ in steps] == list(range(1, 11))
    losses = [float(loss) for _, loss in steps]
    assert losses[-1] < losses[0]


def test_badges_match_the_metadata() -> None:
    """License, Python and torch versions match pyproject.toml and `infinity.optional_dependencies`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    versions = (OLDEST["python"], OLDEST["torch"], NEWEST_TORCH)
    label = "license: {}, python: {} or newer, torch: {} to {}".format(project["license"], *versions)
    assert f"<title>{label}</title>" in (ROOT / "docs" / "images" / "badges.svg").read_text()
    alternative = "License: {}. Python: {} or newer. torch: {} to {}.".format(project["license"], *versions)
    assert f"![{alternative}](docs/images/badges.svg)" in README.read_text()
