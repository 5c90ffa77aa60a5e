"""Fixtures of command tests: empty folders, a finished run, and trials in processes that start quickly."""

from __future__ import annotations

import multiprocessing
import tempfile
from pathlib import Path

import pytest

from support.command import SMALL, run_here
from support.processes import fork_server


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to an empty folder whose subfolder `tmp` receives the stats files."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run in `nvme` that has checkpoints of steps 1 and 2; tests must not change it."""
    place = tmp_path_factory.mktemp("trained")
    (place / "nvme").mkdir()
    steps = ["--max_steps", "2", "--save_steps", "1", "--save_total_limit", "2"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(place))
        assert run_here(*SMALL, *steps, "--nvme", place / "nvme", "--out", place / "out").status == 0
    return place


@pytest.fixture
def runtime(tmp_path: Path) -> Path:
    """Return a runtime folder of a daemon."""
    (tmp_path / "run").mkdir(mode=0o700)
    return tmp_path / "run"


@pytest.fixture
def forked_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the trials of `infinity tune` in a process of `fork_server` instead of a new Python process."""
    context = fork_server()
    monkeypatch.setattr(multiprocessing, "get_context", lambda kind: context)
