"""Updates of FSDP modules, run in backward as gradients are reduced, in `step()`, or in the next forward.

The update schedule (`UpdateSchedule`) determines when each update runs.

[Note: updates in backward] When the gradients of an FSDP module have arrived, the next FSDP module is gathered before
the update runs, unless the gather has to transfer many bytes. The training thread needs the next module immediately,
and computes with it while the update runs.

[Note: updates in forward] `finish` only collects the inputs of an update: the shards with gradients, the edits that
must still be applied to these gradients, and the settings of their param groups. Each FSDP module is updated in the
next forward, before it is gathered. To read the state before then, call `flush_updates` first.

[Note: updates on another thread] When an update is due, the training thread reserves its pages, in the order of the
plan. The arithmetic runs on the worker's thread, in the order of the reservations. An access to one of the pages waits
until the update has finished with the page.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch

from infinity import interrupts, torch_private
from infinity.content.layout import Layout, RangeBatch
from infinity.fsdp.gradient import Edit
from infinity.memory.device import Device, DeviceEvent
from infinity.optim.base_optimizer import BaseOptimizer
from infinity.optim.device_pages import DevicePages, JoinedBatch
from infinity.optim.fetch import GradientFetcher, Slices
from infinity.optim.full_parameter import FullParameters
from infinity.optim.kernel import Own, Scalars
from infinity.optim.planning import StepPlanner
from infinity.optim.update import RangePages, Update
from infinity.optim.update_thread import UpdateWorker, telling
from infinity.schedule.pager import Pager, Reservation
from infinity.schedule.trace import Access, Event, batch_access, update_order
from infinity.telemetry.ledger import Ledger

_SUBMITTED = 1024
"""Maximum number of updates to track. It exceeds the number of FSDP modules whose gradients fit into GPU memory."""


_TOGETHER = 4
"""Maximum number of ranges in one call of the optimizer on the CPU. More of them do not make a call faster, but take
more temporary memory.
"""


class _HandingOver(telling):
    """Defer interrupts while an update is handed to the worker, because an interrupt would lose the update."""

    def __enter__(self) -> None:
        interrupts.begin(True)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        super().__exit__(kind, error, traceback)
        interrupts.end(True)


class _UpdateBatch(NamedTuple):
    """A batch of ranges that are updated together."""

    ranges: RangeBatch
    access: Access
    joined: JoinedBatch | None
    """Arrangement of the batch on the GPU; ``None`` if it is updated on the CPU."""


class Updates:
    """Running and pending updates.

    An update begins when the gradients of its FSDP module are available: in backward (`begin_in_backward`) or in
    `step()` (`finish`). It is *run* range by range: immediately, after the next gather, or when the next forward
    reaches its FSDP module. It ends when the worker has updated its last range. The training thread calls all methods.
    While an update runs, only the worker's thread writes `scalars` and `elements`.

    Args:
        whole: gathers parameters that must be updated as full parameters; ``None`` if the model has no such parameters.
    """

    def __init__(
        self,
        layout: Layout,
        pager: Pager,
        device: Device,
        planner: StepPlanner,
        base_optimizer: BaseOptimizer,
        worker: UpdateWorker,
        ledger: Ledger,
        whole: FullParameters | None = None,
    ) -> None:
        self._layout, self._pager, self._ledger, self._worker = layout, pager, ledger, worker
        self.planner, self.base_optimizer, self.whole = planner, base_optimizer, whole
        on_device = planner.update_on_device
        # On a GPU, either gradients are copied to the host, or pages to the GPU. Only the worker uses these objects.
        self._fetcher = GradientFetcher(layout, device, pager) if device.asynchronous and not on_device else None
        self._device_pages = DevicePages(layout, device, pager) if on_device else None
        self.scalars: dict[int, Scalars] = {}
        """Scalar optimizer states by shard, such as step counts. Shards that were never updated are missing."""
        self.elements = 0
        """Number of elements updated so far."""
        self.step = 0
        """Number of completed steps, including steps before the checkpoint from which the run resumed."""
        self.begun: dict[int, Update] = {}
        """Updates in backward of the current step, by FSDP module."""
        self._submitted: deque[Future[None]] = deque(maxlen=_SUBMITTED if device.asynchronous else 0)
        """Futures of the most recent updates in order, except updates that ran immediately."""
        self._batches: dict[tuple[int, int, bool], Sequence[_UpdateBatch]] = {}
        """Results of `_batches_of`, by FSDP module, number of components, and whether the module is GPU-resident."""
        # FSDP module whose gradients arrived last, if its update in backward has not run yet; otherwise -1
        self._reduced = -1
        self._pending: dict[int, Update] = {}  # updates that have not run when the step ends, by FSDP module
        self._due: dict[int, int] = {}  # module whose pending update runs after a gather, by gathered FSDP module

    # In backward #

    def begin_in_backward(
        self, fsdp_module: int, grads: Mapping[int, torch.Tensor], arrived: Sequence[DeviceEvent]
    ) -> None:
        """Begin to update an FSDP module with gradients that have just arrived.

        Args:
            grads: flat gradients on the device, by shard.
            arrived: events after which the gradients are complete.
        """
        settings, own = self.base_optimizer.noted_settings_of(grads)
        self.begun[fsdp_module] = self._new_update(settings, own, grads=grads, arrived=arrived)
        self._reduced = fsdp_module
        if not self.planner.update_schedule.overlapped:
            self.run_reduced()

    def run_reduced(self) -> None:
        """Run the update in backward that was postponed until after this gather, if there is one."""
        if self._reduced >= 0:
            with _HandingOver(self._pager.fail):
                fsdp_module, self._reduced = self._reduced, -1
                self._run(fsdp_module, self.begun[fsdp_module])

    # In step() and in the next forward #

    def finish(
        self,
        stored: Mapping[int, Mapping[int, tuple[Edit, ...]]],
        components: Mapping[int, int],
        events: Sequence[Event],
    ) -> None:
        """End a step. Run the updates that did not run in backward, or leave them to the next forward.

        Args:
            stored: edits that must still be applied to the stored gradients, by FSDP module (in order of arrival) and
                by shard.
            components: number of stored gradient components by FSDP module.
        """
        self._due = self.planner.next_schedule(stored).due(events)
        settings = self.base_optimizer.settings_of(chain.from_iterable(stored.values()))
        own = self.base_optimizer.kernel.own()
        for fsdp_module, edits in stored.items():
            of_module = {shard: settings[shard] for shard in edits}
            self._pending[fsdp_module] = self._new_update(
                of_module, own, edits=edits, components=components[fsdp_module]
            )
        self.end_step()
        self.base_optimizer.kernel.advance()
        for fsdp_module in update_order(self._pending):
            if fsdp_module not in self._due.values():
                self.run_pending(fsdp_module)

    def end_step(self) -> None:
        """Increment the step count, and reset the state of updates in backward."""
        self.step += 1
        self.begun = {}
        self._reduced = -1

    @property
    def waiting(self) -> Collection[int]:
        """FSDP modules whose updates are left to the next forward."""
        return self._pending.keys()

    def run_pending(self, fsdp_module: int) -> None:
        """Run the update of an FSDP module that was left to the next forward, if it is still pending."""
        if fsdp_module in self._pending:
            with _HandingOver(self._pager.fail):
                self._run(fsdp_module, self._pending.pop(fsdp_module))

    def run_due(self, gathered: int) -> None:
        """Run the pending update that is due after the gather of an FSDP module, if there is one."""
        if gathered in self._due:
            self.run_pending(self._due[gathered])

    def run_left(self) -> None:
        """Run the pending updates of FSDP modules that this step did not gather, in order of gradient arrival."""
        for fsdp_module in list(self._pending):
            self.run_pending(fsdp_module)

    def flush_updates(self) -> None:
        """Run all pending updates in the order of the next forward, and wait until they have finished."""
        for fsdp_module in self._due.values():
            self.run_pending(fsdp_module)
        self.run_left()
        self.drain()

    def bound(self, most: int) -> None:
        """Wait until at most `most` submitted updates are unfinished. If the run has failed, this raises its error."""
        while len(self._submitted) > most:
            self._pager.wait_for_job(self._submitted.popleft(), "update")

    def stop(self) -> None:
        """Stop the worker. Updates that have not begun are dropped."""
        self._worker.close()

    def close(self) -> None:
        """Stop the worker after the updates that other ranks are waiting for, and release the buffer for gradients."""
        if self.whole is not None:
            self.whole.end()
            self.drain()
        self.stop()
        if self._fetcher is not None:
            self._fetcher.close()

    def drain(self) -> None:
        """Wait until all submitted updates have finished.

        If pages are updated on the GPU, make the current stream wait for the GPU work, instead of this thread.
        """
        self._worker.drain()
        if self._device_pages is not None:
            self._device_pages.join()

    def switch(self, method: str) -> None:
        """Run a method of the optimizer on all pages. Call this between two steps, when no updates are pending.

        Args:
            method: one of `MODES`.
        """
        kernel = self.base_optimizer.kernel
        with telling(self._pager.fail):  # a failure leaves pages in different modes, so the run cannot continue
            for fsdp_module, shards in enumerate(self._layout.fsdp_module_shards):
                if self.base_optimizer.in_memory.sharded.keys().isdisjoint(shards):
                    trained = [shard for shard in shards if self._layout.shards[shard].spec.trainable]
                    settings = self.base_optimizer.settings_of(trained)
                    self._run(fsdp_module, self._new_update(settings, kernel.own(), method=method), planned=False)
            self.drain()
            self._pager.transfers.check()  # after a failure, some pages are in the earlier mode
            kernel.advance(method)

    # Execution of one update #

    def _new_update(self, settings: Mapping[int, Mapping[str, Any]], own: Own, **inputs: Any) -> Update:
        kernel, whole = self.base_optimizer.kernel, self.whole
        return Update(self._layout, kernel, settings, self.scalars, self.step, own=own, whole=whole, **inputs)

    def _run(self, fsdp_module: int, update: Update, *, planned: bool = True) -> None:
        """Reserve the pages of an FSDP module, and submit its batches to the worker."""
        name = self._layout.fsdp_modules[fsdp_module].name
        # If updates run on their own thread, this record in a profile covers only the submission of the update.
        with self._ledger.phase("update", name), torch_private.profiled(f"infinity::update ({name})"):
            copies = self._copies(fsdp_module)
            batches = self._batches_of(fsdp_module, update.components)
            reservations = [
                self._pager.reservation(
                    batch.access,
                    planned=planned,
                    threaded=self._worker.threaded,
                    copies=copies,
                    ordered=batch.joined.replaced if batch.joined is not None else (),
                )
                for batch in batches
            ]
            job = self._worker.submit(partial(self._update, update, batches, reservations))
            if job is not None:
                self._submitted.append(job)

    def _batches_of(self, fsdp_module: int, components: int) -> Sequence[_UpdateBatch]:
        layout, gpu_resident = self._layout, self._pager.gpu_resident(fsdp_module)
        if (key := (fsdp_module, components, gpu_resident)) not in self._batches:
            batches = (
                layout.gpu_resident_batches(fsdp_module) if gpu_resident else layout.fsdp_module_batches[fsdp_module]
            )
            accesses = [batch_access(batch, components=components) for batch in batches]
            on_device = self._device_pages is not None
            self._batches[key] = [
                _UpdateBatch(batch, access, JoinedBatch(layout, batch, access) if on_device else None)
                for batch, access in zip(batches, accesses, strict=True)
            ]
        return self._batches[key]

    def _copies(self, fsdp_module: int) -> Callable[[], DeviceEvent] | None:
        """Return a function that records an event after page copies to and from the GPU; ``None`` without copies."""
        if self._device_pages is None or self._pager.gpu_resident(fsdp_module):
            return None  # any later use of GPU-resident pages waits for the update stream
        return self._device_pages.record_event

    def _update(self, update: Update, batches: Sequence[_UpdateBatch], reservations: Sequence[Reservation]) -> None:
        with self._device_pages.on_stream() if self._device_pages is not None else nullcontext():
            self._update_batches(update, batches, reservations)
        update.grads = None
        if update.method:  # parameters that were never updated keep their initial state
            self.scalars.update({shard: now for shard, now in update.after.items() if shard in self.scalars})
            return
        update.run_empty()
        self.scalars.update(update.after)
        self.elements += update.elements

    def _update_batches(
        self, update: Update, batches: Sequence[_UpdateBatch], reservations: Sequence[Reservation]
    ) -> None:
        there, fetcher = self._device_pages, self._fetcher if update.grads is not None else None
        grads: Slices | None = None
        if update.grads is not None:
            grads = {shard: (self._layout.shards[shard].start, grad) for shard, grad in update.grads.items()}
        if there is not None:
            there.begin((update.grads or {}).values(), update.arrived)
        elif fetcher is not None and update.grads is not None:
            items = [segment.ranges[position] for batch in batches for segment, position in batch.ranges]
            fetcher.begin(update.grads, update.arrived, items)
        for (ranges, access, joined), reservation in zip(batches, reservations, strict=True):
            if fetcher is not None:
                fetcher.wait()  # for the first range, before holding pages that other accesses may need
            # A failure must be recorded before the reservation is released, so that these pages are not used
            with reservation as contents, telling(self._pager.fail):
                held = {use.page: content for use, content in zip(access, contents, strict=True)}
                if there is not None and joined is not None:
                    update.run(there.bring(joined, held, grads))
                    there.leave()
                    continue
                for first in range(0, len(ranges), _TOGETHER):
                    opened = []
                    for segment, position in ranges[first : first + _TOGETHER]:
                        grads = fetcher.take() if fetcher is not None else grads
                        opened.append(RangePages.of(self._layout, segment, position, held, grads))
                    update.run(opened)
                    if fetcher is not None:
                        fetcher.release()
