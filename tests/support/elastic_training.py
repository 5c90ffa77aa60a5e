"""Train under torchrun with a variable number of nodes, and resume from the newest checkpoint after each restart.

`torchrun -m support.elastic_training FOLDER SHARED` trains 9 steps, with a checkpoint every 3 steps. It writes the
losses to `SHARED/losses/ranks-WORLD_SIZE-from-FIRST_STEP.json`. One step after the first checkpoint of each of the
first two starts, it creates `SHARED/waiting-FIRST_STEP-RANK` and waits until a node leaves or joins.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from support.session import EVERY, STEPS, Session


def train(folder: Path, shared: Path, run: dict[str, str], *, until: int = STEPS, waits: bool = False) -> None:
    """Train as one rank."""
    losses: list[float] = []
    with Session(folder, run=run) as session:
        first = session.optimizer.steps
        waits &= first < 2 * EVERY
        while session.optimizer.steps < until:
            if waits and session.optimizer.steps > first + EVERY:
                break
            losses.append(session.step())
            if session.optimizer.steps % EVERY == 0:
                session.save_checkpoint()
                session.optimizer._checkpointer.finish()
        if dist.get_rank() == 0:
            (shared / "losses").mkdir(exist_ok=True)
            (shared / "losses" / f"ranks-{dist.get_world_size()}-from-{first}.json").write_text(json.dumps(losses))
        if waits:
            (shared / f"waiting-{first}-{dist.get_rank()}").touch()
            if dist.get_rank() == 0 and dist.get_world_size() > 1:
                dist.barrier()  # fails when the other node is lost
            time.sleep(1e6)


def main() -> None:
    """Train as one rank of torchrun."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder, shared = map(Path, sys.argv[1:])
    train(folder, shared, {"resume": "auto", "mirror": f"file://{shared}/mirror"}, waits=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
