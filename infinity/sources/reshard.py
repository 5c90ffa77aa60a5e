"""Resume from a checkpoint that has a different world size, page size, compute dtype, or different paths.

A new run starts with the values in the checkpoint. Each rank reads its part of the values, one FSDP module at a time,
from the drives of its node or, through the process group, from drives of other nodes.
Peak memory is therefore this rank's part of the master and optimizer states of one FSDP module.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity import torch_private
from infinity.checkpoint.description import RunDescription
from infinity.checkpoint.held import HeldCheckpoint
from infinity.checkpoint.manifest import read_manifest
from infinity.checkpoint.model_state import ResumedState
from infinity.checkpoint.parts import sources
from infinity.checkpoint.publish import check_optimizer, checkpointed_buffers, restore
from infinity.checkpoint.reader import CheckpointReader
from infinity.content.layout import Layout, ShardSpec
from infinity.content.views import dtype_name
from infinity.errors import CheckpointError, FolderBusyError
from infinity.fsdp.sharded_model import Member, local_spans
from infinity.optim.multi_optimizer import name_of
from infinity.ranks import Ranks
from infinity.sources.first_values import FirstValues, ValueOf
from infinity.store.folder import RunFolder, holder_of
from infinity.store.marker import look_for_runs

_log = logging.getLogger("infinity")


def needs_resharding(
    old: RunFolder,
    new: RunFolder,
    checkpoint: HeldCheckpoint,
    described: RunDescription,
    ranks: Ranks,
    replica: int = -1,
) -> bool:
    """Return whether the state must be copied to a new run.

    This is the case if the page layout, the slices, the number of ranks or the folders of a checkpoint differ on any
    rank, if a rank does not have its own files, for example because it runs on another host now, or if one of several
    replicas was chosen.

    Raises:
        CheckpointError: if a manifest is missing or malformed, or if there is no such replica.
    """

    def compare() -> bool:
        own = ranks.rank in checkpoint.holders.get(ranks.rank, ())
        if old != new or checkpoint.name.world_size != ranks.world_size or not own:
            return True
        found = read_manifest(old.checkpoints / checkpoint.name.of(ranks.rank).file_name)
        # also if the replicas are equal: the user may choose an intact one when a page of another one is damaged
        chosen = replica >= 0 and len(sources(found.parts, checkpoint.holders, replica)[0]) < ranks.world_size
        pages = found.layout.fingerprint == described.layout.fingerprint
        return chosen or not pages or found.description.tensors != described.tensors

    return any(ranks.collect(ranks.together("comparing the run", compare)))


def folders_of(paths: Sequence[str | Path], run_id: str, held: Sequence[str | Path]) -> RunFolder:
    """Return the folders of a run on the given paths, in the order that the run uses.

    If the run is not on these paths, its folders are on other nodes, and the result has no folders.

    Args:
        paths: paths to search.
        run_id: id of the run.
        held: paths whose locks this process holds.

    Raises:
        CheckpointError: if the run is also on other paths.
        FolderBusyError: if another process is using the run.
    """
    ours = {Path(path).resolve() for path in held}
    runs = {run.run_id: run for run in look_for_runs(paths)[0]}
    listed = ", ".join(map(str, paths))
    if run_id not in runs:
        return RunFolder(run_id, ())
    run = runs[run_id]
    if not run.complete:
        raise CheckpointError(
            f"run {run_id} uses {run.paths} paths, but only {len(run.roots)} of them were given ({listed}); list all"
        )
    others = tuple(root for root in run.in_order if root.parent.resolve() not in ours)
    # other runs on these paths do not matter, because nothing is written
    if owner := holder_of(RunFolder(run_id, others)):
        named = ", ".join(str(root.parent) for root in others)
        raise FolderBusyError(f"run {run_id} on {named} is in use by {owner}; resume after it has ended")
    return RunFolder(run_id, run.in_order)


class ReshardSource(FirstValues):
    """Source of initial values and progress: a checkpoint with a different layout."""

    def __init__(self, reader: CheckpointReader, ranks: Ranks) -> None:
        self._reader, self._ranks = reader, ranks  # the checkpoint to read, and the ranks of the new run
        self._index = {  # index of each parameter in the checkpoint, by all of its names
            name: index for index, spec in enumerate(reader.tensors) for name in spec.names
        }

    @property
    def reader(self) -> CheckpointReader:
        """Reader of the checkpoint."""
        return self._reader

    def check(
        self, model: nn.Module, members: Sequence[Member], layout: Layout, optimizer: torch.optim.Optimizer
    ) -> None:
        """Check that the checkpoint belongs to this model and optimizer.

        Raises:
            CheckpointError: if it does not. The message describes the difference.
        """
        run_id, step = self._reader.folder.run_id, self._reader.step
        check_optimizer(self._reader.first, name_of(optimizer))
        another = f"the checkpoint at step {step} of run {run_id} belongs to a different model: "
        if len(members) != len(self._reader.tensors):
            raise CheckpointError(
                f"{another}it has {len(self._reader.tensors)} parameters, but this model has {len(members)}"
            )
        for member, placed in zip(members, layout.shards, strict=True):
            self._check_member(member, placed.spec, layout.segments[placed.segment].format.kinds, another)

    def _check_member(self, member: Member, spec: ShardSpec, kinds: tuple[tuple[str, str], ...], another: str) -> None:
        name = spec.name
        index = self._index.get(name, -1)
        if index < 0:
            raise CheckpointError(f"{another}it does not contain the parameter {name}")
        param = member.param
        shape, found = tuple(torch_private.full_shape(param)), self._reader.tensors[index].shape
        if shape != found:
            raise CheckpointError(f"{another}{name} has shape {found} in the checkpoint, but {shape} in the model")
        here = (dtype_name(param.sharded_param.dtype), kinds)
        there = (dtype_name(self._reader.dtype(index)), self._reader.kinds(index))
        if here != there:
            raise CheckpointError(
                f"{another}dtype and optimizer states of {name} are {there} in the checkpoint, but {here} in the model"
            )

    def values(self, fsdp_module: str, members: Sequence[Member]) -> ValueOf:
        """Return a function that reads this rank's slices of the checkpoint's parameters and optimizer states."""

        def value_of(position: int, section: str) -> torch.Tensor:
            param, index = members[position].param, self._index[members[position].names[0]]
            return self._reader.read(index, section, spans=local_spans(param)).reshape(-1)

        return value_of

    def buffers(self, model: nn.Module) -> Mapping[str, torch.Tensor]:
        """Return the buffers of the checkpoint."""
        return checkpointed_buffers(self._reader.first, self._reader.files, model)

    def restore(self, model: nn.Module, members: Sequence[Member], groups: list[dict[str, Any]]) -> ResumedState:
        """Restore buffers, settings and, from this rank's own part, random states. Return the progress.

        A rank whose part belongs to another replica than the chosen one does not use it.
        """
        rank = self._ranks.rank
        source = self._reader.source_of(rank)
        manifest = self._reader.manifest(source)
        if source != rank and self._ranks.world_size == manifest.world_size:
            _log.warning(
                "The random states of rank %d are not restored, because its files are not used. Its random numbers "
                "differ from those of an uninterrupted run.",
                rank,
            )
        indices = [self._index[member.names[0]] for member in members]
        of_param = {id(member.param.sharded_param): index for member, index in zip(members, indices, strict=True)}
        held = [[of_param[id(param)] for param in group["params"] if id(param) in of_param] for group in groups]
        found = restore(manifest, self._reader.files, model, groups, held, random=source == rank)
        scalars = self._reader.scalars()
        by_shard = {shard: scalars[index] for shard, index in enumerate(indices) if index in scalars}
        return replace(found, scalars=by_shard)

    def close(self) -> None:
        """Stop reading from the checkpoint. All ranks must call it together."""
        self._reader.files.close()
