"""Content of shards, through the pager: whole shards in and out of their pages."""

from __future__ import annotations

import gc
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch.profiler import record_function

from infinity import interrupts, torch_private
from infinity.content.format import MASTER
from infinity.content.layout import Layout, Page, Placed, overlapping
from infinity.content.views import Content, bytes_of, put, read_section, section, stored, torch_dtype
from infinity.errors import InfinityError, UnsupportedError
from infinity.fsdp.staging import GpuPrefetcher
from infinity.memory.device import Device
from infinity.schedule.pager import Pager
from infinity.schedule.trace import Mode, Use
from infinity.telemetry.ledger import Ledger
from infinity.units import format_size


class GatherListener(Protocol):
    """Who runs steps: is told when shards are used."""

    def gathering(self, shard: int) -> bool:
        """Note that a shard's pages are about to be copied out for an all-gather; return whether in a training step."""

    def gathered(self, shard: int) -> None:
        """Note that they have been, in a training step."""

    def look(self, shard: int) -> None:
        """Let weights and states of a shard be those of the last step: somebody is about to read or write them."""


class _OpenRun(NamedTuple):
    """What there is until a run is closed."""

    pager: Pager
    listener: GatherListener
    ledger: Ledger
    gpu_prefetcher: GpuPrefetcher
    make_room: Callable[[Iterable[int]], None]


class ShardIO:
    """Gathers, loads and saves whole shards, through the pager; what a `PagedShard` asks.

    It lives as long as tensors of the model do. After `close` it only says why there is nothing to be had any more.
    The training thread calls all methods.
    """

    def __init__(
        self,
        layout: Layout,
        pager: Pager,
        device: Device,
        gpu_prefetcher: GpuPrefetcher,
        listener: GatherListener,
        ledger: Ledger,
        *,
        load_limit: int,
        make_room: Callable[[Iterable[int]], None],
    ) -> None:
        """Listen.

        Args:
            device: what computes.
            staging: may have weights on it ahead of their gather.
            load_limit: most bytes that `load` may have given away at any moment: memory outside of the host cache.
            make_room: called with pages of what is not trained before they are written again: they have no room for it.
        """
        self._layout, self._device, self._load_limit = layout, device, load_limit
        self._open: _OpenRun | None  # None once closed
        self._open = _OpenRun(pager, listener, ledger, gpu_prefetcher, make_room)
        # What errors say once it is closed.
        self._why_closed = "the optimizer of this model was closed, and the model's values went with it"
        self._loaded = 0  # bytes of shards that `load` has returned, but for those in `_returned`
        # Bytes of those that nobody has any more. Any thread appends, also from within the collector: so there is no
        # lock, but one call that is not interrupted; `_held` takes them.
        self._returned: deque[int] = deque()

    def close(self, why: str = "") -> None:
        """Let go of what it has. Tensors refer to this object, where Python's collector finds no cycles.

        Args:
            why: what errors say from now on; by default that the optimizer was closed.
        """
        self._open = None
        self._why_closed = why or self._why_closed

    @property
    def _pager(self) -> Pager:
        return self._opened.pager

    @property
    def _listener(self) -> GatherListener:
        return self._opened.listener

    @property
    def _ledger(self) -> Ledger:
        return self._opened.ledger

    @property
    def _gpu_prefetcher(self) -> GpuPrefetcher:
        return self._opened.gpu_prefetcher

    @property
    def _opened(self) -> _OpenRun:
        if self._open is None:
            raise InfinityError(self._why_closed)
        return self._open

    def gather_into(self, shard: int, destination: torch.Tensor) -> None:
        """Copy the compute-dtype elements of a shard, padding included, into a flat tensor."""
        placed, listener = self._layout.shards[shard], self._listener
        name = placed.spec.name
        shown = record_function(f"infinity::gather ({name})") if torch_private.profiler_is_on() else nullcontext()
        with self._ledger.part("python", name, name="gather"), shown:
            planned = listener.gathering(shard)
            with torch.no_grad():
                if planned and self._gpu_prefetcher.has(placed.fsdp_module):
                    self._gpu_prefetcher.copy_out(shard, destination)
                else:
                    self._copy_param(placed, destination, planned=planned)
            self._ledger.copied(destination.numel() * destination.itemsize)
            if planned:
                listener.gathered(shard)

    def _copy_param(self, placed: Placed, destination: torch.Tensor, *, planned: bool) -> None:
        segment = self._layout.segments[placed.segment]
        stream = self._device.current()
        copied = partial(self._device.record_event, stream)
        for page, first, last in overlapping(segment.param_pages, placed.start, placed.start + placed.spec.padded):
            use = (Use(page.index, Mode.READ),)
            with self._pager.access(use, planned=planned, copies=copied) as (content,):
                source = section(content, page, self._layout, first, last)
                with self._ledger.part("copy"):
                    self._device.copy(destination[first - placed.start : last - placed.start], source, stream)

    def load(self, shard: int) -> torch.Tensor:
        """Return a copy of the real elements of a shard in the dtype it is trained in, shape (numel,).

        Raises:
            UnsupportedError: with what was loaded and is still held, that is more than the limit for loading outside of
                the plan.
        """
        content = self.load_section(shard, MASTER)
        self._loaded += content.nbytes
        weakref.finalize(content.untyped_storage(), self._returned.append, content.nbytes).atexit = False
        return content

    def _held(self) -> int:
        """Return the bytes that `load` has returned and somebody still has."""
        while self._returned:
            self._loaded -= self._returned.popleft()
        return self._loaded

    def load_section(self, shard: int, name: str) -> torch.Tensor:
        """Return one section (``master`` or a state kind) of a shard's real elements, shape (numel,).

        Raises:
            UnsupportedError: as `load`.
            InfinityError: the shard was updated in backward, and `step()` has not been called; or all is closed.
        """
        placed = self._layout.shards[shard]
        segment = self._layout.segments[placed.segment]
        size = placed.spec.numel * torch_dtype(segment.format.dtypes[name]).itemsize
        if size + self._held() > self._load_limit:
            gc.collect()  # what was loaded before an error may hang on its traceback
        if size + self._held() > self._load_limit:
            held = f", and {format_size(self._loaded)} are loaded already" if self._loaded else ""
            raise UnsupportedError(
                f"loading {placed.spec.name} would take {format_size(size)} of host memory outside the host cache{held} "
                f"(limit {format_size(self._load_limit)}); to save the model in bounded memory call "
                "optimizer.save_pretrained(folder), optimizer.save_dcp(folder) or, to go on from, optimizer.save_checkpoint()"
            )
        return self.read(shard, name)

    def read(self, shard: int, name: str) -> torch.Tensor:
        """Return what `load_section` returns, of any size: for who lets go of it before the next one.

        Raises:
            InfinityError: as `load_section`.
        """
        placed = self._layout.shards[shard]
        segment = self._layout.segments[placed.segment]
        self._listener.look(shard)

        def visit(page: Page, copy: Callable[[Content], None]) -> None:
            with self._pager.access((Use(page.index, Mode.READ),), planned=False) as (content,):
                copy(content)

        return read_section(segment, name, placed.start, placed.start + placed.spec.numel, visit)

    def save(self, shard: int, content: torch.Tensor) -> None:
        """Replace the real elements of a shard: its master, and the weights in the compute dtype."""
        self.save_section(shard, MASTER, content)

    def save_section(self, shard: int, name: str, content: torch.Tensor) -> None:
        """Replace one section (``master`` or a state kind) of a shard's real elements, shape (numel,).

        Raises:
            UnsupportedError: `content` has another number of elements.
            BudgetError: it is not trained, and the drives have no room for another version of it.
            InfinityError: as `load_section`.
        """
        placed = self._layout.shards[shard]
        segment = self._layout.segments[placed.segment]
        if content.numel() != placed.spec.numel:
            raise UnsupportedError(
                f"{placed.spec.name} has {placed.spec.numel} elements on this rank, got {content.numel()}"
            )
        self._listener.look(shard)
        self._gpu_prefetcher.drop(placed.fsdp_module)
        begin, end = placed.start, placed.start + placed.spec.numel
        if not segment.trainable:
            pages = (*segment.param_pages, *segment.update_pages)
            self._opened.make_room(page.index for page in pages if page.start < end and page.stop > begin)
        with interrupts.held():
            for component, items in stored(segment.format, name, content.detach().cpu()):
                for page, _, _ in overlapping(segment.pages(component.role), begin, end):
                    with self._pager.access((Use(page.index, Mode.UPDATE),), planned=False) as (held,):
                        put(held, page, component, placed.start, items)

    def initialise(self, fsdp_module: int, value_of: Callable[[int, str], torch.Tensor | None]) -> None:
        """Write the first content of an FSDP module's pages.

        Args:
            value_of: returns one section (``master`` or a state kind) of the real elements of a shard, given its
                position in the FSDP module, shape (numel,); the master in the dtype that is trained; None for zeros.
        """
        first = self._layout.fsdp_module_shards[fsdp_module][0]
        for segment in self._layout.segments:
            if segment.fsdp_module != fsdp_module:
                continue
            parts = [
                (self._layout.shards[shard].start, component, items)
                for shard in segment.shards
                for name in segment.format.dtypes
                if (value := value_of(shard - first, name)) is not None
                for component, items in stored(segment.format, name, self._checked(shard, name, value))
            ]
            for page in (*segment.param_pages, *segment.update_pages):
                with self._pager.access((Use(page.index, Mode.WRITE),), planned=False) as (content,):
                    bytes_of(content).zero_()
                    for start, component, items in parts:
                        if component.role is page.role:
                            put(content, page, component, start, items)

    def _checked(self, shard: int, name: str, value: torch.Tensor) -> torch.Tensor:
        """Return the first value of a section if it fits: more would be written into the next shard's place."""
        spec, segment = self._layout.shards[shard].spec, self._layout.segments[self._layout.shards[shard].segment]
        wanted = torch_dtype(segment.format.dtypes[name])
        if value.numel() != spec.numel or value.dtype != wanted:
            raise UnsupportedError(
                f"the first value of {spec.name} ({name}) has {value.numel()} elements of {value.dtype} on this rank, "
                f"{spec.numel} of {wanted} are needed"
            )
        return value
