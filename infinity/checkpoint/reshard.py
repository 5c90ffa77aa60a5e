"""Going on from a commit whose pages lie otherwise: another world size, page size, dtype of computation or paths.

A new run begins with the values of the commit, read unit by unit: memory is that of one whole parameter, and of this
rank's part of the master and states of one unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.checkpoint.commit import check_optimizer, restore
from infinity.checkpoint.description import description_name, read_description
from infinity.checkpoint.reader import CommitReader
from infinity.errors import CommitError
from infinity.fsdp import private
from infinity.fsdp.content import dtype_name
from infinity.fsdp.materialize import FirstValues, Member, ResumedState, ValueOf, local_slice
from infinity.layout import Layout, ShardSpec
from infinity.ranks import Ranks
from infinity.store.folder import RunFolder


def lies_otherwise(folder: RunFolder, layout: Layout, ranks: Ranks, paths: int) -> bool:
    """Whether the pages of a run are not those of this layout, number of ranks and number of paths, on any rank.

    Raises:
        CommitError: the run's description is missing or malformed.
    """

    def compare() -> bool:
        if not (folder.commits / description_name(0)).exists():
            return False  # this node does not have rank 0's files; its own commits will say what is wrong
        first = read_description(folder.commits, 0)
        if first.world_size != ranks.world_size or len(folder.roots) != paths:
            return True
        return read_description(folder.commits, ranks.rank).layout.fingerprint != layout.fingerprint

    return any(ranks.collect(ranks.together("comparing the run", compare)))


def roots_of(paths: Sequence[str | Path], run_id: str) -> RunFolder:
    """Return the folders that a run has on these paths."""
    return RunFolder(run_id, tuple(root for path in paths if (root := Path(path) / run_id).is_dir()))


class ReshardSource(FirstValues):
    """First values and progress of a run from a commit that lies otherwise."""

    def __init__(self, reader: CommitReader, ranks: Ranks) -> None:
        self._reader, self._ranks = reader, ranks
        self._index = {name: index for index, spec in enumerate(reader.tensors) for name in spec.names}

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
        check_optimizer(self._reader.manifest(0), type(optimizer).__name__)
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
        """Return slices of the commit's whole parameters and states, which are read when they are asked for."""

        def value_of(position: int, section: str) -> torch.Tensor:
            member = members[position]
            return local_slice(member.param, self._reader.read(self._index[member.names[0]], section))

        return value_of

    def restore(self, model: nn.Module, members: Sequence[Member], groups: list[dict[str, Any]]) -> ResumedState:
        """Put back buffers and settings, and random states where this rank was there; return the rest."""
        rank = self._ranks.rank
        was_there = rank < self._reader.world_size
        manifest = self._reader.manifest(rank if was_there else 0)
        found = restore(manifest, self._reader.folder, model, groups, random=was_there)
        scalars = self._reader.scalars()
        indices = [self._index[member.names[0]] for member in members]
        by_shard = {shard: scalars[index] for shard, index in enumerate(indices) if index in scalars}
        return ResumedState(found.step, by_shard, found.extra)
