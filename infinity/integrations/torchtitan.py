"""torchtitan: `on_nvme(config, settings)` in place of a Trainer's config: the same training, with its state on NVMe.

The model stays on the meta device and is initialised FSDP module by FSDP module, the container of optimizers steps the
one that
`infinity.offload` returns, and a checkpoint is a folder with what torchtitan keeps besides weights and optimizer, and a
checkpoint, which copies nothing.
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
_FOLDER = re.compile(r"step-(\d+)")  # as torchtitan names them


def on_nvme(config: Trainer.Config, settings: Mapping[str, Any] | str | os.PathLike[str]) -> PagedTrainer.Config:
    """Return the config of the same training with its state on NVMe; a function of a config registry may return it.

    Args:
        config: what `torchtitan.trainer.Trainer` is built from.
        settings: as for `infinity.offload`.

    Raises:
        UnsupportedError: the config is that of another Trainer.
    """
    if type(config) is not Trainer.Config:
        raise UnsupportedError(f"{type(config).__qualname__} is the config of another Trainer, which may do otherwise")
    given = dict(settings) if isinstance(settings, Mapping) else os.fspath(settings)
    return PagedTrainer.Config(**_fields(config), infinity=given)


def _fields(config: Any) -> dict[str, Any]:
    return {item.name: getattr(config, item.name) for item in fields(config)}


class PagedTrainer(Trainer):  # type: ignore[misc]
    """A Trainer whose weights, master weights and optimizer states are on NVMe."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):  # type: ignore[misc]
        """What `on_nvme` returns."""

        infinity: Annotated[Any, tyro.conf.Suppress] = field(default_factory=dict)
        """Settings, as for `infinity.offload`: a mapping, or the name of a file."""

    def __init__(self, config: PagedTrainer.Config) -> None:
        """Build everything, and move the state to NVMe, or go on from a checkpoint; all ranks together.

        Raises:
            UnsupportedError: the config wants what cannot work, with the reason.
            ConfigError: a setting is wrong, or `checkpoint.load_step` has no folder.
            Exception: what `infinity.offload` raises.
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
            "model_spec": replace(spec, parallelize_fn=partial(_parallelised, spec.parallelize_fn)),
            # Of the ways to have tensor parallel parameters, that which leaves all others to FSDP2.
            "parallelism": replace(config.parallelism, spmd_backend="partial_dtensor"),
            "training": replace(config.training, disable_cuda_graphs=True),  # a graph would keep cache slots' addresses
        }
        super().__init__(replace(config, **changed))

    def init_distributed(self) -> ParallelDims:
        """Make process groups in which ranks can exchange plain objects too, on a GPU."""
        world_size = init_distributed(
            self.config.comm, enable_cpu_backend=self.device.type != "cpu", base_folder=self.config.dump_folder
        )
        return ParallelDims.from_config(self.config.parallelism, world_size)

    def close(self) -> None:
        """End; what is not checkpointed is gone, unless `run.keep` says otherwise."""
        if hasattr(self, "optimizers"):
            self.optimizers.paged.close()
        super().close()


def _fields_of_base(config: BaseCheckpointManager.Config) -> dict[str, Any]:
    """Return what all checkpoint managers of torchtitan are told."""
    return {item.name: getattr(config, item.name) for item in fields(BaseCheckpointManager.Config)}


def _check(config: PagedTrainer.Config) -> None:
    """Refuse what cannot work. Raises `UnsupportedError`, `ConfigError`."""
    checkpoint, parallelism = config.checkpoint, config.parallelism
    wrong = {
        "parallelism.pipeline_parallel_degree": (
            parallelism.pipeline_parallel_degree > 1,
            "one rank has several parts of the model, whose steps are not one sequence of FSDP modules",
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
            'it changes states by a hook; set state.format = "bf16-moments"',
        ),
        "loss": (
            issubclass(_owner(config.loss), ChunkedLossWrapper),
            "it calls the model's head outside of the model, chunk by chunk; use CrossEntropyLoss.Config()",
        ),
        "checkpoint.initial_load_path": (checkpoint.initial_load_path is not None, "a run begins from its own code"),
        "checkpoint.last_save_in_hf": (
            checkpoint.last_save_in_hf,
            "weights of torchtitan's names are not converted; trainer.optimizers.paged.save_dcp(folder) writes them",
        ),
        "checkpoint.create_seed_checkpoint": (checkpoint.create_seed_checkpoint, "it is a model in memory"),
    }
    for name, (is_so, why) in wrong.items():
        if is_so:
            raise UnsupportedError(f"{name} with the state on NVMe: {why}")
    if config.model_spec is None:
        raise ConfigError("model_spec is missing: a config of torchtitan's registry has one")


def _owner(config: Any) -> type:
    owner = getattr(config, "_owner", None)
    return owner if isinstance(owner, type) else object


def _parallelised(parallelise: Callable[..., nn.Module], model: nn.Module, **named: Any) -> nn.Module:
    """Return the sharded model, which stays on the meta device: `PagedOptimizers` gives it its values."""
    sharded = parallelise(model, **named)
    sharded.to_empty = lambda **_: sharded  # type: ignore[method-assign]
    sharded.init_weights = lambda **_: None  # type: ignore[assignment]
    return sharded


def _initialise(module: nn.Module) -> None:
    """Initialise what a module has itself, as torchtitan does; others do it for those inside of it."""
    if isinstance(module, Module):
        module._init_self_parameters()
        module._init_self_buffers()


class PagedOptimizers(OptimizersContainer):  # type: ignore[misc]
    """torchtitan's optimizers as one that steps through pages; all ranks are to build it together."""

    optimizers: list[Any]
    """What `infinity.offload` returned, alone."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):  # type: ignore[misc]
        """torchtitan's own, and where the state is."""

        infinity: Annotated[Any, tyro.conf.Suppress] = field(default_factory=dict)
        """Settings, as for `infinity.offload`: a mapping, or the name of a file."""

        folder: Annotated[str, tyro.conf.Suppress] = ""
        """Of checkpoints: the run goes on from one of them; empty for none."""

        load_step: Annotated[int, tyro.conf.Suppress] = -1
        """Which of them; -1 for the last one whose checkpoint is there, if there is one."""

    def __init__(self, config: PagedOptimizers.Config, *, model_parts: list[nn.Module]) -> None:
        """Build the optimizers, and let `infinity.offload` have them.

        Raises:
            ConfigError: there is no checkpoint of `load_step`.
            Exception: what `infinity.offload` raises.
        """
        super().__init__(config, model_parts=model_parts)
        settings, self.resumed = load_config(config.infinity), None
        if config.folder:
            self.resumed = _resumed(Path(config.folder), config.load_step, settings)
        if self.resumed is not None:
            settings = self.resumed[1].resumed(settings)
        given: Any = self.optimizers if len(self.optimizers) > 1 else self.optimizers[0]
        self.paged = infinity.offload(model_parts[0], given, settings, init=_initialise)
        self.optimizers = [self.paged]

    def state_dict(self) -> dict[str, Any]:
        """Refuse. Raises `UnsupportedError`."""
        raise UnsupportedError(
            "the state of the optimizers is on NVMe: a checkpoint of it is a checkpoint, see `NVMeCheckpointManager`"
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refuse. Raises `UnsupportedError`."""
        self.state_dict()


def _resumed(folder: Path, step: int, settings: Config) -> tuple[Path, Record] | None:
    """Return the checkpoint to go on from; all ranks together. Raises `ConfigError`, `CheckpointError`."""
    ranks = Ranks.current()
    if step >= 0:
        return Record.of_checkpoint(folder / f"step-{step}", settings, ranks)
    there = ranks.on_first("looking for checkpoints", partial(_folders, folder))
    found = Record.newest(there[::-1], settings, ranks)
    if there and found is None:
        raise CheckpointError(
            f"{folder} has checkpoints, and no checkpoint of any of them is in storage.paths: name the paths of the run in "
            "run.resume_paths, or remove the folder to begin anew"
        )
    return found


def _folders(folder: Path) -> list[Path]:
    """Return the folders of checkpoints, by step."""
    found = [child for child in folder.iterdir() if _FOLDER.fullmatch(child.name)] if folder.is_dir() else []
    return sorted(found, key=lambda child: int(child.name.removeprefix("step-")))


class NVMeCheckpointManager(BaseCheckpointManager):  # type: ignore[misc]
    """Checkpoints as checkpoints: a folder has what torchtitan keeps besides weights and optimizer, a file for each
    rank.

    As many are kept as `run.retained_checkpoints` says, not `keep_latest_k`. All ranks call everything together.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):  # type: ignore[misc]
        """torchtitan's own; what it says of the format of other managers' files does not count."""

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
        """Write nothing yet."""
        self.enable, self.save_future, self._config = config.enable, None, config
        self._folder, self._optimizers = Path(base_folder, config.folder), optimizers
        self._kept = {LR_SCHEDULER: lr_schedulers, DATALOADER: dataloader, **states}
        self._checkpoints = Checkpoints(optimizers.paged, "build the trainer with checkpoint.load_step for {}")

    def _load(self, step: int = -1) -> bool:
        """Load what was kept besides the state, which the optimizers have gone on from. Raises `ConfigError`."""
        if self._optimizers.resumed is None:
            return False
        file = self._checkpoints.check(self._optimizers.resumed[0]) / self._name
        try:
            kept = torch.load(file, weights_only=True)
        except FileNotFoundError:
            raise ConfigError(
                f"{str(file)!r} is missing: data go on only on the number of ranks that the checkpoint was saved on"
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
        """Remove the folders of this run whose checkpoints are gone."""
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
        """Nothing is staged."""

    def _wait_for_saving(self) -> None:
        """A checkpoint has ended when `save` returns."""

    def _close(self) -> None:
        """Nothing is open."""
