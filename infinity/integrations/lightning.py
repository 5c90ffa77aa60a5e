"""Lightning: a strategy that replaces `ModelParallelStrategy` for modules that call `fully_shard` in
`configure_model`.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from infinity.config import Config, load_config
from infinity.errors import CheckpointError, ConfigError, UnsupportedError
from infinity.integrations.checkpoint_folders import Checkpoints, Record
from infinity.optional_dependencies import needs
from infinity.ranks import Ranks
from infinity.run.offload import offload_inside
from infinity.run.optimizer import PagedOptimizer
from infinity.sources.initialize import InitFunction
from infinity.untrusted_files import read_regular

with needs("lightning", "infinity.integrations.lightning"):
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import ModelParallelStrategy
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning.pytorch.utilities.model_helpers import is_overridden
    from lightning.pytorch.utilities.seed import isolate_rng

META = "meta.pt"
"""File in a checkpoint folder for the data that Lightning saves in addition to the weights and the optimizer."""
_MOST_META = 1 << 30  # maximum size of this file, in bytes


class PagedStrategy(ModelParallelStrategy):  # type: ignore[misc]
    """Strategy that trains a module with its state on NVMe. The module's `configure_model` must call `fully_shard`.

    `trainer.fit` creates and offloads the optimizer, and resumes from `ckpt_path` if it is given. A Lightning
    checkpoint consists of a folder with Lightning's own data and an infinity checkpoint on the NVMe paths, which is
    saved without copying data. All ranks are data parallel: `self.device_mesh["data_parallel"]` is the mesh for
    `fully_shard`.
    """

    def __init__(
        self,
        config: Config | Mapping[str, Any] | str | os.PathLike[str],
        *,
        weights: str | os.PathLike[str] | None = None,
        strict: bool = True,
        init: InitFunction | None = None,
        **named: Any,
    ) -> None:
        """Args:
            config: settings; see `infinity.offload`.
            weights: see `infinity.offload`. Names are relative to the module on which `fully_shard` was called last.
            strict: see `infinity.offload`.
            init: see `infinity.offload`.
            named: additional arguments for `ModelParallelStrategy` (`process_group_backend`, `timeout`).

        Raises:
            ConfigError: if a setting is invalid.
            UnsupportedError: if parallel sizes or a checkpoint format are passed.
        """
        for unsupported in ("data_parallel_size", "tensor_parallel_size", "save_distributed_checkpoint"):
            if unsupported in named:
                raise UnsupportedError(
                    f"{unsupported} is not supported: all ranks are data parallel, and checkpoints are folders; "
                    "remove it"
                )
        super().__init__(**named)
        self._settings, self._weights, self._strict, self._init = load_config(config), weights, strict, init
        self._paged: PagedOptimizer | None = None  # of the last fit
        self._checkpoints: Checkpoints | None = None  # of the last fit
        self._sharded_model: nn.Module | None = None  # sharded model of the last fit
        self._loaded: Path | None = None  # folder that the next fit resumes from
        self._fitting = False  # whether a fit has offloaded its module and has not ended

    @property
    def paged(self) -> PagedOptimizer:
        """Optimizer returned by `infinity.offload`. Raises `UnsupportedError` before `fit`."""
        if self._paged is None:
            raise UnsupportedError("there is no optimizer yet; call trainer.fit(), which creates and offloads it")
        return self._paged

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Return False, because the checkpoint to resume from must be known when the run starts, in `setup`."""
        return False

    def setup_environment(self) -> None:
        """Create the process group, and a mesh in which all ranks are data parallel."""
        self._data_parallel_size, self._tensor_parallel_size = self.num_nodes * self.num_processes, 1
        super().setup_environment()

    def _get_process_group_backend(self) -> str:
        """Return a backend that can exchange Python objects even if ranks compute on GPUs."""
        given: str | None = self._process_group_backend
        return given or ("cpu:gloo,cuda:nccl" if self.root_device.type == "cuda" else "gloo")

    def setup(self, trainer: Trainer) -> None:
        """Create the optimizer and move the training state to NVMe, in bounded memory.

        Raises:
            UnsupportedError: if the module or the trainer uses an unsupported feature. The message gives the reason.
            ConfigError: if this strategy did not write the checkpoint.
            Exception: any exception that `infinity.offload` raises.
        """
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        if not is_overridden("configure_model", self.lightning_module):
            raise UnsupportedError(
                "the LightningModule has no configure_model(); define it, and call fully_shard on the layers there"
            )
        if self.precision_plugin.precision != "32-true":
            raise UnsupportedError(
                f"Trainer(precision={self.precision_plugin.precision!r}) is not supported; remove it, and pass "
                "mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32) to fully_shard instead"
            )
        self.barrier()
        if trainer.state.fn == TrainerFn.FITTING:
            self._fit(trainer)
        elif self._paged is None:
            raise UnsupportedError("validate(), test() and predict() require weights on NVMe; call fit() first")

    def _fit(self, trainer: Trainer) -> None:
        """Offload the module, or the next optimizer of a module that was offloaded by an earlier fit."""
        loaded, self._loaded = self._loaded, None
        assert self.lightning_module is not None
        again = _sharded(self.lightning_module) is self._sharded_model
        if again and loaded is None and self._paged is not None and not self._paged.closed:
            self._fit_again(trainer, self._paged)
        else:
            self._start(trainer, loaded, has_values=again)
        self.setup_precision_plugin()
        self._fitting = True

    def _fit_again(self, trainer: Trainer, paged: PagedOptimizer) -> None:
        """Continue with the weights of the earlier fit, and like Lightning in memory, with a new optimizer."""
        if not paged.run.settings.run.retained_checkpoints:
            raise UnsupportedError(
                "a second fit() of a module is not supported with run.retained_checkpoints = 0, because the weights "
                "are kept in a checkpoint until the new optimizer is set up; set it to 1 or more"
            )
        self._configure_optimizer(trainer)  # may fail, therefore before the run is closed
        assert self._checkpoints is not None
        settings = self._checkpoints.suspend()
        with isolate_rng():  # resuming restores the random state, which fit() in memory leaves unchanged
            self._offload(settings, has_values=True, new_optimizer=True)

    def _start(self, trainer: Trainer, loaded: Path | None, *, has_values: bool) -> None:
        """Start a run, or resume from a folder.

        Args:
            trainer: the trainer.
            loaded: folder to resume from, or None.
            has_values: whether the module was offloaded before. Initial values are not read again.
        """
        settings = self._settings
        assert self.lightning_module is not None
        if loaded is not None:
            _, record = Record.of_checkpoint(loaded, settings, Ranks.current())
            settings = record.resumed(settings)
        if self._paged is not None and loaded is not None and has_values:
            self._paged.suspend()
            self.lightning_module.zero_grad(set_to_none=True)
        elif self._paged is not None:
            self._paged.close()
        self._configure_optimizer(trainer)
        self._offload(settings, has_values=has_values)
        if loaded is not None:
            assert self._checkpoints is not None
            self._checkpoints.check(loaded)

    def _configure_optimizer(self, trainer: Trainer) -> None:
        assert self.lightning_module is not None
        # After an earlier fit, the root may still be gathered, and the optimizer would get the gathered parameters.
        for module in self.lightning_module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        self.setup_optimizers(trainer)
        if len(self.optimizers) != 1:
            raise UnsupportedError(
                f"configure_optimizers returned {len(self.optimizers)} optimizers; return one, with param groups"
            )

    def _offload(self, settings: Config, *, has_values: bool, new_optimizer: bool = False) -> None:
        assert self.lightning_module is not None
        self._sharded_model = _sharded(self.lightning_module)
        self._paged = offload_inside(
            self.lightning_module,
            self._sharded_model,
            self.optimizers[0],
            settings,
            weights=None if has_values else self._weights,
            strict=has_values or self._strict,
            init=None if has_values else self._init,
            new_optimizer=new_optimizer,
        )
        self._checkpoints = Checkpoints(self._paged, "call trainer.fit(…, ckpt_path={})")
        self.optimizers = [self._paged]

    def on_exception(self, exception: BaseException) -> None:
        """Close the run, and report the reason to the other ranks.

        Outside of `fit`, the run stays open if all ranks have rejected the arguments, because nothing was changed.
        """
        rejected = isinstance(exception, UnsupportedError | ConfigError | CheckpointError) and not self._fitting
        if self._paged is not None and not rejected:
            self._paged.close(exception)

    def teardown(self) -> None:
        """End a fit. The run stays open, for evaluations and for another fit."""
        self._fitting = False
        super().teardown()

    # Checkpoints #

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return an empty dict, because the infinity checkpoint contains the weights."""
        return {}

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return an empty dict, because the infinity checkpoint contains the optimizer states."""
        return {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Write Lightning's data to a folder, and save an infinity checkpoint. All ranks must call this together.

        If `save_weights_only` is set, the folder contains weights for `from_pretrained` instead, and no infinity
        checkpoint is saved. Earlier weights in the folder are kept until the new ones are complete. If replacing them
        is interrupted, the folder may not be loadable until it is saved again.

        Raises:
            InfinityError: if gradients are pending, or another rank failed.
            StorageError, OSError, ConfigError: if a drive reports an error. The previous checkpoint stays intact.
            UnsupportedError: if `storage_options` is passed.
        """
        if storage_options is not None:
            raise UnsupportedError(
                "storage_options is not supported, because checkpoints are folders on a local or shared file system"
            )
        folder = Path(self.broadcast(filepath))
        if self._checkpoints is None:
            raise UnsupportedError("there is no state to save yet; call trainer.fit() first, which offloads the module")
        if "optimizer_states" not in checkpoint:
            self._checkpoints.export(folder)
            return
        kept = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
        kept |= {"state_dict": {}, "optimizer_states": []}  # Lightning checks that these keys exist
        self._checkpoints.save("save_checkpoint", folder, partial(self._write, folder, kept))

    def _write(self, folder: Path, kept: dict[str, Any]) -> Path:
        if self.global_rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(kept, folder / META)
        return folder

    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return Lightning's data. `fit` resumes from the checkpoint, also if it has started already.

        Lightning's `LearningRateFinder` loads a checkpoint during a fit. In that case, the weights are restored in
        place, and the optimizer and its scheduler are configured again.

        Raises:
            ConfigError: if `save_checkpoint` did not write the folder.
            CheckpointError: outside of `fit`, if the run is not at that checkpoint. The message states the fix.
        """
        folder, ranks = Path(self.broadcast(checkpoint_path)), Ranks.current()
        assert self.lightning_module is not None
        if self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
            folder, _ = Record.of_checkpoint(folder, self._settings, ranks)
            if self._fitting:
                self._start(self.lightning_module.trainer, folder, has_values=True)
            else:
                self._loaded = folder
        elif self._checkpoints is not None:
            folder = self._checkpoints.check(folder)

        def read() -> bytes:
            return read_regular(os.path.realpath(folder / META), _MOST_META)

        content = io.BytesIO(ranks.on_first("reading the checkpoint", read))
        found: dict[str, Any] = torch.load(content, map_location="cpu", weights_only=weights_only)
        return found


def _sharded(module: nn.Module) -> nn.Module:
    """Return the module on which `fully_shard` was called last: `module`, or the child with all of its parameters."""
    whole = {id(param) for param in module.parameters()}
    for child in module.children():
        if isinstance(child, FSDPModule) and {id(param) for param in child.parameters()} == whole:
            return child
    return module
