"""Tests of `make bench-step ARGS="--against WORKTREE"`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from bench_step import ROOT, figures, headlines, main

IMPORT = """
import sys
from pathlib import Path
import bench_step
bench_step.import_from(Path(sys.argv[1]))
import infinity_daemon, infinity, infinity_tools
print(infinity.__file__, infinity_daemon.__file__, infinity_tools.__file__)
"""


def test_a_variant_imports_the_packages_of_its_tree(tmp_path: Path) -> None:
    for name in ("infinity", "tools", "daemon"):
        (tmp_path / name).symlink_to(ROOT / name)
    words = [sys.executable, "-c", IMPORT, tmp_path]
    done = subprocess.run(words, cwd=ROOT / "benchmarks", capture_output=True, text=True, check=True)
    folders = ("infinity", "daemon/infinity_daemon", "tools/infinity_tools")
    assert done.stdout.split() == [str(tmp_path / folder / "__init__.py") for folder in folders]


def test_two_trees_are_compared_by_the_ratio_of_their_medians() -> None:
    rows = {
        name: [{"seconds": value, "processor_seconds": value, "stall": 0.0, "schedule": "auto"} for value in found]
        for name, found in {"infinity": (3.0, 1.0, 2.0, 9.0, 2.0, 2.0, 3.0), "against": (4.0,) * 7}.items()
    }
    found = figures(rows)
    assert found["against"] == {
        "ratio_of_medians": 0.5,
        "quartiles": {"infinity": [2.0, 2.0, 3.0], "against": [4.0, 4.0, 4.0]},
    }
    result = {"devices": {"drive": {"by_tokens": {"8": found}}}}
    assert headlines({**result, "against_commit": "0"})["against"] == {"drive": {"8": found["against"]}}
    assert "against" not in headlines({"devices": {}})


@pytest.mark.parametrize(("against", "rounds"), [("/", 7), (ROOT, 6)], ids=["no worktree", "too few rounds"])
def test_an_unusable_comparison_is_an_error(
    against: Path | str, rounds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--against", against, "--rounds", rounds, "--out", tmp_path / "out.json")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["bench_step.py", *map(str, options)])
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit, match=f" {against if rounds == 7 else rounds} "):  # a text gives exit status 1
        main()
    assert not list(tmp_path.iterdir())
