"""Train on several ranks, each with its shard of all state and its part of every batch.

    torchrun --nproc-per-node 2 examples/two_ranks.py FOLDER

FOLDER is on an NVMe drive and shared by all ranks of a node, each with its own files.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import infinity

WIDTH, DEPTH, ROWS = 256, 4, 32  # ROWS is the batch size over all ranks


def main() -> None:
    # torchrun sets the environment of the process group, which uses gloo on CPUs and NCCL on GPUs.
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
        {"storage": {"paths": [sys.argv[1]]}, "memory": {"host_bytes": "8MiB"}},  # host cache per rank
    )
    # If a rank fails, leaving this block notifies the others, so that they do not wait for it.
    with optimizer:
        for step in range(5):
            # Every rank generates the same batch and takes its own rows. Use a DistributedSampler for real data.
            rows = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step)).to(mesh.device_type)
            mine = rows.chunk(ranks)[rank]
            loss = (model(mine) - mine).square().mean()
            loss.backward()  # FSDP2 averages the gradients over the ranks
            norm = optimizer.clip_grad_norm_(1.0)  # global norm over all ranks
            optimizer.step()
            optimizer.zero_grad()
            dist.all_reduce(loss := loss.detach())
            if rank == 0:
                print(f"step {step + 1}: loss {loss / ranks:.4f}, norm {norm:.3f}")
        optimizer.save_checkpoint()  # collective and atomic over all ranks
    if rank == 0:
        print(f"checkpointed by {ranks} ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
