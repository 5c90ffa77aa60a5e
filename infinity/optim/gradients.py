"""Gradients between backward and their update: as they arrived, or in GRAD pages, with what was done to them since.

[Note: life of a gradient] It begins when FSDP2 has reduced it (or when it is assigned), is *held* until those of its
FSDP module are there, and is *stored* then, or used up by an update in backward. It ends with `step()`, which uses it
up, or
when it is dropped: when `p.grad` is another one or None. Nobody is told of that, so it is looked at when a gradient
arrives, in the next forward, and in `step()`. What the user does with `p.grad` in between comes here through a
`PagedGradient`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from mmap import PAGESIZE

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.profiler import record_function

from infinity import interrupts, torch_private
from infinity.content.format import HALVES, MASTER
from infinity.content.halves import halves
from infinity.content.layout import Layout, Page, overlapping
from infinity.content.views import gradient_components, gradient_of, section, torch_dtype
from infinity.errors import InfinityError, UnsupportedError
from infinity.fsdp.gradient import Edit, PagedGradient
from infinity.memory.device import Device, DeviceEvent, Pinned, Stream, transfer_bytes
from infinity.optim.planning import StepPlanner
from infinity.optim.recording import Recording
from infinity.optim.updates import Updates
from infinity.schedule.pager import Pager
from infinity.schedule.trace import Access, Mode, Use, store_gradient_accesses
from infinity.telemetry.ledger import Ledger

_MOST_EDITS = 16
"""Operations that are recorded for a gradient; with one more, the gradient is stored anew."""

USED_IN_BACKWARD = (
    "the gradient of {name} was used up by its update in backward; for clip_grad_norm_, torch.amp.GradScaler, and "
    "everything that reads, changes or drops gradients between backward and step(), set update.schedule = "
    '"after_backward" (or "in_forward")'
)
SECOND = (
    "a second gradient of FSDP module {FSDP module} arrived after its update in backward; with several backward passes per step set "
    'update.schedule = "after_backward"'
)
USED_BY_STEP = (
    "the gradient of {name} was used up by step(): read it before; and call zero_grad() before the next backward, "
    "gradients that are kept over a step cannot be added to"
)
USED_TWICE = (
    "the gradient of {name} was used up by the step() before, and memory would update with it again: call zero_grad() "
    "after step(), also where it is set to zero or None for a part of the parameters only"
)
CUT_OFF = (
    "the gradient of {name} was being stored when that was cut off: call zero_grad(), and begin with the forward again"
)
DROPPED = "this gradient of {name} was dropped, by zero_grad() or for another one; clone() what is to be kept"
CLOSED = "the gradient of {name} went with the optimizer, which was closed"


class OneGradient:
    """One gradient of a shard; what a `PagedGradient` asks. The training thread alone uses it."""

    __slots__ = ("arriving", "edits", "gone", "held", "length", "owner", "shape", "shard", "stored", "zero")

    def __init__(self, owner: Gradients, shard: int, shape: torch.Size) -> None:
        self.owner, self.shard = owner, shard
        self.shape = shape  # of the local shard
        self.held: torch.Tensor | None = None  # as it arrived, on the device, to be added to what is stored
        self.stored = False  # whether (a part of) it is in GRAD pages
        self.zero = False  # whether all elements are zero, and nothing is held or stored
        self.edits: list[Edit] = []  # what was done to it since it was stored, and is still to be done by who reads it
        self.length: torch.Tensor | None = None  # its norm of order 2 when it was stored, a scalar
        self.arriving = False  # between what FSDP2 adds to it and the last hook, with hooks of the user in between
        self.gone = ""  # why it is not there any more, with {name} for the parameter; empty while it is there

    def __repr__(self) -> str:
        return self.owner.name(self.shard)

    def load(self) -> torch.Tensor:
        """Return the elements; see `infinity.fsdp.gradient.Gradient`, as for all methods."""
        return self.owner.load(self).view(self.shape)

    def replace(self, values: torch.Tensor) -> None:
        """Replace the elements."""
        self.owner.replace(self, values)

    def clear(self) -> None:
        """Replace the elements by zeros."""
        self.owner.clear(self)

    def record(self, edit: Edit) -> None:
        """Change the elements when they are read next."""
        self.owner.record(self, edit)

    def add(self, values: torch.Tensor) -> bool:
        """Take over what FSDP2 has reduced."""
        return self.owner.add(self, values)

    def norm(self) -> torch.Tensor | None:
        """Return the norm of order 2, where it is known."""
        self.owner.check(self)
        return None if self.held is not None or self.edits else self.length

    @property
    def there(self) -> bool:
        """Whether it has elements: to be updated with, or to be kept from a checkpoint."""
        return not self.gone and (self.held is not None or self.stored)

    def end(self, reason: str) -> None:
        """Let go of the elements."""
        self.gone = reason
        self.held, self.length, self.stored, self.zero = None, None, False, False
        self.edits = []


class Gradients:
    """The gradients of this rank: what arrives, what is stored, and what is used at once.

    Gradients of one FSDP module come in one after the other; `close_arrivals` ends that, and stores them or begins the
    update
    of the FSDP module, as the update schedule says. All methods are called by the training thread.
    """

    def __init__(
        self,
        layout: Layout,
        pager: Pager,
        device: Device,
        planner: StepPlanner,
        updates: Updates,
        recording: Recording,
        ledger: Ledger,
        parameters: Sequence[nn.Parameter],
    ) -> None:
        """Begin without any.

        Args:
            device: what computes.
            parameters: by shard.
        """
        self._layout, self._pager, self._device, self._planner = layout, pager, device, planner
        self._updates, self._recording, self._ledger = updates, recording, ledger
        self._parameters = {
            shard: param for shard, param in enumerate(parameters) if layout.shards[shard].spec.trainable
        }
        self._trainable = [
            sum(layout.shards[shard].spec.trainable for shard in shards) for shards in layout.fsdp_module_shards
        ]
        """By FSDP module, how many gradients it can have."""
        self._fsdp_module = -1  # whose gradients are coming in; -1: of none
        self._arrivals: dict[
            int, OneGradient
        ] = {}  # by shard of `_fsdp_module`, what is held and neither stored nor used
        self._arrived: dict[Stream, DeviceEvent] = {}  # by stream, the last mark behind gradients of `_fsdp_module`
        self._current: dict[
            int, OneGradient
        ] = {}  # by shard, that of `p.grad`; used up by `step()` until it is another
        self._stored: dict[
            int, dict[int, OneGradient]
        ] = {}  # by FSDP module, in the order in which they came, and shard
        self._components: dict[
            int, int
        ] = {}  # by FSDP module, how many components are stored: as many as were ever needed
        self.looked_at = False
        """Whether anybody but the update needed a gradient since the last step."""
        self.changed = False
        """Whether there is something new since `reconcile`."""
        self._summed = any(isinstance(param, DTensor) and param.device_mesh.size() > 1 for param in parameters)
        """Whether gradients are sums over ranks, whose lower halves are hardly ever zero: nobody looks at them where
        that would make the host wait for the reduction."""
        self._pinned: Pinned | None = None  # the registration of `_on_host`
        self._on_host: torch.Tensor | None = None  # memory of shape (1,) for numbers from the device; None on the CPU
        if device.asynchronous:
            memory, self._pinned = transfer_bytes(device, PAGESIZE, PAGESIZE)
            self._on_host = memory.view(torch.int64)[:1]
        self._closed = False  # set by `close`

    def close(self) -> None:
        """Let go of everything: gradients refer to this object from within tensors, where Python finds no cycles."""
        if self._closed:
            return
        self._closed = True
        if self._pinned is not None:
            self._pinned.close()
        for gradient in self._current.values():
            gradient.end(CLOSED)
        self._parameters, self._stored, self._current, self._arrivals = {}, {}, {}, {}
        del self._pager, self._planner, self._updates, self._recording, self._ledger

    def name(self, shard: int) -> str:
        """Return the name of a parameter."""
        return self._layout.shards[shard].spec.name

    def check(self, gradient: OneGradient) -> None:
        """Note that somebody needs a gradient.

        Raises:
            InfinityError: it is gone.
        """
        if gradient.gone:
            raise InfinityError(gradient.gone.format(name=self.name(gradient.shard)))
        self.looked_at = True

    def _is_current(self, shard: int, local: torch.Tensor) -> bool:
        """Whether a tensor is the gradient of a shard that is known."""
        return isinstance(local, PagedGradient) and local.is_whole and local.gradient is self._current.get(shard)

    # As they come in #

    def take(self, shard: int, local: torch.Tensor | None) -> OneGradient | None:
        """Take over what is in `p.grad` after a reduction, and after the user's hooks.

        Args:
            local: of the shape of the local shard, in the dtype of the parameter; None where it was dropped.

        Returns:
            What is to be in `p.grad` from now on, if that is something else.

        Raises:
            InfinityError: the FSDP module was updated in backward already.
        """
        found = None
        if local is None:
            self._drop(shard)
        elif self._is_current(shard, local):
            gradient = self._current[shard]
            gradient.arriving = False
            if gradient.held is not None:
                self._mark_arrival()  # behind what hooks of the user have done to it
        else:
            found = self._begin(shard, local.clone() if isinstance(local, PagedGradient) else local)
        if self._arrivals and len(self._arrivals) == self._trainable[self._fsdp_module]:
            self.close_arrivals()
        return found

    def _note_arrival(self, gradient: OneGradient) -> None:
        fsdp_module = self._layout.shards[gradient.shard].fsdp_module
        if fsdp_module != self._fsdp_module:
            self.close_arrivals()
            self._fsdp_module = fsdp_module
        self._arrivals[gradient.shard] = gradient
        if gradient.held is not None:
            self._mark_arrival()

    def _mark_arrival(self) -> None:
        stream = self._device.current()
        self._arrived[stream] = self._device.record_event(stream)

    def close_arrivals(self) -> None:
        """Store or use the gradients of the FSDP module whose gradients were coming in.

        Raises:
            InfinityError: the FSDP module was updated in backward already: they are its second ones in this step.
        """
        if not self._arrivals:
            return
        self._updates.run_reduced()
        fsdp_module = self._fsdp_module
        arrivals = {shard: gradient for shard, gradient in self._arrivals.items() if gradient.held is not None}
        arrived = tuple(self._arrived.values())
        self._fsdp_module, self._arrivals, self._arrived = -1, {}, {}
        if not arrivals:
            return
        name = self._layout.fsdp_modules[fsdp_module].name
        if fsdp_module in self._updates.begun:
            raise InfinityError(SECOND.format(fsdp_module=name))
        # What was written into gradients before backward is stored; then the sum is too, and `step()` uses it.
        in_backward = fsdp_module in self._planner.update_schedule.in_backward and fsdp_module not in self._stored
        with torch.no_grad(), record_function(f"infinity::gradients ({name})"):
            held = {shard: gradient.held for shard, gradient in arrivals.items() if gradient.held is not None}
            copied = not all(values.is_contiguous() for values in held.values())
            if copied or not in_backward:
                self._take_over(arrived, held.values())
            grads = {shard: values.reshape(-1) for shard, values in held.items()}
            if copied:
                arrived = (self._device.record_event(self._device.current()),)
            if in_backward:
                self._recording.gradients(fsdp_module, self._components.get(fsdp_module, 1))
                self._updates.begin_in_backward(fsdp_module, grads, arrived)  # may refuse: then nothing is used up
                for gradient in arrivals.values():
                    gradient.end(USED_IN_BACKWARD)
            else:
                self._store(fsdp_module, arrivals)

    def _take_over(self, arrived: Iterable[DeviceEvent], grads: Iterable[torch.Tensor]) -> None:
        """Let this thread's stream use gradients that came in on others."""
        stream = self._device.current()
        for device_event in arrived:
            device_event.before(stream)
        for grad in grads:
            self._device.keep(grad, stream)

    # What is done to one #

    def _begin(self, shard: int, values: torch.Tensor) -> OneGradient:
        """Take over a gradient that has just been reduced, in place of the one that there was."""
        self._drop(shard)
        gradient = self._current[shard] = OneGradient(self, shard, values.shape)
        self._hold(gradient, values)
        return gradient

    def add(self, gradient: OneGradient, values: torch.Tensor) -> bool:
        """Take over what FSDP2 adds to `p.grad`, in backward, before hooks are called.

        Returns:
            Whether it was FSDP2: what others add is a change like any.

        Raises:
            InfinityError: the gradient was used up, by its update in backward or by `step()`.
        """
        if not torch_private.in_backward() or gradient.arriving:
            return False
        if gradient.gone == USED_IN_BACKWARD:
            fsdp_module = self._layout.fsdp_modules[self._layout.shards[gradient.shard].fsdp_module].name
            raise InfinityError(SECOND.format(fsdp_module=fsdp_module))
        if gradient.gone:
            self.check(gradient)
        if gradient.zero:
            values.add_(0.0)  # as zeros to which it is added: they turn -0 into 0
        gradient.arriving = True
        self._hold(gradient, values)
        return True

    def _hold(self, gradient: OneGradient, values: torch.Tensor) -> None:
        if gradient.held is not None:
            self.close_arrivals()
        gradient.held, gradient.zero = values, False
        self.changed = True
        self._note_arrival(gradient)

    def load(self, gradient: OneGradient) -> torch.Tensor:
        """Return the elements: what is held, or a copy."""
        self.check(gradient)
        if gradient.held is not None and not gradient.stored:
            return gradient.held
        if gradient.held is not None:
            self.close_arrivals()
        placed = self._layout.shards[gradient.shard]
        segment = self._layout.segments[placed.segment]
        device = self._parameters[gradient.shard].device
        if gradient.zero:
            return torch.zeros(placed.spec.numel, dtype=torch_dtype(segment.format.dtypes[MASTER]), device=device)
        pages = segment.grad_pages[: self._components[placed.fsdp_module]]
        components = [
            torch.empty(placed.spec.numel, dtype=torch_dtype(dtype)) for dtype in segment.format.grads[: len(pages)]
        ]
        for component, of_component in zip(components, pages, strict=True):
            for page, first, last in overlapping(of_component, placed.start, placed.start + placed.spec.numel):
                with self._pager.access((Use(page.index, Mode.READ),), planned=False) as (content,):
                    part = section(content, page, self._layout, first, last)
                    component[first - placed.start : last - placed.start] = part
        flat = gradient_of(segment.format, components)
        for edit in gradient.edits:
            edit(flat)
        return flat.to(device)

    def replace(self, gradient: OneGradient, values: torch.Tensor) -> None:
        """Replace the elements; where `step()` has used them up, a new gradient begins."""
        if gradient.held is values:
            return
        self._begin_anew(gradient)
        if gradient.held is not None and not gradient.stored:
            gradient.held.copy_(values)
            return
        gradient.held = None
        self._write(gradient, values.reshape(-1))

    def clear(self, gradient: OneGradient) -> None:
        """Replace the elements by zeros, which are not stored."""
        self._begin_anew(gradient)
        self._unstore(gradient)
        gradient.held, gradient.zero, gradient.edits, gradient.length = None, True, [], None
        gradient.arriving = False
        self.changed = True

    def _begin_anew(self, gradient: OneGradient) -> None:
        if gradient.gone in (USED_BY_STEP, CUT_OFF) and self._current.get(gradient.shard) is gradient:
            gradient.gone = ""
        else:
            self.check(gradient)

    def record(self, gradient: OneGradient, edit: Edit) -> None:
        """Change the elements when they are read next; at once if they are held."""
        self.check(gradient)
        if gradient.held is not None and gradient.stored:
            self.close_arrivals()
        if gradient.held is not None:
            edit(gradient.held)
            return
        gradient.edits.append(edit)
        if len(gradient.edits) > _MOST_EDITS:
            self._write(gradient, self.load(gradient).reshape(-1))

    # All of them #

    @property
    def there(self) -> bool:
        """Whether there are gradients to be updated with."""
        return any(gradient.there for gradient in self._current.values())

    @property
    def zeros(self) -> bool:
        """Whether there are gradients that are nothing but zeros: memory updates with them too."""
        return any(gradient.zero for gradient in self._current.values())

    def reconcile(self) -> None:
        """Look at every `p.grad`: drop gradients that are not there any more, store those that were assigned.

        Raises:
            InfinityError: a gradient is to be dropped that an update in backward has used up.
            UnsupportedError: a gradient was assigned that is no DTensor.
        """
        assigned: dict[int, torch.Tensor] = {}
        for shard, param in self._parameters.items():
            grad = param.grad
            if grad is None:
                self._drop(shard)
                continue
            local = torch_private.local_gradient(param)
            if self._is_current(shard, local):
                continue
            if local is grad:
                raise UnsupportedError(f"the gradient that was assigned to {self.name(shard)} is no DTensor")
            if isinstance(local, PagedGradient):
                local = local.clone()
            assigned[shard] = local
        if not torch_private.in_backward():
            self._arrivals = {shard: each for shard, each in self._arrivals.items() if each.held is not None}
        for shard, values in assigned.items():
            self._drop(shard)
            gradient = self._current[shard] = OneGradient(self, shard, values.shape)
            self._write(gradient, values.reshape(-1))
        self.changed = False

    def check_new(self) -> None:
        """Check that no `p.grad` is left from the step before, and none was cut off.

        Raises:
            InfinityError: one is or was.
        """
        for shard, gradient in self._current.items():
            if gradient.gone == USED_BY_STEP:
                raise InfinityError(USED_TWICE.format(name=self.name(shard)))
            if gradient.gone == CUT_OFF:
                self.check(gradient)

    def _drop(self, shard: int) -> None:
        """Forget the gradient of a shard."""
        gradient = self._current.get(shard)
        if gradient is None:
            return
        if gradient.gone == USED_IN_BACKWARD:
            self.check(gradient)
        if gradient.there:
            self.looked_at = True
        self._unstore(gradient)
        del self._current[shard]
        gradient.end(DROPPED)

    def _unstore(self, gradient: OneGradient) -> None:
        fsdp_module = self._layout.shards[gradient.shard].fsdp_module
        if gradient.stored:
            gradient.stored = False
            del self._stored[fsdp_module][gradient.shard]
            if not self._stored[fsdp_module]:
                del self._stored[fsdp_module]
                self._discard(fsdp_module)

    def store_zeros(self) -> None:
        """Store those that are zeros: they are updated with."""
        for gradient in list(self._current.values()):
            if gradient.zero:
                self._write(gradient, self.load(gradient))

    @property
    def components(self) -> Mapping[int, int]:
        """By FSDP module, how many components of its gradients are stored."""
        return self._components

    def use_up(self) -> dict[int, dict[int, tuple[Edit, ...]]]:
        """End all gradients: a step uses them.

        Returns:
            What is stored: by FSDP module in the order in which gradients came, by shard, what is still to be done to
            it.
        """
        stored = {
            fsdp_module: {shard: tuple(gradient.edits) for shard, gradient in of_fsdp_module.items()}
            for fsdp_module, of_fsdp_module in self._stored.items()
        }
        for gradient in self._current.values():
            gradient.end(USED_BY_STEP)
        self._stored = {}
        self.looked_at = self.changed = False
        return stored

    def discard(self) -> None:
        """Free the pages of all gradients: a step uses none."""
        for fsdp_module in self._stored:
            self._discard(fsdp_module)
        self.use_up()

    def _discard(self, fsdp_module: int) -> None:
        for segment in self._layout.fsdp_module_segments[fsdp_module]:
            for pages in self._layout.segments[segment].grad_pages[: self._components[fsdp_module]]:
                self._pager.discard([page.index for page in pages])

    # Pages #

    def _store(self, fsdp_module: int, arrivals: Mapping[int, OneGradient]) -> None:
        """Store what is held of an FSDP module's gradients, added to what is stored."""
        self._updates.run_pending(fsdp_module)
        stored = self._stored.pop(fsdp_module, {})
        try:
            totals = {shard: gradient.held for shard, gradient in arrivals.items() if gradient.held is not None}
            before = self._components.get(fsdp_module, 1)
            components = max(
                before, self._components_of(fsdp_module, totals, added=any(shard in stored for shard in totals))
            )
            self._recording.gradients(fsdp_module, components)
            self._components[fsdp_module] = components
            accesses = store_gradient_accesses(
                self._layout, fsdp_module, stored=before if stored else 0, components=components
            )
            with self._ledger.part("copy"):
                self._walk(accesses, stored, totals, gpu_resident=self._pager.gpu_resident(fsdp_module))
            with self._ledger.part("update"):
                norms = torch._foreach_norm(list(totals.values()), 2.0)
        except BaseException:  # pages of some are sums already, and of others not yet
            for gradient in (stored | dict(arrivals)).values():
                gradient.end(CUT_OFF)
            with suppress(Exception):  # of drives, which is what is raised then
                self._discard(fsdp_module)
            raise
        for shard, norm in zip(totals, norms, strict=True):
            gradient = arrivals[shard]
            gradient.held, gradient.stored, gradient.length, gradient.edits = None, True, norm, []
        self._stored[fsdp_module] = stored | {shard: arrivals[shard] for shard in totals}  # at the end: arrival order

    def _components_of(self, fsdp_module: int, values: Mapping[int, torch.Tensor], *, added: bool) -> int:
        """Return how many components hold gradients of an FSDP module; a sum of two is taken to need all there are."""
        pages = [
            self._layout.pages[access[0].page]
            for access in store_gradient_accesses(self._layout, fsdp_module, stored=0, components=1)
        ]
        divided = [
            part
            for page in pages
            if self._layout.segments[page.segment].format.grads == HALVES
            for _, _, part in self._slices(page, values)
        ]
        if not divided:
            return 1
        if added or (self._device.asynchronous and self._summed) or self._components.get(fsdp_module) == len(HALVES):
            return len(HALVES)
        # Added up on the device: it is waited for once.
        return len(HALVES) if self._number(sum(torch.count_nonzero(halves(part)[1]) for part in divided)) else 1

    def _number(self, value: torch.Tensor | int) -> int:
        """Return what the device has computed: it is waited for."""
        if self._on_host is None or isinstance(value, int):
            return int(value)
        stream = self._device.current()
        self._device.copy(self._on_host, value.reshape(1), stream)
        self._pager.wait_for_device(self._device.record_event(stream), "look at gradients")
        return int(self._on_host.item())

    def _walk(
        self,
        accesses: Iterable[Access],
        stored: Mapping[int, OneGradient],
        totals: Mapping[int, torch.Tensor],
        *,
        gpu_resident: bool,
    ) -> None:
        """Add what is stored to the new gradients, then store the sums. Addition order as in memory: commutative.

        Args:
            gpu_resident: whether that is on the device.
        """
        current = self._device.current()
        back = current if gpu_resident else self._device.stream("back")
        for access in accesses:
            pages = [self._layout.pages[use.page] for use in access]
            old = sum(use.mode.fetches for use in access)
            with self._pager.access(access, copies=partial(self._device.record_event, back)) as contents:
                components = [
                    section(content, page, self._layout, page.start, page.stop)
                    for content, page in zip(contents, pages, strict=True)
                ]
                for component in components[old:] if old else ():
                    component.zero_()  # of shards that have none this time
                for shard, at, part in self._slices(pages[0], totals):
                    fmt = self._layout.format_of(shard)
                    if shard in stored:
                        before = gradient_of(fmt, [component[at] for component in components[:old]])
                        if stored[shard].edits:
                            before = before.clone()
                            for edit in stored[shard].edits:
                                edit(before)
                        part.add_(self._to_device(before, part))
                    values = gradient_components(fmt, part)
                    self._device.record_event(current).before(back)
                    for component, of_component in zip(components, values, strict=False):  # those that are stored
                        self._device.copy(component[at], of_component, back)
                        self._device.keep(of_component, back)

    def _to_device(self, values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Return values where the computation is; they are read there before anything that is copied back now."""
        if not self._device.asynchronous:
            return values
        copied = torch.empty(values.shape, dtype=like.dtype, device=like.device)
        self._device.copy(copied, values, self._device.current())
        return copied

    def _write(self, gradient: OneGradient, values: torch.Tensor) -> None:
        """Store the elements of one gradient, flat, in place of what is stored of it."""
        with interrupts.held():
            try:
                self._write_whole(gradient, values)
            except BaseException:  # some of its pages may have the new ones already
                self._unstore(gradient)
                gradient.end(CUT_OFF)
                raise

    def _write_whole(self, gradient: OneGradient, values: torch.Tensor) -> None:
        shard = gradient.shard
        placed = self._layout.shards[shard]
        fsdp_module, segment = placed.fsdp_module, self._layout.segments[placed.segment]
        self.looked_at = self.changed = True
        values = values.contiguous()
        if fsdp_module not in self._stored:
            gradient.held, gradient.zero = values, False
            self._store(fsdp_module, {shard: gradient})
            return
        self._updates.run_pending(fsdp_module)
        self._add_components(fsdp_module, self._components_of(fsdp_module, {shard: values}, added=False))
        components = gradient_components(segment.format, values)
        for pages, component in zip(segment.grad_pages[: self._components[fsdp_module]], components, strict=False):
            for page, first, last in overlapping(pages, placed.start, placed.start + placed.spec.numel):
                with self._pager.access((Use(page.index, Mode.UPDATE),), planned=False) as (content,):
                    part = component[first - placed.start : last - placed.start]
                    section(content, page, self._layout, first, last).copy_(part)
        gradient.zero, gradient.stored, gradient.edits, gradient.length = False, True, [], None
        self._stored[fsdp_module][shard] = gradient

    def _add_components(self, fsdp_module: int, components: int) -> None:
        """Let the gradients of an FSDP module have more components, which are zero so far."""
        before = self._components[fsdp_module]
        if components <= before:
            return
        for segment in self._layout.fsdp_module_segments[fsdp_module]:
            for pages in self._layout.segments[segment].grad_pages[before:components]:
                for page in pages:
                    with self._pager.access((Use(page.index, Mode.WRITE),), planned=False) as (content,):
                        section(content, page, self._layout, page.start, page.stop).zero_()
        self._components[fsdp_module] = components
        self._recording.widen(fsdp_module, components)

    def _slices(self, page: Page, flats: Mapping[int, torch.Tensor]) -> Iterator[tuple[int, slice, torch.Tensor]]:
        """Yield (shard, slice of the page, slice of the shard's flat tensor) for every overlap."""
        for shard in self._layout.page_shards[page.index]:
            if shard in flats:
                placed = self._layout.shards[shard]
                low, high = max(placed.start, page.start), min(placed.start + placed.spec.numel, page.stop)
                flat = flats[shard].reshape(-1)[low - placed.start : high - placed.start]
                yield shard, slice(low - page.start, high - page.start), flat
