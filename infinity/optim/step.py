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
from torch import nn

from infinity.content.layout import Layout, Page, Segment
from infinity.errors import InfinityError
from infinity.fsdp import private
from infinity.fsdp.gradient import PagedGradient
from infinity.optim.gradients import SECOND, USED_IN_BACKWARD, Gradients, OneGradient
from infinity.optim.kernel import Scalars, UpdateKernel
from infinity.optim.update import Opened, Update, snapshot
from infinity.optim.worker import UpdateWorker
from infinity.schedule.pager import Lease, Pager
from infinity.schedule.placement import Placement
from infinity.schedule.trace import Event, EventKind, range_access, update_order

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
        parameters: Sequence[nn.Parameter],
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
        self._arrivals: dict[int, OneGradient] = {}  # of `_unit`, those that are not stored yet
        self._arrived: torch.cuda.Event | None = None  # where the device has the gradients that came last
        self._pending: dict[int, Update] = {}  # unit -> what is left of its update after the step
        self._due: dict[int, int] = {}  # unit -> the one to be updated when it is gathered
        self.gradients = Gradients(
            layout,
            pager,
            parameters,
            part=part,
            arrived=self._note_arrival,
            close=self.close_arrivals,
            claim=self._claim,
            storing=self._note_storing,
            widened=self._note_rows,
        )
        self._reset()

    def _reset(self) -> None:
        self.events.clear()
        self._begun: dict[int, Update] = {}  # unit -> its update in backward
        self._reduced = -1  # the unit whose update in backward is to come next
        self._backward = -1  # number of the backward in which gradients arrived last
        self._skip = False

    # Gradients #

    def gathering(self, unit: int) -> None:
        """Note that a training pass begins to gather a unit; update it if that is still to be done."""
        self.close_arrivals()
        # After a forward that was not followed by a backward, FSDP2 gathers units ahead in the next one that are done
        # with. A unit that it does use again in the same backward gets a second gradient, which is refused.
        if not private.in_backward() or private.backward_number() != self._backward:
            self.check_weights(unit)
        self.events.append(Event(EventKind.GATHER, unit))
        if unit in self._pending:
            self._apply_pending(unit)

    def gathered(self, unit: int) -> None:
        """Note that a training pass has gathered a unit; update what was left to this moment."""
        self._update_reduced()
        due = self._due.get(unit)
        if due is not None and due in self._pending:
            self._apply_pending(due)

    def check_weights(self, unit: int) -> None:
        """Check that the weights of a unit are those that they would be in memory.

        Raises:
            InfinityError: the unit was updated in backward, and `step()` has not been called since.
        """
        if unit in self._begun:
            raise InfinityError(
                f"the weights of unit {self._layout.units[unit].name} were updated in backward, but step() has not "
                "been called yet: to look at them between the two, run an evaluation there, or run several backward "
                'passes per step, set update.placement = "after_backward" (or "in_forward")'
            )

    def gradient_arrived(self, shard: int, local: torch.Tensor | None) -> OneGradient | None:
        """Take over what is in `p.grad` after a reduction, and after the user's hooks.

        Args:
            local: of the shape of the local shard, in the dtype of the parameter; None where it was dropped.

        Returns:
            What is to be in `p.grad` from now on, if that is something else.
        """
        if private.in_backward():
            self._backward = private.backward_number()
        found = None
        if local is None:
            self.gradients.drop(shard)
        elif self.gradients.is_current(shard, local):
            self.gradients.current[shard].arriving = False
        else:
            found = self.gradients.begin(shard, local.clone() if isinstance(local, PagedGradient) else local)
        if self._arrivals and len(self._arrivals) == self._trainable[self._unit]:
            self.close_arrivals()
        return found

    def _note_arrival(self, gradient: OneGradient) -> None:
        unit = self._layout.shards[gradient.shard].unit
        if unit != self._unit:
            self.close_arrivals()
            self._unit = unit
        self._arrivals[gradient.shard] = gradient
        if gradient.held is not None and gradient.held.is_cuda:
            self._arrived = torch.cuda.current_stream(gradient.held.device).record_event()

    def close_arrivals(self) -> None:
        """Store or apply the gradients of the unit whose gradients were coming in."""
        if not self._arrivals:
            return
        self._update_reduced()
        unit = self._unit
        arrivals = {shard: gradient for shard, gradient in self._arrivals.items() if gradient.held is not None}
        self._unit, self._arrivals = -1, {}
        if not arrivals:
            return
        if unit in self._begun:
            raise InfinityError(SECOND.format(unit=self._layout.units[unit].name))
        early = self.placement.division(unit)
        with torch.no_grad():
            grads = {shard: gradient.held.reshape(-1) for shard, gradient in arrivals.items()}  # type: ignore[union-attr]
            if early < len(self._layout.unit_ranges[unit]):
                if self._arrived is not None:
                    torch.cuda.current_stream().wait_event(self._arrived)
                self.gradients.store(unit, arrivals, early)
            else:
                self._note_storing(unit, self.gradients.rows.get(unit, 1))
            if early:
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
                for gradient in arrivals.values():
                    gradient.end(USED_IN_BACKWARD)
                self._reduced = unit
                if not self.placement.beside:
                    self._update_reduced()

    def _update_reduced(self) -> None:
        """Update the unit whose gradients came in last, as far as it is updated in backward."""
        unit, self._reduced = self._reduced, -1
        if unit >= 0:
            self._update(unit, self._begun[unit], self.placement.division(unit))

    def _note_storing(self, unit: int, rows: int) -> None:
        self.events.append(Event(EventKind.GRADIENTS, unit, rows))

    def _note_rows(self, unit: int, rows: int) -> None:
        self.events[:] = [
            event._replace(rows=rows) if event.kind is EventKind.GRADIENTS and event.unit == unit else event
            for event in self.events
        ]

    def _claim(self, unit: int) -> None:
        """Have the gradients of the last step used up, before others are stored in their place."""
        if unit in self._pending:
            self._apply_pending(unit)

    @property
    def has_gradients(self) -> bool:
        """Whether gradients have arrived since the last step."""
        return bool(self._begun) or self.gradients.there

    def reconcile(self) -> bool:
        """Take over what was done to `p.grad` itself since gradients arrived.

        Returns:
            Whether all gradients were dropped, and with them what was recorded of the step.

        Raises:
            InfinityError: a unit whose gradient was dropped has been updated in backward already.
        """
        self.gradients.reconcile()
        dropped = not self.has_gradients and any(event.kind is EventKind.GRADIENTS for event in self.events)
        if dropped:
            self._reset()
        return dropped

    def check_drop(self) -> None:
        """Check that gradients can be dropped.

        Raises:
            InfinityError: a unit was already updated in backward: there is no way back.
        """
        self.close_arrivals()
        if self._begun:
            raise InfinityError(
                "zero_grad() before step(): updates already ran in backward; to drop gradients set "
                'update.placement = "after_backward"'
            )

    def skip(self) -> None:
        """Let the step update nothing."""
        self._skip = True

    # Updates #

    def end(self) -> tuple[Event, ...]:
        """Close the step; return its events. To be followed by `finish`."""
        self.close_arrivals()
        self.gradients.store_zeros()
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
            self.gradients.discard()
            self.gradients.used_by_step()
            self._reset()
            return False
        self._due = self.placement.due(self.events)
        stored = self.gradients.stored
        settings = self._settings_now(shard for present in stored.values() for shard in present)
        for unit, present in stored.items():
            self._pending[unit] = self._begun.get(unit) or Update(
                self._layout,
                self._kernel,
                {shard: settings[shard] for shard in present},
                self.scalars,
                self.step - 1,
                edits={shard: tuple(gradient.edits) for shard, gradient in present.items()},
                own=self._kernel.own(),
            )
        self._kernel.advance()
        self.gradients.used_by_step()
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
        self._update(unit, self._pending.pop(unit), len(self._layout.unit_ranges[unit]), rows=self.gradients.rows[unit])

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
        self.gradients.close()
