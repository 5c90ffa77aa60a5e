"""Initial state of a run: the initial values of its pages, the buffers, and the training progress."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from infinity.checkpoint.checkpoint_files import CheckpointFiles
from infinity.checkpoint.model_state import ResumedState
from infinity.checkpoint.module_state import load_state
from infinity.checkpoint.publish import checkpointed_buffers, restore
from infinity.checkpoint.remote_files import packed, unpacked
from infinity.errors import StorageError, UnsupportedError
from infinity.formats.companions import carry_companions, keep_companions
from infinity.fsdp.shard_io import ShardIO
from infinity.fsdp.sharded_model import ShardedModel
from infinity.optim.base_optimizer import BaseOptimizer
from infinity.run.run import Run
from infinity.sources.dcp import DcpFolder
from infinity.sources.first_values import FirstValues, OwnValues
from infinity.sources.initialize import InitFunction, ModuleInitializer
from infinity.sources.pretrained_folder import PretrainedFolder


class Filling:
    """Fills the pages of a newly opened run and restores the state that is not stored in pages.

    A run that resumes from its own checkpoint already has its pages. Every other run takes its initial values from
    exactly one source. All ranks run each stage together, and if one rank fails, all of them fail.
    """

    def __init__(
        self,
        run: Run,
        sharded: ShardedModel,
        weights: str | os.PathLike[str] | None,
        strict: bool,
        init: InitFunction | None,
    ) -> None:
        """Open the source of the initial values without reading from it. See `infinity.offload` for the arguments.

        Raises:
            ConfigError, CheckpointError: if `weights` is not a supported source.
            UnsupportedError: if only a checkpoint of a closed run has the values of the model.
        """
        self._run, self._sharded = run, sharded
        # All parameters, by shard.
        self._members = sharded.shards
        # Creates the buffers and parameters that no other source provides.
        self._initializer = ModuleInitializer(sharded.model, run.settings.run.seed, init)

        def open_source() -> FirstValues:
            if run.directory.source is not None:
                return run.directory.source
            if sharded.of_closed_run:
                raise UnsupportedError(
                    "the model was offloaded before and its run was closed, so the model has no values; set run.resume "
                    "to continue from a checkpoint of that run, or build a new model"
                )
            if not sharded.on_meta:
                return OwnValues()
            if weights is None:
                return self._initializer
            if DcpFolder.is_at(weights):
                return DcpFolder(weights)
            return PretrainedFolder(weights, self._initializer, strict=strict, seed=run.settings.run.seed)

        self._source: FirstValues | None = None  # None if the pages already exist
        if run.directory.found is None:
            self._source = run.ranks.together("opening the weights", open_source)

    def fill(
        self, base_optimizer: BaseOptimizer, shards: ShardIO, *, new_optimizer: bool = False
    ) -> ResumedState | None:
        """Compute the buffers, write the initial values, and restore the training progress.

        Values are written one FSDP module at a time, so peak memory is the size of the largest FSDP module.

        Args:
            base_optimizer: optimizer, whose settings are restored.
            new_optimizer: whether to leave the settings and the state of the optimizer at their initial values.

        Returns:
            Training progress, or None for a new run.

        Raises:
            ConfigError, CheckpointError: if the values do not match this model and optimizer. The message lists the
                differences.
            UnsupportedError: if a parameter or buffer cannot be initialized.
            StorageError: if a write fails.
        """
        run, sharded, source = self._run, self._sharded, self._source
        optimizer, in_memory = base_optimizer.optimizer, base_optimizer.in_memory
        model, groups, together = sharded.model, optimizer.param_groups, run.ranks.together
        if new_optimizer:
            groups = [dict(group) for group in groups]  # copies, which receive the settings of the checkpoint
        if source is not None:
            together("checking the initial values", partial(source.check, model, self._members, run.layout, optimizer))
        if sharded.on_meta:
            known = together("reading buffers", self._known_buffers)
            together("computing buffers", partial(self._initializer.set_buffers, sharded.device, known))
        if source is not None:
            together("writing the initial values", partial(self._write, source, shards))
        together("storing files for exports", self._keep_companions)
        if run.settings.run.copies:
            content = run.ranks.on_first("reading files for exports", self._packed_companions)
            together("copying files for exports", partial(self._copy_companions, content))
        resumed = self._restore(groups)
        if source is not None:
            source.close()
        if resumed is not None and resumed.modules is not None:
            load = partial(load_state, resumed.modules, sharded.outermost, model, in_memory)
            together("restoring the state of modules", load)
        if resumed is not None and new_optimizer:
            # An update ignores the states in the pages of a shard without scalars, as it does in a new run.
            resumed = replace(resumed, scalars={}, own={})
            in_memory.clear_state()
        return resumed

    def load(self, optimizer: torch.optim.Optimizer) -> int | None:
        """Load the optimizer state of sources that use `load_state_dict`, after the model was offloaded.

        Returns:
            Number of completed steps, or None if nothing was loaded.

        Raises:
            ConfigError, CheckpointError: if the state does not match the optimizer, or cannot be read.
            StorageError: if a write fails.
        """
        if self._source is None:
            return None
        return self._run.ranks.together(
            "loading the optimizer state", partial(self._source.load, self._sharded.model, optimizer)
        )

    def _restore(self, groups: list[dict[str, Any]]) -> ResumedState | None:
        run, model, together = self._run, self._sharded.model, self._run.ranks.together
        if self._source is not None:
            restored = partial(self._source.restore, model, self._members, groups)
            return together("restoring training progress", restored)
        found = run.directory.found
        if found is None:
            return None
        parameters = [param for fsdp_module in self._sharded.parameters() for param in fsdp_module]  # by shard
        access = CheckpointFiles(run.folder)
        numbers = {id(param): shard for shard, param in enumerate(parameters)}
        held = [[numbers[id(param)] for param in group["params"] if id(param) in numbers] for group in groups]
        return together("restoring the checkpoint", partial(restore, found, access, model, groups, held))

    def _write(self, source: FirstValues, shards: ShardIO) -> None:
        for fsdp_module, (name, members) in enumerate(zip(self._sharded.names, self._sharded.members, strict=True)):
            shards.write_module(fsdp_module, source.values(name, members))
            self._run.freed.bound()

    def _known_buffers(self) -> Mapping[str, torch.Tensor]:
        """Return the buffers that the source or the checkpoint contains, by their names in the model."""
        model: nn.Module = self._sharded.model
        if self._source is not None:
            return self._source.buffers(model)
        found = self._run.directory.found
        return checkpointed_buffers(found, CheckpointFiles(self._run.folder), model) if found is not None else {}

    def _keep_companions(self) -> None:
        """Store the files that exports need, such as the tokenizer, next to the checkpoints of a new run."""
        run = self._run
        if run.ranks.rank or self._source is None:
            return
        try:
            if run.directory.source is not None:
                carry_companions(run.directory.source.reader.checkpoints, run.folder.checkpoints)
            else:
                files = self._source.files if isinstance(self._source, PretrainedFolder) else None
                keep_companions(run.folder.checkpoints, self._sharded.model, files)
        except OSError as error:
            raise self._failed("write", error) from error

    def _packed_companions(self) -> bytes:
        try:
            return packed(self._run.folder.checkpoints)
        except OSError as error:
            raise self._failed("read", error) from error

    def _copy_companions(self, content: bytes) -> None:
        """Store the files for exports of rank 0 on this node, too, because the node of rank 0 may be lost."""
        run = self._run
        if run.ranks.rank == 0 or not run.keeps_companions or not content:
            return
        try:
            with TemporaryDirectory() as place:
                carry_companions(unpacked(content, Path(place)), run.folder.checkpoints)
        except OSError as error:
            raise self._failed("write", error) from error

    def _failed(self, what: str, error: OSError) -> StorageError:
        return StorageError(what, error.filename or str(self._run.folder.checkpoints), 0, 0, error.errno)
