"""One training step: FSDP modules are gathered, gradients come in, pages are updated, wherever the update schedule
says.

The step is a walk over the accesses that `schedule.trace` describes. What listens to the model calls `StepRunner`: the
shards when they are gathered or looked at, the hooks on gradients when they arrive, the optimizer in `step()`.
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
from infinity.fsdp.gradient import Gradient
from infinity.fsdp.staging import GpuPrefetcher
from infinity.heap import FreedMemory
from infinity.memory.device import Device
from infinity.optim.base_optimizer import BaseOptimizer
from infinity.optim.full_parameter import FullParameters
from infinity.optim.gradients import Gradients
from infinity.optim.kernel import Scalars
from infinity.optim.planning import StepPlanner
from infinity.optim.recording import Recording
from infinity.optim.update_thread import UpdateWorker, telling
from infinity.optim.updates import Updates
from infinity.schedule.activation_pages import ActivationPages
from infinity.schedule.link import link_traffic
from infinity.schedule.pager import Pager
from infinity.schedule.trace import Event
from infinity.telemetry.ledger import Ledger, StepRecord

_log = logging.getLogger("infinity")
_MOST_BEHIND = 2
"""FSDP modules whose updates in backward may not have ended when the weights of another one are on the device already:
nothing
else keeps the training thread from going on, and gradients from taking the device's memory."""


_LOOK_SECONDS = 0.5
"""After which it is looked whether the training thread is to be interrupted, while another one has its turn."""
P = ParamSpec("P")
R = TypeVar("R")


def _one_at_a_time(method: Callable[P, R], *, waits: bool = False) -> Callable[P, R]:
    """Let one thread at a time run a method of a `StepRunner`, and Ctrl-C wait until it has, or until it waits.

    Args:
        waits: whether Ctrl-C comes through in none of its waits either.
    """

    @wraps(method)
    def run(*args: P.args, **keywords: P.kwargs) -> R:
        lock = args[0]._lock  # type: ignore[attr-defined]
        with interrupts.held(waits=waits):
            while not lock.acquire(timeout=_LOOK_SECONDS):
                interrupts.check()
            try:
                return method(*args, **keywords)
            finally:
                lock.release()

    return run


_whole_at_a_time = partial(_one_at_a_time, waits=True)


class StepRunner:
    """Runs training steps over paged shards.

    A step begins with the first gather behind the step before. FSDP modules are gathered in forward and in backward
    (`gathering`, `gathered`); gradients arrive in backward (`gradient_arrived`) and may be read and changed until
    `step`, which ends it: what was not updated in backward is updated, or left to the next forward. In between anybody
    may `look` at weights and states, which are those of the last step then. It ends with `close`. The training thread
    calls all methods (in backward, autograd's thread for it); another one may look, and waits for its turn.
    """

    def __init__(
        self,
        layout: Layout,
        pager: Pager,
        device: Device,
        gpu_prefetcher: GpuPrefetcher,
        device_bytes: int,
        update_on_device: bool,
        planner: StepPlanner,
        worker: UpdateWorker,
        base_optimizer: BaseOptimizer,
        ledger: Ledger,
        freed: FreedMemory,
        parameters: Sequence[nn.Parameter],
        whole: FullParameters | None = None,
        activations: ActivationPages | None = None,
    ) -> None:
        """Make what a step consists of, from the bottom up.

        Args:
            device: what computes.
            staging: brings weights to it ahead of their gather.
            device_bytes: memory of the device for those, and for FSDP modules that live there; 0: what it has free
                behind the
                first step, less a margin.
            update_on_device: whether pages are updated there.
            freed: is told when an FSDP module begins.
            parameters: by shard.
            whole: brings together what ranks have of parameters that are updated whole; None where there are none.
            activations: has what forwards keep for backwards; None where that stays on the device.
        """
        self._lock = RLock()
        self._activations = activations
        self._layout, self._pager, self._worker, self._base_optimizer = layout, pager, worker, base_optimizer
        self._device, self._gpu_prefetcher, self._device_bytes = device, gpu_prefetcher, device_bytes
        self._update_on_device = update_on_device
        self._ledger, self._freed = ledger, freed
        self.planner = planner
        """Where updates run, and the plan."""
        planner.update_on_device = update_on_device
        self._whole = whole
        self._recording = Recording()  # what this step shows
        self.updates = Updates(
            layout, pager, device, gpu_prefetcher, update_on_device, planner, base_optimizer, worker, ledger, whole
        )
        """What is being updated."""
        self._gradients = Gradients(layout, pager, device, planner, self.updates, self._recording, ledger, parameters)
        # By FSDP module, the parameters that had no optimizer state when the model was offloaded.
        self._frozen = [
            [
                (layout.shards[shard].spec.name, parameters[shard])
                for shard in shards
                if not layout.shards[shard].spec.trainable
            ]
            for shards in layout.fsdp_module_shards
        ]
        self._counted = 0  # elements that records of steps have counted as updated
        self._grad_enabled = True  # whether the forward that is running makes a graph; set by `forward`
        self._backward = -1  # number of the backward pass in which gradients arrived last; -1: of none in this step
        self._skip = False  # whether the step that is running is to update nothing
        self._looked_between = False  # whether the first step looked at weights between backward and step()
        self._closed = ""  # why nothing can be done any more; empty while it can

    # What listens to the model #

    def forward(self, grad_enabled: bool) -> None:
        """Note that a forward begins that is inside of no other FSDP module's, under `torch.no_grad()` or not."""
        self._grad_enabled = grad_enabled

    @_one_at_a_time
    def gathering(self, shard: int) -> bool:
        """Note that a shard's pages are about to be copied out.

        Returns:
            Whether that is a part of a training step, of which the plan knows: not in an evaluation under no_grad.

        Raises:
            InfinityError: the FSDP module was updated in backward, and `step()` has not been called since.
            UnsupportedError: the FSDP module is to train what it was offloaded without.
        """
        self.check_open()
        fsdp_module = self._layout.shards[shard].fsdp_module
        training = self._grad_enabled or torch_private.in_backward()
        begins = self._layout.begins_fsdp_module(shard)
        if begins:
            of = fsdp_module, torch_private.in_backward(), self._grad_enabled
            first = training and not self._recording.events
            self._freed.bound(of, measure=training and self.planner.plan is None, first=first)
            self._check_frozen(fsdp_module)
        self._ledger.enter(
            "backward" if torch_private.in_backward() else "forward", self._layout.fsdp_modules[fsdp_module].name
        )
        if not training:
            self.look(shard)
        elif begins:
            if self._gradients.changed and not torch_private.in_backward():
                self.reconcile()
            self._gradients.close_arrivals()
            # After a forward that was not followed by a backward, FSDP2 gathers FSDP modules ahead in the next one that
            # are
            # done with. An FSDP module that it does use again in the same backward gets a second gradient, which is
            # refused.
            if not torch_private.in_backward() or torch_private.backward_number() != self._backward:
                self._check_weights(fsdp_module)
            if torch_private.in_backward() and (
                self._gpu_prefetcher.has(fsdp_module) or self._pager.gpu_resident(fsdp_module)
            ):
                self.updates.bound(_MOST_BEHIND)
            self._recording.gather(fsdp_module)
            self.updates.run_pending(fsdp_module)
        return training

    @_one_at_a_time
    def gathered(self, shard: int) -> None:
        """Note that the pages of a shard have been copied out in a training pass."""
        if self._layout.ends_fsdp_module(shard):
            self.updates.run_reduced()
            self.updates.run_due(self._layout.shards[shard].fsdp_module)
            following = self.planner.to_prefetch(self._recording.events)
            wanted = following >= 0 and following not in self.updates.begun
            if wanted and not self._gpu_prefetcher.has(following) and self._gpu_prefetcher.has_room(following):
                self.updates.run_pending(following)
                self._gpu_prefetcher.stage(following)

    @_one_at_a_time
    def gradient_arrived(self, shard: int, local: torch.Tensor | None) -> Gradient | None:
        """Take over what is in `p.grad` after a reduction; see `Gradients.take`."""
        self.check_open()
        self._ledger.enter("backward")
        with self._ledger.part("python", name="gradient"):
            if self.planner.recording or self.planner.update_schedule.in_backward:
                self._base_optimizer.note_settings()
            if torch_private.in_backward():
                self._backward = torch_private.backward_number()
            return self._gradients.take(shard, local)

    def _check_frozen(self, fsdp_module: int) -> None:
        for name, param in self._frozen[fsdp_module]:
            if param.requires_grad:
                raise UnsupportedError(
                    f"{name} was frozen when the model was offloaded, so it has no optimizer state, and requires a "
                    "gradient now: call requires_grad_(True) before infinity.offload (it may be frozen again later)"
                )

    def _check_weights(self, fsdp_module: int) -> None:
        """Check that the weights of an FSDP module are those that they would be in memory."""
        if fsdp_module in self.updates.begun:
            raise InfinityError(
                f"the weights of FSDP module {self._layout.fsdp_modules[fsdp_module].name} were updated in backward, but step() has not "
                "been called yet. Behind a step that was cut off, end it as it is, with step() and then zero_grad(), "
                "or resume from the last checkpoint; to look at weights between the two, run an evaluation there, or run "
                'several backward passes per step, set update.schedule = "after_backward" (or "in_forward")'
            )

    # Who looks at weights and states #

    @_one_at_a_time
    def look(self, shard: int) -> None:
        """Let the weights and the state of a shard be those of the last step, before anybody looks at them.

        Raises:
            InfinityError: its FSDP module was updated in backward already, and `step()` has not been called; or all has
                ended.
        """
        self.check_open()
        self._check_weights(self._layout.shards[shard].fsdp_module)
        if self.planner.recording and not torch_private.in_backward():
            self._looked_between |= self.has_gradients
        self.flush_updates()

    @_one_at_a_time
    def flush_updates(self) -> None:
        """Have all updates done, those too that are left to the next forward: before anybody looks at the state."""
        if self.updates.waiting:
            self.planner.settling(self.updates.waiting)
        self.updates.flush_updates()

    @_one_at_a_time
    def switch(self, method: str) -> None:
        """Run a method of the optimizer that changes its mode over all pages; all ranks together.

        Raises:
            InfinityError: there are gradients, which belong to the weights of the mode that it is in.
        """
        self.check_open()
        self.reconcile()
        if self.has_gradients:
            raise InfinityError(f"{method}() between backward and step(): call it after step() and zero_grad()")
        self.flush_updates()
        with self._ledger.phase("update", method), record_function(f"infinity::{method}"):
            self.updates.switch(method)

    # What the optimizer does #

    @property
    def has_gradients(self) -> bool:
        """Whether gradients have arrived since the last step."""
        return bool(self.updates.begun) or self._gradients.there

    @_one_at_a_time
    def reconcile(self) -> None:
        """Take over what was done to `p.grad` itself since gradients arrived.

        Raises:
            InfinityError: an FSDP module whose gradient was dropped has been updated in backward already.
            UnsupportedError: a gradient was assigned that is no DTensor.
        """
        self._gradients.reconcile()
        if not self.has_gradients and self._recording.has_gradients:  # all were dropped, and with them this step
            self._begin()
            self.planner.follow(self.planner.events, waiting=self.updates.waiting)

    @_one_at_a_time
    def close_arrivals(self) -> None:
        """Store or use the gradients that were coming in: nobody waits for others of their FSDP module."""
        self._gradients.close_arrivals()

    @_one_at_a_time
    def check_drop(self) -> None:
        """Check that gradients can be dropped.

        Raises:
            InfinityError: an FSDP module was already updated in backward: there is no way back.
        """
        if self.updates.begun:
            raise InfinityError(
                "zero_grad() before step(): updates already ran in backward, and cannot be undone; end the step as it "
                "is, with step() and then zero_grad(), or resume from the last checkpoint; to be able to drop them set "
                'update.schedule = "after_backward"'
            )

    @_one_at_a_time
    def check_new(self) -> None:
        """Check that no `p.grad` is left from the step before. Raises `InfinityError` where one is."""
        self._gradients.check_new()

    def skip(self) -> None:
        """Let the step that is running update nothing."""
        self._skip = True

    @_whole_at_a_time
    def step(self) -> StepRecord | None:
        """End the step: update what was not updated in backward, or leave it to the next forward.

        Returns:
            What the step took; None where there were no gradients, so that it was none.

        Raises:
            InfinityError: settings were changed after updates had run in backward, or the update schedule is
                impossible.
            UnsupportedError: a setting, or what the optimizer keeps on itself, cannot be copied; nothing is used up.
        """
        gradients, updates = self._gradients, self.updates
        if not self.has_gradients and not gradients.zeros:
            self._base_optimizer.kernel.advance()  # what optimizers count without any gradient
            return None
        self._base_optimizer.check_copies()
        self._ledger.enter("other")
        with record_function("infinity::step"):
            late = gradients.looked_at
            if not self.planner.recording:
                self._base_optimizer.check_settings()
            elif self.planner.automatic:
                late |= self._looked_between or bool(self._base_optimizer.changed_setting())
            gradients.close_arrivals()
            gradients.store_zeros()
            updates.run_reduced()
            events = self._recording.end()
            self._choose(events, late)
            with telling(self._pager.fail):  # FSDP modules of which some are a step ahead are nothing to go on from
                updates.run_left()
                if self._skip:
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
        elements = updates.elements  # read once: the worker's thread adds to it
        updated, self._counted = elements - self._counted, elements
        self._ledger.linked(*self._device.take_copied())
        return self._ledger.end_step(updates.step, updated, cache_slots, held, pager.in_flight())

    def _choose(self, events: tuple[Event, ...], late: bool) -> None:
        """Choose update schedule and plan, and have on the device what they need there."""
        planner = self.planner
        if self._device.asynchronous and (planner.recording or planner.plan is None):
            spare = self._device.spare_bytes() - (device_update_bytes(self._layout) if self._update_on_device else 0)
            planner.device_bytes = self._device_bytes or max(0, spare)
        if self._whole is not None and planner.recording:
            late = self._whole.on_any_rank(late)
        planner.choose(events, late)
        try:
            self._provide(events)
        except torch.OutOfMemoryError:
            _log.warning("the device has no room for weights and whole FSDP modules; set memory.device_bytes lower")
            planner.device_bytes = 0
            planner.choose(events, late)
            self._provide(events)
        if self._device.asynchronous and events != planner.events:
            traffic = link_traffic(
                events, self._layout, planner.update_schedule, update_on_device=self._update_on_device
            )
            self._ledger.predicted_link(traffic.to_device, traffic.from_device)

    def _provide(self, events: Sequence[Event]) -> None:
        """Have slots, and FSDP modules GPU-resident, as the update schedule says. Raises `torch.OutOfMemoryError`."""
        self._gpu_prefetcher.provide(
            self.planner.update_schedule, events
        )  # first: nothing is staged then of an FSDP module that moves
        self._pager.house(self.planner.update_schedule.gpu_resident)

    def _begin(self) -> None:
        """Begin a step: nothing was gathered, and no gradients have arrived."""
        self._gpu_prefetcher.drop()
        self._recording.clear()
        self._base_optimizer.forget_settings()
        self._backward = -1
        self._skip = False

    # Its beginning and its end #

    def resume(self, step: int, scalars: Mapping[int, Scalars]) -> None:
        """Go on behind a step. `scalars` are those of the optimizer by shard."""
        self.updates.step = step
        self.updates.scalars.update(scalars)

    def check_open(self) -> None:
        """Check that steps can still be taken. Raises `InfinityError`, with the reason, where they cannot."""
        if self._closed:
            raise InfinityError(self._closed)

    def end(self, why: str, *, early: bool = False) -> None:
        """Refuse everything from now on, with `why`; what was begun goes on, unless it ends `early`."""
        self._closed = why
        if self._whole is not None and early:
            self._whole.end(early=True)

    def drain(self) -> None:
        """Wait until updates that were begun have run and nothing is in flight, so that byte counters stand still.

        Updates that are left to the next forward do not run. No step can be taken afterwards.
        """
        self.updates.drain()
        self._gpu_prefetcher.close()  # before the worker: what it copies may wait for updates that are queued
        self._worker.close()
        self._pager.drain()

    def close(self) -> None:
        """End the worker; updates that have not begun are dropped, but for those that other ranks wait for.

        Gradients are gone.
        """
        self._gpu_prefetcher.close()  # before the worker: what it copies may wait for updates that are queued
        if self._whole is not None:
            self._whole.end()
            self.updates.drain()
        self._worker.close()
        self.updates.close()
        self._gradients.close()
