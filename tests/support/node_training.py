"""Train a tiny model on several ranks with different data, with or without an interruption."""

from __future__ import annotations

import json
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


def train(folder: str, results: str) -> None:
    """Train with an interruption as one rank, and write its losses to a file in `results`."""
    dist.init_process_group("gloo")
    losses = interrupted(Path(folder))
    Path(results, f"rank{dist.get_rank()}.json").write_text(json.dumps(losses))
    dist.destroy_process_group()
