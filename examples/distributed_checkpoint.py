"""Save weights and optimizer state with torch.distributed.checkpoint, to a folder or an object store, and load them.

    python examples/distributed_checkpoint.py FOLDER [--checkpoint URL]
    torchrun --nproc-per-node 2 examples/distributed_checkpoint.py FOLDER

FOLDER is a new folder on an NVMe drive. URL is a folder or an address of fsspec, such as s3://bucket/step-3.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import infinity

STEPS = 3


def make_model(mesh: DeviceMesh) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a sharded model and its optimizer."""
    torch.manual_seed(0)  # all ranks create the same model
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(4)), nn.Linear(256, 1))
    model.to(mesh.device_type)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, mesh: DeviceMesh) -> list[float]:
    """Train for some steps and return the losses of this rank."""
    losses = []
    for step in range(first, first + STEPS):
        generator = torch.Generator().manual_seed(step * mesh.size() + mesh.get_local_rank())
        x = torch.randn(16, 256, generator=generator).to(mesh.device_type)
        loss = (model(x) - x.sum(1, keepdim=True).sign()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--checkpoint", help="folder or URL (default: FOLDER/step-3)")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    checkpoint = options.checkpoint or str(options.folder / f"step-{STEPS}")
    mesh = infinity.mesh()

    # Tensors in the state dicts are on NVMe. The writer reads one at a time.
    model, optimizer = make_model(mesh)
    settings = {
        "storage": {"paths": [str(options.folder / "pages")]},
        "memory": {"host_bytes": "2MiB"},
        "run": {"keep": "never"},
    }
    with infinity.offload(model, optimizer, settings) as paged:
        train(model, paged, 0, mesh)
        weights, state = get_state_dict(model, paged)
        dcp.save({"model": weights, "optim": state}, checkpoint_id=checkpoint)
        expected = train(model, paged, STEPS, mesh)

    # Load the checkpoint into plain FSDP2, in memory. Loading into an offloaded model uses the same calls.
    model, optimizer = make_model(mesh)
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optim": state}, checkpoint_id=checkpoint)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    losses = train(model, optimizer, STEPS, mesh)
    assert losses == expected  # equal in every bit
    if mesh.get_rank() == 0:
        for step, loss in enumerate(losses, STEPS + 1):
            print(f"step {step}: loss {loss:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
