"""torchtitan: `on_nvme(config, settings)` turns a Trainer config into the config of the same training with its state
on NVMe.

The model stays on the meta device and is initialized one FSDP module at a time. The optimizer container steps the
optimizer that `infinity.offload` returns. A torchtitan checkpoint is a folder with torchtitan's own data, plus an
infinity checkpoint on the NVMe paths, which copies no data.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import nn

import infinity
from infinity.config import Config, load_config
from infinity.errors import CheckpointError, ConfigError, UnsupportedError
from infinity.integrations.checkpoint_folders import Checkpoints, Record
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

_log = logging.getLogger("infinity")
_FOLDER = re.compile(r"step-(\d+)")  # torchtitan's naming


def on_nvme(config: Trainer.Config, settings: Mapping[str, Any] | str | os.PathLike[str]) -> PagedTrainer.Config:
    """Return the config of the same training with its state on NVMe, for example from a function of a config
    registry.

    Args:
        config: config that `torchtitan.trainer.Trainer` is built from.
        settings: as for `infinity.offload`.

    Raises:
        UnsupportedError: if the config belongs to another Trainer.
    """
    if type(config) is not Trainer.Config:
        raise UnsupportedError(
            f"{type(config).__qualname__} is the config of another Trainer, which is not supported; pass a torchtitan "
            "Trainer.Config"
        )
    given = dict(settings) if isinstance(settings, Mapping) else os.fspath(settings)
    return PagedTrainer.Config(**_fields(config), infinity=given)


def _fields(config: Any) -> dict[str, Any]:
    return {item.name: getattr(config, item.name) for item in fields(config)}


class PagedTrainer(Trainer):  # type: ignore[misc]
    """A Trainer whose weights, master weights and optimizer states are on NVMe."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):  # type: ignore[misc]
        """Config returned by `on_nvme`."""

        infinity: Annotated[Any, tyro.conf.Suppress] = field(default_factory=dict)
        """Settings, as for `infinity.offload`: a mapping, or the name of a file."""

    def __init__(self, config: PagedTrainer.Config) -> None:
        """Build the trainer and move its state to NVMe, or resume from a checkpoint. All ranks build it together.

        Raises:
            UnsupportedError: if the config uses a feature that cannot work. The message gives the reason.
            ConfigError: if a setting is invalid, or `checkpoint.load_step` has no folder.
            Exception: any error of `infinity.offload`.
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
            "checkpoint": NVMeCheckpointManager.Config(**_fields_of_base(config.checkpoint)),
            "model_spec": replace(spec, parallelize_fn=partial(_paralllized, spec.parallelize_fn)),
            # Of the ways to obtain tensor-parallel parameters, this one leaves all other parameters to FSDP2.
            "parallelism": replace(config.parallelism, spmd_backend="partial_dtensor"),
            # a graph would keep the addresses of cache slots
            "training": replace(config.training, disable_cuda_graphs=True),
        }
        super().__init__(replace(config, **changed))

    def init_distributed(self) -> ParallelDims:
        """Create process groups that can also exchange Python objects if ranks compute on GPUs."""
        world_size = init_distributed(
            self.config.comm, enable_cpu_backend=self.device.type != "cpu", base_folder=self.config.dump_folder
        )
        return ParallelDims.from_config(self.config.parallelism, world_size)

    def close(self) -> None:
        """Close the run. State without a checkpoint is discarded unless `run.keep` says otherwise."""
        if hasattr(self, "optimizers"):
            self.optimizers.paged.close()
        super().close()


def _fields_of_base(config: BaseCheckpointManager.Config) -> dict[str, Any]:
    """Return the arguments common to all checkpoint managers of torchtitan."""
    return {item.name: getattr(config, item.name) for item in fields(BaseCheckpointManager.Config)}


def _check(config: PagedTrainer.Config) -> None:
    """Raise `UnsupportedError` or `ConfigError` for features that cannot work."""
    checkpoint, parallelism = config.checkpoint, config.parallelism
    wrong = {
        "parallelism.pipeline_parallel_degree": (
            parallelism.pipeline_parallel_degree > 1,
            "several model parts on one rank do not form one sequence of FSDP modules",
        ),
        **{
            f"parallelism.{kind}_parallel_degree": (
                getattr(parallelism, f"{kind}_parallel_degree") > 1,
                "all ranks are data parallel",
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
            "a run is initialized by its own code",
        ),
        "checkpoint.last_save_in_hf": (
            checkpoint.last_save_in_hf,
            "weights are saved under torchtitan's names; call trainer.optimizers.paged.save_dcp(folder)",
        ),
        "checkpoint.create_seed_checkpoint": (checkpoint.create_seed_checkpoint, "it needs a model in memory"),
    }
    for name, (is_so, why) in wrong.items():
        if is_so:
            raise UnsupportedError(f"{name} with the state on NVMe: {why}")
    if config.model_spec is None:
        raise ConfigError("model_spec is missing; use a config of torchtitan's registry")


def _owner(config: Any) -> type:
    owner = getattr(config, "_owner", None)
    return owner if isinstance(owner, type) else object


def _paralllized(paralllize: Callable[..., nn.Module], model: nn.Module, **named: Any) -> nn.Module:
    """Return the sharded model, still on the meta device; `PagedOptimizers` initializes it."""
    sharded = paralllize(model, **named)
    sharded.to_empty = lambda **_: sharded  # type: ignore[method-assign]
    sharded.init_weights = lambda **_: None  # type: ignore[assignment]
    return sharded


def _initialize(module: nn.Module) -> None:
    """Initialize a module's own parameters as torchtitan does; its children are initialized separately."""
    if isinstance(module, Module):
        module._init_self_parameters()
        module._init_self_buffers()


class PagedOptimizers(OptimizersContainer):  # type: ignore[misc]
    """torchtitan's optimizers as one optimizer that updates pages. All ranks build it together."""

    optimizers: list[Any]
    """The optimizer returned by `infinity.offload`, as the only item."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):  # type: ignore[misc]
        """torchtitan's config plus the location of the state."""

        infinity: Annotated[Any, tyro.conf.Suppress] = field(default_factory=dict)
        """Settings, as for `infinity.offload`: a mapping, or the name of a file."""

        folder: Annotated[str, tyro.conf.Suppress] = ""
        """Folder of checkpoints to resume from; empty to start a new run."""

        load_step: Annotated[int, tyro.conf.Suppress] = -1
        """Step to resume from; -1 for the last one whose checkpoint exists, if any."""

    def __init__(self, config: PagedOptimizers.Config, *, model_parts: list[nn.Module]) -> None:
        """Build the optimizers and pass them to `infinity.offload`.

        Raises:
            ConfigError: if there is no checkpoint of `load_step`.
            Exception: any error of `infinity.offload`.
        """
        super().__init__(config, model_parts=model_parts)
        settings, self.resumed = load_config(config.infinity), None
        if config.folder:
            self.resumed = _resumed(Path(config.folder), config.load_step, settings)
        if self.resumed is not None:
            settings = self.resumed[1].resumed(settings)
        given: Any = self.optimizers if len(self.optimizers) > 1 else self.optimizers[0]
        self.paged = infinity.offload(model_parts[0], given, settings, init=_initialize)
        self.optimizers = [self.paged]

    def state_dict(self) -> dict[str, Any]:
        """Raise `UnsupportedError`, because the state is on NVMe."""
        raise UnsupportedError("the state of the optimizers is on NVMe: `NVMeCheckpointManager` saves it")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raise `UnsupportedError`, because the state is on NVMe."""
        self.state_dict()


def _resumed(folder: Path, step: int, settings: Config) -> tuple[Path, Record] | None:
    """Return the checkpoint to resume from. All ranks call it together. Raises `ConfigError`, `CheckpointError`."""
    ranks = Ranks.current()
    if step >= 0:
        return Record.of_checkpoint(folder / f"step-{step}", settings, ranks)
    there = ranks.on_first("looking for checkpoints", partial(_folders, folder))
    found = Record.newest(there[::-1], settings, ranks)
    if there and found is None:
        raise CheckpointError(
            f"{folder} has checkpoint folders, but storage.paths has none of their NVMe checkpoints; set "
            "run.resume_paths to the paths of the run, or remove the folder to start a new run"
        )
    return found


def _folders(folder: Path) -> list[Path]:
    """Return the checkpoint folders, ordered by step."""
    found = [child for child in folder.iterdir() if _FOLDER.fullmatch(child.name)] if folder.is_dir() else []
    return sorted(found, key=lambda child: int(child.name.removeprefix("step-")))


class NVMeCheckpointManager(BaseCheckpointManager):  # type: ignore[misc]
    """Saves torchtitan checkpoints as folders of torchtitan's own data, one file per rank, plus an infinity
    checkpoint.

    `run.retained_checkpoints` sets the number of checkpoints to keep, not `keep_latest_k`. All ranks call all methods
    together.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):  # type: ignore[misc]
        """torchtitan's config. Fields about file formats of other managers have no effect."""

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

    def _load(self, step: int = -1) -> bool:
        """Load torchtitan's own data; the optimizers have already resumed from the state. Raises `ConfigError`."""
        if self._optimizers.resumed is None:
            return False
        file = self._checkpoints.check(self._optimizers.resumed[0]) / self._name
        try:
            kept = torch.load(file, weights_only=True)
        except FileNotFoundError:
            raise ConfigError(
                f"{str(file)!r} is missing: data loading can only resume on as many ranks as saved the checkpoint"
            ) from None
        for name, state in self._kept.items():
            if name not in self._config.exclude_from_loading:
                state.load_state_dict(kept[name])
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
        Ranks.current().on_first("removing checkpoints", self._remove_others)
        return True

    def _remove_others(self) -> None:
        """Remove the folders of this run whose checkpoints no longer exist."""
        run = self._optimizers.paged.run
        for folder in _folders(self._folder):
            try:
                record = Record.read(folder)
            except ConfigError as error:
                _log.warning("%s stays: %s", folder, error)
                continue
            if record.run_id == run.folder.run_id and record.step not in run.store.checkpoints:
                shutil.rmtree(folder, ignore_errors=True)

    def _maybe_wait_for_staging(self) -> None:
        """Do nothing, because no data is staged."""

    def _wait_for_saving(self) -> None:
        """Do nothing, because a checkpoint is complete when `save` returns."""

    def _close(self) -> None:
        """Do nothing, because no resource is held."""
