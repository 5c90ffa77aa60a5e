"""Train, save a checkpoint, resume and export without optional dependencies: `bare.py FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch.distributed.fsdp import fully_shard

import infinity
from infinity.checkpoint.reader import CheckpointReader
from infinity.formats.dcp import export_dcp
from infinity.formats.safetensors import export_safetensors
from infinity.store.folder import RunFolder
from infinity.store.marker import look_for_runs


class Model(torch.nn.Sequential):
    """Two layers, with an attribute that transformers models have."""

    loss_function = None


def train(folder: Path, resume: str) -> int:
    """Train two more steps; return the total number of steps."""
    with torch.device("meta"):
        model = Model(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    mesh = infinity.mesh()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    infinity.micro_batches(model, 2, batch_dim=0)
    optimizer = infinity.offload(
        model,
        torch.optim.AdamW(model.parameters()),
        {"storage": {"paths": [str(folder)]}, "memory": {"host_bytes": "64MiB"}, "run": {"resume": resume}},
    )
    for _ in range(2):
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.save_checkpoint()
    optimizer.close()
    return optimizer.steps


if __name__ == "__main__":
    place = Path(sys.argv[1])
    (nvme := place / "nvme").mkdir()
    print(train(nvme, ""), train(nvme, "latest"))
    (run,) = (found.run_id for found in look_for_runs([nvme])[0])
    reader = CheckpointReader(RunFolder(run, (nvme / run,)))
    export_safetensors(reader, place / "weights", file_bytes=1 << 20)
    export_dcp(reader, place / "dcp")
