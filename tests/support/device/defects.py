"""Defects that remove synchronization between threads, streams or the host, and which the simulation must detect."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from infinity.content.format import Role
from infinity.content.views import section
from infinity.fsdp import gradient
from infinity.fsdp.saved_activations import SavedActivations
from infinity.fsdp.staging import GpuPrefetcher
from infinity.memory.device import AcceleratorDevice
from infinity.optim.device_pages import DevicePages
from infinity.optim.fetch import GradientFetcher
from infinity.optim.gradients import Gradients
from infinity.optim.update import Update
from infinity.schedule import cache
from infinity.schedule.activation_pages import ActivationPages
from infinity.schedule.homes import GpuResidentPages
from infinity.schedule.pager import Pager
from infinity.schedule.trace import Mode, Use
from infinity.schedule.transfers import Transfers
from support.device.cases import stop_in_forward
from support.device.simulation import SimulatedDevice, simulation
from support.device.streams import LOOKS
from support.train import Outcome, Paging, Recipe, offloaded, train

COMPUTATION, BACK, REDUCTION = "the stream of the computation", "the stream 'back'", "FSDP2's reduce_scatter_stream"
UPDATE, TRAINING = "thread infinity-update_0", "thread MainThread"
IN_BACKWARD = Recipe(model="toy", steps=2)
IN_FORWARD = Recipe(model="toy", steps=2, clip=1.0)
LEAST = Paging(host_cache="least")
KEEPING = Recipe(model="toy", steps=2, sequences=44, checkpointing=True)
ACTIVATIONS = Paging(activations="nvme")
GPU_RESIDENT_PAGES = Paging(host_cache="least", device=64 << 20)
"""Paging in which all FSDP modules are GPU-resident."""


@dataclass(frozen=True, kw_only=True)
class Defect:
    """A defect, a training run that it breaks, and the two accesses in the message."""

    change: Callable[[], AbstractContextManager[Any]]
    later: str
    """Access that comes too early, and its actor. Alternatives are separated by ``|``."""
    earlier: str
    """Access after which it must be ordered."""
    recipe: Recipe = IN_BACKWARD
    paging: Paging = LEAST
    looks: int = LOOKS
    """Maximum number of event queries. See `Streams`."""
    kind: str = "order"
    run: Callable[[Recipe, Paging, Path], None] | None = None
    """Function to run. By default, the recipe is trained."""
    by_chance: bool = False
    """``True`` if detection depends on the scheduling of host threads, so that several runs may be needed."""

    def found(self, folder: Path, seed: int = 0) -> list[str]:
        """Run with the defect and return the races. Training with wrong values may raise an error."""
        with simulation(self.kind, seed, self.looks) as device, self.change():
            try:
                (self.run or _train)(self.recipe, self.paging, folder)
            except Exception:
                if not device.races.found:
                    raise
        return list(device.races.found)


def _train(recipe: Recipe, paging: Paging, folder: Path) -> None:
    with offloaded(recipe, paging, folder) as (model, optimizer):
        train(recipe, model, optimizer, Outcome())


def _flush_after_copy(recipe: Recipe, paging: Paging, folder: Path) -> None:
    """Write pages to NVMe immediately after a copy from the device into one of them."""
    with offloaded(recipe, paging, folder) as (model, optimizer):
        train(recipe, model, optimizer, Outcome())
        run = optimizer.run
        page = next(page for page in run.layout.pages if page.role is Role.PARAM)
        run.pager.flush()  # waits for running updates before it writes pages
        back = run.device.stream("back")
        uses = (Use(page.index, Mode.UPDATE),)

        def record_event() -> Any:
            event = run.device.record_event(back)
            event._event.delay(200)
            return event

        with run.pager.access(uses, planned=False, copies=record_event) as (content,):
            weights = section(content, page, run.layout, page.start, page.stop)
            run.device.copy_all([weights], [weights.clone()], back)
        run.pager.flush()


def _checkpoint(recipe: Recipe, paging: Paging, folder: Path) -> None:
    with offloaded(recipe, paging, folder) as (model, optimizer):
        train(recipe, model, optimizer, Outcome())
        optimizer.save_checkpoint()


def _evict_gpu_resident(recipe: Recipe, paging: Paging, folder: Path) -> None:
    """Train with GPU-resident FSDP modules, move them back to the host, and continue training."""
    with offloaded(recipe, paging, folder) as (model, optimizer):
        train(recipe, model, optimizer, Outcome())
        optimizer.run.pager.set_gpu_resident(frozenset())
        torch.zeros(8).add_(1)
        train(replace(recipe, steps=recipe.steps + 1), model, optimizer, Outcome(), first=recipe.steps)


class _Passed:
    """A device event that has always completed."""

    def passed(self) -> bool:
        return True

    def before(self, stream: Any) -> None:
        pass


def _without_events(*, fetches: bool) -> AbstractContextManager[Any]:
    """Release pages at the end of an access, without waiting for copies."""
    access = Pager.access

    def without_events(pager: Any, uses: Any, **settings: Any) -> Any:
        if settings.get("copies") is not None and uses[0].mode.modifies is not fetches:
            settings["copies"]()
            settings["copies"] = None
        return access(pager, uses, **settings)

    return patch.object(Pager, "access", without_events)


def _without_wait(cause: str, *, page: bool = True) -> AbstractContextManager[Any]:
    """Skip waits for one cause: waits for a single page if `page`, or else waits for all pages."""
    wait = Transfers.wait

    def skip_wait(transfers: Any, ready: Any, why: str, of: int, **settings: Any) -> None:
        if why != cause or (of >= 0) is not page:
            wait(transfers, ready, why, of, **settings)

    return patch.object(Transfers, "wait", skip_wait)


@contextmanager
def _without_wait_for_updates() -> Iterator[None]:
    """Do not make the training thread wait for updates, which are slowed down so that it accesses their pages."""
    run = Update.run

    def slow(update: Any, ranges: Any) -> None:
        time.sleep(0.02)
        run(update, ranges)

    with _without_wait("update"), patch.object(Update, "run", slow):
        yield


def _without_arrival() -> AbstractContextManager[Any]:
    begin = GradientFetcher.begin
    return patch.object(GradientFetcher, "begin", lambda self, grads, _, ranges: begin(self, grads, (), ranges))


def _without_end_of_ring() -> AbstractContextManager[Any]:
    def copy_ahead(self: Any) -> None:
        while self._waiting:
            self._coming.append(self._copy(self._waiting.popleft()))

    return patch.object(GradientFetcher, "_copy_ahead", copy_ahead)


@contextmanager
def _gradients_dropped() -> Iterator[None]:
    """Release gradients when all copies have been queued instead of completed."""
    begin, copy_ahead = GradientFetcher.begin, GradientFetcher._copy_ahead

    def begun(self: Any, grads: Any, arrived: Any, ranges: Any) -> None:
        begin(self, dict(grads), arrived, ranges)
        grads.clear()
        copied(self)

    def copied(self: Any) -> None:
        copy_ahead(self)
        if not self._waiting:
            self._grads = {}

    with patch.object(GradientFetcher, "begin", begun), patch.object(GradientFetcher, "_copy_ahead", copied):
        yield


def _unordered(owner: Any, name: str) -> AbstractContextManager[Any]:
    """Ignore the device events that a method records."""
    record_event, original = AcceleratorDevice.record_event, getattr(owner, name)

    def changed(self: Any, *args: Any, **named: Any) -> Any:
        with patch.object(
            AcceleratorDevice, "record_event", lambda device, stream: _Unordered(record_event(device, stream))
        ):
            return original(self, *args, **named)

    return patch.object(owner, name, changed)


class _Unordered:
    """A device event for which no stream waits."""

    def __init__(self, device_event: Any) -> None:
        self.passed, self.then = device_event.passed, device_event.then

    def before(self, stream: Any) -> None:
        pass


def _gathered_on_another_stream() -> AbstractContextManager[Any]:
    """Copy weights on a stream for which no other stream waits."""
    copy_all = AcceleratorDevice.copy_all

    def copy(self: Any, targets: Any, sources: Any, stream: Any = None) -> None:
        copy_all(self, targets, sources, stream or self.stream("aside"))

    return patch.object(AcceleratorDevice, "copy_all", copy)


def _closed_without_drain() -> AbstractContextManager[Any]:
    def drain(self: Any) -> bool:
        self._cursor = None
        self._cache.close()
        return True

    return patch.object(Pager, "drain", drain)


def _numbers_without_order() -> AbstractContextManager[Any]:
    begin = gradient._Number.__init__

    def begun(self: Any, value: torch.Tensor) -> None:
        begin(self, value)
        self._made = _Passed()

    return patch.object(gradient._Number, "__init__", begun)


def _slot_used_while_it_is_read() -> AbstractContextManager[Any]:
    """Fill a prefetch slot without waiting for the stream that reads it."""
    fill = GpuPrefetcher._fill
    return patch.object(GpuPrefetcher, "_fill", lambda self, memory, _, *others: fill(self, memory, None, *others))


def _slot_used_before_it_is_filled() -> AbstractContextManager[Any]:
    """Read a prefetch slot without waiting for the stream that fills it."""
    filled = GpuPrefetcher._filled
    return patch.object(GpuPrefetcher, "_filled", lambda self, slot: _Unordered(filled(self, slot)))


def _resident_without_order(name: str) -> AbstractContextManager[Any]:
    """Make `_bring`, `_send` or `contents` ignore earlier uses of GPU-resident pages. See `GpuResidentPages`."""
    owner: Any = GpuResidentPages if name == "contents" else Pager
    original = getattr(owner, name)

    def changed(self: Any, *args: Any) -> Any:
        if name == "_send":
            args[1].used[args[0]] = _Unordered(args[1].used[args[0]])
        found = original(self, *args)
        if name == "_bring":
            for page, entry in self._gpu_resident_pages.of(args[0]).items():
                entry.used[page] = _Unordered(entry.used[page])
        return found

    def contents(self: Any, uses: Any) -> Any:
        for use in uses:
            if entry := self._memory.get(use.page):
                entry.used[use.page] = _Unordered(entry.used[use.page])
        return original(self, uses)

    return patch.object(owner, name, contents if name == "contents" else changed)


def _not_kept(purpose: str) -> AbstractContextManager[Any]:
    """Do not call `record_stream` for one stream."""
    keep = SimulatedDevice.keep

    def kept(self: Any, tensor: Any, stream: Any) -> None:
        if stream is not self.stream(purpose):
            keep(self, tensor, stream)

    return patch.object(SimulatedDevice, "keep", kept)


class _OtherStream:
    """A device with a different current stream."""

    def __init__(self, device: Any, purpose: str) -> None:
        self._device, self._purpose = device, purpose

    def current(self) -> Any:
        return self._device.stream(self._purpose)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)


def _activations_elsewhere(method: str) -> AbstractContextManager[Any]:
    """Handle activations as if a different stream than the current one used them."""
    original = getattr(ActivationPages, method)

    def with_other_stream(self: Any, *args: Any) -> Any:
        device = self._device
        self._device = _OtherStream(device, "activations" if method == "keep" else "elsewhere")
        try:
            return original(self, *args)
        finally:
            self._device = device

    return patch.object(ActivationPages, method, with_other_stream)


def _activations_without_events() -> AbstractContextManager[Any]:
    """Release pages of activations when their copy has been launched."""
    release = cache.Cache.release

    def skip_wait(self: Any, uses: Any, device_event: Any = None, **settings: Any) -> None:
        release(self, uses, device_event if self._named else None, **settings)

    return patch.object(cache.Cache, "release", skip_wait)


def _copies_without_wait() -> AbstractContextManager[Any]:
    """End copies on a thread that does not wait for their events."""

    def add(self: Any, device_event: Any, uses: Any) -> None:
        self.copies += 1
        threading.Thread(target=self._end_copy, args=(uses, None)).start()

    return patch.object(cache.Cache, "_begin_copy", add)


def _without_device_wait(skipped: str) -> AbstractContextManager[Any]:
    """Skip one of the waits for the device."""
    wait_for_device = Pager.wait_for_device

    def skip_wait(pager: Any, device_event: Any, what: str) -> None:
        if what != skipped:
            wait_for_device(pager, device_event, what)

    return patch.object(Pager, "wait_for_device", skip_wait)


DEFECTS: dict[str, Defect] = {
    "weights: no event after the copy": Defect(
        change=partial(_without_events, fetches=True),
        later="an NVMe read into it|aten._fused_adamw_",
        earlier=f"a copy to the device (reads, {COMPUTATION})",
    ),
    "gradients: no event after the copy": Defect(
        change=partial(_without_events, fetches=False),
        later="an NVMe write from it|aten.",
        earlier=f"a copy to the host (writes, {BACK})",
        recipe=IN_FORWARD,
    ),
    "copies: no thread waits for their events": Defect(
        change=_copies_without_wait,
        later="an NVMe read into it|aten._fused_adamw_",
        earlier=f"a copy to the device (reads, {COMPUTATION})",
        by_chance=True,
    ),
    "gradients: copied before the reduction has completed": Defect(
        change=_without_arrival,
        later=f"a copy to the host (reads, {BACK})",
        earlier=f"aten.copy_.default (writes, {REDUCTION})",
    ),
    "gradients: copied to pages before the reduction has completed": Defect(
        change=partial(_unordered, Gradients, "_copy"),
        later=f"a copy to the host (reads, {BACK})",
        earlier=f"aten.copy_.default (writes, {REDUCTION})",
        recipe=Recipe(model="toy", steps=2, micro=2),  # after the first micro-batch, the host does not read them
    ),
    "ring: slot read before the copy has completed": Defect(
        change=partial(_without_device_wait, "copy gradients"),
        later=f"aten._fused_adamw_.default (writes, {UPDATE})",
        earlier=f"a copy to the host (writes, {BACK})",
    ),
    "ring: slot reused too early": Defect(
        change=_without_end_of_ring,
        later=f"a copy to the host (writes, {BACK})|aten._fused_adamw_.default (writes, {UPDATE})",
        earlier=f"a copy to the host (writes, {BACK})|aten._fused_adamw_.default (writes, {UPDATE})",
        recipe=Recipe(model="even", steps=2),  # FSDP modules with more ranges than slots
    ),
    "gradients: released before the copy has completed": Defect(
        change=_gradients_dropped,
        later=f"({REDUCTION}) after it was freed",
        earlier=f"a copy to the host (reads, {BACK})",
        looks=40,  # the allocator must reuse the memory before the copy has completed
    ),
    "gradients: record_stream is not called": Defect(
        change=lambda: patch.object(SimulatedDevice, "keep", lambda *_: None),
        later=f"({REDUCTION}) after it was freed",
        earlier=f"a copy to the host (reads, {BACK})",
        recipe=replace(IN_FORWARD, steps=3),
    ),
    "edit: no wait for the copy of the page to the device": Defect(
        change=lambda: patch.object(cache, "_is_left_by_device", lambda state, mode: True),
        later=f"aten.copy_.default (writes, {TRAINING})|aten.copy_.default (writes, {COMPUTATION})",
        earlier=f"a copy to the device (reads, {COMPUTATION})",
        recipe=Recipe(model="toy", steps=2, evaluate=True, edit=True),
        paging=Paging(host_cache="all"),
        looks=100,
    ),
    "activations: copied before they are computed": Defect(
        change=partial(_activations_elsewhere, "keep"),
        later="a copy to the host (reads, the stream 'activations')",
        earlier=f"(writes, {COMPUTATION})",
        recipe=KEEPING,
        paging=ACTIVATIONS,
        looks=100,  # the host must not have observed that a later operation has completed
    ),
    "activations: used before the copy has completed": Defect(
        change=partial(_activations_elsewhere, "load"),
        later=f"(reads, {COMPUTATION})",
        earlier="a copy to the device (writes, the stream 'elsewhere')",
        recipe=KEEPING,
        paging=ACTIVATIONS,
    ),
    "activations: memory reused before the copy has completed": Defect(
        change=lambda: patch.object(SavedActivations, "_end_copies", lambda self: self._copying.clear()),
        later=f"({COMPUTATION}) after it was freed",
        earlier="a copy to the host (reads, the stream 'activations')",
        recipe=KEEPING,
        paging=ACTIVATIONS,
        looks=100,  # the copy thread also queries the event, and may be first on a busy machine
        by_chance=True,
    ),
    "activations: no event after the copy": Defect(
        change=_activations_without_events,
        later="an NVMe write from it|a copy to the device",
        earlier="a copy to the host (writes, the stream 'activations')",
        recipe=KEEPING,
        paging=ACTIVATIONS,
    ),
    "close: no wait for copies": Defect(
        change=_closed_without_drain,
        later="unregistering it",
        earlier=f"a copy to the device (reads, {COMPUTATION})",
        looks=200,  # the copy thread must not have observed the end of the last copies
        run=stop_in_forward,
    ),
    "number: read before the copy has completed": Defect(
        change=partial(_without_device_wait, "look at gradients"),
        later=f"aten._local_scalar_dense.default (reads, {TRAINING})",
        earlier=f"a copy to the host (writes, {REDUCTION})",
        recipe=IN_FORWARD,
    ),
    "number: copied to the update thread before it is computed": Defect(
        change=_numbers_without_order,
        later="a number's copy to the host (reads, the stream 'numbers')",
        earlier=f"aten.clone.default (writes, {COMPUTATION})",
        recipe=Recipe(model="toy", steps=3, clip=1.0, clips="torch"),
    ),
    "number: used on the device before it is computed": Defect(
        change=_numbers_without_order,
        later="(reads, the stream 'update')",
        earlier=f"aten.clone.default (writes, {COMPUTATION})",
        recipe=Recipe(model="toy", steps=3, clip=1.0, clips="torch"),
        kind="order-updates",
    ),
    "weights: used before the copy has completed": Defect(
        change=_gathered_on_another_stream,
        later=f"(reads, {COMPUTATION})",
        earlier="a copy to the device (writes, the stream 'aside')",
    ),
    "update: the training thread does not wait": Defect(
        change=_without_wait_for_updates,
        later=f"a copy to the device (reads, {COMPUTATION})|aten.copy_.default (writes, {UPDATE})",
        earlier=f"a copy to the device (reads, {COMPUTATION})|aten.copy_.default (writes, {UPDATE})",
        paging=Paging(host_cache="all"),
        by_chance=True,
    ),
    "device update: starts before its pages are copied": Defect(
        change=partial(_unordered, DevicePages, "bring"),
        later="(writes, the stream 'update')",
        earlier="a copy to the device (writes, the stream 'in')",
        kind="order-updates",
    ),
    "device update: copied back before it has completed": Defect(
        change=partial(_unordered, DevicePages, "leave"),
        later=f"a copy to the host (reads, {BACK})",
        earlier="(writes, the stream 'update')",
        kind="order-updates",
    ),
    "device update: no event after the copies back": Defect(
        change=lambda: patch.object(DevicePages, "record_event", lambda self: _Passed()),
        later="an NVMe write from it|a copy to the device",
        earlier=f"a copy to the host (writes, {BACK})",
        kind="order-updates",
    ),
    "GPU-resident: used before the update has completed": Defect(
        change=partial(_resident_without_order, "contents"),
        later=f"aten.copy_.default (reads, {COMPUTATION})",
        earlier="(writes, the stream 'update')",
        paging=GPU_RESIDENT_PAGES,
        kind="order-updates",
    ),
    "GPU-resident: updated before gradients are stored": Defect(
        change=partial(_resident_without_order, "contents"),
        later="(reads, the stream 'update')",
        earlier=f"(writes, {REDUCTION})",
        recipe=Recipe(model="toy", steps=2, micro=2),  # without clipping, because the host waits for the norm
        paging=GPU_RESIDENT_PAGES,
        kind="order-updates",
    ),
    "GPU-resident: used before it is filled": Defect(
        change=partial(_resident_without_order, "_bring"),
        later=f"aten.copy_.default (reads, {COMPUTATION})|(writes, the stream 'update')",
        earlier="a copy to the device (writes, the stream 'stage')",
        paging=replace(GPU_RESIDENT_PAGES, host_cache="all"),  # without waiting for cache slots
        looks=200,
        kind="order-updates",
    ),
    "GPU-resident: copied for a checkpoint before the update has completed": Defect(
        change=partial(_resident_without_order, "_send"),
        later=f"a copy to the host (reads, {BACK})",
        earlier="(writes, the stream 'update')",
        paging=GPU_RESIDENT_PAGES,
        kind="order-updates",
        run=_checkpoint,
    ),
    "GPU-resident: freed during the copy": Defect(
        change=partial(_not_kept, "back"),
        later="after it was freed",
        earlier=f"a copy to the host (reads, {BACK})",
        paging=GPU_RESIDENT_PAGES,
        kind="order-updates",
        run=_evict_gpu_resident,
    ),
    "GPU-resident: gathered before the update is launched": Defect(
        change=_without_wait_for_updates,
        later=f"aten.copy_.default (reads, {COMPUTATION})|(writes, the stream 'update')",
        earlier=f"aten.copy_.default (reads, {COMPUTATION})|(writes, the stream 'update')",
        paging=GPU_RESIDENT_PAGES,
        kind="order-updates",
        by_chance=True,
    ),
    "page: used while it is being read": Defect(
        change=partial(_without_wait, "read"),
        later=f"a copy to the device (reads, {COMPUTATION})",
        earlier="an NVMe read into it (writes, ",
        by_chance=True,
    ),
    "page: written during a copy from the device": Defect(
        change=partial(_without_wait, "copy", page=False),
        later="an NVMe write from it (reads, ",
        earlier=f"a copy to the host (writes, {BACK})",
        recipe=Recipe(model="toy", steps=1),
        run=_flush_after_copy,
    ),
    "prefetch: slot read before it is filled": Defect(
        change=_slot_used_before_it_is_filled,
        later=f"aten.copy_.default (reads, {COMPUTATION})",
        earlier="a copy to the device (writes, the stream 'stage')",
        paging=Paging(host_cache="least", device=256 << 10),
    ),
    "prefetch: slot filled before it has been read": Defect(
        change=_slot_used_while_it_is_read,
        later="a copy to the device (writes, the stream 'stage')",
        earlier=f"aten.copy_.default (reads, {COMPUTATION})",
        paging=Paging(host_cache="least", device=120 << 10),  # two slots, and no GPU-resident modules
    ),
}
"""Defects by name."""


def sides(defect: Defect, messages: list[str]) -> list[str]:
    """Return the messages that contain both accesses of a defect."""
    return [
        message
        for message in messages
        if any(later in message.partition(" is not ordered after ")[0] for later in defect.later.split("|"))
        and any(earlier in message.partition(" is not ordered after ")[2] for earlier in defect.earlier.split("|"))
    ]
