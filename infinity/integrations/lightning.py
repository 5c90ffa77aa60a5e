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

import infinity
from infinity.checkpoint.durable import write_durably
from infinity.config import Config, load_config
from infinity.errors import UnsupportedError
from infinity.integrations.checkpoint_folders import Checkpoints, Record
from infinity.optional_dependencies import needs
from infinity.ranks import Ranks
from infinity.run.optimizer import PagedOptimizer
from infinity.sources.initialize import InitFunction
from infinity.untrusted_files import read_regular

with needs("lightning", "infinity.integrations.lightning"):
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import ModelParallelStrategy
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning.pytorch.utilities.model_helpers import is_overridden

META = "meta.pt"
"""File in a checkpoint folder with the data that Lightning saves in addition to weights and optimizer."""
_MOST_META = 1 << 30  # limit for its size, in bytes


class PagedStrategy(ModelParallelStrategy):  # type: ignore[misc]
    """Trains a module whose `configure_model` calls `fully_shard`, with its state on NVMe.

    `trainer.fit` creates the optimizer, offloads it, and with `ckpt_path` resumes from that checkpoint. A Lightning
    checkpoint is a folder with Lightning's own data, plus an infinity checkpoint on the NVMe paths, which copies no
    data. All ranks are data parallel: `self.device_mesh["data_parallel"]` is the mesh for `fully_shard`.
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
            config: settings, as for `infinity.offload`.
            weights: as for `infinity.offload`; names are relative to the module that `fully_shard` was called on
                last.
            strict: as for `infinity.offload`.
            init: as for `infinity.offload`.
            named: further arguments of `ModelParallelStrategy` (`process_group_backend`, `timeout`).

        Raises:
            ConfigError: if a setting is invalid.
            UnsupportedError: if parallel sizes or a checkpoint format are given.
        """
        for refused in ("data_parallel_size", "tensor_parallel_size", "save_distributed_checkpoint"):
            if refused in named:
                raise UnsupportedError(
                    f"{refused}: all ranks are data parallel, and checkpoints are folders; remove it"
                )
        super().__init__(**named)
        self._settings, self._weights, self._strict, self._init = load_config(config), weights, strict, init
        self._paged: PagedOptimizer | None = None  # of the last fit
        self._checkpoints: Checkpoints | None = None  # of the last fit
        self._loaded: Path | None = None  # folder that the next fit resumes from

    @property
    def paged(self) -> PagedOptimizer:
        """Optimizer returned by `infinity.offload`, to save, inspect and close. Raises `UnsupportedError` before
        `fit`.
        """
        if self._paged is None:
            raise UnsupportedError("call trainer.fit first: it creates the optimizer and moves the weights to NVMe")
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
        """Return a backend that can also exchange Python objects if ranks compute on GPUs."""
        given: str | None = self._process_group_backend
        return given or ("cpu:gloo,cuda:nccl" if self.root_device.type == "cuda" else "gloo")

    def setup(self, trainer: Trainer) -> None:
        """Create the optimizer and move the training state to NVMe; values are initialized or read as a stream.

        Raises:
            UnsupportedError: if the module or the trainer uses a feature that cannot work. The message gives the
                reason.
            ConfigError: if this strategy did not write the checkpoint.
            Exception: any error of `infinity.offload`.
        """
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        if not is_overridden("configure_model", self.lightning_module):
            raise UnsupportedError(
                "the LightningModule has no configure_model(); define it, and call fully_shard on the layers in it"
            )
        if self.precision_plugin.precision != "32-true":
            raise UnsupportedError(
                f"Trainer(precision={self.precision_plugin.precision!r}): give fully_shard "
                "mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32) instead, and remove precision"
            )
        self.barrier()
        if trainer.state.fn == TrainerFn.FITTING:
            self._fit(trainer)
        elif self._paged is None:
            raise UnsupportedError("validate(), test() and predict() need weights on NVMe; call fit() first")

    def _fit(self, trainer: Trainer) -> None:
        settings, loaded = self._settings, self._loaded
        self._loaded = None
        if loaded is not None:
            _, record = Record.of_checkpoint(loaded, settings, Ranks.current())
            settings = record.resumed(settings)
        if self._paged is not None:
            self._paged.close()
        self.setup_optimizers(trainer)
        assert self.lightning_module is not None
        if len(self.optimizers) != 1:
            raise UnsupportedError(
                f"configure_optimizers returned {len(self.optimizers)} optimizers; return one, with param groups"
            )
        self._paged = infinity.offload(
            _sharded(self.lightning_module),
            self.optimizers[0],
            settings,
            weights=self._weights,
            strict=self._strict,
            init=self._init,
        )
        self._checkpoints = Checkpoints(self._paged, "trainer.fit(…, ckpt_path={})")
        if loaded is not None:
            self._checkpoints.check(loaded)
        self.optimizers = [self._paged]
        self.setup_precision_plugin()

    def on_exception(self, exception: BaseException) -> None:
        """End the run, and report the reason to the other ranks."""
        if self._paged is not None:
            self._paged.close(exception)

    # Checkpoints #

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return an empty dict, because weights are in the checkpoint."""
        return {}

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return an empty dict, because optimizer states are in the checkpoint."""
        return {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Write Lightning's data into a folder, and save a checkpoint. All ranks call it together.

        Without optimizer states (`save_weights_only=True`), the folder is written for `from_pretrained` instead,
        without a checkpoint. A previous folder is replaced once the new one is complete.

        Raises:
            InfinityError: if gradients are pending, or another rank failed.
            StorageError, OSError, ConfigError: if a drive reports an error. The previous checkpoint stays intact.
            UnsupportedError: if `storage_options` are given.
        """
        if storage_options is not None:
            raise UnsupportedError(
                "storage_options is not supported, because checkpoints are folders on a local or shared file system"
            )
        folder = Path(self.broadcast(filepath))
        assert self._checkpoints is not None
        if "optimizer_states" not in checkpoint:
            self._checkpoints.export(folder)
            return
        kept = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
        kept |= {"state_dict": {}, "optimizer_states": []}  # Lightning checks that these keys exist
        self._checkpoints.save("save_checkpoint", folder, partial(self._write, folder, kept))

    def _write(self, folder: Path, kept: dict[str, Any]) -> Path:
        if self.global_rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            content = io.BytesIO()
            torch.save(kept, content)
            write_durably(folder / META, content.getvalue())
        return folder

    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return Lightning's data; the run starts from weights and optimizer of the checkpoint, or is already there.

        Raises:
            ConfigError: if `save_checkpoint` did not write the folder.
            CheckpointError: if the run is not at that checkpoint. The message names the fix.
        """
        folder, ranks = Path(self.broadcast(checkpoint_path)), Ranks.current()
        assert self.lightning_module is not None
        if self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
            folder, _ = Record.of_checkpoint(folder, self._settings, ranks)
            self._loaded = folder
        elif self._checkpoints is not None:
            folder = self._checkpoints.check(folder)

        def read() -> bytes:
            return read_regular(os.path.realpath(folder / META), _MOST_META)

        content = io.BytesIO(ranks.on_first("reading the checkpoint", read))
        found: dict[str, Any] = torch.load(content, map_location="cpu", weights_only=weights_only)
        return found


def _sharded(module: nn.Module) -> nn.Module:
    """Return the module that `fully_shard` was called on last: `module`, or the child with all of its parameters."""
    whole = {id(param) for param in module.parameters()}
    for child in module.children():
        if isinstance(child, FSDPModule) and {id(param) for param in child.parameters()} == whole:
            return child
    return module
