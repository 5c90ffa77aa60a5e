"""Exports of a live run in formats that other tools read, between two steps and directly from the shards."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import nn
from torch.profiler import record_function

from infinity import torch_private
from infinity.checkpoint.description import RunDescription, TensorSpec
from infinity.checkpoint.full_state import FullState, owners_of
from infinity.content.format import MASTER
from infinity.content.spans import Spans, full_spans, numel, overlaps, sizes_of
from infinity.content.views import torch_dtype
from infinity.errors import LostRankError
from infinity.formats.companions import keep_configs
from infinity.fsdp.attach import Attachment
from infinity.optim.step import StepRunner
from infinity.run.modules_in_memory import ModulesInMemory
from infinity.run.run import Run
from infinity.store.folder import RunFolder

T = TypeVar("T")


class LiveState(FullState):
    """The state after the last step, assembled on rank 0 one tensor at a time.

    The other ranks send the requested slices. Peak memory is one tensor on rank 0 and one slice on every other rank.
    """

    def __init__(
        self,
        run: Run,
        described: RunDescription,
        model: nn.Module,
        read: Callable[[int], torch.Tensor],
    ) -> None:
        """Exchange the metadata. All ranks must call it together.

        Args:
            model: the model whose buffers are exported.
            read: function that returns the weights of a shard.

        Raises:
            CheckpointError: if a full parameter cannot be assembled from the ranks' slices.
        """
        self._run, self._described, self._model, self._read = run, described, model, read
        self._specs = list(zip(*run.ranks.collect(described.tensors), strict=True))
        """Descriptions from all ranks, for each parameter."""
        self._owners = [owners_of(dict(enumerate(specs)), run.folder.run_id) for specs in self._specs]
        self._wire = torch.device("cpu") if run.ranks.exchange_on_cpu else run.device.name
        """Device on which slices are exchanged."""

    @property
    def folder(self) -> RunFolder:
        """Folders of the run."""
        return self._run.folder

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """All parameters, in the order of their shards."""
        return self._described.tensors

    def dtype(self, index: int) -> torch.dtype:
        """Return the dtype in which a parameter is trained."""
        return torch_dtype(self._described.layout.format_of(index).dtypes[MASTER])

    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the persistent buffers of the model, on the CPU."""
        found = torch_private.tensors_in_memory(self._model)
        for name in self._described.buffers:
            # Layers may share a buffer, but safetensors rejects tensors that overlap in memory.
            yield name, found[name].detach().to("cpu", copy=True, memory_format=torch.contiguous_format)

    def read(self, index: int) -> torch.Tensor:
        """Return a parameter in its full shape.

        Call it on rank 0 while the other ranks run `serve`.

        Raises:
            StorageError, CorruptPageError: if a page cannot be read or does not match its checksum.
            InfinityError: if the read failed on another rank.
        """
        self._run.ranks.agree(index)
        spec, owners = self.tensors[index], self._owners[index]

        def fill(whole: torch.Tensor, spans: Spans, part: torch.Tensor) -> None:
            part = part.view(sizes_of(spans))
            for source, target in overlaps(spans, full_spans(spec.shape)):
                whole[target] = part[source]

        def prepare() -> tuple[torch.Tensor, torch.Tensor]:
            mine, part = self._described.tensors[index].spans, self._read(index)
            if len(owners) == 1 and mine in owners:
                return part.view(spec.shape), part
            whole = torch.empty(spec.shape, dtype=part.dtype)
            fill(whole, mine, part)
            largest = max(map(numel, owners), default=0) * part.itemsize
            return whole, torch.empty(largest, dtype=torch.uint8, device=self._wire)

        whole, buffer = self._together(index, prepare)
        for spans, rank in owners.items():
            if rank != self._run.ranks.rank:
                sent = buffer[: numel(spans) * whole.itemsize]
                self._run.ranks.receive(sent, rank)
                fill(whole, spans, sent.cpu().view(whole.dtype))
        return whole

    def serve(self) -> None:
        """Send slices to rank 0 until it calls `end`. Call it on every other rank.

        Raises:
            Exception: the first read error on this rank or on another one.
        """
        failure: Exception | None = None
        while (index := self._run.ranks.agree(None)) is not None:
            try:
                sent = self._together(index, partial(self._to_send, index))
            except Exception as error:  # `together` has also raised it on rank 0, which ends the loop
                failure = failure or error
                continue
            if sent.numel():
                self._run.ranks.send(sent, 0)
        if failure is not None:
            raise failure

    def end(self) -> None:
        """Let the other ranks return from `serve`. Call it on rank 0."""
        with contextlib.suppress(LostRankError):  # a lost rank is not waiting
            self._run.ranks.agree(None)

    def _to_send(self, index: int) -> torch.Tensor:
        """Return the bytes of this rank's slice, or an empty tensor if another rank sends the same slice."""
        part, rank = self._read(index), self._run.ranks.rank
        if self._owners[index].get(self._specs[index][rank].spans) != rank:
            return part[:0]
        return part.contiguous().view(torch.uint8).to(self._wire)

    def _together(self, index: int, prepare: Callable[[], T]) -> T:
        return self._run.ranks.together(f"reading {self.tensors[index].names[0]}", prepare)


class LiveSaves:
    """Exports the state after the last step without affecting training."""

    def __init__(
        self,
        run: Run,
        model: nn.Module,
        described: RunDescription,
        runner: StepRunner,
        attachment: Attachment,
        in_memory: ModulesInMemory,
    ) -> None:
        self._in_memory = in_memory
        self._run, self._model, self._described = run, model, described
        self._runner, self._attachment = runner, attachment

    def write(self, what: str, check: Callable[[str], None], write: Callable[[FullState], list[Path]]) -> list[Path]:
        """Write the files on rank 0 while the other ranks send their slices. All ranks must call it together.

        Args:
            what: name of the export, for messages.
            check: function that raises an error unless it is called between two steps.
            write: function that writes the files of a state and returns their paths.

        Returns:
            Paths of the files, on every rank.

        Raises:
            InfinityError: if `check` raises it or another rank failed.
            CheckpointError: if a parameter cannot be assembled.
            Exception: any error that `write` raises.
        """
        run = self._run
        with run.ledger.phase("other"), record_function("infinity::save"), _random_states_kept():
            run.ranks.together(what, partial(self._prepare, partial(check, what)))
            state = LiveState(run, self._described, self._model, self._in_memory.read)
            written = run.ranks.agree(run.ranks.together(what, partial(self._take_part, state, write)))
        run.ledger.restart_step()
        return written

    def _prepare(self, check: Callable[[], None]) -> None:
        """Flush pending updates, and update the run's copies of the model's configs."""
        check()
        self._runner.flush_updates()
        self._in_memory.check()
        self._attachment.check()
        if self._run.ranks.rank == 0:
            keep_configs(self._run.folder.checkpoints, self._model)

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
    """Restore the random states on exit, because building a model to determine its parameter names may draw random
    numbers.
    """
    python, array = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(array)
