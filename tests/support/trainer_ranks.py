"""Functions that ranks run in tests of the Trainer integration."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch.distributed as dist

import infinity
from infinity import torchrun
from support.trainers import BATCH, LENGTH, Outcome, build, by_hand, dataset, make, outcome_of, with_adapters


def as_torchrun() -> None:
    """Set the environment variables of torchrun, which are all that Accelerate reads."""
    # The port is not used, because the process group exists already.
    os.environ |= torchrun.variables(dist.get_rank(), dist.get_world_size(), 1)


def hand_written(policy: str, options: dict[str, Any]) -> Outcome:
    """Return the outcome of the reference loop in memory on this rank."""
    model = build(policy=policy)
    if options.get("joined"):
        infinity.micro_batches(model, options["accumulation"])
    return by_hand(model, **options)


def offloaded(folder: Path, policy: str, options: dict[str, Any], resume: bool = False) -> tuple[Outcome, list[str]]:
    """Return the outcome of an offloaded Trainer on this rank, and the names of the retained checkpoints."""
    as_torchrun()
    model = build("meta" if resume else "cpu", policy=policy)
    trainer = make(folder / "out", model, nvme=folder / "nvme", **options)
    assert (trainer.args.world_size, trainer.args.process_index) == (dist.get_world_size(), dist.get_rank())
    trainer.train(resume_from_checkpoint=resume)
    outcome = outcome_of(trainer)
    trainer.optimizer.optimizer.close()
    return outcome, sorted(path.name for path in (folder / "out").glob("checkpoint-*"))


def uneven(folder: Path, chosen: bool) -> tuple[list[float], dict[str, list[float]], list[int]]:
    """Train on rows of which some are shorter on rank 1 in every second step.

    Args:
        folder: Folder of the run.
        chosen: Whether the Trainer selects layer-major execution or a loop. Otherwise these steps use the loop.

    Returns:
        Losses (of rank 0), weights, and the number of micro-batches that each step ran as one batch.
    """
    as_torchrun()
    folder.mkdir(exist_ok=True)
    rows = dataset()
    for batch in range(3, len(rows) // BATCH, 8):  # the ranks receive batches alternately, two of each per step
        for row in range(batch * BATCH, (batch + 1) * BATCH):
            rows[row] = {name: value[: LENGTH - 4] for name, value in rows[row].items()}
    options = {"train_dataset": rows, "gradient_accumulation_steps": 2}
    trainer = make(folder / "out", build(), nvme=folder / "nvme", **options)
    accumulation, joined = trainer._infinity.accumulation, []
    begin = accumulation.begin

    def begin_and_record(batches: Any, labels: Any) -> None:
        if chosen:
            begin(batches, labels)
        else:
            accumulation._held, accumulation._joined = [], 2 * (trainer.state.global_step % 2)
        joined.append(accumulation._joined)

    accumulation.begin = begin_and_record
    trainer.train()
    outcome = outcome_of(trainer)
    trainer.optimizer.optimizer.close()
    return outcome.losses, {name: value.tolist() for name, value in outcome.weights.items()}, joined


def adapters(folder: Path) -> dict[str, tuple[int, ...]]:
    """Train and save adapters; return their shapes by their names in peft."""
    as_torchrun()
    trainer = make(folder / "out", with_adapters(), nvme=folder / "nvme", max_steps=2)
    trainer.train()
    trainer.save_model()
    trainer.optimizer.optimizer.close()
    trained = {name: param for name, param in trainer.model.named_parameters() if param.requires_grad}
    return {name.replace(".default", ""): tuple(param.shape) for name, param in trained.items()}


def adapters_to_unwritable_folder(folder: Path) -> str:
    """Save adapters to a path that rank 0 cannot write; return the error on this rank."""
    as_torchrun()
    trainer = make(folder / "out", with_adapters(), nvme=folder / "nvme", max_steps=2)
    trainer.train()
    (folder / "file").write_text("")
    target = folder / "file" if dist.get_rank() == 0 else folder / "saved"
    try:
        trainer.model.save_pretrained(str(target), True)  # positional arguments, as in peft
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        trainer.optimizer.optimizer.close()
    return "no error"
