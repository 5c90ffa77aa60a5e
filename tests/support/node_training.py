"""Train a tiny model on several ranks with different data, with or without an interruption.

`torchrun -m support.node_training FOLDER RESULTS` trains with an interruption and writes the losses of each rank to a
file in `RESULTS`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from support.session import EVERY, Session


def uninterrupted(folder: Path) -> list[float]:
    """Return this rank's losses of a run."""
    with Session(folder) as session:
        torch.manual_seed(dist.get_rank())
        return session.run()


def interrupted(folder: Path) -> list[float]:
    """Return this rank's losses of a run that is closed after its first checkpoint and resumed."""
    with Session(folder) as session:
        torch.manual_seed(dist.get_rank())
        losses = session.run(EVERY)
    with Session(folder, run={"resume": "latest"}) as session:
        assert session.optimizer.steps == EVERY
        return losses + session.run()


def main() -> None:
    """Train as one rank of torchrun."""
    folder, results = map(Path, sys.argv[1:])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    losses = interrupted(folder)
    (results / f"rank{dist.get_rank()}.json").write_text(json.dumps(losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
