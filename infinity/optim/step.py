"""One training step: gradients come in, pages are updated, wherever the placement says.

The step is a walk over the accesses that `schedule.trace` describes; this module does the arithmetic inside them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from infinity.errors import InfinityError
from infinity.fsdp import private
from infinity.fsdp.content import section, torch_dtype
from infinity.layout import MASTER, Layout, Page, Role, Segment, overlapping
from infinity.optim.kernel import Piece, Scalars, UpdateKernel
from infinity.schedule.pager import Pager
from infinity.schedule.trace import (
    Access,
    Event,
    EventKind,
    Mode,
    Placement,
    Use,
    range_access,
    store_gradient_accesses,
    update_order,
)


class StepState:
    """Gradients, pending updates and optimizer scalars of the step that is running."""

    def __init__(
        self,
        layout: Layout,
        pager: Pager,
        kernel: UpdateKernel,
        *,
        group_of: Callable[[int], Mapping[str, Any]],
        phase: Callable[[str], Any],
    ) -> None:
        self._layout, self._pager, self._kernel = layout, pager, kernel
        self._group_of, self._phase = group_of, phase
        self._trainable = [
            sum(layout.shards[shard].spec.trainable for shard in shards) for shards in layout.unit_shards
        ]
        self.placement = Placement.after_backward()
        self.events: list[Event] = []
        self.scalars: dict[int, Scalars] = {}
        self.updated_elements = 0
        self._unit = -1
        self._arrivals: dict[int, tuple[nn.Parameter, torch.Tensor]] = {}
        self._reset()

    def _reset(self) -> None:
        self.events.clear()
        self._stored: dict[int, set[int]] = {}  # unit -> shards whose gradient waits in GRAD pages, in arrival order
        self._done: set[int] = set()  # units updated in backward
        self._scalars_after: dict[int, Scalars] = {}
        self._norms: dict[int, tuple[nn.Parameter, torch.Tensor]] = {}
        self._scale: torch.Tensor | None = None
        self.clipped = False

    # Gradients #

    def gathered(self, unit: int) -> None:
        """Note that a training pass gathers a unit."""
        self.close_arrivals()
        self.events.append(Event(EventKind.GATHER, unit))

    def gradient_arrived(self, shard: int, param: nn.Parameter, grad: torch.Tensor) -> None:
        """Take over a reduced gradient, shape of the local shard, dtype of the parameter."""
        unit = self._layout.shards[shard].unit
        if unit != self._unit or shard in self._arrivals:
            self.close_arrivals()
            self._unit = unit
        self._arrivals[shard] = (param, grad)
        if len(self._arrivals) == self._trainable[unit]:
            self.close_arrivals()

    def close_arrivals(self) -> None:
        """Store or apply the gradients of the unit whose gradients were coming in."""
        if not self._arrivals:
            return
        unit, arrivals = self._unit, self._arrivals
        self._unit, self._arrivals = -1, {}
        if unit in self._done:
            raise InfinityError(
                f"a second gradient of unit {self._layout.units[unit].name} arrived after its update in backward; with "
                'several backward passes per step set update.placement = "after_backward"'
            )
        self.events.append(Event(EventKind.GRADIENTS, unit))
        with torch.no_grad():
            if unit in self.placement.in_backward:
                self._done.add(unit)
                grads = {shard: grad.reshape(-1).cpu() for shard, (_, grad) in arrivals.items()}
                with self._phase("update"):
                    self._update(unit, grads)
            else:
                self._store(unit, arrivals)

    def _store(self, unit: int, arrivals: dict[int, tuple[nn.Parameter, torch.Tensor]]) -> None:
        stored = self._stored.pop(unit, None)
        accesses = store_gradient_accesses(self._layout, unit, first=stored is None)
        stored = stored or set()
        totals = {shard: grad for shard, (_, grad) in arrivals.items()}
        self._walk_gradients(accesses, {s: g for s, g in totals.items() if s in stored}, totals)
        for shard, (param, total) in arrivals.items():
            self._norms[shard] = (param, torch.linalg.vector_norm(total, 2.0))
        self._stored[unit] = stored | set(arrivals)  # at the end: arrival order

    def _walk_gradients(self, accesses: Any, added: dict[int, torch.Tensor], totals: dict[int, torch.Tensor]) -> None:
        """Add what is stored to the new gradients, then store the sums. Addition order as in memory: commutative."""
        for access in accesses:
            page = self._layout.pages[access[0].page]
            with self._pager.access(access) as (content,):
                values = section(content, page, self._layout, "")
                for shard, held, part in self._slices(page, totals):
                    if shard in added:
                        part.add_(values[held].to(part.device))
                    values[held].copy_(part)

    def _slices(self, page: Page, flats: Mapping[int, torch.Tensor]) -> list[tuple[int, slice, torch.Tensor]]:
        """Return (shard, slice of the page, slice of the shard's flat tensor) for every overlap."""
        found = []
        for shard in self._layout.segments[page.segment].shards:
            if shard not in flats:
                continue
            placed = self._layout.shards[shard]
            low, high = max(placed.start, page.start), min(placed.start + placed.spec.numel, page.stop)
            if low < high:
                flat = flats[shard].reshape(-1)[low - placed.start : high - placed.start]
                found.append((shard, slice(low - page.start, high - page.start), flat))
        return found

    @property
    def has_gradients(self) -> bool:
        """Whether gradients have arrived since the last step."""
        return bool(self._stored or self._done or self._arrivals)

    def drop_gradients(self) -> None:
        """Forget stored gradients (`zero_grad` without a step).

        Raises:
            InfinityError: a unit was already updated in backward: there is no way back.
        """
        self.close_arrivals()
        if self._done:
            raise InfinityError(
                "zero_grad() before step(): updates already ran in backward; to drop gradients set "
                'update.placement = "after_backward"'
            )
        for unit in self._stored:
            for segment in self._layout.unit_segments[unit]:
                self._pager.discard([page.index for page in self._layout.segments[segment].grad_pages])
        self._reset()

    def clip(self, max_norm: float, norm_type: float, error_if_nonfinite: bool, order: Sequence[int]) -> torch.Tensor:
        """Scale all gradients by one factor, as `torch.nn.utils.clip_grad_norm_` does; return the norm before.

        Args:
            order: shards in the order of `model.parameters()`: the order in which the reference adds up.

        Raises:
            InfinityError: gradients were already consumed by updates in backward, or clipped before.
            RuntimeError: the norm is not finite and `error_if_nonfinite` is set.
        """
        self.close_arrivals()
        if self._done:
            raise InfinityError(
                "clip_grad_norm_ needs all gradients at once, but updates already ran in backward; set "
                'update.placement = "after_backward"'
            )
        if self.clipped:
            raise InfinityError("clip_grad_norm_ was already called for this step; call it once between steps")
        norms = self._norms
        if norm_type != 2.0:
            norms = {s: (p, torch.linalg.vector_norm(self.gradient(s), norm_type)) for s, (p, _) in norms.items()}
        if not norms:
            return torch.tensor(0.0)
        total = private.total_norm([norms[shard] for shard in order if shard in norms], norm_type)
        if error_if_nonfinite and not torch.isfinite(total):
            raise RuntimeError(
                f"The total norm of order {norm_type} for gradients is non-finite, so it cannot be clipped. To disable "
                "this error and scale the gradients by the non-finite norm anyway, set error_if_nonfinite=False"
            )
        self._scale = torch.clamp(max_norm / (total + 1e-6), max=1.0).cpu()
        self.clipped = True
        return total

    def gradient(self, shard: int) -> torch.Tensor:
        """Return the accumulated local gradient of a shard, shape (numel,).

        Raises:
            InfinityError: there is none.
        """
        self.close_arrivals()
        placed = self._layout.shards[shard]
        if shard not in self._stored.get(placed.unit, ()):
            raise InfinityError(f"{placed.spec.name} has no gradient")
        segment = self._layout.segments[placed.segment]
        flat = torch.empty(placed.spec.numel, dtype=torch_dtype(segment.format.grad))
        for page, _, _ in overlapping(segment.grad_pages, placed.start, placed.start + placed.spec.numel):
            with self._pager.access((Use(page.index, Mode.READ),), planned=False) as (content,):
                for _, held, part in self._slices(page, {shard: flat}):
                    part.copy_(section(content, page, self._layout, "")[held])
        if self._scale is not None:
            flat.mul_(self._scale)
        return flat

    # Updates #

    def finish(self) -> tuple[Event, ...]:
        """Update what was not updated in backward; return the events of the step that ends here."""
        self.close_arrivals()
        self.events.append(Event(EventKind.STEP))
        with self._phase("update"), torch.no_grad():
            for unit in update_order(self._stored):
                self._update(unit, None)
        self.scalars.update(self._scalars_after)
        events = tuple(self.events)
        self._reset()
        return events

    def _update(self, unit: int, grads: dict[int, torch.Tensor] | None) -> None:
        for index in self._layout.unit_segments[unit]:
            segment = self._layout.segments[index]
            for position in range(len(segment.ranges)):
                access = range_access(segment, position, gradients_paged=grads is None)
                with self._pager.access(access) as contents:
                    self._update_range(segment, segment.ranges[position], access, contents, grads)

    def _update_range(
        self,
        segment: Segment,
        item: Page,
        access: Access,
        contents: Sequence[torch.Tensor],
        grads: dict[int, torch.Tensor] | None,
    ) -> None:
        held = dict(zip((self._layout.pages[use.page] for use in access), contents, strict=True))
        params = {page: section(c, page, self._layout, "") for page, c in held.items() if page.role is Role.PARAM}
        states = {
            name: section(held[item], item, self._layout, name)
            for name, _ in segment.format.sections
            if segment.update_pages
        }
        waiting = {page: section(c, page, self._layout, "") for page, c in held.items() if page.role is Role.GRAD}
        by_group: dict[int, tuple[Mapping[str, Any], list[Piece]]] = {}
        for shard, low, high in self._cuts(segment, item, tuple(params), grads):
            grad = self._gradient_slice(shard, low, high, waiting, grads)
            views = {name: view[low - item.start : high - item.start] for name, view in states.items()}
            master = views.pop(MASTER, None)
            if master is None:
                page = next(page for page in params if page.start <= low < page.stop)
                master = params[page][low - page.start : high - page.start]
            group = self._group_of(shard)
            by_group.setdefault(id(group), (group, []))[1].append(Piece(shard, master, grad, views))
        for group, pieces in by_group.values():
            self._scalars_after.update(self._kernel.update(pieces, group, self.scalars))
            self.updated_elements += sum(piece.master.numel() for piece in pieces)
        if MASTER in states:
            for page, values in params.items():
                low, high = max(page.start, item.start), min(page.stop, item.stop)
                values[low - page.start : high - page.start].copy_(states[MASTER][low - item.start : high - item.start])

    def _cuts(
        self, segment: Segment, item: Page, params: Sequence[Page], grads: dict[int, torch.Tensor] | None
    ) -> list[tuple[int, int, int]]:
        """Return (shard, first, last) for the slices of shards with a gradient, in elements of the segment.

        Where the PARAM pages are the master, a slice ends where its page does.
        """
        present = grads.keys() if grads is not None else self._stored.get(segment.unit, ())
        borders = [] if segment.format.master else [page.start for page in params]
        found = []
        for shard in segment.shards:
            placed = self._layout.shards[shard]
            low, high = max(placed.start, item.start), min(placed.start + placed.spec.numel, item.stop)
            if shard not in present or low >= high:
                continue
            points = [low, *(border for border in borders if low < border < high), high]
            found += [(shard, a, b) for a, b in itertools.pairwise(points)]
        return found

    def _gradient_slice(
        self,
        shard: int,
        low: int,
        high: int,
        waiting: Mapping[Page, torch.Tensor],
        grads: dict[int, torch.Tensor] | None,
    ) -> torch.Tensor:
        if grads is not None:
            start = self._layout.shards[shard].start
            return grads[shard][low - start : high - start]
        parts = [
            values[max(low, page.start) - page.start : min(high, page.stop) - page.start]
            for page, values in waiting.items()
            if max(low, page.start) < min(high, page.stop)
        ]
        grad = parts[0] if len(parts) == 1 else torch.cat(parts)
        return grad.mul_(self._scale) if self._scale is not None else grad
