"""Fixtures of command tests: an empty folder, trials in processes that start quickly, and a simulated machine."""

from __future__ import annotations

import multiprocessing
import tempfile
from pathlib import Path

import pytest

from support.doctor import Machine
from support.processes import fork_server


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to an empty folder whose subfolder `tmp` receives the stats files."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def forked_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the trials of `infinity tune` in a process of `fork_server` instead of a new Python process."""
    context = fork_server()
    monkeypatch.setattr(multiprocessing, "get_context", lambda kind: context)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Return a machine on which every check passes."""
    return Machine(tmp_path / "root")
