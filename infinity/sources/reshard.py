"""Going on from a commit whose pages lie otherwise: another world size, page size, dtype of computation or paths.

A new run begins with the values of the commit, read unit by unit, each rank what it will hold: memory is that of this
rank's part of the master and states of one unit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.checkpoint.commit import check_optimizer, committed_buffers, restore
from infinity.checkpoint.manifest import CommitName, read_manifest
from infinity.checkpoint.reader import CommitReader
from infinity.checkpoint.state import ResumedState
from infinity.content.layout import Layout, ShardSpec
from infinity.content.views import dtype_name
from infinity.errors import CommitError, FolderBusyError
from infinity.fsdp import private
from infinity.fsdp.sharded_model import Member, local_slice
from infinity.optim.several import name_of
from infinity.ranks import Ranks
from infinity.sources.first_values import FirstValues, ValueOf
from infinity.store.folder import RunFolder, holder_of
from infinity.store.marker import look_for_runs


def lies_otherwise(old: RunFolder, new: RunFolder, commit: CommitName, layout: Layout, ranks: Ranks) -> bool:
    """Whether the pages of a commit are not those of this layout, number of ranks and folders, on any rank.

    Raises:
        CommitError: a manifest is missing or malformed.
    """

    def compare() -> bool:
        if old != new:
            return True
        if commit.world_size != ranks.world_size:
            # Where this node does not have them all, the next to read them says what is wrong.
            return all((old.commits / commit.of(rank).file_name).exists() for rank in range(commit.world_size))
        return read_manifest(old.commits / commit.of(ranks.rank).file_name).layout.fingerprint != layout.fingerprint

    return any(ranks.collect(ranks.together("comparing the run", compare)))


def folders_of(paths: Sequence[str | Path], run_id: str, held: Sequence[str | Path]) -> RunFolder:
    """Return the folders that a run has on these paths, in its own order, whatever theirs is.

    Args:
        held: paths whose locks this process holds.

    Raises:
        CommitError: it has none, or others too that are not named. FolderBusyError: the run is live.
    """
    ours = {Path(path).resolve() for path in held}
    runs = {run.run_id: run for run in look_for_runs(paths)[0]}
    listed = ", ".join(map(str, paths))
    if run_id not in runs:
        raise CommitError(f"run {run_id} is not in {listed} of this node")
    run = runs[run_id]
    if not run.complete:
        raise CommitError(
            f"run {run_id} lies on {run.paths} paths, {len(run.roots)} were named ({listed}); name them all"
        )
    others = tuple(root for root in run.in_order if root.parent.resolve() not in ours)
    if owner := holder_of(RunFolder(run_id, others)):  # other runs there do not matter: nothing is written
        named = ", ".join(str(root.parent) for root in others)
        raise FolderBusyError(f"run {run_id} on {named} is in use by {owner}; resume when it has ended")
    return RunFolder(run_id, run.in_order)


class ReshardSource(FirstValues):
    """First values and progress of a run from a commit that lies otherwise."""

    def __init__(self, reader: CommitReader, ranks: Ranks) -> None:
        self._reader, self._ranks = reader, ranks  # the commit that is read; the ranks of the new run
        self._index = {  # of parameters in the commit, by all their names
            name: index for index, spec in enumerate(reader.tensors) for name in spec.names
        }

    @property
    def reader(self) -> CommitReader:
        """The commit."""
        return self._reader

    def check(
        self, model: nn.Module, members: Sequence[Member], layout: Layout, optimizer: torch.optim.Optimizer
    ) -> None:
        """Check that the commit is of this model and optimizer.

        Raises:
            CommitError: it is not; what differs is named.
        """
        run_id, step = self._reader.folder.run_id, self._reader.step
        check_optimizer(self._reader.manifest(0), name_of(optimizer))
        another = f"the commit of step {step} of run {run_id} belongs to another model: "
        if len(members) != len(self._reader.tensors):
            raise CommitError(f"{another}it has {len(self._reader.tensors)} parameters, this model {len(members)}")
        for member, placed in zip(members, layout.shards, strict=True):
            self._check_member(member, placed.spec, layout.segments[placed.segment].format.kinds, another)

    def _check_member(self, member: Member, spec: ShardSpec, kinds: tuple[tuple[str, str], ...], another: str) -> None:
        name = spec.name
        index = self._index.get(name, -1)
        if index < 0:
            raise CommitError(f"{another}it has no parameter {name}")
        param = member.param
        shape, found = tuple(private.full_shape(param)), self._reader.tensors[index].shape
        if shape != found:
            raise CommitError(f"{another}{name} has shape {found} there, {shape} here")
        here = (dtype_name(param.sharded_param.dtype), kinds)
        there = (dtype_name(self._reader.dtype(index)), self._reader.kinds(index))
        if here != there:
            raise CommitError(f"{another}{name} is trained as {there} there, {here} here")

    def values(self, unit: str, members: Sequence[Member]) -> ValueOf:
        """Return slices of the commit's parameters and states, which are read when they are asked for."""

        def value_of(position: int, section: str) -> torch.Tensor:
            param, index = members[position].param, self._index[members[position].names[0]]
            spec = self._reader.tensors[index]
            if private.shard_dim(param) != spec.dim:
                return local_slice(param, self._reader.read(index, section))
            rank, size = private.shard_rank_and_size(param)
            rows = replace(spec, shard_size=size).slice_of(rank)
            return self._reader.read(index, section, rows=rows).reshape(-1)

        return value_of

    def buffers(self, model: nn.Module) -> Mapping[str, torch.Tensor]:
        """Return the commit's buffers."""
        return committed_buffers(self._reader.manifest(0), self._reader.folder, model)

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
