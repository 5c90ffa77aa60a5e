"""The arithmetic of an update inside one access: gradients, master and moments in, weights out."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from infinity.fsdp.content import gradient_of, put, read_section, row_of, section, stored
from infinity.layout import MASTER, RANGE_ALIGNMENT, SHARD_ALIGNMENT, Layout, Page, Role, Segment
from infinity.optim.kernel import Piece, Scalars, UpdateKernel
from infinity.schedule.trace import Access
from infinity.units import align_up

_DECODED = 128 * RANGE_ALIGNMENT
"""Most elements that are decoded at once: what an update needs beside the pages is bounded, and fits a cache."""


def snapshot(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a param group as they are now."""
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in group.items() if k != "params"}


@dataclass
class Update:
    """The update of one unit.

    `settings` has those of its group for every shard that has a gradient; `before` the scalars of shards at the start
    of the step, whose number is `step`. Gradients are in `grads` by shard, flat, on the device, which has them behind
    `arrived`; or else in GRAD pages, of which all are multiplied by `scale`.
    """

    layout: Layout
    kernel: UpdateKernel
    settings: Mapping[int, Mapping[str, Any]]
    before: Mapping[int, Scalars]
    step: int
    grads: Mapping[int, torch.Tensor] | None = None
    arrived: torch.cuda.Event | None = None
    scale: torch.Tensor | None = None
    after: dict[int, Scalars] = field(default_factory=dict)
    """Scalars of the shards after the step."""
    elements: int = 0
    """Elements updated so far."""

    def run(self, segment: Segment, item: Page, access: Access, contents: Sequence[torch.Tensor]) -> None:
        """Update the elements of one range.

        Args:
            item: one of the segment's ranges.
            access: what `range_access` returns for it.
            contents: the pages of the access, uint8.
        """
        self._fetch_gradients()
        fmt = segment.format
        held = {self.layout.pages[use.page]: content for use, content in zip(access, contents, strict=True)}
        params = {page: section(c, page, self.layout) for page, c in held.items() if page.role is Role.PARAM}
        waiting = {page: section(c, page, self.layout) for page, c in held.items() if page.role is Role.GRAD}
        states = {
            name: row_of(held[item], item, rows[0])
            for name, rows in fmt.rows.items()
            if name not in fmt.encoded and rows[0].role is Role.UPDATE
        }
        most = _DECODED if fmt.encoded else item.count
        for start in range(item.start, item.stop, most):
            self._run(segment, item, start, min(start + most, item.stop), held, params, waiting, states)
        if MASTER in states:
            for page, weights in params.items():
                low, high = max(page.start, item.start), min(page.stop, item.stop)
                weights[low - page.start : high - page.start].copy_(
                    states[MASTER][low - item.start : high - item.start]
                )

    def _run(
        self,
        segment: Segment,
        item: Page,
        start: int,
        stop: int,
        held: Mapping[Page, torch.Tensor],
        params: Mapping[Page, torch.Tensor],
        waiting: Mapping[Page, torch.Tensor],
        states: Mapping[str, torch.Tensor],
    ) -> None:
        """Update elements [start, stop): in the pages, or, sections that are stored otherwise, decoded."""
        fmt = segment.format
        decoded: list[tuple[int, str, torch.Tensor]] = []
        by_group: dict[int, tuple[Mapping[str, Any], list[Piece]]] = {}
        for shard, low, high in self._cuts(segment, start, stop, tuple(params)):
            grad = self._gradient(shard, low, high, waiting)
            views = {name: view[low - item.start : high - item.start] for name, view in states.items()}
            for name in fmt.encoded:
                end = align_up(high, SHARD_ALIGNMENT)
                values = read_section(segment, name, low, end, lambda page, copy: copy(held[page]))
                decoded.append((low, name, values))
                views[name] = values[: high - low]
            master = views.pop(MASTER, None)
            if master is None:
                page = next(page for page in params if page.start <= low < page.stop)
                master = params[page][low - page.start : high - page.start]
            group = self.settings[shard]
            by_group.setdefault(id(group), (group, []))[1].append(Piece(shard, master, grad, views))
        for group, pieces in by_group.values():
            self.after.update(self.kernel.update(pieces, group, self.before))
            self.elements += sum(piece.master.numel() for piece in pieces)
        for low, name, values in decoded:
            for row, items in stored(fmt, name, values, self.step):
                for page, content in held.items():
                    if page.role is row.role:
                        put(content, page, row, low, items)

    def _fetch_gradients(self) -> None:
        """Bring gradients from the device, on a stream of their own: nobody but this thread waits for the copies."""
        if self.grads and self.arrived is not None:
            stream = torch.cuda.Stream(next(iter(self.grads.values())).device)  # type: ignore[no-untyped-call]
            stream.wait_event(self.arrived)
            with torch.cuda.stream(stream):
                self.grads = {shard: grad.cpu() for shard, grad in self.grads.items()}
            self.arrived = None

    def _cuts(self, segment: Segment, start: int, stop: int, params: Sequence[Page]) -> list[tuple[int, int, int]]:
        """Return (shard, first, last) for the slices in [start, stop) of shards with a gradient, in elements.

        Where the PARAM pages are the master, a slice ends where its page does.
        """
        borders = [] if segment.format.master else [page.start for page in params]
        found = []
        for shard in segment.shards:
            placed = self.layout.shards[shard]
            low, high = max(placed.start, start), min(placed.start + placed.spec.numel, stop)
            if shard not in self.settings or low >= high:
                continue
            points = [low, *(border for border in borders if low < border < high), high]
            found += [(shard, a, b) for a, b in itertools.pairwise(points)]
        return found

    def _gradient(self, shard: int, low: int, high: int, waiting: Mapping[Page, torch.Tensor]) -> torch.Tensor:
        if self.grads is not None:
            start = self.layout.shards[shard].start
            return self.grads[shard][low - start : high - start]
        rows: dict[int, list[torch.Tensor]] = {}
        for page, values in waiting.items():
            first, last = max(low, page.start), min(high, page.stop)
            if first < last:
                rows.setdefault(page.row, []).append(values[first - page.start : last - page.start])
        whole = [parts[0] if len(parts) == 1 else torch.cat(parts) for _, parts in sorted(rows.items())]
        grad = gradient_of(self.layout.format_of(shard), whole)
        return grad.mul_(self.scale) if self.scale is not None else grad
