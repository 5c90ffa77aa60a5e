"""Content of shards, through the pager: whole shards in and out of their pages."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import NamedTuple

import torch

from infinity.content.format import MASTER
from infinity.content.layout import Layout, Page, Placed, overlapping
from infinity.content.views import put, read_section, section, stored, torch_dtype
from infinity.errors import InfinityError, UnsupportedError
from infinity.schedule.pager import Pager
from infinity.schedule.trace import Mode, Use
from infinity.units import format_size


def _copies_issued(device: torch.device) -> torch.cuda.Event | None:
    """Return an event behind the copies that the current stream has been given; None where copies are done at once."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


class _Open(NamedTuple):
    """What lives until `ShardIO.close`."""

    pager: Pager
    gathering: Callable[[int], bool]
    gathered: Callable[[int], None]
    look: Callable[[int], None]


class ShardIO:
    """Loads, saves and gathers shards; implements what a `PagedShard` asks for.

    `gathering(shard)` is called before the pages of a shard are copied out for an all-gather; it says whether that is
    part of a training step, in which `gathered(shard)` is called after. `copied(source tier, target tier, bytes)` is
    called in any case, and `look(shard)` before a shard is loaded or saved for anybody else. `part(part, what,
    name=...)` is entered for the length of a part of the ledger.
    """

    def __init__(
        self,
        layout: Layout,
        pager: Pager,
        *,
        load_limit: int,
        gathering: Callable[[int], bool],
        gathered: Callable[[int], None],
        copied: Callable[[str, str, int], None],
        look: Callable[[int], None],
        part: Callable[..., AbstractContextManager[None]],
    ) -> None:
        self._layout, self._load_limit, self._copied, self._part = layout, load_limit, copied, part
        self._open: _Open | None = _Open(pager, gathering, gathered, look)
        self._why_closed = "the optimizer of this model was closed, and the model's values went with it"
        self._loaded = 0  # bytes of shards that `load` has returned, and which somebody still has

    def close(self, why: str = "") -> None:
        """Let go of the pager. Shards refer to this object from within tensors, where Python finds no cycles.

        Args:
            why: what errors say from now on; by default that the optimizer was closed.
        """
        self._open = None
        self._why_closed = why or self._why_closed

    @property
    def _pager(self) -> Pager:
        return self._opened().pager

    def _opened(self) -> _Open:
        if self._open is None:
            raise InfinityError(self._why_closed)
        return self._open

    def gather_into(self, shard: int, destination: torch.Tensor) -> None:
        """Copy the compute-dtype elements of a shard, padding included, into a flat tensor."""
        placed, opened = self._layout.shards[shard], self._opened()
        with self._part("python", placed.spec.name, name="gather"):
            planned = opened.gathering(shard)
            with torch.no_grad():
                self._copy_param(placed, destination, planned=planned)
            self._copied("host", "device", destination.numel() * destination.itemsize)
            if planned:
                opened.gathered(shard)

    def _copy_param(self, placed: Placed, destination: torch.Tensor, *, planned: bool) -> None:
        segment = self._layout.segments[placed.segment]
        for page, first, last in overlapping(segment.param_pages, placed.start, placed.start + placed.spec.padded):
            use = (Use(page.index, Mode.READ),)
            leaves = partial(_copies_issued, destination.device)
            with self._pager.access(use, planned=planned, leaves=leaves) as (content,):
                source = section(content, page, self._layout, first, last)
                with self._part("copy"):
                    destination[first - placed.start : last - placed.start].copy_(source, non_blocking=True)

    def load(self, shard: int) -> torch.Tensor:
        """Return a copy of the real elements of a shard in the dtype it is trained in, shape (numel,).

        Raises:
            UnsupportedError: with what was loaded and is still held, that is more than the limit for loading outside of
                the plan.
        """
        content = self.load_section(shard, MASTER)
        self._loaded += content.nbytes
        weakref.finalize(content.untyped_storage(), self._let_go, content.nbytes).atexit = False
        return content

    def _let_go(self, nbytes: int) -> None:
        self._loaded -= nbytes

    def load_section(self, shard: int, name: str) -> torch.Tensor:
        """Return one section (``master`` or a state kind) of a shard's real elements, shape (numel,)."""
        placed = self._layout.shards[shard]
        segment = self._layout.segments[placed.segment]
        size = placed.spec.numel * torch_dtype(segment.format.dtypes[name]).itemsize
        if size + self._loaded > self._load_limit:
            gc.collect()  # what was loaded before an error may hang on its traceback
        if size + self._loaded > self._load_limit:
            held = f", and {format_size(self._loaded)} are loaded already" if self._loaded else ""
            raise UnsupportedError(
                f"loading {placed.spec.name} would take {format_size(size)} of host memory outside the arena{held} "
                f"(limit {format_size(self._load_limit)}); to save the model use optimizer.commit(), and `infinity "
                "export` makes safetensors of a commit"
            )
        self._opened().look(shard)

        def visit(page: Page, copy: Callable[[memoryview], None]) -> None:
            with self._pager.access((Use(page.index, Mode.READ),), planned=False) as (content,):
                copy(content)

        return read_section(segment, name, placed.start, placed.start + placed.spec.numel, visit)

    def save(self, shard: int, content: torch.Tensor) -> None:
        """Replace the real elements of a shard: its master, and the weights in the compute dtype."""
        self.save_section(shard, MASTER, content)

    def save_section(self, shard: int, name: str, content: torch.Tensor) -> None:
        """Replace one section (``master`` or a state kind) of a shard's real elements, shape (numel,)."""
        placed = self._layout.shards[shard]
        segment = self._layout.segments[placed.segment]
        if content.numel() != placed.spec.numel:
            raise UnsupportedError(
                f"{placed.spec.name} has {placed.spec.numel} elements on this rank, got {content.numel()}"
            )
        self._opened().look(shard)
        for row, items in stored(segment.format, name, content.detach().cpu()):
            for page, _, _ in overlapping(segment.pages(row.role), placed.start, placed.start + placed.spec.numel):
                with self._pager.access((Use(page.index, Mode.UPDATE),), planned=False) as (held,):
                    put(held, page, row, placed.start, items)

    def initialise(self, unit: int, value_of: Callable[[int, str], torch.Tensor | None]) -> None:
        """Write the first content of a unit's pages.

        Args:
            value_of: returns one section (``master`` or a state kind) of the real elements of a shard, given its
                position in the unit, shape (numel,); the master in the dtype that is trained; None for zeros.
        """
        first = self._layout.unit_shards[unit][0]
        for segment in self._layout.segments:
            if segment.unit != unit:
                continue
            parts = [
                (self._layout.shards[shard].start, row, items)
                for shard in segment.shards
                for name in segment.format.dtypes
                if (value := value_of(shard - first, name)) is not None
                for row, items in stored(segment.format, name, value)
            ]
            for page in (*segment.param_pages, *segment.update_pages):
                with self._pager.access((Use(page.index, Mode.WRITE),), planned=False) as (content,):
                    torch.frombuffer(content, dtype=torch.uint8).zero_()
                    for start, row, items in parts:
                        if row.role is page.role:
                            put(content, page, row, start, items)
