"""`torchrun --nnodes 1:2` continues on the remaining nodes after a node and its drive are lost."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest

from support.elastic_training import train
from support.nodes import PATIENCE, Nodes

CONF = "--rdzv-conf=last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"


def wait_for(*files: Path) -> None:
    """Wait until files exist."""
    end = time.monotonic() + PATIENCE
    while not all(file.exists() for file in files):
        assert time.monotonic() < end, files
        time.sleep(0.1)


@pytest.mark.slow
def test_training_continues_without_a_lost_node(tmp_path: Path) -> None:
    """Losses equal those of a run that resumes from the same checkpoint deliberately."""
    (shared := tmp_path / "shared").mkdir()
    with Nodes(tmp_path, 2) as nodes:
        words = [word for word in nodes.rendezvous(1) if not word.startswith("--nnodes")]
        words += ["--nnodes=1:2", "--max-restarts=3", CONF, "-m", "support.elastic_training", nodes.local, shared, "9"]
        first, second = (node.torchrun(*words) for node in nodes)
        wait_for(shared / "waiting0", shared / "waiting1")
        shutil.copytree(shared / "mirror", tmp_path / "mirror")
        second.node.kill()
        shutil.rmtree(second.node.folder / "nvme0")
        first.wait()
    found = json.loads((shared / "losses" / "ranks-1-from-3.json").read_text())
    assert len(found) == 6

    (deliberate := tmp_path / "deliberate").mkdir()
    train(deliberate, deliberate, 9, {"resume": f"file://{tmp_path}/mirror"})
    assert json.loads((deliberate / "losses" / "ranks-1-from-3.json").read_text()) == found
