"""Checkpoints of a training run: collect the state of the model, the optimizer and the steps, and publish it."""

from __future__ import annotations

import logging
from collections.abc import Collection
from functools import partial
from typing import Any

import torch
from torch.profiler import record_function

from infinity import interrupts, torch_private
from infinity.checkpoint.copier import Copier
from infinity.checkpoint.description import RunDescription, TensorSpec
from infinity.checkpoint.held import Seen, held, usable
from infinity.checkpoint.manifest import CheckpointName
from infinity.checkpoint.mirror import Mirror, MirrorFiles
from infinity.checkpoint.mirror_writer import MirrorWriter
from infinity.checkpoint.model_state import check_buffers
from infinity.checkpoint.module_state import check_state_dict
from infinity.checkpoint.node_copier import NodeCopier
from infinity.checkpoint.parts import replica_of
from infinity.checkpoint.publish import CheckpointWriter
from infinity.checkpoint.reserved_space import CheckpointSpace, checkpoint_bytes
from infinity.checkpoint.values import save_extra, save_settings
from infinity.config import runtime_dir
from infinity.content.layout import Layout
from infinity.daemon_client import NodeDaemon
from infinity.errors import StorageError
from infinity.formats.companions import keep_configs
from infinity.fsdp.attach import Attachment
from infinity.fsdp.sharded_model import Member, ShardedModel, local_spans
from infinity.optim.base_optimizer import BaseOptimizer
from infinity.optim.step import StepRunner
from infinity.run.modules_in_memory import ModulesInMemory
from infinity.run.run import Run
from infinity.store.page_store import state_pages

_log = logging.getLogger("infinity")


def describe(layout: Layout, sharded: ShardedModel) -> RunDescription:
    """Return a description of the tensors that are stored in this rank's pages."""
    return RunDescription(
        layout=layout,
        tensors=tuple(_full_parameter(member) for member in sharded.shards),
        buffers=torch_private.persistent_buffers(sharded.model),
    )


def make_checkpoint_writer(
    run: Run, sharded: ShardedModel, described: RunDescription, base_optimizer: BaseOptimizer
) -> CheckpointWriter:
    """Create the writer that publishes a run's checkpoints, and reserve space for the checkpoint files.

    All ranks must call this function together.

    Raises:
        BudgetError, StorageError: if there is not enough space.
        CheckpointError: if the resumed checkpoint belongs to a different model, or a param group setting cannot be
            saved.
        UnsupportedError: if a buffer or another entry of `state_dict()` cannot be saved.
    """
    nbytes, optimizer, in_memory = 0, base_optimizer.optimizer, base_optimizer.in_memory
    if run.settings.run.retained_checkpoints:
        check_buffers(sharded.model)
        module_state = check_state_dict(sharded.outermost, sharded.model, in_memory)
        for group in optimizer.param_groups:  # tensors can always be saved; skipping them avoids copies
            save_settings(
                {key: value for key, value in group.items() if not torch.is_tensor(value) and key != "params"}
            )
    file = run.folder.reserved_file(run.ranks.rank)
    if run.settings.run.retained_checkpoints:
        nbytes = checkpoint_bytes(described, sharded.model, module_state, optimizer.param_groups, run.ranks.world_size)
        nbytes += in_memory.state_bytes()
    space = CheckpointSpace(file, nbytes)
    copiers: list[Copier] = []
    if run.settings.run.mirror:
        copiers.append(_open_mirror(run))
        run.undo.push(copiers[-1].close)
    if run.settings.run.copies:
        copiers.append(_open_node_copier(run, nbytes))
        run.undo.push(copiers[-1].close)
    name, directory = base_optimizer.name, run.directory
    checkpoint_writer = CheckpointWriter(
        run.folder,
        run.ranks,
        described,
        run.store,
        name,
        directory.stripe_weights,
        directory.checkpoints,
        space,
        run.update_device,
        _replica(sharded),
        copiers,
        run.settings.run.copied_checkpoints,
    )
    run.undo.push(checkpoint_writer.close)
    run.ranks.together("reserving space for checkpoints", checkpoint_writer.reserve)
    return checkpoint_writer


def _open_mirror(run: Run) -> MirrorWriter:
    """Open the mirror, after checking that it can be written. Raises `ConfigError` or `CheckpointError`."""
    settings, ranks, found = run.settings.run, run.ranks, run.directory.found
    mirror = Mirror(settings.mirror)
    ranks.together("opening the mirror", partial(mirror.check, run.settings.storage.paths))

    def complete() -> CheckpointName | None:
        there = usable(held([Seen(mirror.published(run.folder.run_id))]))
        names = [each.name for each in there if found is not None and each.name.step <= found.step]
        return max(names, key=lambda name: name.identity, default=None)

    source, previous = run.directory.source, ""
    if source is not None and isinstance(files := source.reader.files, MirrorFiles) and files.address == mirror.address:
        previous = source.reader.folder.run_id
    before = ranks.on_first("looking for checkpoints in the mirror", complete)
    return MirrorWriter(mirror, run.folder, ranks, run.store, settings.mirror_rate, before=before, previous=previous)


def _open_node_copier(run: Run, file_bytes: int) -> NodeCopier:
    """Prepare copies on other nodes. Raises `ConfigError`, `BudgetError` or `StorageError`."""
    state_bytes = sum(page.nbytes for page in state_pages(run.layout.pages))
    retained = [manifest.name.checkpoint for manifest in run.directory.checkpoints]
    daemon = NodeDaemon(runtime_dir(run.settings.telemetry))
    return NodeCopier(run.settings.run, run.folder, run.ranks, daemon, state_bytes, file_bytes, retained)


def _full_parameter(member: Member) -> TensorSpec:
    shape = tuple(torch_private.full_shape(member.param))
    return TensorSpec(names=member.names, shape=shape, spans=local_spans(member.param))


def _replica(sharded: ShardedModel) -> int | None:
    """Return the replica of this rank, or None if it is unknown, for example because a parameter is tensor-parallel."""
    if any(torch_private.is_tensor_parallel(member.param) for member in sharded.shards):
        return None
    return replica_of(torch_private.shard_ranks(member.param) for member in sharded.shards)


class Checkpointer:
    """Saves checkpoints of the state after the last completed step."""

    def __init__(
        self,
        run: Run,
        sharded: ShardedModel,
        base_optimizer: BaseOptimizer,
        runner: StepRunner,
        attachment: Attachment,
        checkpoint_writer: CheckpointWriter,
        in_memory: ModulesInMemory,
    ) -> None:
        self._in_memory = in_memory
        self._run, self._base_optimizer = run, base_optimizer
        self._model, self._outermost = sharded.model, sharded.outermost
        self._runner, self._attachment, self._checkpoint_writer = runner, attachment, checkpoint_writer

    def save_checkpoint(self, extra: dict[str, Any], prefer: Collection[int]) -> None:
        """Write the modified pages and publish the checkpoint. All ranks must call it together.

        Args:
            prefer: steps of earlier checkpoints to retain in preference to newer ones.

        Raises:
            CheckpointError: if `extra` contains an unsupported value, or the state of a module cannot be saved or
                restored. No checkpoint is written in that case.
            UnsupportedError: if a weight was replaced, so the checkpoint would not contain the weights in use.
            StorageError: if a write fails.
            InfinityError: if another rank failed.
        """
        run = self._run
        run.ranks.together("checkpoint", partial(save_extra, extra))
        with run.ledger.phase("checkpoint"), record_function("infinity::checkpoint"):
            self._runner.flush_updates()
            scalars = self._in_memory.store()
            run.pager.flush()
            run.ledger.linked(*run.device.take_copied())  # not part of a step
            self._attachment.check()
            if run.keeps_companions:
                self._keep_configs()
            updates, own = self._runner.updates, self._base_optimizer.kernel.persistent_attributes
            groups = self._base_optimizer.groups_by_shard()
            try:
                with interrupts.held():  # an interrupt between publishing and freeing would leave old extents allocated
                    self._checkpoint_writer.publish(
                        updates.step, self._model, self._outermost, self._base_optimizer.in_memory,
                        {**updates.scalars, **scalars}, groups, extra, own, prefer,
                    )  # fmt: skip
            except OSError as error:
                file = error.filename or str(run.folder.checkpoints)
                raise StorageError("checkpoint", file, 0, 0, error.errno) from error

    def finish(self) -> None:
        """Wait until the newest checkpoint has been copied, or has failed to be copied."""
        self._checkpoint_writer.finish()

    def _keep_configs(self) -> None:
        """Store the model's current configuration for exports. If this fails, the checkpoint is still written."""
        try:
            keep_configs(self._run.folder.checkpoints, self._model)
        except OSError as error:
            _log.warning("exports will contain an earlier configuration of the model: %s", error)
