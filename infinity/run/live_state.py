"""Saves of a run that trains, in the formats of other tools: between two steps, from where the shards lie."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.profiler import record_function

from infinity.checkpoint.description import RunDescription, TensorSpec
from infinity.checkpoint.extra import save_extra
from infinity.checkpoint.full_state import FullState, owners_of
from infinity.checkpoint.model_state import load_scalars, read_groups, save_groups, save_scalars
from infinity.content.format import MASTER
from infinity.content.views import torch_dtype
from infinity.errors import LostRankError
from infinity.fsdp.attach import Attachment
from infinity.fsdp.shard_io import ShardIO
from infinity.optim.base_optimizer import BaseOptimizer
from infinity.optim.step import StepRunner
from infinity.run.run import Run
from infinity.store.folder import RunFolder


class LiveState(FullState):
    """The state after the last step, assembled on rank 0 tensor by tensor; the other ranks send what it asks for.

    Memory is that of one tensor, and on the other ranks of one slice.
    """

    def __init__(
        self,
        run: Run,
        described: RunDescription,
        model: nn.Module,
        shards: ShardIO,
        step: int,
        plain: tuple[dict[int, dict[str, Any]], list[dict[str, Any]]],
        extra: dict[str, Any],
    ) -> None:
        """Exchange what is small; all ranks together.

        Args:
            described: what the pages of this rank hold.
            shards: reads them.
            step: the last one.
            plain: scalars of the optimizer by shard, and param groups, as plain data of checkpoints.
            extra: the user's.

        Raises:
            CheckpointError: a parameter cannot be put together from the ranks.
        """
        self._run, self._described, self._model, self._shards = run, described, model, shards
        self._step, self._extra = step, extra
        scalars, self._groups = plain
        self._scalars: dict[int, dict[str, Any]] = {}
        for found in run.ranks.collect(scalars):  # a rank whose slice is empty may have none: another one has
            self._scalars = load_scalars(found) | self._scalars
        self._specs = list(zip(*run.ranks.collect(described.tensors), strict=True))
        """What each rank says of every parameter."""
        self._owners = [owners_of(list(specs)) for specs in self._specs]
        self._wire = torch.device("cpu") if run.ranks.exchange_on_cpu else run.device.name
        """Where slices are when they are sent."""

    @property
    def folder(self) -> RunFolder:
        """The run's folders."""
        return self._run.folder

    @property
    def step(self) -> int:
        """Optimizer steps that were done."""
        return self._step

    @property
    def extra(self) -> dict[str, Any]:
        """What the user gave."""
        return self._extra

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """All parameters, in the order of their shards."""
        return self._described.tensors

    def dtype(self, index: int, name: str = MASTER) -> torch.dtype:
        """Return the dtype in which a parameter is trained, or that of one of its states."""
        return torch_dtype(self._described.layout.format_of(index).dtypes[name])

    def kinds(self, index: int) -> tuple[tuple[str, str], ...]:
        """Return the optimizer's states of a parameter, as (name, dtype)."""
        return self._described.layout.format_of(index).kinds

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's param groups; their `params` are indices into `tensors`."""
        return read_groups(self._groups)

    def scalars(self) -> dict[int, dict[str, Any]]:
        """Return the optimizer's scalars of every parameter that was ever updated, by index into `tensors`."""
        return self._scalars

    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the model's persistent buffers, on the CPU."""
        found = dict(self._model.named_buffers(remove_duplicate=False))
        for name in self._described.buffers:
            yield name, found[name].detach().cpu().contiguous()

    def read(self, index: int, name: str = MASTER) -> torch.Tensor:
        """Return a parameter or a state in its full shape; on rank 0, while the others `serve`.

        Raises:
            StorageError, CorruptPageError: a page cannot be read, or is not what was written.
            InfinityError: it failed on another rank.
        """
        self._run.ranks.agree((index, name))
        part = self._part(index, name)
        spec, mine = self.tensors[index], self._specs[index][self._run.ranks.rank].shard_rank
        if spec.shard_size == 1:
            return part.view(spec.shape)
        whole = torch.empty(spec.shape, dtype=part.dtype)
        for position in range(spec.shard_size):
            start, stop = spec.slice_of(position)
            rows = whole.narrow(spec.dim, start, stop - start)
            if position == mine:
                rows.copy_(part.view(rows.shape))
            elif rows.numel():
                sent = torch.empty(rows.numel() * rows.itemsize, dtype=torch.uint8, device=self._wire)
                self._run.ranks.receive(sent, self._owners[index][position])
                rows.copy_(sent.cpu().view(part.dtype).view(rows.shape))
        return whole

    def serve(self) -> None:
        """Send slices to rank 0 until it has written all; on the other ranks.

        Raises:
            Exception: the first reason for which this rank, or another one, could not.
        """
        failure: Exception | None = None
        while (wanted := self._run.ranks.agree(None)) is not None:
            index, name = wanted
            try:
                part = self._part(index, name)
            except Exception as error:  # rank 0 knows of it too, and ends
                failure = failure or error
                continue
            position = self._specs[index][self._run.ranks.rank].shard_rank
            if part.numel() and self._owners[index][position] == self._run.ranks.rank:
                self._run.ranks.send(part.contiguous().view(torch.uint8).to(self._wire), 0)
        if failure is not None:
            raise failure

    def end(self) -> None:
        """Let the other ranks return from `serve`; on rank 0."""
        with contextlib.suppress(LostRankError):  # that one has ended by itself
            self._run.ranks.agree(None)

    def _part(self, index: int, name: str) -> torch.Tensor:
        """Return this rank's slice, flat. Raises, on all ranks, what it raises on one."""
        what = f"reading {name} of {self.tensors[index].names[0]}"
        return self._run.ranks.together(what, partial(self._shards.read, index, name))


class LiveSaves:
    """Writes the state after the last step; training goes on from where it was."""

    def __init__(
        self,
        run: Run,
        model: nn.Module,
        described: RunDescription,
        base_optimizer: BaseOptimizer,
        runner: StepRunner,
        shards: ShardIO,
        attachment: Attachment,
    ) -> None:
        self._run, self._model, self._described, self._base_optimizer = run, model, described, base_optimizer
        self._runner, self._shards, self._attachment = runner, shards, attachment

    def write(
        self, what: str, check: Callable[[str], None], extra: dict[str, Any], write: Callable[[FullState], list[Path]]
    ) -> list[Path]:
        """Write on rank 0, while the others send their slices; all ranks together.

        Args:
            what: names the call in messages.
            check: raises where it is not between two steps.
            extra: the user's plain data.
            write: makes the files of the state, and returns them.

        Raises:
            InfinityError: what `check` raises, or it failed on another rank.
            CheckpointError: `extra` cannot be kept, or parameters cannot be put together.
            Exception: what `write` raises.
        """
        run = self._run
        with run.ledger.phase("other"), record_function("infinity::save"), _random_states_kept():
            plain = run.ranks.together(what, partial(self._prepare, partial(check, what), extra))
            step = self._runner.updates.step
            state = LiveState(run, self._described, self._model, self._shards, step, plain, extra)
            written = run.ranks.agree(run.ranks.together(what, partial(self._take_part, state, write)))
        run.ledger.restart_step()
        return written

    def _prepare(
        self, check: Callable[[], None], extra: dict[str, Any]
    ) -> tuple[dict[int, dict[str, Any]], list[dict[str, Any]]]:
        """Let the state be that of the last step; return of it what is plain data."""
        check()
        save_extra(extra)
        self._runner.flush_updates()
        self._attachment.check()
        return save_scalars(self._runner.updates.scalars), save_groups(self._base_optimizer.groups_by_shard())

    def _take_part(self, state: LiveState, write: Callable[[FullState], list[Path]]) -> list[Path]:
        if self._run.ranks.rank != 0:
            state.serve()
            return []
        try:
            written = write(state)
        except Exception:
            state.end()
            raise
        state.end()
        return written


@contextlib.contextmanager
def _random_states_kept() -> Iterator[None]:
    """Put back the states of the generators: a model that is built to ask it for its names may draw."""
    python, array = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(array)
