"""The command of the Kubernetes Job for two nodes, on two nodes that are not managed by Kubernetes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from support.nodes import Nodes

MANIFEST = Path(__file__).parents[2] / "deploy/kubernetes/trainer-two-nodes.yaml"
PROGRAM = """
import socket
from pathlib import Path

import torch
import torch.distributed as dist

from support.session import EVERY, Session

torch.set_num_threads(1)
dist.init_process_group("gloo")
with Session(Path.cwd(), run={"resume": "auto"}) as session:
    session.run(session.optimizer.steps + EVERY)
    print(f"rank {dist.get_rank()} on {socket.gethostname()}: step {session.optimizer.steps}")
dist.destroy_process_group()
"""


@pytest.mark.wide
def test_ranks_return_to_their_nodes(tmp_path: Path) -> None:
    """The Job is started twice, and the indices of its pods are swapped in between. Its run is resumed in place."""
    yaml = pytest.importorskip("yaml")
    (job,) = (tree for tree in yaml.safe_load_all(MANIFEST.read_text()) if tree["kind"] == "Job")
    shell, option, command = job["spec"]["template"]["spec"]["containers"][0]["command"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with Nodes(tmp_path, 2) as nodes:
        for node in nodes:
            (node.folder / "train.py").write_text(PROGRAM)
        for launch, order in enumerate(([0, 1], [1, 0]), start=1):
            words = command.replace("infinity-nodes-0.infinity-nodes", nodes[order[0]].name)
            words = words.replace("--nproc-per-node 8", "--nproc-per-node 1")
            pods = [
                nodes[order[index]].command(
                    shell,
                    option,
                    words,
                    PATH=path,
                    NODE_IP=nodes[order[index]].address,
                    JOB_COMPLETION_INDEX=str(index),
                )
                for index in (0, 1)
            ]
            for pod in pods:
                pod.wait()
                rank = pod.node.name.removeprefix("node")
                assert f"rank {rank} on {pod.node.name}: step {3 * launch}\n" in pod.output
        for node in nodes:
            assert len(list(node.folder.glob("nvme0/*/rank*.pages"))) == 1
