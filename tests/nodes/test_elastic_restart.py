"""`torchrun --nnodes 1:2` continues when a node and its drive are lost, and includes the node when it returns."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest

from support.elastic_training import train
from support.nodes import PATIENCE, Nodes
from support.ranks import RankPool

WORDS = [
    "--nnodes=1:2", "--max-restarts=9", "--monitor-interval=0.5",
    "--rdzv-conf=last_call_timeout=20",  # only a round with one node waits for this time
]  # fmt: skip
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # see "Elastic restarts" in docs/how-to/several-nodes.md


def wait_for(*files: Path) -> None:
    """Wait until files exist."""
    end = time.monotonic() + PATIENCE
    while not all(file.exists() for file in files):
        assert time.monotonic() < end, files
        time.sleep(0.1)


@pytest.mark.wide
def test_training_continues_on_fewer_and_on_more_nodes(pair: RankPool, tmp_path: Path) -> None:
    """Losses equal those of runs that resume from the same checkpoints deliberately."""
    (shared := tmp_path / "shared").mkdir()
    with Nodes(tmp_path, 2) as nodes:
        words = [word for word in nodes.rendezvous(1) if not word.startswith("--nnodes")]
        words += [*WORDS, "-m", "support.elastic_training", nodes.local, shared]
        first, second = (node.torchrun(*words, **OWN_STORE) for node in nodes)
        wait_for(shared / "waiting-0-0", shared / "waiting-0-1")
        shutil.copytree(shared / "mirror", tmp_path / "mirror3")
        second.node.kill()
        shutil.rmtree(second.node.folder / "nvme0")
        wait_for(shared / "waiting-3-0")
        shutil.copytree(shared / "mirror", tmp_path / "mirror6")
        second = second.node.torchrun(*words, **OWN_STORE)
        first.wait()
        second.wait()
    losses = {file.name: json.loads(file.read_text()) for file in (shared / "losses").iterdir()}
    assert {name: len(found) for name, found in losses.items()} == {
        "ranks-2-from-0.json": 4, "ranks-1-from-3.json": 4, "ranks-2-from-6.json": 3,
    }  # fmt: skip

    (deliberate := tmp_path / "deliberate").mkdir()
    train(deliberate, deliberate, {"resume": f"file://{tmp_path}/mirror3"}, until=7)
    (again := tmp_path / "again").mkdir()
    pair.run(train, again, again, {"resume": f"file://{tmp_path}/mirror6"})
    for file in (*(deliberate / "losses").iterdir(), *(again / "losses").iterdir()):
        assert json.loads(file.read_text()) == losses[file.name], file.name
