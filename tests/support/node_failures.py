"""Train on several nodes until a test causes a failure, and resume from the last checkpoint."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import infinity
from infinity import peer_failures
from infinity.ranks import Ranks
from support.daemon_process import until
from support.nodes import Node, Nodes, start_ranks
from support.session import EVERY, Session


class NodeRun:
    """A run with the same number of ranks on each node. Rank 0 hosts the store of the process group."""

    def __init__(self, nodes: Nodes | Sequence[Node], ranks: int = 1, *, limit: int = 5, **options: object) -> None:
        """Start the ranks; see `train`. The first node is node 0."""
        self._shared = nodes[0].folder.parent / "shared"
        self._shared.mkdir(exist_ok=True)
        (self._shared / "stop").unlink(missing_ok=True)
        for file in self._shared.glob("rank*"):
            file.unlink()
        self.programs = start_ranks(nodes, ranks, train, str(nodes[0].local), str(self._shared), limit, options)

    def losses(self, rank: int = 0) -> dict[int, str]:
        """Return the losses of a rank so far, by step."""
        file = self._shared / f"rank{rank}"
        lines = file.read_text().splitlines() if file.exists() else []
        return {int(step): loss for step, _, loss in (line.partition(" ") for line in lines)}

    def wait_for_steps(self, count: int) -> None:
        """Wait until every rank has finished a number of further steps, or a rank has exited."""
        ranks = range(len(self.programs))
        before = [len(self.losses(rank)) for rank in ranks]
        until(
            lambda: (
                any(program.poll() is not None for program in self.programs)
                or all(len(self.losses(rank)) >= before[rank] + count for rank in ranks)
            ),
            900,
        )

    def stop(self) -> None:
        """End the run after the current step."""
        (self._shared / "stop").touch()


def train(local: str, shared: str, limit: int, options: dict[str, object]) -> None:
    """Train until the file `stop` exists, and write the losses to a file.

    Args:
        local: Folder of the run's files on this node.
        shared: Folder for the losses.
        limit: `run.heartbeat_timeout_seconds`.
        options: `resume`: whether to resume the last checkpoint. `fail`: rank that raises an error after a step.
            `linger`: rank that trains without collectives for a while after the others have exited. `hsdp`: whether
            each node has a replica of the model. `own_data`: whether the data of the ranks differs. `run`: further
            settings of the section ``run``.
    """
    logging.basicConfig(format="%(message)s")
    peer_failures.GRACE_SECONDS = 1.0
    ranks = Ranks(int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"]))
    dist.init_process_group("gloo")
    if options.get("hsdp"):
        count = ranks.local_world_size
        mesh = init_device_mesh("cpu", (ranks.world_size // count, count), mesh_dim_names=("replicate", "shard"))
        infinity.mesh = lambda *_: mesh
    run = {"heartbeat_timeout_seconds": limit, **({"resume": "latest"} if options.get("resume") else {})}
    run |= options.get("run", {})  # type: ignore[operator]
    file, telemetry = Path(shared, f"rank{ranks.rank}"), {"runtime_dir": f"{local}/run"}  # of the node's daemon, if any
    with Session(Path(local), run=run, telemetry=telemetry) as session, file.open("w", buffering=1) as losses:
        if options.get("own_data") and not session.optimizer.steps:
            torch.manual_seed(ranks.rank)
        while not ranks.agree(Path(shared, "stop").exists()):
            loss = session.step()
            losses.write(f"{session.optimizer.steps} {loss.hex()}\n")
            if session.optimizer.steps % EVERY == 0:
                session.save_checkpoint()
            if options.get("fail") == ranks.rank:
                raise ValueError("user error")
            time.sleep(0.02)
        if options.get("linger") == ranks.rank:
            time.sleep(2 * limit)
            torch.save(session.model.state_dict(), Path(shared, "weights"))


def reference(folder: Path, steps: int) -> dict[int, str]:
    """Return the losses of an uninterrupted run, by step, in the format of `NodeRun.losses`."""
    with Session(folder) as session:
        return {step + 1: loss.hex() for step, loss in enumerate(session.run(steps, every=0))}
