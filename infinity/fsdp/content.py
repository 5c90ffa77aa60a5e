"""Content of shards, through the pager: whole shards in and out of their pages."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import torch

from infinity.errors import InfinityError, UnsupportedError
from infinity.layout import MASTER, Layout, Page, Placed, Role, overlapping
from infinity.schedule.pager import Pager
from infinity.schedule.trace import Mode, Use
from infinity.units import format_size


def torch_dtype(name: str) -> torch.dtype:
    """Return a dtype from its name in a `StateFormat`."""
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name} is not a dtype")
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype as a `StateFormat` has it."""
    return str(dtype).removeprefix("torch.")


def section(content: torch.Tensor, page: Page, layout: Layout, name: str) -> torch.Tensor:
    """Return one section of a page's bytes, shape (page.count,).

    Args:
        content: uint8, the page's bytes.
        name: ``master`` or a state kind for update pages; ignored for PARAM and GRAD pages, which have one.
    """
    fmt = layout.segments[page.segment].format
    if page.role is Role.UPDATE:
        dtype = torch_dtype(dict(fmt.sections)[name])
        start = fmt.offsets[name] * page.count
    else:
        dtype = torch_dtype(fmt.param if page.role is Role.PARAM else fmt.grad)
        start = 0
    return content[start : start + page.count * dtype.itemsize].view(dtype)


def _copies_issued(device: torch.device) -> torch.cuda.Event | None:
    """Return an event behind the copies that the current stream has been given; None where copies are done at once."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


class ShardContent:
    """Loads, saves and gathers shards; implements what a `PagedShard` asks for.

    `gathering(shard)` is called before the pages of a shard are copied out for an all-gather, `copied(source
    tier, target tier, bytes)` after; `settle()` before a shard is loaded or saved for anybody else. `part(part, what,
    name=...)` is entered for the length of a part of the ledger.
    """

    def __init__(
        self,
        layout: Layout,
        pager: Pager,
        *,
        load_limit: int,
        gathering: Callable[[int], bool],
        copied: Callable[[str, str, int], None],
        settle: Callable[[], None],
        part: Callable[..., AbstractContextManager[None]],
    ) -> None:
        self._layout, self._load_limit, self._copied, self._part = layout, load_limit, copied, part
        self._open: tuple[Pager, Callable[[int], bool], Callable[[], None]] | None = (pager, gathering, settle)

    def close(self) -> None:
        """Let go of the pager. Shards refer to this object from within tensors, where Python finds no cycles."""
        self._open = None

    @property
    def _pager(self) -> Pager:
        return self._opened()[0]

    def _opened(self) -> tuple[Pager, Callable[[int], bool], Callable[[], None]]:
        if self._open is None:
            raise InfinityError("the optimizer of this model was closed, and the model's values went with it")
        return self._open

    def gather_into(self, shard: int, destination: torch.Tensor) -> None:
        """Copy the compute-dtype elements of a shard, padding included, into a flat tensor."""
        placed = self._layout.shards[shard]
        with self._part("python", placed.spec.name, name="gather"):
            planned = self._opened()[1](shard)
            with torch.no_grad():
                self._copy_param(placed, destination, planned=planned)
        self._copied("host", "device", destination.numel() * destination.itemsize)

    def _copy_param(self, placed: Placed, destination: torch.Tensor, *, planned: bool) -> None:
        segment = self._layout.segments[placed.segment]
        for page, first, last in overlapping(segment.param_pages, placed.start, placed.start + placed.spec.padded):
            use = (Use(page.index, Mode.READ),)
            leaves = partial(_copies_issued, destination.device)
            with self._pager.access(use, planned=planned, leaves=leaves) as (content,):
                source = section(content, page, self._layout, "")[first - page.start : last - page.start]
                with self._part("copy"):
                    destination[first - placed.start : last - placed.start].copy_(source, non_blocking=True)

    def load(self, shard: int) -> torch.Tensor:
        """Return the real elements of a shard in the dtype it is trained in.

        Raises:
            UnsupportedError: the shard is larger than the limit for loading outside the plan.
        """
        return self.load_section(shard, MASTER)

    def load_section(self, shard: int, name: str) -> torch.Tensor:
        """Return one section (``master`` or a state kind) of a shard's real elements, shape (numel,)."""
        placed = self._layout.shards[shard]
        pages, dtype_of = self._layout.home_of(shard, name)
        dtype = torch_dtype(dtype_of)
        size = placed.spec.numel * dtype.itemsize
        if size > self._load_limit:
            raise UnsupportedError(
                f"loading {placed.spec.name} would take {format_size(size)} of host memory outside the arena "
                f"(limit {format_size(self._load_limit)}); use optimizer.commit() to save and export from a commit"
            )
        self._opened()[2]()
        result = torch.empty(placed.spec.numel, dtype=dtype)
        for page, first, last in overlapping(pages, placed.start, placed.start + placed.spec.numel):
            with self._pager.access((Use(page.index, Mode.READ),), planned=False) as (content,):
                part = section(content, page, self._layout, name)
                result[first - placed.start : last - placed.start] = part[first - page.start : last - page.start]
        return result

    def save(self, shard: int, content: torch.Tensor) -> None:
        """Replace the real elements of a shard: its master, and the weights in the compute dtype."""
        placed = self._layout.shards[shard]
        segment = self._layout.segments[placed.segment]
        if content.numel() != placed.spec.numel:
            raise UnsupportedError(
                f"{placed.spec.name} has {placed.spec.numel} elements on this rank, got {content.numel()}"
            )
        content = content.detach().cpu()
        self._opened()[2]()
        pages = [(segment.param_pages, "")] + ([(segment.update_pages, MASTER)] if segment.format.master else [])
        for row, name in pages:
            for page, first, last in overlapping(row, placed.start, placed.start + placed.spec.numel):
                with self._pager.access((Use(page.index, Mode.UPDATE),), planned=False) as (held,):
                    target = section(held, page, self._layout, name)
                    target[first - page.start : last - page.start] = content[first - placed.start : last - placed.start]

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
            values = {
                (shard, name): value_of(shard - first, name)
                for shard in segment.shards
                for name in (MASTER, *(kind for kind, _ in segment.format.kinds))
            }
            for page in (*segment.param_pages, *segment.update_pages):
                names = [name for name, _ in segment.format.sections] if page.role is Role.UPDATE else [MASTER]
                with self._pager.access((Use(page.index, Mode.WRITE),), planned=False) as (content,):
                    content.zero_()
                    for name in names:
                        target = section(content, page, self._layout, name)
                        for shard in segment.shards:
                            self._fill(target, page, self._layout.shards[shard], values[shard, name])

    @staticmethod
    def _fill(target: torch.Tensor, page: Page, placed: Placed, value: torch.Tensor | None) -> None:
        low = max(placed.start, page.start)
        high = min(placed.start + placed.spec.numel, page.stop)
        if value is not None and low < high:
            target[low - page.start : high - page.start] = value[low - placed.start : high - placed.start]
