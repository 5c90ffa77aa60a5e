"""Run the training loop of examples/ray_train.py, and record its losses.

`torchrun -m support.ray_training FOLDER` runs it on the ranks of torchrun. `python -m support.ray_training FOLDER` runs
it on workers of Ray Train. In the first start, rank 1 kills itself in the step `KILLED`.

Each rank writes the losses of each start to `FOLDER/from-STEP/rankRANK`. STEP is the number of steps before the first
loss.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import ray.train
import ray.train.torch
import torch.distributed as dist

import infinity

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_train.py"
STEPS, KILLED = 9, 5


def train(settings: dict[str, Any], *, kills: bool = True) -> None:
    """Run the training loop as one rank."""
    report, step = ray.train.report, infinity.PagedOptimizer.step
    losses = Path()

    def reported(metrics: dict[str, Any]) -> None:
        nonlocal losses
        if not losses.name:
            losses = Path(settings["nvme"]).parent / f"from-{metrics['step'] - 1}" / f"rank{dist.get_rank()}"
            losses.parent.mkdir(exist_ok=True)
        with losses.open("a") as file:
            print(metrics["loss"], file=file)  # all digits
        if kills:
            report(metrics)

    def stepped(optimizer: infinity.PagedOptimizer) -> None:
        if kills and dist.get_rank() == 1 and optimizer.steps == KILLED - 1 and losses.parent.name == "from-0":
            os.kill(os.getpid(), signal.SIGKILL)
        step(optimizer)

    with patch.object(ray.train, "report", reported), patch.object(infinity.PagedOptimizer, "step", stepped):
        runpy.run_path(str(EXAMPLE))["train"](settings)


def main() -> None:
    """Train as a rank of torchrun, or start Ray."""
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        train({"nvme": f"{sys.argv[1]}/nvme", "steps": STEPS}, kills=False)
        dist.destroy_process_group()
        return
    trainer = ray.train.torch.TorchTrainer
    with patch.object(ray.train.torch, "TorchTrainer", lambda _, **keywords: trainer(train, **keywords)):
        sys.argv[1:] = [sys.argv[1], "--steps", str(STEPS)]
        runpy.run_path(str(EXAMPLE), run_name="__main__")


if __name__ == "__main__":
    main()
