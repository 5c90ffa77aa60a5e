"""The updates of units: in backward as soon as gradients are reduced, or left to the next forward (`Placement`).

[Note: updates in backward] When the gradients of a unit have come in, the next unit is gathered first, where that costs
few bytes: the training thread needs it at once, and can compute with it while the update runs.

[Note: updates in forward] `finish` only fixes what an update needs: which shards have gradients, what is still to be
done to them, and the settings of their groups. Each unit is updated in the next forward, before it is gathered. Whoever
wants to see the state in between calls `settle`.

[Note: updates on another thread] An update takes its place in the plan, page by page, when it is due (a lease); the
arithmetic runs on the worker's thread, in the same order. Whoever needs one of the pages earlier waits for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch.profiler import record_function

from infinity import interrupts
from infinity.budget import TOGETHER
from infinity.content.layout import Layout, Range, Segment
from infinity.content.views import Content
from infinity.fsdp.gradient import Edit
from infinity.fsdp.staging import Staging
from infinity.memory.device import Device, Mark
from infinity.optim.device_pages import DevicePages
from infinity.optim.fetch import GradientFetcher, Slices
from infinity.optim.given import GivenOptimizer
from infinity.optim.kernel import Scalars
from infinity.optim.planning import StepPlanner
from infinity.optim.update import Opened, Update
from infinity.optim.whole import WholeParameters
from infinity.optim.worker import UpdateWorker, telling
from infinity.schedule.pager import Lease, Pager
from infinity.schedule.trace import Event, range_access, update_order
from infinity.telemetry.ledger import Ledger

_SUBMITTED = 1024
"""Updates that are remembered: more than there are units whose gradients a device has room for."""


class _Range(NamedTuple):
    """A range of a segment that is to be updated, and the lease of its pages."""

    segment: Segment
    item: Range
    lease: Lease


class Updates:
    """What is being updated, and what is left to be.

    An update begins when the gradients of its unit are there: in backward (`begin_in_backward`) or in `step()`
    (`finish`). It is *run* at once, behind the next gather, or when the next forward comes to its unit, range by range;
    it has ended when the worker has updated its last range. The training thread calls all methods; the worker's thread
    alone writes `scalars` and `elements` while an update runs.
    """

    def __init__(
        self,
        layout: Layout,
        pager: Pager,
        device: Device,
        staging: Staging,
        update_on_device: bool,
        planner: StepPlanner,
        given: GivenOptimizer,
        worker: UpdateWorker,
        ledger: Ledger,
        whole: WholeParameters | None = None,
    ) -> None:
        """Begin without any.

        Args:
            whole: brings together what ranks have of parameters that are updated whole; None where there are none.
        """
        self._whole = whole
        self._layout, self._pager, self._planner, self._ledger = layout, pager, planner, ledger
        self._given, self._worker, self._staging = given, worker, staging
        # One of the two, for the worker's thread: gradients come to the host, or pages go to the device.
        self._fetcher = None if update_on_device else GradientFetcher(layout, device, pager)
        self._device_pages = DevicePages(layout, device, pager) if update_on_device else None
        self.scalars: dict[int, Scalars] = {}
        """By shard, what the optimizer keeps of it besides tensors of its size: step counts; none if never updated."""
        self.elements = 0
        """Elements updated so far."""
        self.step = 0
        """How many steps were taken, those before a resumed commit too."""
        self.begun: dict[int, Update] = {}
        """By unit, its update in backward of the step that is running."""
        self._submitted: deque[Future[None]] = deque(maxlen=_SUBMITTED if device.asynchronous else 0)
        """What ends with each of the last updates, in order; without those that ran at once."""
        self._reduced = -1  # unit whose gradients came in last, and whose update in backward is still to be run; or -1
        self._pending: dict[int, Update] = {}  # by unit, what is left of its update after the step
        self._due: dict[int, int] = {}  # by unit that is gathered, the pending one to be updated then

    # In backward #

    def begin_in_backward(self, unit: int, grads: Mapping[int, torch.Tensor], arrived: Sequence[Mark]) -> None:
        """Begin to update a unit with gradients that have just come in.

        Args:
            grads: by shard, flat, on the device.
            arrived: behind all of these the device has them.
        """
        self.begun[unit] = Update(
            self._layout,
            self._given.kernel,
            self._given.settings_of(grads),
            self.scalars,
            self.step,
            grads,
            arrived,
            own=self._given.kernel.own(),
            whole=self._whole,
        )
        self._reduced = unit
        if not self._planner.placement.overlapped:
            self.run_reduced()

    def run_reduced(self) -> None:
        """Run the update in backward that waits for the next gather, if one does."""
        if self._reduced >= 0:
            with self._handing_on():
                unit, self._reduced = self._reduced, -1
                self._run(unit, self.begun[unit])

    # In step() and in the next forward #

    def finish(
        self,
        stored: Mapping[int, Mapping[int, Sequence[Edit]]],
        components: Mapping[int, int],
        events: Sequence[Event],
    ) -> None:
        """End a step: run what was not updated in backward, or leave it to the next forward, as the placement says.

        Args:
            stored: by unit in the order in which gradients came, by shard, what is still to be done to its gradient.
            components: by unit, of its stored gradients.
            events: of the step.
        """
        self._due = self._planner.next_placement(stored).due(events)
        settings = self._given.settings_of(shard for edits in stored.values() for shard in edits)
        own = self._given.kernel.own()
        for unit, edits in stored.items():
            self._pending[unit] = Update(
                self._layout,
                self._given.kernel,
                {shard: settings[shard] for shard in edits},
                self.scalars,
                self.step,
                edits=edits,
                components=components[unit],
                own=own,
                whole=self._whole,
            )
        self.end_step()
        self._given.kernel.advance()
        for unit in update_order(self._pending):
            if unit not in self._due.values():
                self.run_pending(unit)

    def end_step(self) -> None:
        """Count a step; no unit counts as updated in backward any more."""
        self.step += 1
        self.begun = {}
        self._reduced = -1

    @property
    def waiting(self) -> Collection[int]:
        """Units whose updates wait for the next forward."""
        return self._pending.keys()

    def run_pending(self, unit: int) -> None:
        """Run the update of a unit that was left to the next forward, if it still waits."""
        if unit in self._pending:
            with self._handing_on():
                self._run(unit, self._pending.pop(unit))

    def run_due(self, gathered: int) -> None:
        """Run the update that was left to the moment at which a unit has been gathered."""
        self.run_pending(self._due.get(gathered, -1))

    def run_left(self) -> None:
        """Run the updates that wait, in the order in which steps left them: what this step did not gather."""
        for unit in list(self._pending):
            self.run_pending(unit)

    def settle(self) -> None:
        """Run the updates that wait for the next forward, in the order in which it would; wait until all have run."""
        for unit in self._due.values():
            self.run_pending(unit)
        self.run_left()
        self.drain()

    def bound(self, most: int) -> None:
        """Wait until at most so many updates have been submitted and have not ended. Raises the first error."""
        while len(self._submitted) > most:
            self._pager.wait_for_job(self._submitted.popleft(), "update")

    def close(self) -> None:
        """Let go of the memory for gradients; the worker has ended."""
        if self._fetcher is not None:
            self._fetcher.close()

    def drain(self) -> None:
        """Wait until everything that was run has been updated, or let the device wait where that updates."""
        self._worker.drain()
        if self._device_pages is not None:
            self._device_pages.join()

    def switch(self, method: str) -> None:
        """Run a method of the optimizer over all pages, one of `MODES`, when nothing waits; between two steps."""
        with telling(self._pager.fail):  # some pages in the one mode and some in the other are nothing to go on from
            for unit in range(len(self._layout.units)):
                self._switch_unit(unit, method)
            self._given.kernel.switch(method)

    def _switch_unit(self, unit: int, method: str) -> None:
        there = self._device_pages
        self._staging.drop(unit)
        accesses = [
            (segment, position, range_access(segment, position)) for segment, position in self._layout.unit_ranges[unit]
        ]
        shards = [
            shard for segment in self._layout.unit_segments[unit] for shard in self._layout.segments[segment].shards
        ]
        update = Update(
            self._layout, self._given.kernel, self._given.settings_of(shards), self.scalars, self.step,
            own=self._given.kernel.own(), whole=self._whole, method=method,
        )  # fmt: skip
        copies = there.mark if there is not None else None
        with there.on_stream() if there is not None else nullcontext(), torch.no_grad():
            if there is not None:
                there.begin(None, (), [access for _, _, access in accesses])
            for segment, position, access in accesses:
                # What fails is known before the pages are released: nobody is to use them.
                with self._pager.access(access, planned=False, copies=copies) as contents, telling(self._pager.fail):
                    found = there.bring(access, contents) if there is not None else contents
                    update.run([Opened(self._layout, segment, segment.ranges[position], access, found, None)])
                    if there is not None:
                        there.leave()
        self.scalars.update({shard: now for shard, now in update.after.items() if shard in self.scalars})

    # One of them #

    @contextmanager
    def _handing_on(self) -> Iterator[None]:
        """Do without interrupts what takes an update and hands it on: nobody would know of it in between."""
        with interrupts.held(), telling(self._pager.fail):
            yield

    def _run(self, unit: int, update: Update) -> None:
        """Give the worker a unit's ranges to update; their leases are taken here."""
        name = self._layout.units[unit].name
        self._staging.drop(unit)
        ranges: deque[_Range] = deque()
        # In a profile this is the whole update, or, with a thread for updates, when it was handed over.
        with self._ledger.phase("update", name), torch.no_grad(), record_function(f"infinity::update ({name})"):
            copies = self._copies(unit)
            for segment, position in self._layout.unit_ranges[unit]:
                access = range_access(segment, position, components=update.components)
                lease = self._pager.lease(access, threaded=self._worker.threaded, copies=copies)
                ranges.append(_Range(segment, segment.ranges[position], lease))
            job = self._worker.submit(partial(self._update, update, ranges))
            if job is not None:
                self._submitted.append(job)

    def _copies(self, unit: int) -> Callable[[], Mark] | None:
        """Return what marks the end of copies of pages to the device and back; None where nothing is copied."""
        if self._device_pages is None or self._pager.at_home(unit):
            return None  # at home the next use comes behind the stream of updates
        return self._device_pages.mark

    def _update(self, update: Update, ranges: deque[_Range]) -> None:
        """Update a unit, on the stream of updates where the device does it."""
        with self._device_pages.on_stream() if self._device_pages is not None else nullcontext():
            self._update_ranges(update, ranges)
        update.grads = None
        update.run_empty()
        self.scalars.update(update.after)
        self.elements += update.elements

    def _update_ranges(self, update: Update, ranges: deque[_Range]) -> None:
        """Update ranges in order: one that is waited for, and with it those behind it that are there."""
        there, fetcher = self._device_pages, self._fetcher if update.grads is not None else None
        grads: Slices | None = None
        if there is not None:
            grads = there.begin(update.grads, update.arrived, [found.lease.uses for found in ranges])
        elif fetcher is not None and update.grads is not None:
            fetcher.begin(update.grads, update.arrived, [found.item for found in ranges])
        while ranges:
            if fetcher is not None:
                grads = fetcher.take()  # before pages are held, which others may want
            with ExitStack() as held:
                contents: Sequence[Content] | None = held.enter_context(ranges[0].lease)
                with telling(self._pager.fail):  # before the leases are returned: nobody is to use these pages
                    opened: list[Opened] = []
                    while contents is not None:
                        segment, item, lease = ranges.popleft()
                        if there is not None:
                            contents = there.bring(lease.uses, contents)
                        opened.append(Opened(self._layout, segment, item, lease.uses, contents, grads))
                        more = ranges and len(opened) < TOGETHER and not (segment.format.encoded or segment.whole)
                        more = more and (fetcher is None or fetcher.ready)
                        contents = ranges[0].lease.hold_at_once() if more else None
                        if contents is not None:
                            held.push(ranges[0].lease)
                            grads = fetcher.take() if fetcher is not None else grads
                    update.run(opened)
                    if there is not None:
                        there.leave()
            if fetcher is not None:
                fetcher.release()
