"""Going on from a checkpoint whose pages lie otherwise: another world size, page size, dtype of computation or paths.

A new run begins with the values of the checkpoint, read FSDP module by FSDP module, each rank what it will hold: memory
is that of this
rank's part of the master and states of one FSDP module.
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
    """Whether the pages of a checkpoint are not those of this layout, number of ranks and folders, on any rank.

    Raises:
        CheckpointError: a manifest is missing or malformed.
    """

    def compare() -> bool:
        if old != new:
            return True
        if checkpoint.world_size != ranks.world_size:
            # Where this node does not have them all, the next to read them says what is wrong.
            return all(
                (old.checkpoints / checkpoint.of(rank).file_name).exists() for rank in range(checkpoint.world_size)
            )
        return (
            read_manifest(old.checkpoints / checkpoint.of(ranks.rank).file_name).layout.fingerprint
            != layout.fingerprint
        )

    return any(ranks.collect(ranks.together("comparing the run", compare)))


def folders_of(paths: Sequence[str | Path], run_id: str, held: Sequence[str | Path]) -> RunFolder:
    """Return the folders that a run has on these paths, in its own order, whatever theirs is.

    Args:
        held: paths whose locks this process holds.

    Raises:
        CheckpointError: it has none, or others too that are not named. FolderBusyError: the run is live.
    """
    ours = {Path(path).resolve() for path in held}
    runs = {run.run_id: run for run in look_for_runs(paths)[0]}
    listed = ", ".join(map(str, paths))
    if run_id not in runs:
        raise CheckpointError(f"run {run_id} is not in {listed} of this node")
    run = runs[run_id]
    if not run.complete:
        raise CheckpointError(
            f"run {run_id} lies on {run.paths} paths, {len(run.roots)} were named ({listed}); name them all"
        )
    others = tuple(root for root in run.in_order if root.parent.resolve() not in ours)
    if owner := holder_of(RunFolder(run_id, others)):  # other runs there do not matter: nothing is written
        named = ", ".join(str(root.parent) for root in others)
        raise FolderBusyError(f"run {run_id} on {named} is in use by {owner}; resume when it has ended")
    return RunFolder(run_id, run.in_order)


class ReshardSource(FirstValues):
    """First values and progress of a run from a checkpoint that lies otherwise."""

    def __init__(self, reader: CheckpointReader, ranks: Ranks) -> None:
        self._reader, self._ranks = reader, ranks  # the checkpoint that is read; the ranks of the new run
        self._index = {  # of parameters in the checkpoint, by all their names
            name: index for index, spec in enumerate(reader.tensors) for name in spec.names
        }

    @property
    def reader(self) -> CheckpointReader:
        """The checkpoint."""
        return self._reader

    def check(
        self, model: nn.Module, members: Sequence[Member], layout: Layout, optimizer: torch.optim.Optimizer
    ) -> None:
        """Check that the checkpoint is of this model and optimizer.

        Raises:
            CheckpointError: it is not; what differs is named.
        """
        run_id, step = self._reader.folder.run_id, self._reader.step
        check_optimizer(self._reader.manifest(0), name_of(optimizer))
        another = f"the checkpoint of step {step} of run {run_id} belongs to another model: "
        if len(members) != len(self._reader.tensors):
            raise CheckpointError(f"{another}it has {len(self._reader.tensors)} parameters, this model {len(members)}")
        for member, placed in zip(members, layout.shards, strict=True):
            self._check_member(member, placed.spec, layout.segments[placed.segment].format.kinds, another)

    def _check_member(self, member: Member, spec: ShardSpec, kinds: tuple[tuple[str, str], ...], another: str) -> None:
        name = spec.name
        index = self._index.get(name, -1)
        if index < 0:
            raise CheckpointError(f"{another}it has no parameter {name}")
        param = member.param
        shape, found = tuple(torch_private.full_shape(param)), self._reader.tensors[index].shape
        if shape != found:
            raise CheckpointError(f"{another}{name} has shape {found} there, {shape} here")
        here = (dtype_name(param.sharded_param.dtype), kinds)
        there = (dtype_name(self._reader.dtype(index)), self._reader.kinds(index))
        if here != there:
            raise CheckpointError(f"{another}{name} is trained as {there} there, {here} here")

    def values(self, fsdp_module: str, members: Sequence[Member]) -> ValueOf:
        """Return slices of the checkpoint's parameters and states, which are read when they are asked for."""

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
        """Return the checkpoint's buffers."""
        return checkpointed_buffers(self._reader.manifest(0), self._reader.folder, model)

    def restore(self, model: nn.Module, members: Sequence[Member], groups: list[dict[str, Any]]) -> ResumedState:
        """Put back buffers and settings, and random states where this rank was there; return the rest."""
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
