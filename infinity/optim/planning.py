"""Selection of the update schedule, and of the pager's plan, based on the events of completed steps.

An *event* is a gather, the arrival of gradients, or a call of `step()`. Updates whose gradients are ready at `step()`
may be *left to* the next forward; until then, they are *pending*.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Literal

from infinity.content.layout import Layout
from infinity.errors import InfinityError
from infinity.schedule.pager import Pager
from infinity.schedule.planner import Plan, make_simulation, prepend
from infinity.schedule.schedule_choice import choose_simulation, resolve_schedule
from infinity.schedule.trace import Access, Event, EventKind
from infinity.schedule.update_schedule import UpdateSchedule, expand, expand_pending, next_gather
from infinity.telemetry.ledger import Ledger

Start = Literal["nothing", "flushing"]
"""State in which a plan begins: without pending updates, or with pending updates that are flushed first."""


class StepPlanner:
    """Select the update schedule, and install matching plans in the pager.

    The first step *records* its events. Its pages are prefetched while the events are the expected ones, and read on
    demand from the first unexpected event on. The update schedule is selected once, at the end of the first step. If
    the events of a step differ from those of the previous step, a new plan is made.

    [Note: transition step] The first step stores the gradients of all FSDP modules, even those that are updated in
    backward from the second step on. The first updates of these modules are left to the forward of the second step, as
    with ``in_forward``. This *transition step* has its own plan. GPU-resident FSDP modules need no transfers, so they
    are updated immediately.

    In `choose` and `follow`, `events` are the events of the completed step. In all methods, `waiting` contains the FSDP
    modules whose updates are left to the next forward.

    Args:
        wanted: value of the setting `update.schedule`.
        device_limit: value of the setting `memory.device_bytes`.
    """

    def __init__(
        self, layout: Layout, pager: Pager, ledger: Ledger, *, cache_slots: int, wanted: str, threaded: bool,
        exchanges: bool, device_limit: int,
    ) -> None:  # fmt: skip
        self._exchanges = exchanges
        self._layout, self._pager, self._ledger = layout, pager, ledger
        self._cache_slots, self.wanted, self._threaded = cache_slots, wanted, threaded
        self.recording = wanted not in ("in_forward", "after_backward")
        """``True`` until the update schedule is selected."""
        self.schedule = "recording" if self.recording else wanted
        """Name of the update schedule, or ``recording`` until the schedule is selected."""
        self.update_schedule = UpdateSchedule()
        """Update schedule of the current step; changes only between steps."""
        self.events: tuple[Event, ...] = ()
        """Events of the step for which the current plan was made."""
        self.recorded: list[Event] = []
        """Events of the current step so far. Only the training thread adds events."""
        self.device_limit = device_limit
        """GPU memory that may be used for prefetched weights and GPU-resident FSDP modules, in bytes. If 0, all memory
        that is free after the first step may be used, except for a margin."""
        self.device_bytes = 0
        """GPU memory for prefetched weights and GPU-resident FSDP modules, in bytes. Set after the first step; 0 if the
        model trains on the CPU."""
        self.update_on_device = False
        """``True`` if pages are updated on the GPU. Set when the run opens."""
        self.plan: Plan | None = None
        """Plan for steps with these events; ``None`` until the first step has been recorded."""
        self._others: dict[Start, Plan] = {}  # plans that lead to `plan` from another start, made on first use

    def widen(self, fsdp_module: int, components: int) -> None:
        """Change the recorded number of components of an FSDP module's stored gradients."""
        for number, event in enumerate(self.recorded):
            if event.kind is EventKind.GRADIENTS and event.fsdp_module == fsdp_module:
                self.recorded[number] = event._replace(components=components)

    def expect(self, events: tuple[Event, ...]) -> None:
        """Prefetch pages of the first step, assuming that it will have these events.

        A wrong assumption only costs time. All gradients of this step are stored, because the update schedule is
        selected at its end.
        """
        # Except in these cases, the next forward consumes the gradients, whichever schedule is selected.
        at_once = self._exchanges or self.wanted == "after_backward"
        update_schedule = UpdateSchedule.of("after_backward" if at_once else "in_forward", events)
        plan = make_simulation(
            expand(events, self._layout, update_schedule), self._layout, self._cache_slots, quick=True
        ).plan
        if update_schedule.in_forward:
            plan = prepend(expand(events, self._layout, update_schedule, pending=False), plan, self._layout)
        self._pager.install(plan, guessed=True)

    def next_schedule(self, waiting: Collection[int]) -> UpdateSchedule:
        """Return the update schedule of the next step. See [Note: transition step]."""
        in_transition = self.update_schedule.in_backward.intersection(waiting) - self.update_schedule.gpu_resident
        if self._exchanges or not in_transition:
            return self.update_schedule
        return replace(self.update_schedule, in_forward=self.update_schedule.in_forward | in_transition)

    def choose(self, events: tuple[Event, ...], late: bool) -> None:
        """Select the update schedule after the first step, and make a new plan if the events have changed.

        Args:
            late: whether updates must not run in backward, because gradients or weights were read, or settings changed,
                between backward and `step()`.

        Raises:
            BudgetError: if steps store gradients but the drives have too little free space for them.
            InfinityError: if the update schedule set by the user is impossible.
        """
        if self.recording:
            self.schedule = resolve_schedule(self.wanted, events, late=late, exchanges=self._exchanges)
            self.recording = False
            if self.wanted == "in_backward" != self.schedule:
                raise InfinityError(
                    'update.schedule = "in_backward" is impossible here: the step clips or otherwise uses gradients, '
                    'or every FSDP module has several gradients per step; set "auto", "in_forward" or "after_backward"'
                )
        if events != self.events:
            self.update_schedule, simulation = choose_simulation(
                self.schedule, events, self._layout, self._cache_slots,
                threaded=self._threaded, device_bytes=self.device_bytes, update_on_device=self.update_on_device,
                exchanges=self._exchanges,
            )  # fmt: skip
            plan = simulation.plan
            if plan.stores_gradients:
                self._pager.reserve_space(plan)  # before any update, because this fails if space is short
            self.plan, self._others = plan, {}

    def follow(self, events: tuple[Event, ...], *, waiting: Collection[int]) -> None:
        """Make the pager continue with the next step, with the new plan if the events have changed."""
        plan, changed = self.plan, events != self.events
        if plan is not None and changed:
            self.events = events
            self._ledger.predicted(plan.traffic.read_bytes, plan.traffic.written_bytes)
        update_schedule = self.next_schedule(waiting)
        # Exactly one plan is installed, because its first reads start immediately.
        if update_schedule != self.update_schedule:
            transition = expand(events, self._layout, update_schedule)
            self._pager.install(self._after(transition))
            return
        if self.update_schedule.in_forward and not waiting:
            self._pager.install(self._plan_from("nothing"))
        elif changed:
            self._pager.install(plan)
        else:
            self._pager.begin_step()
        if plan is not None:
            self._pager.reserve_space(plan)  # releases the space of stored gradients that are no longer needed

    def to_prefetch(self) -> int:
        """Return the FSDP module whose weights should be copied to the GPU now, or -1."""
        last = len(self.recorded) - 1
        if not self.update_schedule.prefetched or self.events[last : last + 1] != (self.recorded[last],):
            return -1
        following = next_gather(self.events, last)
        fsdp_module = self.events[following].fsdp_module if following >= 0 else -1
        return fsdp_module if fsdp_module not in self.update_schedule.gpu_resident else -1

    def flushing(self, waiting: Collection[int]) -> None:
        """Prefetch the pages of pending updates that are about to be flushed between two steps."""
        if self._pager.between_steps:
            update_schedule = self.next_schedule(waiting)
            in_transition = update_schedule != self.update_schedule
            self._pager.install(self._flushed(update_schedule) if in_transition else self._plan_from("flushing"))

    def _flushed(self, update_schedule: UpdateSchedule) -> Plan:
        """Return a plan that starts after a step, and first runs the pending updates of `update_schedule`."""
        prefix = expand_pending(self.events, self._layout, update_schedule)
        prefix += expand(self.events, self._layout, self.update_schedule, pending=False)
        return self._after(prefix)

    def _plan_from(self, start: Start) -> Plan:
        if start not in self._others and start == "flushing":
            self._others[start] = self._flushed(self.update_schedule)
        elif start not in self._others:
            self._others[start] = self._after(expand(self.events, self._layout, self.update_schedule, pending=False))
        return self._others[start]

    def _after(self, prefix: tuple[Access, ...]) -> Plan:
        """Return a plan that runs a prefix before the first step."""
        assert self.plan is not None
        return prepend(prefix, self.plan, self._layout)
