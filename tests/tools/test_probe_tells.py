"""What `infinity probe` measures is known to the node's daemon from then on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from infinity.node import NodeDaemon
from support.command import run_here
from support.daemon_process import daemon


def test_the_daemon_knows_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best of each direction, by drive."""
    session, place = tmp_path / "session", tmp_path / "place"
    for folder in (session, session / "infinity", place):
        folder.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(session))
    options = ["--size", "8MiB", "--block", "64KiB,1MiB", "--depth", "1,2", "--seconds", "0.05", "--json"]
    with daemon(session / "infinity"):
        ended = run_here("probe", str(place), *options)
        assert ended.status == 0, ended.errors
        (measured,) = json.loads(ended.output)["paths"].values()
        answer = NodeDaemon(session / "infinity").ask("bandwidth", paths=[str(place)])
        assert answer is not None
        profile = answer["bandwidth"][str(place)]
    for op in ("read", "write"):
        best = max(found[f"{op}_bytes_per_second"] for found in measured if found["load"] == op)
        assert profile[op] == pytest.approx(best, abs=1)
