"""Commits of a run that trains: what is to be published, gathered from model, optimizer and steps."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.profiler import record_function

from infinity import interrupts
from infinity.checkpoint.commit import Committer, check_tensors, remove_commits
from infinity.checkpoint.description import RunDescription, TensorSpec
from infinity.checkpoint.extra import save_extra
from infinity.checkpoint.room import CommitRoom, commit_bytes
from infinity.checkpoint.state import check_buffers, save_settings
from infinity.errors import StorageError
from infinity.fsdp import private
from infinity.fsdp.attach import Attachment
from infinity.fsdp.sharded_model import Member, ShardedModel
from infinity.optim.given import GivenOptimizer
from infinity.optim.several import name_of
from infinity.optim.step import StepRunner
from infinity.run.run import Run


def describe(run: Run, sharded: ShardedModel) -> RunDescription:
    """Return what the pages of this rank hold."""
    return RunDescription(
        layout=run.layout,
        tensors=tuple(_whole(member) for member in sharded.shards),
        buffers=private.persistent_buffers(sharded.model),
    )


def make_committer(
    run: Run, sharded: ShardedModel, described: RunDescription, optimizer: torch.optim.Optimizer
) -> Committer:
    """Return what publishes commits of a run, with space reserved for their files; all ranks together.

    Raises:
        BudgetError, StorageError: there is no space.
        CommitError: the commit that the run goes on from is of another model, or a setting cannot be committed.
        UnsupportedError: a buffer cannot.
    """
    if run.settings.run.retained_commits:
        check_buffers(sharded.model)
        for group in optimizer.param_groups:  # tensors, which may be on a device, are none that could not be
            save_settings(
                {key: value for key, value in group.items() if not torch.is_tensor(value) and key != "params"}
            )
    if run.place.found is not None:
        run.ranks.together("comparing the commit", partial(check_tensors, run.place.found, described))
    file = run.folder.commits / f"rank{run.ranks.rank:05d}.room.tmp"
    room = CommitRoom(file, commit_bytes(described, sharded.model, optimizer.param_groups))
    name, place = name_of(optimizer), run.place
    committer = Committer(
        run.folder, run.ranks, described, run.store, name, place.shares, place.commits, room, run.update_device
    )
    run.undo.push(committer.close)
    run.ranks.together("reserving space for commits", committer.reserve)
    return committer


def _whole(member: Member) -> TensorSpec:
    """Describe the whole parameter of which this rank has a slice."""
    rank, size = private.shard_rank_and_size(member.param)
    return TensorSpec(
        names=member.names,
        shape=tuple(private.full_shape(member.param)),
        dim=private.shard_dim(member.param),
        shard_rank=rank,
        shard_size=size,
        tensor_parallel=private.is_tensor_parallel(member.param),
    )


class Checkpointer:
    """Commits the state after the last step."""

    def __init__(
        self,
        run: Run,
        model: nn.Module,
        given: GivenOptimizer,
        runner: StepRunner,
        attachment: Attachment,
        committer: Committer,
    ) -> None:
        self._run, self._model, self._given = run, model, given
        self._runner, self._attachment, self._committer = runner, attachment, committer

    def commit(self, extra: dict[str, Any], prefer: Collection[int]) -> None:
        """Write what is modified, and publish; all ranks together. Of earlier commits, those of `prefer` stay first.

        Raises:
            CommitError: `extra` would come back as something else; nothing is written.
            UnsupportedError: weights were exchanged, so that a commit would not have what the model computes with.
            StorageError: a device or the folder refused. InfinityError: another rank failed.
        """
        run = self._run
        run.ranks.together("commit", partial(save_extra, extra))
        with run.ledger.phase("commit"), record_function("infinity::commit"):
            self._runner.settle()
            run.pager.flush()
            run.ledger.linked(*run.device.take_copied())  # is no part of a step
            self._attachment.check()
            updates, own = self._runner.updates, self._given.kernel.kept_own
            groups = self._given.groups_by_shard()
            try:
                with interrupts.held():  # else it may be published while what it replaces is still kept
                    self._committer.publish(updates.step, self._model, updates.scalars, groups, extra, own, prefer)
            except OSError as error:
                file = error.filename or str(run.folder.commits)
                raise StorageError("commit", file, 0, 0, error.errno) from error

    def forget_others(self) -> None:
        """Remove what is beside the commits that the run goes on from: its start has succeeded on every rank."""
        run = self._run
        keep = [manifest.name.commit for manifest in run.place.commits]
        run.ranks.together("removing commits", lambda: remove_commits(run.folder, run.ranks, keep=keep))
