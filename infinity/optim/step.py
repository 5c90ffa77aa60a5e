"""Execution of a training step with paged shards.

During a step, FSDP modules are gathered, gradients arrive, and pages are updated at the times given by the update
schedule. `schedule.trace` describes the resulting sequence of page accesses. Shards call `StepRunner` when they are
gathered or read, gradient hooks call it when gradients arrive, and the optimizer calls it in `step()`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from threading import RLock
from typing import ParamSpec, TypeVar

import torch
from torch import nn
from torch.profiler import record_function

from infinity import interrupts, torch_private
from infinity.budget import device_update_bytes
from infinity.content.format import Role
from infinity.content.layout import Layout
from infinity.errors import InfinityError, UnsupportedError
from infinity.fsdp.passes import RESUME
from infinity.fsdp.staging import GpuPrefetcher
from infinity.heap import FreedMemory
from infinity.memory.device import Device
from infinity.optim.gradients import Gradients
from infinity.optim.kernel import Scalars
from infinity.optim.update_thread import telling
from infinity.optim.updates import Updates
from infinity.schedule.activation_pages import ActivationPages
from infinity.schedule.link import link_traffic
from infinity.schedule.pager import Pager
from infinity.schedule.trace import Event, EventKind
from infinity.schedule.update_schedule import expand
from infinity.telemetry.ledger import Ledger, StepRecord

_log = logging.getLogger("infinity")
_MAX_UNFINISHED_UPDATES = 2
"""Maximum number of unfinished updates in backward if the weights of the next FSDP module are already on the GPU.
Without this limit, the training thread could run ahead and fill GPU memory with gradients."""


_CHECK_SECONDS = 0.5
"""Interval at which a thread that waits for the lock checks for interrupts, in seconds."""
P = ParamSpec("P")
R = TypeVar("R")


def _one_at_a_time(method: Callable[P, R], *, waits: bool = False) -> Callable[P, R]:
    """Run a method of a `StepRunner` under its lock, and defer Ctrl-C until the method returns or waits.

    Args:
        waits: whether to also defer Ctrl-C while the method waits.
    """

    @wraps(method)
    def run(*args: P.args, **keywords: P.kwargs) -> R:
        lock = args[0]._lock  # type: ignore[attr-defined]
        interrupts.begin(waits)  # not `held`, because a generator would be slower
        try:
            while not lock.acquire(timeout=_CHECK_SECONDS):
                interrupts.check()
            try:
                return method(*args, **keywords)
            finally:
                lock.release()
        finally:
            interrupts.end(waits)

    return run


class StepRunner:
    """Run training steps with paged shards.

    A step begins with the first gather after the previous step. FSDP modules are gathered in forward and in backward
    (`gathering`, `gathered`). Gradients arrive in backward (`gradient_arrived`) and may be read and changed until
    `step`. `step` updates the FSDP modules that were not updated in backward, or leaves their updates to the next
    forward. Between steps, any caller may `look` at the weights and states of the last step. `close` ends the runner.

    The training thread calls all methods; in backward, autograd's thread calls them on its behalf. Other threads may
    only call `look`, which waits until the lock is free.

    Args:
        parameters: model parameters, indexed by shard.
        activations: pages activations between forward and backward; ``None`` if they stay on the GPU.
    """

    def __init__(
        self,
        layout: Layout,
        pager: Pager,
        device: Device,
        updates: Updates,
        ledger: Ledger,
        freed: FreedMemory,
        parameters: Sequence[nn.Parameter],
        activations: ActivationPages | None = None,
    ) -> None:
        self._lock = RLock()
        self._layout, self._pager, self._device, self._activations = layout, pager, device, activations
        self._ledger, self._freed = ledger, freed
        self.gpu_prefetcher = GpuPrefetcher(layout, pager, device)
        """Copies weights to the GPU before FSDP2 gathers them."""
        self.updates = updates
        """Running and pending updates."""
        self.planner = updates.planner
        """Planner that selects the update schedule and the plan."""
        base_optimizer = self._base_optimizer = updates.base_optimizer
        in_memory = base_optimizer.in_memory.sharded
        self._in_memory = {layout.shards[shard].fsdp_module for shard in in_memory}  # FSDP modules
        paged = {shard: param for shard, param in enumerate(parameters) if shard not in in_memory}
        self._gradients = Gradients(layout, pager, device, updates, ledger, paged)
        # Parameters without optimizer state because they were frozen in `infinity.offload`, by FSDP module
        self._frozen = [
            [
                (layout.shards[shard].spec.name, parameters[shard])
                for shard in shards
                if not layout.shards[shard].spec.trainable
            ]
            for shards in layout.fsdp_module_shards
        ]
        self._counted = 0  # number of updated elements that previous step records already include
        self._grad_enabled = True  # whether the current forward builds a graph; set by `forward`
        self._backward = -1  # number of the backward pass in which gradients last arrived in this step, or -1
        self.skips = False
        """``True`` if the current step skips all updates."""
        self._looked_between = False  # whether weights were read between backward and step() in the first step
        self._closed = ""  # reason why the runner is closed; empty while it is open
        self.began = 0
        """Number of steps that were completed before this run."""

    # Called by model hooks #

    def forward(self, grad_enabled: bool) -> None:
        """Note that an outermost forward begins. See `ModelListener`."""
        self._grad_enabled = grad_enabled

    @_one_at_a_time
    def gathering(self, fsdp_module: int) -> bool:
        """Note that the weights of an FSDP module are about to be copied into FSDP2's buffer. See `GatherListener`.

        Raises:
            InfinityError: if the FSDP module was updated in backward and `step()` has not been called since.
            UnsupportedError: if a parameter that was frozen in `infinity.offload` now requires a gradient.
        """
        self.check_open()
        in_backward = torch_private.in_backward()
        training = self._grad_enabled or in_backward
        first = training and not self.planner.recorded
        of = fsdp_module, in_backward, self._grad_enabled
        self._freed.bound(of, measure=training and self.planner.plan is None, first=first)
        self._check_frozen(fsdp_module)
        self._ledger.enter("backward" if in_backward else "forward", self._layout.fsdp_modules[fsdp_module].name)
        if not training:
            self._look(fsdp_module)
            return False
        if self._gradients.changed and not in_backward:
            self.reconcile()
        self._gradients.close_arrivals()
        # If an earlier forward was not followed by a backward, FSDP2 prefetches FSDP modules in this backward that
        # have already finished. These gathers are harmless. If FSDP2 does use such a module again in this backward,
        # the module receives a second gradient, which raises an error.
        if not in_backward or torch_private.backward_number() != self._backward:
            self._check_weights(fsdp_module)
        if in_backward and (self.gpu_prefetcher.has(fsdp_module) or self._pager.gpu_resident(fsdp_module)):
            self.updates.bound(_MAX_UNFINISHED_UPDATES)
        self.planner.recorded.append(Event(EventKind.GATHER, fsdp_module))
        self.updates.run_pending(fsdp_module)
        return True

    @_one_at_a_time
    def gathered(self, fsdp_module: int) -> None:
        """Note that, in a training step, the weights of an FSDP module have been copied into FSDP2's buffer."""
        self.updates.run_reduced()
        self.updates.run_due(fsdp_module)
        following = self.planner.to_prefetch()
        wanted = following >= 0 and following not in self.updates.begun
        if wanted and self.gpu_prefetcher.can_stage(following):
            self.updates.run_pending(following)
            self.gpu_prefetcher.stage(following)

    def gradient_arrived(self, shard: int, param: nn.Parameter) -> None:
        """Take over the gradient in `p.grad` after it was reduced. See `Gradients.take`.

        Unless it stores gradients, this method neither takes the lock, because `look` does not access arrivals, nor
        defers Ctrl-C, because an interrupted backward drops its gradients.
        """
        if self._closed:
            self.check_open()
        optimizer, gradients = self._base_optimizer, self._gradients
        if optimizer.noted is None and (self.planner.recording or self.planner.update_schedule.in_backward):
            optimizer.note_settings()
        self._backward = max(self._backward, torch_private.backward_number())
        if gradients.arriving not in (-1, self._layout.shards[shard].fsdp_module):
            self.close_arrivals()
        if gradients.take(shard, param):
            self.close_arrivals()

    def _check_frozen(self, fsdp_module: int) -> None:
        for name, param in self._frozen[fsdp_module]:
            if param.requires_grad:
                raise UnsupportedError(
                    f"{name} requires a gradient, but has no optimizer state because it was frozen when the model was "
                    "offloaded; call requires_grad_(True) before infinity.offload (it may be frozen again later)"
                )

    def _check_weights(self, fsdp_module: int) -> None:
        """Check that the weights of an FSDP module are the same as in memory, i.e. not yet updated in this step."""
        if fsdp_module in self.updates.begun:
            raise InfinityError(
                f"the weights of FSDP module {self._layout.fsdp_modules[fsdp_module].name} were updated in backward, "
                "but step() has not been called yet. If the step was interrupted, call step() and then zero_grad(), or "
                "resume from the last checkpoint. To read weights, evaluate or run several backward passes before "
                'step(), set update.schedule = "after_backward" (or "in_forward")'
            )

    # Access to weights and states #

    @_one_at_a_time
    def look(self, shard: int) -> None:
        """Bring the weights and the state of a shard up to date with the last step before they are read.

        Raises:
            InfinityError: if its FSDP module was updated in backward but `step()` has not been called, or if the runner
                is closed.
        """
        self._look(self._layout.shards[shard].fsdp_module)

    def _look(self, fsdp_module: int) -> None:
        self.check_open()
        self._check_weights(fsdp_module)
        if self.planner.recording and not torch_private.in_backward():
            self._looked_between |= self.has_gradients
        self.flush_updates()

    @_one_at_a_time
    def flush_updates(self) -> None:
        """Run all pending updates, including updates left to the next forward, before the state is read."""
        if self.updates.waiting:
            self.planner.flushing(self.updates.waiting)
        self.updates.flush_updates()

    @_one_at_a_time
    def switch(self, method: str) -> None:
        """Run a method that changes the mode of the optimizer on all pages. All ranks must call this together.

        Args:
            method: one of `MODES`.

        Raises:
            InfinityError: if there are gradients, because they were computed with the weights of the current mode.
        """
        self.check_open()
        self.reconcile()
        if self.has_gradients:
            raise InfinityError(
                f"{method}() was called between backward and step(); call it after step() and zero_grad()"
            )
        self.flush_updates()
        self.gpu_prefetcher.drop()  # a forward without a backward may have prefetched weights of the current mode
        with self._ledger.phase("update", method), record_function(f"infinity::{method}"):
            self.updates.switch(method)

    # Called by the optimizer #

    @property
    def has_gradients(self) -> bool:
        """``True`` if gradients have arrived since the last step."""
        return bool(self.updates.begun) or self._gradients.there

    @_one_at_a_time
    def reconcile(self) -> None:
        """Drop gradients that the user has removed from `p.grad`, and store gradients that the user has assigned.

        Raises:
            InfinityError: if a removed gradient was already consumed by an update in backward.
            UnsupportedError: if an assigned gradient is not a DTensor.
        """
        self._gradients.reconcile()
        arrived = any(event.kind is EventKind.GRADIENTS for event in self.planner.recorded)
        if arrived and not self.has_gradients:  # all gradients were dropped
            self._begin()
            self.planner.follow(self.planner.events, waiting=self.updates.waiting)

    def backward_interrupted(self) -> None:
        """Raise an error because the last backward was interrupted, and the caller did not drop its gradients.

        Raises:
            InfinityError: always.
        """
        self.check_repeat()
        raise InfinityError(
            f"the last backward was interrupted; call optimizer.zero_grad() and repeat the step, or {RESUME}"
        )

    def check_repeat(self) -> None:
        """Check that a step whose backward was interrupted can be repeated.

        Raises:
            InfinityError: if an FSDP module was already updated in backward, or an update has failed.
        """
        if self._pager.failure is not None:
            raise self._pager.failure
        if self.updates.begun:
            raise InfinityError(
                f"the last backward was interrupted after some updates had run; {RESUME}. To be able to repeat "
                'interrupted steps, set update.schedule = "after_backward"'
            )

    def restart(self) -> None:
        """Forget how an interrupted step used its gradients, which `reconcile` has dropped.

        Otherwise, an interrupt in the first step would rule out updates in backward.
        """
        self._gradients.looked_at = self._looked_between = False

    @_one_at_a_time
    def close_arrivals(self) -> None:
        """Store or consume the gradients that have arrived, without waiting for more gradients of their FSDP module."""
        self._gradients.close_arrivals()

    @_one_at_a_time
    def check_drop(self) -> None:
        """Check that gradients can be dropped.

        Raises:
            InfinityError: if an FSDP module was already updated in backward, which cannot be undone.
        """
        if self.updates.begun:
            raise InfinityError(
                "zero_grad() was called before step(), but updates already ran in backward and cannot be undone; call "
                "step() and then zero_grad(), or resume from the last checkpoint. To drop gradients before step(), set "
                'update.schedule = "after_backward"'
            )

    @_one_at_a_time
    def check_new(self) -> None:
        """Check that no gradient of the previous step remains in `p.grad`.

        Raises:
            InfinityError: if a gradient remains.
        """
        self._gradients.check_new()

    @partial(_one_at_a_time, waits=True)
    def step(self, *, others: bool = False) -> StepRecord | None:
        """End the step. Run the updates that did not run in backward, or leave them to the next forward.

        Args:
            others: whether parameters that are not paged have gradients.

        Returns:
            The record of the step, or ``None`` if there were no gradients and therefore no step.

        Raises:
            InfinityError: if settings changed after updates ran in backward, or the update schedule is impossible.
            UnsupportedError: if a setting or an attribute of the optimizer cannot be copied, or a parameter that stays
                in memory was frozen in `infinity.offload`. In this case, all gradients remain available.
        """
        gradients, updates = self._gradients, self.updates
        for fsdp_module in self._in_memory:
            self._check_frozen(fsdp_module)
        if not (self.has_gradients or gradients.zeros or others):
            self._base_optimizer.kernel.advance()  # optimizers may count steps without gradients
            return None
        self._base_optimizer.check_copies()
        self._ledger.enter("other")
        with record_function("infinity::step"):
            late = gradients.looked_at
            if not self.planner.recording:
                self._base_optimizer.check_settings()
            elif self.planner.wanted == "auto":
                late |= self._looked_between or bool(self._base_optimizer.changed_setting())
            gradients.close_arrivals()
            gradients.complete()
            updates.run_reduced()
            events = (*self.planner.recorded, Event(EventKind.STEP))
            self._choose(events, late)
            # A failure here leaves some FSDP modules one step ahead of others, so the run cannot continue
            with telling(self._pager.fail):
                updates.run_left()
                if self.skips:
                    gradients.discard()
                    updates.end_step()
                    self._ledger.skipped()
                else:
                    updates.finish(gradients.use_up(), gradients.components, events)
            self._begin()
            self.planner.follow(events, waiting=updates.waiting)
        pager, cache_slots, held = self._pager, Counter(self._pager.census()), self._pager.held_bytes()
        if self._activations is not None:
            held |= {Role.ACTIVATION.value: self._activations.end_step()}
            cache_slots.update(self._activations.census())
            moved, linked = self._activations.traffic, self._device.asynchronous
            self._ledger.predicted_activations(moved.read, moved.written, moved.loaded * linked, moved.kept * linked)
        elements = updates.elements  # read once, because the worker thread changes it
        updated, self._counted = elements - self._counted, elements
        self._ledger.linked(*self._device.take_copied())
        return self._ledger.end_step(updates.step, updated, cache_slots, held, pager.in_flight())

    def _choose(self, events: tuple[Event, ...], late: bool) -> None:
        planner = self.planner
        if self._device.asynchronous and (planner.recording or planner.plan is None):
            spare = self._device.spare_bytes() - self._base_optimizer.in_memory.absent_state_bytes
            spare -= device_update_bytes(self._layout) if planner.update_on_device else 0
            planner.device_bytes = planner.device_limit or max(0, spare)
        if self.updates.whole is not None and planner.recording:
            late = any(self.updates.whole.ranks.collect(late))  # affects the order of updates, so all ranks must agree
        planner.choose(events, late)
        try:
            self._provide(events)
        except torch.OutOfMemoryError:
            _log.warning("not enough GPU memory for prefetched and GPU-resident weights; reduce memory.device_bytes")
            planner.device_bytes = 0
            planner.choose(events, late)
            self._provide(events)
        if self._device.asynchronous and events != planner.events:
            trace = expand(events, self._layout, planner.update_schedule)
            traffic = link_traffic(
                events, self._layout, planner.update_schedule, trace, update_on_device=planner.update_on_device
            )
            self._ledger.predicted_link(traffic.to_device, traffic.from_device)

    def _provide(self, events: Sequence[Event]) -> None:
        """Allocate GPU prefetch buffers and move FSDP modules to the GPU, according to the update schedule.

        Raises:
            torch.OutOfMemoryError: if GPU memory is exhausted.
        """
        # Before `set_gpu_resident`, so that no FSDP module has prefetched weights when it is moved.
        self.gpu_prefetcher.provide(self.planner.update_schedule, events)
        self._pager.set_gpu_resident(self.planner.update_schedule.gpu_resident)

    def _begin(self) -> None:
        self.gpu_prefetcher.drop()
        self.planner.recorded.clear()
        self._base_optimizer.noted = None
        self._backward = -1
        self.skips = False

    # Start and end of the run #

    def resume(self, step: int, scalars: Mapping[int, Scalars]) -> None:
        """Continue after the last step of a checkpoint."""
        self.updates.step = self.began = step
        self.updates.scalars.update(scalars)

    def check_open(self) -> None:
        """Check that the runner is open.

        Raises:
            InfinityError: if the runner is closed; the message contains the reason.
        """
        if self._closed:
            raise InfinityError(self._closed)

    def end(self, why: str, *, early: bool = False) -> None:
        """Make all further calls raise an error with the message `why`.

        Running updates continue, except that they no longer wait for other ranks if `early` is set.
        """
        self._closed = why
        if self.updates.whole is not None and early:
            self.updates.whole.end(early=True)

    def drain(self) -> None:
        """Wait for running updates and transfers, so that byte counters no longer change.

        Updates left to the next forward do not run. No further step is possible after this call.
        """
        self.updates.drain()
        self.gpu_prefetcher.close()  # before the worker, because its copies may wait for queued updates
        self.updates.stop()
        self._pager.drain()

    def close(self) -> None:
        """Stop the worker and drop all gradients.

        Updates that have not begun are dropped, unless other ranks are waiting for them.
        """
        self.gpu_prefetcher.close()  # before the worker, because its copies may wait for queued updates
        self.updates.close()
        self._gradients.close()
