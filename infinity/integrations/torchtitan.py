"""torchtitan: `on_nvme(config, settings)` converts a Trainer config to one that keeps the training state on NVMe.

The model stays on the meta device and is initialized one FSDP module at a time. The optimizer container steps the
optimizer that `infinity.offload` returns. A torchtitan checkpoint consists of a folder with torchtitan's own data and
an infinity checkpoint on the NVMe paths, which is saved without copying data.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import nn

import infinity
from infinity.config import Config, load_config
from infinity.errors import ConfigError, UnsupportedError
from infinity.integrations.checkpoint_folders import (
    Checkpoints,
    Record,
    numbered_folders,
    restore_settings,
    settings_of,
)
from infinity.optional_dependencies import needs
from infinity.ranks import Ranks

with needs("torchtitan", "infinity.integrations.torchtitan"):
    import tyro
    from torchtitan.components.checkpointer.base import DATALOADER, LR_SCHEDULER, BaseCheckpointManager
    from torchtitan.components.loss import ChunkedLossWrapper
    from torchtitan.components.optimizer import OptimizersContainer
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.utils import init_distributed
    from torchtitan.protocols.module import Module
    from torchtitan.trainer import Trainer


def on_nvme(config: Trainer.Config, settings: Mapping[str, Any] | str | os.PathLike[str]) -> PagedTrainer.Config:
    """Return a config for the same training with its state on NVMe. Use it, for example, in a config registry function.

    Args:
        config: config of a `torchtitan.trainer.Trainer`.
        settings: see `infinity.offload`.

    Raises:
        UnsupportedError: if the config belongs to a different Trainer class.
    """
    if type(config) is not Trainer.Config:
        raise UnsupportedError(
            f"{type(config).__qualname__} is the config of a different Trainer class, which is not supported; pass a "
            "torchtitan Trainer.Config"
        )
    given = dict(settings) if isinstance(settings, Mapping) else os.fspath(settings)
    return PagedTrainer.Config(**_fields(config), infinity=given)


def _fields(config: Any, kind: Any = None) -> dict[str, Any]:
    """Return the fields of a config, or only those of its base class `kind`."""
    return {item.name: getattr(config, item.name) for item in fields(kind or config)}


class PagedTrainer(Trainer):  # type: ignore[misc]
    """A Trainer whose weights, master weights and optimizer states are on NVMe."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):  # type: ignore[misc]
        """Config returned by `on_nvme`."""

        infinity: Annotated[Any, tyro.conf.Suppress] = field(default_factory=dict)
        """Settings: a mapping, or the path to a file. See `infinity.offload`."""

    def __init__(self, config: PagedTrainer.Config) -> None:
        """Build the trainer and move its state to NVMe, or resume from a checkpoint. A collective call.

        Raises:
            UnsupportedError: if the config uses an unsupported feature. The message gives the reason.
            ConfigError: if a setting is invalid, or there is no folder for `checkpoint.load_step`.
            Exception: any exception that `infinity.offload` raises.
        """
        _check(config)
        folder = os.path.join(config.dump_folder, config.checkpoint.folder) if config.checkpoint.enable else ""
        optimizer = PagedOptimizers.Config(
            **_fields(config.optimizer), infinity=config.infinity, folder=folder, load_step=config.checkpoint.load_step
        )
        spec = config.model_spec
        assert spec is not None
        changed: dict[str, Any] = {
            "optimizer": optimizer,
            "checkpoint": NVMeCheckpointManager.Config(**_fields(config.checkpoint, BaseCheckpointManager.Config)),
            "model_spec": replace(spec, parallelize_fn=partial(_parallelize_on_meta, spec.parallelize_fn)),
            # Of the ways to obtain tensor-parallel parameters, this one leaves all other parameters to FSDP2.
            "parallelism": replace(config.parallelism, spmd_backend="partial_dtensor"),
            # a CUDA graph would record the addresses of cache slots
            "training": replace(config.training, disable_cuda_graphs=True),
        }
        super().__init__(replace(config, **changed))

    def init_distributed(self) -> ParallelDims:
        """Create process groups that can exchange Python objects even if ranks compute on GPUs."""
        world_size = init_distributed(
            self.config.comm, enable_cpu_backend=self.device.type != "cpu", base_folder=self.config.dump_folder
        )
        return ParallelDims.from_config(self.config.parallelism, world_size)

    def close(self) -> None:
        """Close the run. State that is not part of a checkpoint is discarded, depending on `run.keep`."""
        if hasattr(self, "optimizers"):
            self.optimizers.paged.close()
        super().close()


def _check(config: PagedTrainer.Config) -> None:
    """Raise `UnsupportedError` or `ConfigError` if the config uses an unsupported feature."""
    checkpoint, parallelism = config.checkpoint, config.parallelism
    wrong = {
        "parallelism.pipeline_parallel_degree": (
            parallelism.pipeline_parallel_degree > 1,
            "several model parts on one rank do not form a single sequence of FSDP modules",
        ),
        **{
            f"parallelism.{kind}_parallel_degree": (
                getattr(parallelism, f"{kind}_parallel_degree") > 1,
                "all ranks must be data parallel",
            )
            for kind in ("tensor", "context", "expert")
        },
        "training.enable_cpu_offload": (config.training.enable_cpu_offload, "it keeps the state in memory"),
        "optimizer.implementation = 'fused_opt_states_bf16'": (
            config.optimizer.implementation == "fused_opt_states_bf16",
            'it modifies states in a hook; set state.format = "bf16-moments"',
        ),
        "loss": (
            issubclass(_owner(config.loss), ChunkedLossWrapper),
            "it calls the head in chunks outside of the model; use CrossEntropyLoss.Config()",
        ),
        "checkpoint.initial_load_path": (
            checkpoint.initial_load_path is not None,
            "the model is initialized by its own code",
        ),
        "checkpoint.last_save_in_hf": (
            checkpoint.last_save_in_hf,
            "weights keep torchtitan's parameter names; save them with torch.distributed.checkpoint.save",
        ),
        "checkpoint.create_seed_checkpoint": (checkpoint.create_seed_checkpoint, "it requires a model in memory"),
    }
    for name, (is_so, why) in wrong.items():
        if is_so:
            raise UnsupportedError(f"{name} is not supported with the state on NVMe: {why}")
    if config.model_spec is None:
        raise ConfigError("model_spec is missing; use a config from torchtitan's registry")


def _owner(config: Any) -> type:
    owner = getattr(config, "_owner", None)
    return owner if isinstance(owner, type) else object


def _parallelize_on_meta(parallelize: Callable[..., nn.Module], model: nn.Module, **named: Any) -> nn.Module:
    """Shard a model but keep it on the meta device, because `PagedOptimizers` initializes it."""
    sharded = parallelize(model, **named)
    sharded.to_empty = lambda **_: sharded  # type: ignore[method-assign]
    sharded.init_weights = lambda **_: None  # type: ignore[assignment]
    return sharded


def _initialize(module: nn.Module) -> None:
    """Initialize a module's own parameters as torchtitan does. Its children are initialized separately."""
    if isinstance(module, Module):
        module._init_self_parameters()
        module._init_self_buffers()


class PagedOptimizers(OptimizersContainer):  # type: ignore[misc]
    """Container that combines torchtitan's optimizers into one offloaded optimizer. All ranks build it together."""

    optimizers: list[Any]
    """List whose only item is the optimizer that `infinity.offload` returned."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):  # type: ignore[misc]
        """torchtitan's config, extended by the location of the state."""

        infinity: Annotated[Any, tyro.conf.Suppress] = field(default_factory=dict)
        """Settings: a mapping, or the path to a file. See `infinity.offload`."""

        folder: Annotated[str, tyro.conf.Suppress] = ""
        """Folder with the checkpoints to resume from. Empty: start a new run."""

        load_step: Annotated[int, tyro.conf.Suppress] = -1
        """Step to resume from. -1: the last step whose checkpoint exists, if any."""

    def __init__(self, config: PagedOptimizers.Config, *, model_parts: list[nn.Module]) -> None:
        """Build the optimizers and pass them to `infinity.offload`.

        Raises:
            ConfigError: if there is no checkpoint for `load_step`.
            Exception: any exception that `infinity.offload` raises.
        """
        super().__init__(config, model_parts=model_parts)
        settings, self.resumed = load_config(config.infinity), None
        if config.folder:
            self.resumed = _resumed(Path(config.folder), config.load_step, settings)
        if self.resumed is not None:
            settings = self.resumed[1].resumed(settings)
        given: Any = self.optimizers if len(self.optimizers) > 1 else self.optimizers[0]
        self.paged = infinity.offload(model_parts[0], given, settings, init=_initialize)
        self.settings = settings_of(self.paged)
        self.optimizers = [self.paged]


def _resumed(folder: Path, step: int, settings: Config) -> tuple[Path, Record] | None:
    """Return the checkpoint to resume from. A collective call. Raises `ConfigError` or `CheckpointError`."""
    if step >= 0:
        return Record.of_checkpoint(folder / f"step-{step}", settings, Ranks.current())
    return Record.newest(folder, "step-", settings, Ranks.current())


class NVMeCheckpointManager(BaseCheckpointManager):  # type: ignore[misc]
    """Saves a checkpoint as a folder with torchtitan's own data, one file per rank, and an infinity checkpoint.

    The number of checkpoints to keep is set by `run.retained_checkpoints` instead of `keep_latest_k`. All ranks must
    call each method together.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):  # type: ignore[misc]
        """torchtitan's config. Fields that describe the file formats of other managers have no effect."""

    def __init__(
        self,
        config: NVMeCheckpointManager.Config,
        *,
        dataloader: Any,
        model_parts: list[nn.Module],
        optimizers: PagedOptimizers,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
    ) -> None:
        self.enable, self.save_future, self._config = config.enable, None, config
        self._folder, self._optimizers = Path(base_folder, config.folder), optimizers
        self._kept = {LR_SCHEDULER: lr_schedulers, DATALOADER: dataloader, **states}
        self._checkpoints = Checkpoints(optimizers.paged, "build the trainer with checkpoint.load_step for {}")
        self._began = optimizers.paged.steps

    def _load(self, step: int = -1) -> bool:
        """Load torchtitan's own data. The optimizers have already resumed from the same step.

        Raises:
            ConfigError: if the folder or the file of this rank is missing.
            CheckpointError: if the run is not at `step`.
        """
        resumed = self._optimizers.resumed
        if step < 0 and resumed is None:
            return False
        folder = resumed[0] if step < 0 and resumed is not None else self._folder / f"step-{step}"
        file = self._checkpoints.check(folder) / self._name
        try:
            kept = torch.load(file, weights_only=True)
        except FileNotFoundError:
            raise ConfigError(
                f"{str(file)!r} is missing: data loading can only resume with the number of ranks that saved the "
                "checkpoint"
            ) from None
        for name, state in self._kept.items():
            if name not in self._config.exclude_from_loading:
                state.load_state_dict(kept[name])
        if LR_SCHEDULER not in self._config.exclude_from_loading and self._optimizers.paged.steps == self._began:
            # torchtitan constructs its schedulers after the optimizers
            restore_settings(self._optimizers.paged, self._optimizers.settings)
        return True

    @property
    def _name(self) -> str:
        return f"rank{Ranks.current().rank:05d}.pt"

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        config = self._config
        first = curr_step == 1 and config.enable_first_step_checkpoint
        if config.load_only or not (first or last_step or curr_step % config.interval == 0):
            return False
        folder = self._folder / f"step-{curr_step}"

        def write() -> Path:
            folder.mkdir(parents=True, exist_ok=True)
            torch.save({name: state.state_dict() for name, state in self._kept.items()}, folder / self._name)
            return folder

        self._checkpoints.save("save", folder, write)
        self._checkpoints.remove_others(numbered_folders(self._folder, "step-"))
        return True

    def _maybe_wait_for_staging(self) -> None:
        """Do nothing, because no data is staged."""

    def _wait_for_saving(self) -> None:
        """Do nothing, because a checkpoint is complete when `save` returns."""

    def _close(self) -> None:
        """Do nothing, because no resource is held."""
