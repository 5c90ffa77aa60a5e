"""Where updates run, and the plan that is followed: decided from what steps show."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Literal

from infinity.content.layout import Layout
from infinity.errors import InfinityError
from infinity.schedule.pager import Pager
from infinity.schedule.planner import Plan, make_plan, predict_seconds, prepend
from infinity.schedule.schedule_choice import choose_plan, placed
from infinity.schedule.trace import Event
from infinity.schedule.update_schedule import UpdateSchedule, expand, expand_pending, next_gather
from infinity.telemetry.ledger import Ledger

Start = Literal["pending", "nothing", "settling"]
"""What a plan begins with: updates that wait in forward, none, or those that wait run first, before the step."""


class StepPlanner:
    """Chooses the update update schedule, and lets the pager follow a plan for it.

    The first step shows what steps look like (*recording*). It is read ahead as far as it looks as expected, and served
    on demand from there. At its end the update schedule is chosen, once. A step that looks otherwise than the one
    before is
    planned anew.

    [Note: turning] A step may have stored gradients of FSDP modules that are updated in backward from the next one on:
    the
    first step has stored all of them. These updates are left to the next forward, as with in_forward; that step, the
    *turning* one, has a plan of its own. FSDP modules GPU-resident need no transfers, and are updated at once.
    """

    def __init__(
        self, layout: Layout, pager: Pager, ledger: Ledger, *, cache_slots: int, wanted: str, threaded: bool,
        exchanges: bool,
    ) -> None:  # fmt: skip
        """Plan nothing yet.

        Args:
            cache slots: of the host cache.
            wanted: the setting `update.schedule`.
            threaded: whether updates have a thread of their own.
            exchanges: whether ranks exchange what they have in updates.
        """
        self._exchanges = exchanges
        self._layout, self._pager, self._ledger = layout, pager, ledger
        self._cache_slots, self._wanted, self._threaded = cache_slots, wanted, threaded
        self.placed = wanted if wanted in ("in_forward", "after_backward") else "recording"
        """The name of the update schedule; ``recording`` until it is chosen."""
        self.update_schedule = UpdateSchedule()
        """Where updates run in the step that is running; changes between steps only."""
        self.events: tuple[Event, ...] = ()
        """What the last step that was planned for looked like."""
        self.device_bytes = 0
        """Memory of the device for weights and whole FSDP modules: a plan is made for so much. 0 on the CPU; set behind
        the
        first step."""
        self.update_on_device = False
        """Whether pages are updated on the device; set before the first step."""
        self.plan: Plan | None = None
        """The plan of steps that look like it; None until the first step has been recorded."""
        self._plans: dict[Start, Plan] = {}  # for `events` and `schedule`, made when they are first needed

    @property
    def recording(self) -> bool:
        """Whether the update schedule is still to be chosen."""
        return self.placed == "recording"

    @property
    def automatic(self) -> bool:
        """Whether the update schedule is chosen by what the first step shows."""
        return self._wanted == "auto"

    def expect(self, events: tuple[Event, ...]) -> None:
        """Have pages of the first step read ahead, if it looks so; nothing depends on whether it does.

        Until the update schedule is chosen all gradients are stored.
        """
        # The next forward uses them, whatever is chosen, where there is no reason against it.
        at_once = self._exchanges or self._wanted == "after_backward"
        update_schedule = UpdateSchedule.of("after_backward" if at_once else "in_forward", events)
        plan = make_plan(expand(events, self._layout, update_schedule), self._layout, self._cache_slots, quick=True)
        if update_schedule.in_forward:
            plan = prepend(expand(events, self._layout, update_schedule, pending=False), plan, self._layout)
        self._pager.install(plan, guessed=True)

    def next_schedule(self, waiting: Collection[int]) -> UpdateSchedule:
        """Return where updates run in the next step, if those of these FSDP modules are left to be run.

        [Note: turning]
        """
        turning = self.update_schedule.in_backward.intersection(waiting) - self.update_schedule.gpu_resident
        if self._exchanges or not turning:
            return self.update_schedule
        return replace(self.update_schedule, in_forward=self.update_schedule.in_forward | turning)

    def choose(self, events: tuple[Event, ...], late: bool) -> None:
        """Choose the update schedule once, after the first step; plan anew for a step of other events.

        Args:
            late: updates in backward would be too early: something has looked at gradients or weights, or changed
                settings, between backward and step.

        Raises:
            InfinityError: the update schedule that is set is impossible.
            BudgetError: steps will store gradients, and the drives have no room for them.
        """
        if self.recording:
            self.placed = placed(self._wanted, events, late=late, exchanges=self._exchanges)
            if self._wanted == "in_backward" != self.placed:
                raise InfinityError(
                    'update.schedule = "in_backward" is impossible here: the step clips, or uses gradients '
                    'otherwise, or every FSDP module has several gradients per step; set "auto", "in_forward" or '
                    '"after_backward"'
                )
        if events != self.events:
            self.update_schedule, plan = choose_plan(
                self.placed, events, self._layout, self._cache_slots,
                threaded=self._threaded, device_bytes=self.device_bytes, update_on_device=self.update_on_device,
                exchanges=self._exchanges,
            )  # fmt: skip
            if plan.stores_gradients:
                self._pager.make_room(plan)  # before anything is updated: it may be that there is no room
            self._plans = {"pending": plan}

    def follow(self, events: tuple[Event, ...], *, waiting: Collection[int]) -> None:
        """Let the pager go on with the next step; where this one looked otherwise, plan the next one like it.

        Args:
            waiting: FSDP modules whose updates wait for the next forward.
        """
        changed = events != self.events
        if changed:
            self.events = events
            self.plan = self._plan_from("pending")
            self._ledger.predicted(self.plan.traffic.read_bytes, self.plan.traffic.written_bytes)
        update_schedule = self.next_schedule(waiting)
        # Installed once: what a plan wants is read there and then.
        if update_schedule != self.update_schedule:
            turning = expand(events, self._layout, update_schedule)
            self._pager.install(prepend(turning, self._plan_from("pending"), self._layout))
            return
        if self.update_schedule.in_forward and not waiting:
            self._pager.install(self._plan_from("nothing"))
        elif changed:
            self._pager.install(self.plan)
        else:
            self._pager.begin_step()
        if self.plan is not None:
            self._pager.make_room(self.plan)  # gives back what stored gradients took, now that they are gone

    def to_prefetch(self, events: Sequence[Event]) -> int:
        """Return the FSDP module whose weights are to be copied to the device now, or -1.

        Args:
            events: of the step that is running, so far.
        """
        last = len(events) - 1
        if not self.update_schedule.prefetched or last >= len(self.events) or events[last] != self.events[last]:
            return -1
        following = next_gather(self.events, last)
        fsdp_module = self.events[following].fsdp_module if following >= 0 else -1
        return fsdp_module if fsdp_module not in self.update_schedule.gpu_resident else -1

    def settling(self, waiting: Collection[int]) -> None:
        """Have the pages of updates that wait read ahead, before they are run between two steps."""
        if self._pager.between_steps:
            update_schedule = self.next_schedule(waiting)
            turning = update_schedule != self.update_schedule
            self._pager.install(self._flushed(update_schedule) if turning else self._plan_from("settling"))

    def _flushed(self, update_schedule: UpdateSchedule) -> Plan:
        """Return the plan from the end of a step on where the updates run first that wait as `schedule` says."""
        prefix = expand_pending(self.events, self._layout, update_schedule)
        prefix += expand(self.events, self._layout, self.update_schedule, pending=False)
        return prepend(prefix, self._plan_from("pending"), self._layout)

    def _plan_from(self, start: Start) -> Plan:
        """Return the plan from the end of a step on."""
        if start not in self._plans and start == "settling":
            self._plans[start] = self._flushed(self.update_schedule)
        elif start not in self._plans:
            prefix = expand(self.events, self._layout, self.update_schedule, pending=False)
            self._plans[start] = prepend(prefix, self._plans["pending"], self._layout)
        return self._plans[start]

    def predict_seconds(self, bandwidth: float, computation: float, activations: float) -> float:
        """Return how many seconds the plan predicts for a step; see `PagedOptimizer.predict_seconds`.

        Raises:
            InfinityError: there is no plan before the first step has been taken.
        """
        if self.plan is None:
            raise InfinityError("there is no plan before the first step: take a step first")
        return predict_seconds(
            self.plan,
            self._layout,
            bandwidth=bandwidth,
            computation=computation,
            activations=activations,
            threaded=self._threaded,
        )
