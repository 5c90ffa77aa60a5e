"""Resume from a checkpoint with another page layout: other world size, page size, compute dtype or paths.

A new run starts with the values of the checkpoint. Each rank reads the part that it will hold, one FSDP module at a
time, so that memory is this rank's part of the master and states of one FSDP module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity import torch_private
from infinity.checkpoint.manifest import CheckpointName, read_manifest
from infinity.checkpoint.model_state import ResumedState
from infinity.checkpoint.publish import check_optimizer, checkpointed_buffers, restore
from infinity.checkpoint.reader import CheckpointReader
from infinity.content.layout import Layout, ShardSpec
from infinity.content.views import dtype_name
from infinity.errors import CheckpointError, FolderBusyError
from infinity.fsdp.sharded_model import Member, local_slice
from infinity.optim.multi_optimizer import name_of
from infinity.ranks import Ranks
from infinity.sources.first_values import FirstValues, ValueOf
from infinity.store.folder import RunFolder, holder_of
from infinity.store.marker import look_for_runs


def lies_otherwise(old: RunFolder, new: RunFolder, checkpoint: CheckpointName, layout: Layout, ranks: Ranks) -> bool:
    """Return whether the pages of a checkpoint differ from this layout, number of ranks or folders, on any rank.

    Raises:
        CheckpointError: if a manifest is missing or malformed.
    """

    def compare() -> bool:
        if old != new:
            return True
        if checkpoint.world_size != ranks.world_size:
            # If this node does not have all manifests, the next reader reports which ones are missing.
            return all(
                (old.checkpoints / checkpoint.of(rank).file_name).exists() for rank in range(checkpoint.world_size)
            )
        return (
            read_manifest(old.checkpoints / checkpoint.of(ranks.rank).file_name).layout.fingerprint
            != layout.fingerprint
        )

    return any(ranks.collect(ranks.together("comparing the run", compare)))


def folders_of(paths: Sequence[str | Path], run_id: str, held: Sequence[str | Path]) -> RunFolder:
    """Return the folders of a run on these paths, in the run's own order.

    Args:
        paths: paths to search.
        run_id: id of the run.
        held: paths whose locks this process holds.

    Raises:
        CheckpointError: if the run has no folder there, or has other folders that are not named.
        FolderBusyError: if a live process owns the run.
    """
    ours = {Path(path).resolve() for path in held}
    runs = {run.run_id: run for run in look_for_runs(paths)[0]}
    listed = ", ".join(map(str, paths))
    if run_id not in runs:
        raise CheckpointError(f"run {run_id} is not in {listed} of this node")
    run = runs[run_id]
    if not run.complete:
        raise CheckpointError(
            f"run {run_id} has {run.paths} paths, {len(run.roots)} given ({listed}); list all of them"
        )
    others = tuple(root for root in run.in_order if root.parent.resolve() not in ours)
    # other runs in these paths do not matter, because nothing is written
    if owner := holder_of(RunFolder(run_id, others)):
        named = ", ".join(str(root.parent) for root in others)
        raise FolderBusyError(f"run {run_id} on {named} is in use by {owner}; resume after it has ended")
    return RunFolder(run_id, run.in_order)


class ReshardSource(FirstValues):
    """Initial values and progress of a run from a checkpoint with another layout."""

    def __init__(self, reader: CheckpointReader, ranks: Ranks) -> None:
        self._reader, self._ranks = reader, ranks  # the checkpoint to read, and the ranks of the new run
        self._index = {  # of parameters in the checkpoint, by each of their names
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
            CheckpointError: if it does not. The message names the difference.
        """
        run_id, step = self._reader.folder.run_id, self._reader.step
        check_optimizer(self._reader.manifest(0), name_of(optimizer))
        another = f"the checkpoint of step {step} of run {run_id} belongs to another model: "
        if len(members) != len(self._reader.tensors):
            raise CheckpointError(
                f"{another}the checkpoint has {len(self._reader.tensors)} parameters, this model {len(members)}"
            )
        for member, placed in zip(members, layout.shards, strict=True):
            self._check_member(member, placed.spec, layout.segments[placed.segment].format.kinds, another)

    def _check_member(self, member: Member, spec: ShardSpec, kinds: tuple[tuple[str, str], ...], another: str) -> None:
        name = spec.name
        index = self._index.get(name, -1)
        if index < 0:
            raise CheckpointError(f"{another}the checkpoint has no parameter {name}")
        param = member.param
        shape, found = tuple(torch_private.full_shape(param)), self._reader.tensors[index].shape
        if shape != found:
            raise CheckpointError(f"{another}{name} has shape {found} in the checkpoint and {shape} in the model")
        here = (dtype_name(param.sharded_param.dtype), kinds)
        there = (dtype_name(self._reader.dtype(index)), self._reader.kinds(index))
        if here != there:
            raise CheckpointError(f"{another}{name} is trained as {there} in the checkpoint and {here} in the model")

    def values(self, fsdp_module: str, members: Sequence[Member]) -> ValueOf:
        """Return slices of the checkpoint's parameters and states, which are read on request."""

        def value_of(position: int, section: str) -> torch.Tensor:
            param, index = members[position].param, self._index[members[position].names[0]]
            spec = self._reader.tensors[index]
            if torch_private.shard_dim(param) != spec.dim:
                return local_slice(param, self._reader.read(index, section))
            rank, size = torch_private.shard_rank_and_size(param)
            rows = replace(spec, shard_size=size).slice_of(rank)
            return self._reader.read(index, section, rows=rows).reshape(-1)

        return value_of

    def buffers(self, model: nn.Module) -> Mapping[str, torch.Tensor]:
        """Return the buffers of the checkpoint."""
        return checkpointed_buffers(self._reader.manifest(0), self._reader.folder, model)

    def restore(self, model: nn.Module, members: Sequence[Member], groups: list[dict[str, Any]]) -> ResumedState:
        """Restore buffers and settings, and random states if this rank existed in the checkpoint; return the
        progress.
        """
        rank = self._ranks.rank
        was_there = rank < self._reader.world_size
        manifest = self._reader.manifest(rank if was_there else 0)
        indices = [self._index[member.names[0]] for member in members]
        of_param = {id(member.param.sharded_param): index for member, index in zip(members, indices, strict=True)}
        held = [[of_param[id(param)] for param in group["params"]] for group in groups]
        found = restore(manifest, self._reader.folder, model, groups, held, random=was_there)
        scalars = self._reader.scalars()
        by_shard = {shard: scalars[index] for shard, index in enumerate(indices) if index in scalars}
        return ResumedState(found.step, by_shard, found.extra, found.own)
