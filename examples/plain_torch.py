"""Train a plain torch model without transformers, with settings from a TOML file.

    python examples/plain_torch.py FOLDER

FOLDER is a new folder on an NVMe drive.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import infinity

SETTINGS = """
[storage]
paths = ["{folder}/pages"]  # one folder per drive; pages are striped over them

[memory]
host_bytes = "8MiB"  # size of the host cache, the only host memory for pages

[run]
retained_checkpoints = 2  # keep the two newest checkpoints
"""


class Block(nn.Module):
    """A residual block, which becomes one FSDP module."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(nn.functional.gelu(self.wide(self.norm(x))))


class Regression(nn.Module):
    """A few blocks and a head."""

    def __init__(self, width: int = 128, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def smaller(module: nn.Module) -> None:
    """Initialize a module in place of its `reset_parameters`. Called for every module."""
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.02)
        nn.init.zeros_(module.bias)


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    (settings := folder / "infinity.toml").write_text(SETTINGS.format(folder=folder.resolve()))

    with torch.device("meta"):
        model = Regression()
    mesh = infinity.mesh()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    # Works with any element-wise optimizer. Others raise `UnsupportedError` with the reason.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = infinity.offload(model, optimizer, settings, init=smaller)
    with optimizer:
        for step in range(10):
            x = torch.randn(64, 128, device=mesh.device_type)
            loss = nn.functional.mse_loss(model(x), x.mean(dim=1, keepdim=True))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if (step + 1) % 5 == 0:
                optimizer.save_checkpoint()
                print(f"step {step + 1}: loss {loss:.4f}, checkpointed")
        # Read one parameter and its moments from the drive.
        state = optimizer.read_state("head.weight")
        print({name: tuple(value.shape) for name, value in state.items() if isinstance(value, torch.Tensor)})


if __name__ == "__main__":
    main()
