"""Train on two workers of Ray Train. If a worker fails, Ray starts new ones, which resume from the newest checkpoint.

    python examples/ray_train.py FOLDER [--steps N]

FOLDER is on an NVMe drive. A second call with a larger N resumes training, too.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import ray.train
import torch
import torch.distributed as dist
from ray.train.torch import TorchTrainer
from torch import nn
from torch.distributed.fsdp import fully_shard

import infinity

WIDTH, DEPTH, ROWS = 256, 4, 32  # ROWS is the batch size over all workers
EVERY = 3  # steps between checkpoints


def train(settings: dict[str, Any]) -> None:
    """Train as one worker. Ray has initialized the process group."""
    mesh = infinity.mesh()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(DEPTH)))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = infinity.offload(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True),
        {
            "storage": {"paths": [settings["nvme"]]},
            "memory": {"host_bytes": "8MiB"},  # host cache per worker
            "run": {"resume": "auto"},  # start a new run if there is no checkpoint
        },
    )
    # If a worker fails, leaving this block notifies the others, so that they do not wait for it.
    with optimizer:
        while optimizer.steps < settings["steps"]:
            # The batch depends only on the step, so that a resumed run continues with the same data.
            rows = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(optimizer.steps))
            mine = rows.chunk(ranks)[rank].to(mesh.device_type)
            loss = (model(mine) - mine).square().mean()
            loss.backward()  # FSDP2 averages the gradients over the workers
            optimizer.step()
            optimizer.zero_grad()
            dist.all_reduce(loss := loss.detach())
            if optimizer.steps % EVERY == 0 or optimizer.steps == settings["steps"]:
                optimizer.save_checkpoint()  # collective and atomic over all workers
            if rank == 0:
                print(f"step {optimizer.steps}: loss {loss / ranks:.4f}", flush=True)
            ray.train.report({"step": optimizer.steps, "loss": loss.item() / ranks})  # without a Ray checkpoint


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=9)
    options = parser.parse_args()
    folder = options.folder.resolve()  # the current folder of the workers is a different one
    trainer = TorchTrainer(
        train,
        train_loop_config={"nvme": str(folder / "nvme"), "steps": options.steps},
        scaling_config=ray.train.ScalingConfig(num_workers=2, use_gpu=torch.cuda.is_available()),
        run_config=ray.train.RunConfig(
            storage_path=str(folder / "ray"),
            failure_config=ray.train.FailureConfig(max_failures=3),
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
