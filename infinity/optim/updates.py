"""The updates of FSDP modules: in backward as soon as gradients are reduced, or left to the next forward
(`UpdateSchedule`).

[Note: updates in backward] When the gradients of an FSDP module have come in, the next FSDP module is gathered first,
where that costs
few bytes: the training thread needs it at once, and can compute with it while the update runs.

[Note: updates in forward] `finish` only fixes what an update needs: which shards have gradients, what is still to be
done to them, and the settings of their groups. Each FSDP module is updated in the next forward, before it is gathered.
Whoever
wants to see the state in between calls `flush_updates`.

[Note: updates on another thread] An update takes its place in the plan, page by page, when it is due (a reservation);
the
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
from infinity.fsdp.staging import GpuPrefetcher
from infinity.memory.device import Device, DeviceEvent
from infinity.optim.base_optimizer import BaseOptimizer
from infinity.optim.device_pages import DevicePages
from infinity.optim.fetch import GradientFetcher, Slices
from infinity.optim.full_parameter import FullParameters
from infinity.optim.kernel import Scalars
from infinity.optim.planning import StepPlanner
from infinity.optim.update import RangePages, Update
from infinity.optim.update_thread import UpdateWorker, telling
from infinity.schedule.pager import Pager, Reservation
from infinity.schedule.trace import Event, range_access, update_order
from infinity.telemetry.ledger import Ledger

_SUBMITTED = 1024
"""Updates that are remembered: more than there are FSDP modules whose gradients a device has room for."""


class _Range(NamedTuple):
    """A range of a segment that is to be updated, and the reservation of its pages."""

    segment: Segment
    item: Range
    reservation: Reservation


class Updates:
    """What is being updated, and what is left to be.

    An update begins when the gradients of its FSDP module are there: in backward (`begin_in_backward`) or in `step()`
    (`finish`). It is *run* at once, behind the next gather, or when the next forward comes to its FSDP module, range by
    range;
    it has ended when the worker has updated its last range. The training thread calls all methods; the worker's thread
    alone writes `scalars` and `elements` while an update runs.
    """

    def __init__(
        self,
        layout: Layout,
        pager: Pager,
        device: Device,
        gpu_prefetcher: GpuPrefetcher,
        update_on_device: bool,
        planner: StepPlanner,
        base_optimizer: BaseOptimizer,
        worker: UpdateWorker,
        ledger: Ledger,
        whole: FullParameters | None = None,
    ) -> None:
        """Begin without any.

        Args:
            whole: brings together what ranks have of parameters that are updated whole; None where there are none.
        """
        self._whole = whole
        self._layout, self._pager, self._planner, self._ledger = layout, pager, planner, ledger
        self._base_optimizer, self._worker, self._gpu_prefetcher = base_optimizer, worker, gpu_prefetcher
        # One of the two, for the worker's thread: gradients come to the host, or pages go to the device.
        self._fetcher = None if update_on_device else GradientFetcher(layout, device, pager)
        self._device_pages = DevicePages(layout, device, pager) if update_on_device else None
        self.scalars: dict[int, Scalars] = {}
        """By shard, what the optimizer keeps of it besides tensors of its size: step counts; none if never updated."""
        self.elements = 0
        """Elements updated so far."""
        self.step = 0
        """How many steps were taken, those before a resumed checkpoint too."""
        self.begun: dict[int, Update] = {}
        """By FSDP module, its update in backward of the step that is running."""
        self._submitted: deque[Future[None]] = deque(maxlen=_SUBMITTED if device.asynchronous else 0)
        """What ends with each of the last updates, in order; without those that ran at once."""
        self._reduced = (
            -1
        )  # FSDP module whose gradients came in last, and whose update in backward is still to be run; or -1
        self._pending: dict[int, Update] = {}  # by FSDP module, what is left of its update after the step
        self._due: dict[int, int] = {}  # by FSDP module that is gathered, the pending one to be updated then

    # In backward #

    def begin_in_backward(
        self, fsdp_module: int, grads: Mapping[int, torch.Tensor], arrived: Sequence[DeviceEvent]
    ) -> None:
        """Begin to update an FSDP module with gradients that have just come in.

        Args:
            grads: by shard, flat, on the device.
            arrived: behind all of these the device has them.
        """
        self.begun[fsdp_module] = Update(
            self._layout,
            self._base_optimizer.kernel,
            self._base_optimizer.settings_of(grads),
            self.scalars,
            self.step,
            grads,
            arrived,
            own=self._base_optimizer.kernel.own(),
            whole=self._whole,
        )
        self._reduced = fsdp_module
        if not self._planner.update_schedule.overlapped:
            self.run_reduced()

    def run_reduced(self) -> None:
        """Run the update in backward that waits for the next gather, if one does."""
        if self._reduced >= 0:
            with self._handing_on():
                fsdp_module, self._reduced = self._reduced, -1
                self._run(fsdp_module, self.begun[fsdp_module])

    # In step() and in the next forward #

    def finish(
        self,
        stored: Mapping[int, Mapping[int, Sequence[Edit]]],
        components: Mapping[int, int],
        events: Sequence[Event],
    ) -> None:
        """End a step: run what was not updated in backward, or leave it to the next forward, as the update schedule
        says.

        Args:
            stored: by FSDP module in the order in which gradients came, by shard, what is still to be done to its
                gradient.
            components: by FSDP module, of its stored gradients.
            events: of the step.
        """
        self._due = self._planner.next_schedule(stored).due(events)
        settings = self._base_optimizer.settings_of(shard for edits in stored.values() for shard in edits)
        own = self._base_optimizer.kernel.own()
        for fsdp_module, edits in stored.items():
            self._pending[fsdp_module] = Update(
                self._layout,
                self._base_optimizer.kernel,
                {shard: settings[shard] for shard in edits},
                self.scalars,
                self.step,
                edits=edits,
                components=components[fsdp_module],
                own=own,
                whole=self._whole,
            )
        self.end_step()
        self._base_optimizer.kernel.advance()
        for fsdp_module in update_order(self._pending):
            if fsdp_module not in self._due.values():
                self.run_pending(fsdp_module)

    def end_step(self) -> None:
        """Count a step; no FSDP module counts as updated in backward any more."""
        self.step += 1
        self.begun = {}
        self._reduced = -1

    @property
    def waiting(self) -> Collection[int]:
        """FSDP modules whose updates wait for the next forward."""
        return self._pending.keys()

    def run_pending(self, fsdp_module: int) -> None:
        """Run the update of an FSDP module that was left to the next forward, if it still waits."""
        if fsdp_module in self._pending:
            with self._handing_on():
                self._run(fsdp_module, self._pending.pop(fsdp_module))

    def run_due(self, gathered: int) -> None:
        """Run the update that was left to the moment at which an FSDP module has been gathered."""
        self.run_pending(self._due.get(gathered, -1))

    def run_left(self) -> None:
        """Run the updates that wait, in the order in which steps left them: what this step did not gather."""
        for fsdp_module in list(self._pending):
            self.run_pending(fsdp_module)

    def flush_updates(self) -> None:
        """Run the updates that wait for the next forward, in the order in which it would; wait until all have run."""
        for fsdp_module in self._due.values():
            self.run_pending(fsdp_module)
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
            for fsdp_module in range(len(self._layout.fsdp_modules)):
                self._switch_fsdp_module(fsdp_module, method)
            self._base_optimizer.kernel.switch(method)

    def _switch_fsdp_module(self, fsdp_module: int, method: str) -> None:
        there = self._device_pages
        self._gpu_prefetcher.drop(fsdp_module)
        accesses = [
            (segment, position, range_access(segment, position))
            for segment, position in self._layout.fsdp_module_ranges[fsdp_module]
        ]
        shards = [
            shard
            for segment in self._layout.fsdp_module_segments[fsdp_module]
            for shard in self._layout.segments[segment].shards
        ]
        update = Update(
            self._layout, self._base_optimizer.kernel, self._base_optimizer.settings_of(shards), self.scalars, self.step,
            own=self._base_optimizer.kernel.own(), whole=self._whole, method=method,
        )  # fmt: skip
        copies = there.record_event if there is not None else None
        with there.on_stream() if there is not None else nullcontext(), torch.no_grad():
            if there is not None:
                there.begin(None, (), [access for _, _, access in accesses])
            for segment, position, access in accesses:
                # What fails is known before the pages are released: nobody is to use them.
                with self._pager.access(access, planned=False, copies=copies) as contents, telling(self._pager.fail):
                    found = there.bring(access, contents) if there is not None else contents
                    update.run([RangePages(self._layout, segment, segment.ranges[position], access, found, None)])
                    if there is not None:
                        there.leave()
        self.scalars.update({shard: now for shard, now in update.after.items() if shard in self.scalars})

    # One of them #

    @contextmanager
    def _handing_on(self) -> Iterator[None]:
        """Do without interrupts what takes an update and hands it on: nobody would know of it in between."""
        with interrupts.held(), telling(self._pager.fail):
            yield

    def _run(self, fsdp_module: int, update: Update) -> None:
        """Give the worker an FSDP module's ranges to update; their reservations are taken here."""
        name = self._layout.fsdp_modules[fsdp_module].name
        self._gpu_prefetcher.drop(fsdp_module)
        ranges: deque[_Range] = deque()
        # In a profile this is the whole update, or, with a thread for updates, when it was handed over.
        with self._ledger.phase("update", name), torch.no_grad(), record_function(f"infinity::update ({name})"):
            copies = self._copies(fsdp_module)
            for segment, position in self._layout.fsdp_module_ranges[fsdp_module]:
                access = range_access(segment, position, components=update.components)
                reservation = self._pager.reservation(access, threaded=self._worker.threaded, copies=copies)
                ranges.append(_Range(segment, segment.ranges[position], reservation))
            job = self._worker.submit(partial(self._update, update, ranges))
            if job is not None:
                self._submitted.append(job)

    def _copies(self, fsdp_module: int) -> Callable[[], DeviceEvent] | None:
        """Return what marks the end of copies of pages to the device and back; None where nothing is copied."""
        if self._device_pages is None or self._pager.gpu_resident(fsdp_module):
            return None  # GPU-resident the next use comes behind the stream of updates
        return self._device_pages.record_event

    def _update(self, update: Update, ranges: deque[_Range]) -> None:
        """Update an FSDP module, on the stream of updates where the device does it."""
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
            grads = there.begin(update.grads, update.arrived, [found.reservation.uses for found in ranges])
        elif fetcher is not None and update.grads is not None:
            fetcher.begin(update.grads, update.arrived, [found.item for found in ranges])
        while ranges:
            if fetcher is not None:
                grads = fetcher.take()  # before pages are held, which others may want
            with ExitStack() as held:
                contents: Sequence[Content] | None = held.enter_context(ranges[0].reservation)
                with telling(self._pager.fail):  # before the reservations are returned: nobody is to use these pages
                    opened: list[RangePages] = []
                    while contents is not None:
                        segment, item, reservation = ranges.popleft()
                        if there is not None:
                            contents = there.bring(reservation.uses, contents)
                        opened.append(RangePages(self._layout, segment, item, reservation.uses, contents, grads))
                        more = ranges and len(opened) < TOGETHER and not (segment.format.encoded or segment.whole)
                        more = more and (fetcher is None or fetcher.ready)
                        contents = ranges[0].reservation.hold_at_once() if more else None
                        if contents is not None:
                            held.push(ranges[0].reservation)
                            grads = fetcher.take() if fetcher is not None else grads
                    update.run(opened)
                    if there is not None:
                        there.leave()
            if fetcher is not None:
                fetcher.release()
