"""Script that trains a model with the given number of layers and prints its peak resident memory."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import infinity
import infinity.heap
from infinity.checkpoint.reader import CheckpointReader
from infinity.formats.dcp import export_dcp
from infinity.store.folder import RunFolder
from infinity.store.marker import look_for_runs

WIDTH = 512
ELEMENTS = 4 * WIDTH * WIDTH
"""Number of parameters of a layer."""


class Layer(nn.Module):
    """Two large matrices. No other tensors depend on the number of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda y: y + self.down(torch.relu(self.up(y))), x, use_reentrant=False)


def main(mode: str, layers: int, host_bytes: int, folder: str) -> None:
    """Run one mode, and print the peak memory as JSON.

    Args:
        mode: ``nothing`` (import only), ``paged`` (train offloaded), ``checkpoint`` (train offloaded and save a
            checkpoint), ``save`` (train offloaded and save to both formats), ``export`` (export the checkpoint to DCP)
            or ``load`` (start a run from the export).
        layers: Number of layers.
        host_bytes: Size of the host cache.
        folder: Folder of the run and of the exports.
    """
    torch.set_num_threads(1)
    if mode == "export":
        export(Path(folder))
    elif mode != "nothing":
        train(mode, layers, host_bytes, Path(folder))
    status = Path("/proc/self/status").read_text()
    peak = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    print(json.dumps({"peak": int(peak.split()[1]) * 1024}))


def export(folder: Path) -> None:
    """Export the newest checkpoint."""
    run_id = look_for_runs([folder])[0][-1].run_id
    reader = CheckpointReader(RunFolder(run_id, (folder / run_id,)))
    export_dcp(reader, folder / "dcp")


def train(mode: str, layers: int, host_bytes: int, folder: Path) -> list[float]:
    """Train two steps (none in mode ``load``), in plain FSDP2 in mode ``memory``; return the losses."""
    infinity.heap.CREEP_BYTES = 2 << 20
    mesh, policy = infinity.mesh("cpu"), MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    torch.manual_seed(0)
    with torch.device("cpu" if mode == "memory" else "meta"):
        model = nn.Sequential(*(Layer() for _ in range(layers)))
    for layer in model:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    if mode != "memory":
        config = {
            "storage": {"paths": [str(folder)]},
            "memory": {"host_bytes": host_bytes, "page_bytes": "256KiB"},
            "telemetry": {"runtime_dir": str(folder / "runtime")},
        }
        optimizer = infinity.offload(model, optimizer, config, weights=folder / "dcp" if mode == "load" else None)
    losses = []
    for step in range(0 if mode == "load" else 2):
        torch.manual_seed(step)
        x = torch.randn(2, WIDTH)
        loss = (model(x) - x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if mode == "checkpoint":
        optimizer.save_checkpoint()
    if mode == "save":
        optimizer.save_pretrained(folder / "saved", file_bytes=4 * WIDTH * 2 * WIDTH)
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optim": state}, checkpoint_id=folder / "saved-dcp")
    if mode != "memory":
        optimizer.close()
    return losses


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
