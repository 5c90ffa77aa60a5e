"""Script that trains a tiny model with torchtitan on the CPU, in memory or offloaded.

torchtitan requires an accelerator and functions of later torch releases. This module provides both, so that the
Trainer of torchtitan runs with the components of this project.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def on_the_cpu() -> None:
    """Make torchtitan use the CPU as an accelerator."""
    names = (name for name in dir(torch.cpu) if not name.startswith("__"))
    cpu = SimpleNamespace(**{name: getattr(torch.cpu, name) for name in names})
    cpu.get_device_name, cpu.current_device = (lambda device=None: "cpu"), (lambda: 0)
    cpu.get_device_properties = lambda device=None: SimpleNamespace(total_memory=1 << 34)
    cpu.memory_stats = lambda device=None: {}
    cpu.reset_peak_memory_stats = cpu.empty_cache = lambda *_: None
    real = torch._utils._get_device_module
    torch._utils._get_available_device_type = lambda: "cpu"  # type: ignore[assignment]
    torch._utils._get_device_module = lambda kind: cpu if kind == "cpu" else real(kind)  # type: ignore
    factor = FSDPModule.set_gradient_divide_factor

    def summed(module: FSDPModule, value: float) -> None:
        factor(module, value)
        module.set_force_sum_reduction_for_comms(True)  # gloo does not support pre-multiplied reductions

    FSDPModule.set_gradient_divide_factor = summed  # type: ignore[method-assign]
    if not hasattr(dist, "set_timeout"):
        dist.set_timeout = dist.distributed_c10d._set_pg_timeout  # type: ignore[attr-defined]


on_the_cpu()

from torchtitan.components.dataloader import ParallelAwareDataloader  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config.manager import ConfigManager  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3 import model_registry  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402

from infinity.errors import InfinityError  # noqa: E402
from infinity.integrations.torchtitan import on_nvme  # noqa: E402

STEPS = 6
VOCABULARY = 2048


class Tokens(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    """Random tokens, with a resumable position."""

    def __init__(self, rank: int, ranks: int, seq: int) -> None:
        self.rank, self.ranks, self.seq, self.at = rank, ranks, seq, 0

    def __iter__(self) -> Any:
        while True:
            seed = torch.Generator().manual_seed(self.at * self.ranks + self.rank)
            self.at += 1
            tokens = torch.randint(VOCABULARY, (self.seq + 1,), generator=seed)
            yield {"input": tokens[:-1]}, tokens[1:]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Loader(ParallelAwareDataloader):  # type: ignore[misc]
    """torchtitan data loader for `Tokens`."""

    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):  # type: ignore[misc]
        """Required by torchtitan."""

    def __init__(
        self, config: Any, *, dp_world_size: int, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any
    ) -> None:
        tokens = Tokens(dp_rank, dp_world_size, seq_len)
        super().__init__(tokens, dp_rank=dp_rank, dp_world_size=dp_world_size, batch_size=local_batch_size)


class NoTokenizer(BaseTokenizer):  # type: ignore[misc]
    """Tokenizer that is not used, because `Tokens` are generated."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):  # type: ignore[misc]
        """Required by torchtitan."""

    def __init__(self, config: Any, **_: Any) -> None:
        super().__init__()

    def encode(self, *_: Any, **__: Any) -> list[int]:
        return []

    def decode(self, *_: Any, **__: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return VOCABULARY


def in_memory() -> Any:
    """Return the config of a tiny Llama, in the form of a config registry function."""
    config = llama3_debugmodel()
    config.model_spec = model_registry("debugmodel", attn_backend="flex")
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.loss, config.dataloader, config.tokenizer = CrossEntropyLoss.Config(), Loader.Config(), NoTokenizer.Config()
    training = config.training
    training.seq_len, training.local_batch_size, training.steps, training.disable_cuda_graphs = 32, 2, STEPS, True
    training.global_batch_size = 4 * int(os.environ.get("WORLD_SIZE", "1"))  # two micro-batches
    config.lr_scheduler.total_steps = STEPS
    config.debug.seed, config.debug.enable_structured_logging = 1, False
    config.validator.enable = config.checkpoint.enable = False
    config.activation_checkpoint = None
    config.parallelism.spmd_backend = "partial_dtensor"  # supported by torch 2.13
    config.dump_folder = os.environ["TITAN"]
    return config


def paged() -> Any:
    """Return the config of the same training with its state on NVMe."""
    config = in_memory()
    config.checkpoint.enable, config.checkpoint.interval = True, 2
    settings = {
        "storage": {"paths": [os.path.join(os.environ["TITAN"], "nvme")]},
        "memory": {"host_bytes": "24MiB"},
        "run": {"retained_checkpoints": 2},
        "telemetry": {"runtime_dir": os.path.join(os.environ["TITAN"], "runtime")},
    }
    return on_nvme(config, settings)


def train(name: str, first: str, result: str, *words: str) -> None:
    """Train like torchtitan's command line; save losses, norms, the weights before and after training, and the state.

    Training in memory also saves the optimizer with torchtitan's own methods, and later trainings on NVMe load it.

    Args:
        name: Name of the function in this module that returns the config.
        first: Name of the result whose initial weights are used. Empty for the weights of the config.
        result: Name of the saved result.
        words: Further command-line arguments.
    """
    folder, rank = Path(os.environ["TITAN"]), os.environ["RANK"]
    try:
        config = ConfigManager().parse_args(["--module", "support.titan", "--config", name, *words])
        trainer = config.build()
    except InfinityError as error:
        torch.save({"error": f"{type(error).__name__}: {error}"}, folder / f"{result}-{rank}.pt")
        return
    parts = dict(trainer.model_parts[0].named_parameters())
    with torch.no_grad():
        if first:
            for key, value in torch.load(folder / f"{first}-{rank}.pt")["before"].items():
                parts[key].to_local().copy_(value)
        before = {key: part.to_local().clone() for key, part in parts.items()}
    steps: list[Any] = []
    trainer.metrics_processor.should_log = lambda step: True
    trainer.metrics_processor.log = lambda step, loss, most, norm, **_: steps.append((step, loss, most, norm))
    trainer.train()
    with torch.no_grad():
        after = {key: part.to_local().clone() for key, part in parts.items()}
        found = {"steps": steps, "before": before, "after": after, "optimizer": full(trainer.optimizers.state_dict())}
        state, saved = trainer.optimizers.state_dict(), folder / "optimizer"
        if name == "in_memory":
            dcp.save(state, checkpoint_id=saved)
        elif saved.is_dir():
            dcp.load(state, checkpoint_id=saved)
            trainer.optimizers.load_state_dict(state)
            found["loaded"] = full(trainer.optimizers.state_dict())
    if name == "paged":
        found["loads"] = [load(trainer, step) for step in (trainer.step, trainer.step - 2)]
    trainer.close()
    torch.save(found, folder / f"{result}-{rank}.pt")


def load(trainer: Any, step: int) -> str:
    """Load a checkpoint after training; return the result or the error."""
    try:
        return str(trainer.checkpointer.load(step))
    except InfinityError as error:
        return str(error)


def full(state: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a state dict, with full tensors."""
    gathered = {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in state.items()}
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in gathered.items()}


if __name__ == "__main__":
    train(*sys.argv[1:])
