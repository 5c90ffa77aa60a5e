"""One training step: gradients come in, pages are updated, wherever the placement says.

The step is a walk over the accesses that `schedule.trace` describes; `optim.update` does the arithmetic inside them.

[Note: updates in backward] When the gradients of a unit have come in, the next unit is gathered first, where that costs
few bytes: the training thread needs it at once, and can compute with it while the update runs.

[Note: updates in forward] `finish` only fixes what the update needs: which shards have gradients, the clip factor and
the settings of their groups. Each unit is updated in the next forward, before it is gathered (`Placement`). Whoever
wants to see the state in between calls `settle`.

Of a unit that is updated in both passes, the first ranges are updated in backward, and the gradients of the others are
stored; it is one `Update`, which has ended when the last range has.

[Note: updates on another thread] An update takes its place in the plan, page by page, when it is due (a lease); the
arithmetic runs on the worker's thread, in the same order. Whoever needs one of the pages earlier waits for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from infinity.errors import InfinityError
from infinity.fsdp import private
from infinity.fsdp.content import gradient_of, gradient_rows, section, torch_dtype
from infinity.fsdp.encoding import halves
from infinity.layout import HALVES, Layout, Page, Segment, overlapping
from infinity.optim.kernel import Scalars, UpdateKernel
from infinity.optim.update import Opened, Update, snapshot
from infinity.optim.worker import UpdateWorker
from infinity.schedule.pager import Lease, Pager
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

_TOGETHER = 4
"""Ranges that are updated in one call of the optimizer at most, to share what a call costs beside the arithmetic.

What has to be decoded takes several calls for each range, so there is nothing to share.
"""


class _Range(NamedTuple):
    """A range of a segment that is to be updated, and the lease of its pages."""

    segment: Segment
    item: Page
    lease: Lease


class StepState:
    """Gradients, pending updates and optimizer scalars of the step that is running."""

    def __init__(
        self,
        layout: Layout,
        pager: Pager,
        kernel: UpdateKernel,
        *,
        group_of: Callable[[int], Mapping[str, Any]],
        phase: Callable[..., AbstractContextManager[None]],
        part: Callable[[str], AbstractContextManager[None]],
        worker: UpdateWorker,
    ) -> None:
        self._layout, self._pager, self._kernel, self._worker = layout, pager, kernel, worker
        self._group_of, self._phase, self._part = group_of, phase, part
        self._trainable = [
            sum(layout.shards[shard].spec.trainable for shard in shards) for shards in layout.unit_shards
        ]
        self.placement = Placement()
        self.events: list[Event] = []
        self.scalars: dict[int, Scalars] = {}
        self.step = 0
        self.updated_elements = 0
        self._unit = -1
        self._arrivals: dict[int, tuple[nn.Parameter, torch.Tensor]] = {}
        self._arrived: torch.cuda.Event | None = None  # where the device has the gradients that came last
        self._pending: dict[int, Update] = {}  # unit -> what is left of its update after the step
        self._due: dict[int, int] = {}  # unit -> the one to be updated when it is gathered
        self._rows: dict[int, int] = {}  # unit -> rows of its gradient that are stored: as many as were ever needed
        self._reset()

    def _reset(self) -> None:
        self.events.clear()
        self._stored: dict[int, set[int]] = {}  # unit -> shards whose gradient waits in GRAD pages, in arrival order
        self._begun: dict[int, Update] = {}  # unit -> its update in backward
        self._reduced = -1  # the unit whose update in backward is to come next
        self._norms: dict[int, tuple[nn.Parameter, torch.Tensor]] = {}
        self._scale: torch.Tensor | None = None
        self._skip = False
        self.clipped = False

    # Gradients #

    def gathering(self, unit: int) -> None:
        """Note that a training pass begins to gather a unit; update it if that is still to be done."""
        self.close_arrivals()
        self.events.append(Event(EventKind.GATHER, unit))
        if unit in self._pending:
            self._apply_pending(unit)

    def gathered(self, unit: int) -> None:
        """Note that a training pass has gathered a unit; update what was left to this moment."""
        self._update_reduced()
        due = self._due.get(unit)
        if due is not None and due in self._pending:
            self._apply_pending(due)

    def gradient_arrived(self, shard: int, param: nn.Parameter, grad: torch.Tensor) -> None:
        """Take over a reduced gradient, shape of the local shard, dtype of the parameter."""
        unit = self._layout.shards[shard].unit
        if unit != self._unit or shard in self._arrivals:
            self.close_arrivals()
            self._unit = unit
        self._arrivals[shard] = (param, grad)
        if grad.is_cuda:
            self._arrived = torch.cuda.current_stream(grad.device).record_event()
        if len(self._arrivals) == self._trainable[unit]:
            self.close_arrivals()

    def close_arrivals(self) -> None:
        """Store or apply the gradients of the unit whose gradients were coming in."""
        if not self._arrivals:
            return
        self._update_reduced()
        unit, arrivals = self._unit, self._arrivals
        self._unit, self._arrivals = -1, {}
        if unit in self._begun:
            raise InfinityError(
                f"a second gradient of unit {self._layout.units[unit].name} arrived after its update in backward; with "
                'several backward passes per step set update.placement = "after_backward"'
            )
        early = self.placement.division(unit)
        with torch.no_grad():
            if early < len(self._layout.unit_ranges[unit]):
                self._store(unit, arrivals, early)
            else:
                self.events.append(Event(EventKind.GRADIENTS, unit, self._rows.get(unit, 1)))
            if early:
                grads = {shard: grad.reshape(-1) for shard, (_, grad) in arrivals.items()}
                self._begun[unit] = Update(
                    self._layout,
                    self._kernel,
                    self._settings_now(grads),
                    self.scalars,
                    self.step,
                    grads,
                    self._arrived,
                    own=self._kernel.own(),
                )
                self._reduced = unit
                if not self.placement.beside:
                    self._update_reduced()

    def _update_reduced(self) -> None:
        """Update the unit whose gradients came in last, as far as it is updated in backward."""
        unit, self._reduced = self._reduced, -1
        if unit >= 0:
            self._update(unit, self._begun[unit], self.placement.division(unit))

    def _store(self, unit: int, arrivals: dict[int, tuple[nn.Parameter, torch.Tensor]], start: int) -> None:
        """Store the gradients of a unit's ranges from `start` on, or add them to what is stored."""
        stored = self._stored.pop(unit, set())
        if self._arrived is not None:
            torch.cuda.current_stream().wait_event(self._arrived)
        totals = {shard: grad for shard, (_, grad) in arrivals.items()}
        before, rows = self._rows.get(unit, 1), self._rows_of(unit, totals, start, added=bool(stored))
        self._rows[unit] = max(before, rows)
        self.events.append(Event(EventKind.GRADIENTS, unit, self._rows[unit]))
        accesses = store_gradient_accesses(
            self._layout, unit, start=start, stored=before if stored else 0, rows=self._rows[unit]
        )
        with self._part("copy"):
            self._walk_gradients(accesses, {s: g for s, g in totals.items() if s in stored}, totals)
        if not start:
            with self._part("update"):
                for shard, (param, total) in arrivals.items():
                    self._norms[shard] = (param, torch.linalg.vector_norm(total, 2.0))
        self._stored[unit] = stored | set(arrivals)  # at the end: arrival order

    def _rows_of(self, unit: int, grads: Mapping[int, torch.Tensor], start: int, *, added: bool) -> int:
        """Return how many rows hold the gradients of a unit's ranges; a sum of two is taken to need all there are."""
        pages = [
            self._layout.pages[access[0].page]
            for access in store_gradient_accesses(self._layout, unit, start=start, stored=0, rows=1)
        ]
        divided = [
            part
            for page in pages
            if self._layout.segments[page.segment].format.grads == HALVES
            for _, _, part in self._slices(page, grads)
        ]
        if not divided:
            return 1
        # Added up on the device: it is waited for once.
        needed = added or bool(sum(torch.count_nonzero(halves(part)[1]) for part in divided))
        return len(HALVES) if needed else 1

    def _walk_gradients(
        self, accesses: Iterable[Access], added: dict[int, torch.Tensor], totals: dict[int, torch.Tensor]
    ) -> None:
        """Add what is stored to the new gradients, then store the sums. Addition order as in memory: commutative."""
        for access in accesses:
            pages = [self._layout.pages[use.page] for use in access]
            old = sum(use.mode.fetches for use in access)
            with self._pager.access(access) as contents:
                rows = [
                    section(content, page, self._layout, page.start, page.stop)
                    for content, page in zip(contents, pages, strict=True)
                ]
                for row in rows[old:] if old else ():
                    row.zero_()  # of shards that have none this time
                for shard, held, part in self._slices(pages[0], totals):
                    fmt = self._layout.format_of(shard)
                    if shard in added:
                        part.add_(gradient_of(fmt, [row[held] for row in rows[:old]]).to(part.device))
                    for row, values in zip(rows, gradient_rows(fmt, part), strict=False):  # those that are stored
                        row[held].copy_(values)

    def _slices(self, page: Page, flats: Mapping[int, torch.Tensor]) -> list[tuple[int, slice, torch.Tensor]]:
        """Return (shard, slice of the page, slice of the shard's flat tensor) for every overlap."""
        found = []
        for shard in self._layout.page_shards[page.index]:
            if shard in flats:
                placed = self._layout.shards[shard]
                low, high = max(placed.start, page.start), min(placed.start + placed.spec.numel, page.stop)
                flat = flats[shard].reshape(-1)[low - placed.start : high - placed.start]
                found.append((shard, slice(low - page.start, high - page.start), flat))
        return found

    @property
    def has_gradients(self) -> bool:
        """Whether gradients have arrived since the last step."""
        return bool(self._stored or self._begun or self._arrivals)

    def drop_gradients(self) -> None:
        """Forget stored gradients (`zero_grad` without a step).

        Raises:
            InfinityError: a unit was already updated in backward: there is no way back.
        """
        self.close_arrivals()
        if self._begun:
            raise InfinityError(
                "zero_grad() before step(): updates already ran in backward; to drop gradients set "
                'update.placement = "after_backward"'
            )
        self._discard_stored()
        self._reset()

    def _discard_stored(self) -> None:
        for unit in self._stored:
            for segment in self._layout.unit_segments[unit]:
                for pages in self._layout.segments[segment].grad_pages[: self._rows[unit]]:
                    self._pager.discard([page.index for page in pages])

    def clip(self, max_norm: float, norm_type: float, error_if_nonfinite: bool, order: Sequence[int]) -> torch.Tensor:
        """Scale all gradients by one factor, as `torch.nn.utils.clip_grad_norm_` does; return the norm before.

        Where it is not finite, the step will update nothing, as under `torch.amp.GradScaler`.

        Args:
            order: shards in the order of `model.parameters()`: the order in which the reference adds up.

        Raises:
            InfinityError: gradients were already consumed by updates in backward, or clipped before.
            RuntimeError: the norm is not finite and `error_if_nonfinite` is set.
        """
        self.close_arrivals()
        if self._begun:
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
        ordered = [norms[shard] for shard in order if shard in norms]
        with self._part("collective" if dist.get_world_size() > 1 else "update"):
            total = private.total_norm(ordered, norm_type)
        if error_if_nonfinite and not torch.isfinite(total):
            raise RuntimeError(
                f"The total norm of order {norm_type} for gradients is non-finite, so it cannot be clipped. To disable "
                "this error and scale the gradients by the non-finite norm anyway, set error_if_nonfinite=False"
            )
        self._scale = torch.clamp(max_norm / (total + 1e-6), max=1.0).cpu()
        self._skip = not bool(torch.isfinite(total))
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
        stored = segment.grad_pages[: self._rows[placed.unit]]
        rows = [
            torch.empty(placed.spec.numel, dtype=torch_dtype(dtype)) for dtype in segment.format.grads[: len(stored)]
        ]
        for row, pages in zip(rows, stored, strict=True):
            for page, first, last in overlapping(pages, placed.start, placed.start + placed.spec.numel):
                with self._pager.access((Use(page.index, Mode.READ),), planned=False) as (content,):
                    part = section(content, page, self._layout, first, last)
                    row[first - placed.start : last - placed.start] = part
        flat = gradient_of(segment.format, rows)
        if self._scale is not None:
            flat.mul_(self._scale)
        return flat

    # Updates #

    def end(self) -> tuple[Event, ...]:
        """Close the step; return its events. To be followed by `finish`."""
        self.close_arrivals()
        self._update_reduced()
        self.events.append(Event(EventKind.STEP))
        return tuple(self.events)

    def finish(self) -> bool:
        """Update what was not updated in backward, or leave it to the next forward, as the placement says.

        Returns:
            Whether there was an update: none where the norm of the gradients was not finite.
        """
        for unit in list(self._pending):  # what this step did not gather
            self._apply_pending(unit)
        self.step += 1
        if self._skip:
            self._discard_stored()
            self._reset()
            return False
        self._due = self.placement.due(self.events)
        settings = self._settings_now(shard for present in self._stored.values() for shard in present)
        for unit, present in self._stored.items():
            self._pending[unit] = self._begun.get(unit) or Update(
                self._layout,
                self._kernel,
                {shard: settings[shard] for shard in present},
                self.scalars,
                self.step - 1,
                scale=self._scale,
                own=self._kernel.own(),
            )
        self._kernel.advance()
        self._reset()
        # Divided otherwise than the next steps will be, if this one was the first of its kind.
        if any(update.begun != self.placement.division(unit) for unit, update in self._pending.items()):
            self._due = {}
        for unit in update_order(self._pending):
            if unit not in self._due.values():
                self._apply_pending(unit)
        return True

    def step_without_gradients(self) -> None:
        """Advance what an optimizer counts in its param groups, as its `step` does without any gradient."""
        self._kernel.advance()

    @property
    def kernel(self) -> UpdateKernel:
        """What updates pages."""
        return self._kernel

    def _settings_now(self, shards: Iterable[int]) -> dict[int, Mapping[str, Any]]:
        """Return the settings of shards as they are now: schedulers change them before the update runs."""
        fixed: dict[int, Mapping[str, Any]] = {}
        found = {}
        for shard in shards:
            group = self._group_of(shard)
            if id(group) not in fixed:
                fixed[id(group)] = snapshot(group)
            found[shard] = fixed[id(group)]
        return found

    @property
    def has_worker(self) -> bool:
        """Whether updates run on a thread of their own."""
        return self._worker.beside

    @property
    def pending(self) -> bool:
        """Whether updates wait for the next forward."""
        return bool(self._pending)

    def settle(self) -> None:
        """Run the updates that wait for the next forward, in the order in which it would; wait until all have run."""
        for unit in self._due.values():
            if unit in self._pending:
                self._apply_pending(unit)
        self._worker.drain()

    def _apply_pending(self, unit: int) -> None:
        self._update(unit, self._pending.pop(unit), len(self._layout.unit_ranges[unit]), rows=self._rows[unit])

    def _update(self, unit: int, update: Update, stop: int, *, rows: int = 0) -> None:
        """Update a unit's ranges up to `stop` that are still to be, from `rows` rows of stored gradients if not 0."""
        unit_ranges = self._layout.unit_ranges[unit]
        ranges: deque[_Range] = deque()
        with self._phase("update", self._layout.units[unit].name), torch.no_grad():
            for segment, position in unit_ranges[update.begun : stop]:
                lease = self._pager.lease(range_access(segment, position, rows=rows), beside=self._worker.beside)
                ranges.append(_Range(segment, segment.ranges[position], lease))
            update.begun = stop
            self._worker.submit(partial(self._run, update, ranges, stop == len(unit_ranges)))

    def _run(self, update: Update, ranges: deque[_Range], ends: bool) -> None:
        """Update ranges in order: one that is waited for, and with it those behind it that are there."""
        while ranges:
            with ExitStack() as held:
                contents: list[memoryview] | None = held.enter_context(ranges[0].lease)
                opened: list[Opened] = []
                while contents is not None:
                    segment, item, lease = ranges.popleft()
                    opened.append(Opened(self._layout, segment, item, lease.uses, contents))
                    more = ranges and len(opened) < _TOGETHER and not segment.format.encoded
                    contents = ranges[0].lease.hold_at_once() if more else None
                    if contents is not None:
                        held.push(ranges[0].lease)
                update.run(opened)
        update.grads = None
        if ends:
            self.scalars.update(update.after)
            self.updated_elements += update.elements

    def close(self) -> None:
        """End the worker; updates that have not begun are dropped."""
        self._worker.close()
