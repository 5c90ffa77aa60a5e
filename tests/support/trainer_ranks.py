"""What ranks do in tests of Trainers, as torchrun starts them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch.distributed as dist

import infinity
from infinity import torchrun
from support.trainers import BATCH, LENGTH, Outcome, build, by_hand, dataset, make, outcome_of, with_adapters


def as_torchrun() -> None:
    """Set what torchrun says in variables: Accelerate asks for nothing else."""
    # No port is asked: the process group is there already.
    os.environ |= torchrun.variables(dist.get_rank(), dist.get_world_size(), 1)


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


def uneven(folder: Path, chosen: bool) -> tuple[list[float], dict[str, list[float]], list[int]]:
    """Train on rows of which, in every second step, rank 1 has some that are shorter.

    Args:
        folder: of the run.
        chosen: whether the Trainer chooses between layer-major and loop; else the loop is set for those steps.

    Returns:
        Losses (of rank 0), weights, and the micro-batches that each step ran as one.
    """
    as_torchrun()
    folder.mkdir(exist_ok=True)
    rows = dataset()
    for batch in range(3, len(rows) // BATCH, 8):  # batches go to the ranks in turn, two of each make a step
        for row in range(batch * BATCH, (batch + 1) * BATCH):
            rows[row] = {name: value[: LENGTH - 4] for name, value in rows[row].items()}
    given = {"train_dataset": rows, "gradient_accumulation_steps": 2}
    trainer = make(folder / "out", build(), nvme=folder / "nvme", **given)
    accumulation, joined = trainer._infinity.accumulation, []
    begin = accumulation.begin

    def noted(batches: Any, labels: Any) -> None:
        if chosen:
            begin(batches, labels)
        else:
            accumulation._held, accumulation._joined = [], 2 * (trainer.state.global_step % 2)
        joined.append(accumulation._joined)

    accumulation.begin = noted
    trainer.train()
    outcome = outcome_of(trainer)
    trainer.optimizer.optimizer.close()
    return outcome.losses, {name: value.tolist() for name, value in outcome.weights.items()}, joined


def adapters(folder: Path) -> dict[str, tuple[int, ...]]:
    """Train adapters and save them; return their shapes by the names that peft gives them."""
    as_torchrun()
    trainer = make(folder / "out", with_adapters(), nvme=folder / "nvme", max_steps=2)
    trainer.train()
    trainer.save_model()
    trainer.optimizer.optimizer.close()
    trained = {name: param for name, param in trainer.model.named_parameters() if param.requires_grad}
    return {name.replace(".default", ""): tuple(param.shape) for name, param in trained.items()}


def adapters_nowhere(folder: Path) -> str:
    """Save adapters where rank 0 cannot write; return what this rank is told."""
    as_torchrun()
    trainer = make(folder / "out", with_adapters(), nvme=folder / "nvme", max_steps=2)
    trainer.train()
    (folder / "file").write_text("")
    target = folder / "file" if dist.get_rank() == 0 else folder / "saved"
    try:
        trainer.model.save_pretrained(str(target), True)  # arguments as peft has them
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        trainer.optimizer.optimizer.close()
    return "nothing"
