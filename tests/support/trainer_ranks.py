"""What ranks do in tests of Trainers, as torchrun starts them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch.distributed as dist

import infinity
from support.trainers import Outcome, build, by_hand, make, outcome_of, with_adapters


def as_torchrun() -> None:
    """Set what torchrun says in variables: Accelerate asks for nothing else."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # the process group is there already


def hand_written(policy: str, by: dict[str, Any]) -> Outcome:
    """Return what the loop in memory shows on this rank."""
    model = build(policy=policy)
    if by.get("joined"):
        infinity.micro_batches(model, by["accumulation"])
    return by_hand(model, **by)


def offloaded(folder: Path, policy: str, given: dict[str, Any], resume: bool = False) -> tuple[Outcome, list[str]]:
    """Return what a Trainer with its state on NVMe shows on this rank, and the checkpoints that are left."""
    as_torchrun()
    model = build("meta" if resume else "cpu", policy=policy)
    trainer = make(folder / "out", model, nvme=folder / "nvme", **given)
    assert (trainer.args.world_size, trainer.args.process_index) == (dist.get_world_size(), dist.get_rank())
    trainer.train(resume_from_checkpoint=resume)
    outcome = outcome_of(trainer)
    trainer.optimizer.optimizer.close()
    return outcome, sorted(path.name for path in (folder / "out").glob("checkpoint-*"))


def adapters(folder: Path) -> dict[str, tuple[int, ...]]:
    """Train adapters and save them; return their shapes by the names that peft gives them."""
    as_torchrun()
    trainer = make(folder / "out", with_adapters(), nvme=folder / "nvme", max_steps=2)
    trainer.train()
    trainer.save_model()
    trainer.optimizer.optimizer.close()
    trained = {name: param for name, param in trainer.model.named_parameters() if param.requires_grad}
    return {name.replace(".default", ""): tuple(param.shape) for name, param in trained.items()}
