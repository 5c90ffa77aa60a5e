"""Train under torchrun with a variable number of nodes, and resume from the newest checkpoint after each restart.

`torchrun -m support.elastic_training FOLDER SHARED UNTIL` trains up to a step, saves a checkpoint every 3 steps, and
writes the losses to `SHARED/losses/ranks-WORLD-SIZE-from-FIRST-STEP.json`. After step 4 of the first start, it waits
for the loss of a node.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from support.session import EVERY, Session

WAITS = EVERY + 1


def train(folder: Path, shared: Path, until: int, run: dict[str, str]) -> None:
    """Train as one rank."""
    with Session(folder, run=run) as session:
        first, losses = session.optimizer.steps, []
        while session.optimizer.steps < until:
            losses.append(session.step())
            if session.optimizer.steps % EVERY == 0:
                session.save_checkpoint()
                session.optimizer._checkpointer.finish()
            if first == 0 and session.optimizer.steps == WAITS:
                (shared / f"waiting{dist.get_rank()}").touch()
                dist.barrier() if dist.get_rank() == 0 else time.sleep(1e6)
    if dist.get_rank() == 0:
        (shared / "losses").mkdir(exist_ok=True)
        (shared / "losses" / f"ranks-{dist.get_world_size()}-from-{first}.json").write_text(json.dumps(losses))


def main() -> None:
    """Train as one rank of torchrun."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    shared = Path(sys.argv[2])
    train(Path(sys.argv[1]), shared, int(sys.argv[3]), {"resume": "auto", "mirror": f"file://{shared}/mirror"})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
