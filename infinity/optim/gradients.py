"""Gradients between their arrival in backward and the update, and the changes made to them in between.

[Note: life of a gradient] The life of a gradient begins when FSDP2 has reduced it, or when the user assigns it. The
gradient is *held* as a tensor on the compute device until all gradients of its FSDP module have arrived. Then it is
*stored* in GRAD pages, or consumed by an update in backward. Its life ends when `step()` consumes it, or when it is
*dropped*, i.e. when `p.grad` is set to a different tensor or to None. PyTorch does not report such an assignment, so
`p.grad` is checked when a gradient arrives, in the next forward, and in `step()`. Operations that the user applies to
`p.grad` in between reach this module through a `PagedGradient`.

An fp32 gradient may be stored as two *components*, its upper and lower 16-bit halves, in separate pages. The lower
halves are stored only if they are not all zero. On a GPU, the host must wait to learn this. Therefore, if the lower
halves of an FSDP module have always been zero, they are assumed to be zero again. `_check_halves` checks this
assumption later: when gradients of another FSDP module arrive, or when gradients are read, dropped or used by `step()`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial, reduce
from mmap import PAGESIZE
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from infinity import interrupts, torch_private
from infinity.content.format import HALVES, MASTER
from infinity.content.halves import halves
from infinity.content.layout import Layout, overlapping
from infinity.content.views import array_of, gradient_components, gradient_of, section, torch_dtype
from infinity.errors import InfinityError, UnsupportedError
from infinity.fsdp.gradient import Edit, PagedGradient
from infinity.memory.device import Device, DeviceEvent, Pinned, Stream, transfer_bytes
from infinity.optim.updates import Updates
from infinity.schedule.pager import Pager
from infinity.schedule.trace import Access, Event, EventKind, Mode, Use, store_gradient_accesses
from infinity.telemetry.ledger import Ledger

_LAST_SECONDS = 5.0
"""Time that `close` waits for the last number from the GPU, in seconds."""
_MOST_EDITS = 16
"""Maximum number of recorded edits per gradient. One more edit causes the edited gradient to be stored again."""

USED_IN_BACKWARD = (
    "the gradient of {name} was consumed by its update in backward; to use clip_grad_norm_, torch.amp.GradScaler or "
    "other code that reads, changes or drops gradients between backward and step(), set update.schedule = "
    '"after_backward" (or "in_forward")'
)
SECOND = (
    "a second gradient of FSDP module {fsdp_module} arrived after its update in backward; to run several backward "
    'passes per step, set update.schedule = "after_backward"'
)
USED_BY_STEP = (
    "the gradient of {name} was consumed by step(); read it before step(), and call zero_grad() before the next "
    "backward, because gradients cannot be accumulated across steps"
)
USED_TWICE = (
    "the gradient of {name} was consumed by the previous step(), and an optimizer in memory would apply it again; call "
    "zero_grad() after step(), even if you set the gradients of some parameters to zero or None"
)
CUT_OFF = (
    "the gradient of {name} is incomplete because storing it was interrupted; call zero_grad() and repeat the forward"
)
DROPPED = "this gradient of {name} was dropped by zero_grad() or replaced by another one; clone() it to keep a copy"
CLOSED = "the gradient of {name} was released when the optimizer was closed"


class OneGradient:
    """One gradient of a shard, which user code accesses through a `PagedGradient`. Only the training thread uses it."""

    __slots__ = ("arriving", "edits", "gone", "held", "length", "owner", "shape", "shard", "stored", "zero")

    def __init__(self, owner: Gradients, shard: int, shape: torch.Size) -> None:
        self.owner, self.shard = owner, shard
        self.shape = shape  # of the local shard
        self.held: torch.Tensor | None = None  # part that has arrived but has not been added to the stored part
        self.stored = False  # whether the gradient, or a part of it, is in GRAD pages
        self.zero = False  # whether all elements are zero, in which case none are held or stored
        self.edits: list[Edit] = []  # edits since it was stored, which every reader must still apply
        self.length: torch.Tensor | None = None  # 2-norm at the time it was stored, a scalar
        self.arriving = False  # true from FSDP2's accumulation until all hooks, including the user's, have run
        self.gone = ""  # reason why it is unavailable, with {name} for the parameter; empty while available

    @property
    def name(self) -> str:
        return f"the gradient of {self.owner.name(self.shard)}"

    def check(self) -> None:
        """Check that a gradient is available, and note that it was read.

        Raises:
            InfinityError: if it was consumed or dropped.
        """
        if self.gone:
            raise InfinityError(self.gone.format(name=self.owner.name(self.shard)))
        self.owner.looked_at = True

    def add(self, values: torch.Tensor) -> bool:
        """Take over a gradient that FSDP2 adds to `p.grad` in backward, before it calls hooks.

        Returns:
            ``True`` if FSDP2 is adding the gradient. If other code is adding, the addition is an ordinary edit.

        Raises:
            InfinityError: if the gradient was consumed by its update in backward or by `step()`.
        """
        if not torch_private.in_backward() or self.arriving:
            return False
        if self.gone == USED_IN_BACKWARD:
            layout = self.owner._layout
            fsdp_module = layout.fsdp_modules[layout.shards[self.shard].fsdp_module].name
            raise InfinityError(SECOND.format(fsdp_module=fsdp_module))
        if self.gone:
            self.check()
        if self.zero:
            values.add_(0.0)  # adding to stored zeros would also turn -0 into 0
        self.arriving = True
        self.owner.hold(self, values)
        return True

    def fail(self, error: Exception) -> None:
        """End the run on all ranks with `error`. Without an open run, do nothing."""
        if not self.owner._closed:
            self.owner._pager.fail(error)

    def load(self) -> torch.Tensor:
        """Return the elements: the held tensor itself, or a copy of the stored elements."""
        self.check()
        if self.held is not None and not self.stored:
            return self.held
        if self.held is not None:
            self.owner.close_arrivals()
        owner, layout = self.owner, self.owner._layout
        owner._check_halves()
        placed = layout.shards[self.shard]
        segment, device = layout.segments[placed.segment], owner._parameters[self.shard].device
        if self.zero:
            return torch.zeros(self.shape, dtype=torch_dtype(segment.format.dtypes[MASTER]), device=device)
        pages = segment.grad_pages[: owner.components[placed.fsdp_module]]
        components = [
            torch.empty(placed.spec.numel, dtype=torch_dtype(dtype)) for dtype in segment.format.grads[: len(pages)]
        ]
        for component, of_component in zip(components, pages, strict=True):
            for page, first, last in overlapping(of_component, placed.start, placed.start + placed.spec.numel):
                with owner._pager.access((Use(page.index, Mode.READ),), planned=False) as (content,):
                    part = section(content, page, layout, first, last)
                    component[first - placed.start : last - placed.start] = part
        flat = gradient_of(segment.format, components)
        for edit in self.edits:
            edit(flat)
        return flat.to(device).view(self.shape)

    def save(self, content: torch.Tensor) -> None:
        """Replace the elements. If `step()` has consumed the gradient, this begins a new one."""
        if self.held is content:
            return
        self._restart()
        if self.held is not None and not self.stored:
            self.held.copy_(content.view(self.shape))
            return
        self.held = None
        self.owner._write(self, content.reshape(-1))

    def clear(self) -> None:
        """Replace the elements with zeros, which are not stored."""
        self._restart()
        self.owner._unstore(self)
        self.held, self.zero, self.edits, self.length = None, True, [], None
        self.arriving = False
        self.owner.changed = True

    def _restart(self) -> None:
        if self.gone in (USED_BY_STEP, CUT_OFF) and self.owner._current.get(self.shard) is self:
            self.gone = ""
        else:
            self.check()

    def record(self, edit: Edit) -> None:
        """Apply an edit immediately if the elements are held, otherwise the next time they are read."""
        if self.gone:
            self.check()
        self.owner.looked_at = True
        if self.held is not None and self.stored:
            self.owner.close_arrivals()
        if self.held is not None:
            edit(self.held)
            return
        self.edits.append(edit)
        if len(self.edits) > _MOST_EDITS:
            self.owner._write(self, self.load().reshape(-1))

    def norm(self) -> torch.Tensor | None:
        """Return the 2-norm, or ``None`` if it is unknown."""
        if self.gone:
            self.check()
        self.owner.looked_at = True
        return None if self.held is not None or self.edits else self.length

    @property
    def there(self) -> bool:
        """``True`` if the gradient has elements that are neither consumed nor dropped."""
        return self.stored or self.held is not None

    def end(self, reason: str) -> None:
        """Release the elements, and make later accesses raise an error with `reason`."""
        self.gone = reason
        self.held, self.length, self.stored, self.zero = None, None, False, False
        self.edits = []


class _Unchecked(NamedTuple):
    """Stored gradients of an FSDP module whose lower halves are assumed to be zero."""

    fsdp_module: int
    values: Mapping[int, torch.Tensor]
    """Gradients on the device, by shard."""
    counted: DeviceEvent
    """Event after the copy of the number of nonzero lower halves to the host."""


class _Batch(NamedTuple):
    """Consecutive GRAD pages of a segment that are stored together, and the slices of shards in them."""

    fsdp_module: int
    access: Access
    """Pages of the batch. The components of each page follow one another."""
    components: int
    dtypes: Sequence[str]
    """Dtype of each page."""
    counts: Sequence[int]
    """Number of elements of each page."""
    slices: Sequence[tuple[int, int, slice, int, int]]
    """For each slice of a shard: the shard, the position of the first component of its page in the access, the slice of
    the page, and the first element and the element after the last one in the shard."""

    @classmethod
    def of(cls, layout: Layout, access: Access, components: int) -> _Batch:
        """Return the batch of an access that `store_gradient_accesses` has returned."""
        pages = [layout.pages[use.page] for use in access]
        slices = []
        for first in range(0, len(pages), components):
            page = pages[first]
            for shard in layout.page_shards[page.index]:
                placed = layout.shards[shard]
                low, high = max(placed.start, page.start), min(placed.start + placed.spec.numel, page.stop)
                at = slice(low - page.start, high - page.start)
                slices.append((shard, first, at, low - placed.start, high - placed.start))
        dtypes = [layout.segments[page.segment].format.grads[page.component] for page in pages]
        return cls(pages[0].fsdp_module, access, components, dtypes, [page.count for page in pages], slices)


class Gradients:
    """Gradients of this rank, from their arrival until an update consumes them.

    The gradients of an FSDP module arrive one after the other. Then `close_arrivals` stores them, or begins the update
    of the FSDP module in backward, depending on the update schedule. The training thread calls all methods.

    Args:
        parameters: paged parameters, by shard.
    """

    def __init__(
        self,
        layout: Layout,
        pager: Pager,
        device: Device,
        updates: Updates,
        ledger: Ledger,
        parameters: Mapping[int, nn.Parameter],
    ) -> None:
        self._layout, self._pager, self._device, self._planner = layout, pager, device, updates.planner
        self._updates, self._ledger = updates, ledger
        self._parameters = {shard: param for shard, param in parameters.items() if layout.shards[shard].spec.trainable}
        self._trainable = [
            sum(layout.shards[shard].spec.trainable for shard in shards) for shards in layout.fsdp_module_shards
        ]
        """Number of trainable shards of each FSDP module, which is the number of gradients that it can receive."""
        self.arriving = -1
        """FSDP module whose gradients are arriving, or -1."""
        # Gradients of this FSDP module that have arrived but are not stored or consumed yet, by shard
        self._arrivals: dict[int, OneGradient] = {}
        self._streams: set[Stream] = set()  # streams on which its gradients have arrived
        # Gradients in `p.grad`, by shard; a gradient that `step()` has consumed stays until it is replaced
        self._current: dict[int, OneGradient] = {}
        # Stored gradients, by FSDP module (in order of arrival) and by shard
        self._stored: dict[int, dict[int, OneGradient]] = {}
        self.components: dict[int, int] = {}
        """Number of stored components by FSDP module. It never decreases."""
        self.looked_at = False
        """``True`` if anything but the update has read a gradient since the last step."""
        self.changed = False
        """``True`` if gradients changed since the last `reconcile`."""
        self._summed = any(isinstance(param, DTensor) and param.device_mesh.size() > 1 for param in parameters.values())
        """``True`` if gradients are sums across ranks. The lower halves of such sums are hardly ever all zero, so this
        is not checked if the check would make the host wait for the reduction."""
        self._pinned: Pinned | None = None  # memory registration of `_on_host`
        self._on_host: torch.Tensor | None = None  # buffer of shape (1,) for numbers from the GPU; None on the CPU
        if device.asynchronous:
            memory, self._pinned = transfer_bytes(device, PAGESIZE, PAGESIZE)
            self._on_host = memory.view(torch.int64)[:1]
        self._unchecked: _Unchecked | None = None
        self._halved = {shard for shard in self._parameters if layout.format_of(shard).grads == HALVES}
        self._batches: dict[tuple[int, int, int], Sequence[_Batch]] = {}  # results of `_batches_of`
        self._closed = False

    def close(self) -> None:
        """Release all gradients.

        This is necessary because gradients reference this object from inside tensors, where Python's garbage collector
        cannot find reference cycles.
        """
        if self._closed:
            return
        self._closed = True
        counted = self._unchecked.counted if self._unchecked is not None else DeviceEvent()
        with suppress(Exception):  # the device may still write to memory whose last copy has not ended
            if self._pinned is not None and self._device.wait(counted, _LAST_SECONDS):
                self._pinned.close()
        for gradient in self._current.values():
            gradient.end(CLOSED)
        self._parameters, self._stored, self._current, self._arrivals = {}, {}, {}, {}
        self._unchecked = None
        del self._pager, self._planner, self._updates, self._ledger

    def name(self, shard: int) -> str:
        """Return the name of a parameter."""
        return self._layout.shards[shard].spec.name

    # Arrival #

    def take(self, shard: int, param: nn.Parameter) -> bool:
        """Take over the gradient in `p.grad` after it was reduced and the user's hooks have run.

        Returns:
            Whether all gradients of the FSDP module have arrived, so that the caller must call `close_arrivals`.

        Raises:
            InfinityError: if the FSDP module was already updated in backward.
        """
        gradient, (local,) = self._current.get(shard), torch_private.local_gradients((param,))
        if local is None:
            self._drop(shard)
        elif isinstance(local, PagedGradient) and local.handle is gradient and local.is_whole:
            gradient.arriving = False
            if gradient.held is not None:
                self._streams.add(self._device.current())  # user hooks may have changed the gradient
        else:
            if gradient is not None:
                self._drop(shard)
            gradient = OneGradient(self, shard, local.shape)
            gradient.held = local.clone() if isinstance(local, PagedGradient) else local.contiguous()
            paged = PagedGradient.stored(gradient, local.shape, local.dtype, local.device)
            torch_private.replace_local_gradient(param, paged)
            self.arriving = self._layout.shards[shard].fsdp_module
            self._current[shard] = self._arrivals[shard] = gradient
            self._streams.add(self._device.current())
            self.changed = True
        return bool(self._arrivals) and len(self._arrivals) == self._trainable[self.arriving]

    def close_arrivals(self) -> None:
        """Store the gradients that have arrived, or begin the update of their FSDP module in backward.

        Raises:
            InfinityError: if the FSDP module was already updated in backward, so that these are its second gradients in
                this step.
        """
        if not self._arrivals:
            return
        self._updates.run_reduced()
        self._check_halves()  # first, so that an error loses no arrivals; may change the number of components
        fsdp_module = self.arriving
        arrivals = {shard: gradient for shard, gradient in self._arrivals.items() if gradient.held is not None}
        arrived = tuple(map(self._device.record_event, self._streams))
        self.arriving, self._arrivals, self._streams = -1, {}, set()
        if not arrivals:
            return
        name = self._layout.fsdp_modules[fsdp_module].name
        if fsdp_module in self._updates.begun:
            raise InfinityError(SECOND.format(fsdp_module=name))
        # If values were written into gradients before backward, they are stored. Then the sums must be stored too.
        in_backward = fsdp_module in self._planner.update_schedule.in_backward and fsdp_module not in self._stored
        part = self._ledger.part("python", name, name="gradients")
        with part, torch.no_grad(), torch_private.profiled(f"infinity::gradients ({name})"):
            held = {shard: gradient.held for shard, gradient in arrivals.items() if gradient.held is not None}
            copied = not all(map(torch.Tensor.is_contiguous, held.values()))
            if copied or not in_backward:
                self._take_over(arrived, held.values())
            grads = {shard: values.reshape(-1) for shard, values in held.items()}
            if copied:
                arrived = (self._device.record_event(self._device.current()),)
            if in_backward:
                components = self.components.get(fsdp_module, 1)
                self._planner.recorded.append(Event(EventKind.GRADIENTS, fsdp_module, components))
                # This may raise an error, in which case the gradients remain available
                self._updates.begin_in_backward(fsdp_module, grads, arrived)
                for gradient in arrivals.values():
                    gradient.end(USED_IN_BACKWARD)
            else:
                self._store(fsdp_module, arrivals)

    def _take_over(self, arrived: Iterable[DeviceEvent], grads: Iterable[torch.Tensor]) -> None:
        """Make the current stream wait for gradients that arrived on other streams."""
        stream = self._device.current()
        for device_event in arrived:
            device_event.before(stream)
        for grad in grads:
            self._device.keep(grad, stream)

    # Operations on one gradient #

    def hold(self, gradient: OneGradient, values: torch.Tensor) -> None:
        """Note that FSDP2 adds values to a gradient. They are added to its stored part once all have arrived."""
        fsdp_module = self._layout.shards[gradient.shard].fsdp_module
        if gradient.held is not None or fsdp_module != self.arriving:
            self.close_arrivals()
        gradient.held, gradient.zero = values, False
        self.arriving, self._arrivals[gradient.shard] = fsdp_module, gradient
        self._streams.add(self._device.current())
        self.changed = True

    # Operations on all gradients #

    @property
    def there(self) -> bool:
        """``True`` if there are gradients that have not been consumed or dropped."""
        return any([gradient.there for gradient in [*self._current.values()]])  # `take` may change the dictionary

    @property
    def zeros(self) -> bool:
        """``True`` if there are gradients whose elements are all zero. In-memory updates use such gradients too."""
        return any(gradient.zero for gradient in self._current.values())

    def reconcile(self) -> None:
        """Check every `p.grad`. Drop gradients that the user has removed, and store those that the user has assigned.

        Raises:
            InfinityError: if a removed gradient was already consumed by an update in backward.
            UnsupportedError: if an assigned gradient is not a DTensor.
        """
        assigned: dict[int, torch.Tensor] = {}
        locals_ = torch_private.local_gradients(self._parameters.values())
        for (shard, param), local in zip(self._parameters.items(), locals_, strict=True):
            gradient = self._current.get(shard)
            if local is None:
                if gradient is not None and gradient.gone == USED_BY_STEP:  # has nothing to release
                    gradient.gone = DROPPED
                    del self._current[shard]
                elif gradient is not None:
                    self._drop(shard)
            elif isinstance(local, PagedGradient):
                if local.handle is not gradient or not local.is_whole:
                    assigned[shard] = local.clone()
            elif local is param.grad:
                raise UnsupportedError(
                    f"the gradient assigned to {self.name(shard)} is not a DTensor; assign a DTensor"
                )
            else:
                assigned[shard] = local
        if not torch_private.in_backward():
            self._arrivals = {shard: each for shard, each in self._arrivals.items() if each.held is not None}
        for shard, values in assigned.items():
            self._drop(shard)
            gradient = self._current[shard] = OneGradient(self, shard, values.shape)
            self._write(gradient, values.reshape(-1))
        self.changed = False

    def check_new(self) -> None:
        """Check that no gradient of the previous step remains in `p.grad`, and that all gradients are complete.

        Raises:
            InfinityError: if a gradient remains or is incomplete.
        """
        for shard, gradient in self._current.items():
            if gradient.gone == USED_BY_STEP:
                raise InfinityError(USED_TWICE.format(name=self.name(shard)))
            if gradient.gone == CUT_OFF:
                gradient.check()

    def _drop(self, shard: int) -> None:
        gradient = self._current.get(shard)
        if gradient is None:
            return
        if gradient.gone == USED_IN_BACKWARD:
            gradient.check()
        if not gradient.gone:
            self.looked_at |= gradient.there
            self._unstore(gradient)
            gradient.end(DROPPED)
        gradient.gone = DROPPED
        del self._current[shard]

    def _unstore(self, gradient: OneGradient) -> None:
        fsdp_module = self._layout.shards[gradient.shard].fsdp_module
        if gradient.stored:
            self._check_halves()
            gradient.stored = False
            del self._stored[fsdp_module][gradient.shard]
            if not self._stored[fsdp_module]:
                del self._stored[fsdp_module]
                self._discard(fsdp_module)

    def complete(self) -> None:
        """Store what updates still need: nonzero lower halves, and gradients whose elements are all zero."""
        for gradient in list(self._current.values()):
            if gradient.zero:
                self._write(gradient, gradient.load().reshape(-1))
        self._check_halves()

    def use_up(self) -> dict[int, dict[int, tuple[Edit, ...]]]:
        """End all gradients because a step consumes them.

        Returns:
            The edits that must still be applied to the stored gradients, by FSDP module (in order of arrival) and by
            shard.
        """
        stored = {
            fsdp_module: {shard: tuple(gradient.edits) for shard, gradient in of_fsdp_module.items()}
            for fsdp_module, of_fsdp_module in self._stored.items()
        }
        for gradient in self._current.values():
            if gradient.gone:  # consumed by its update in backward
                gradient.gone = USED_BY_STEP
            else:
                gradient.end(USED_BY_STEP)
        self._stored = {}
        self.looked_at = self.changed = False
        return stored

    def discard(self) -> None:
        """End all gradients and free their pages because a step skips its updates."""
        for fsdp_module in self._stored:
            self._discard(fsdp_module)
        self.use_up()

    def _discard(self, fsdp_module: int) -> None:
        for segment in self._layout.fsdp_module_segments[fsdp_module]:
            for pages in self._layout.segments[segment].grad_pages[: self.components[fsdp_module]]:
                self._pager.discard([page.index for page in pages])

    # Pages #

    def _store(self, fsdp_module: int, arrivals: Mapping[int, OneGradient]) -> None:
        """Add the held gradients of an FSDP module to its stored gradients, and store the sums."""
        self._updates.run_pending(fsdp_module)
        stored = self._stored.pop(fsdp_module, {})
        try:
            totals = {shard: gradient.held for shard, gradient in arrivals.items() if gradient.held is not None}
            before = self.components.get(fsdp_module, 1)
            parts = self._parts_of(totals)
            added = not stored.keys().isdisjoint(totals)
            components = max(before, self._components_of(fsdp_module, totals, parts, added=added, later=True))
            self._planner.recorded.append(Event(EventKind.GRADIENTS, fsdp_module, components))
            self.components[fsdp_module] = components
            with self._ledger.part("copy"):
                self._copy(self._batches_of(fsdp_module, before if stored else 0, components), stored, totals, parts)
            with self._ledger.part("update"):
                norms = torch._foreach_norm(list(totals.values()), 2.0)
        except BaseException:  # some pages already hold sums, but others do not
            self._unchecked = None
            for gradient in (stored | dict(arrivals)).values():
                gradient.end(CUT_OFF)
            with suppress(Exception):  # such as an I/O error, which the outer exception already reports
                self._discard(fsdp_module)
            raise
        for shard, norm in zip(totals, norms, strict=True):
            gradient = arrivals[shard]
            gradient.held, gradient.stored, gradient.length, gradient.edits = None, True, norm, []
        # Appended, so that the dictionary keeps the order of arrival
        self._stored[fsdp_module] = stored | {shard: arrivals[shard] for shard in totals}

    def _parts_of(self, values: Mapping[int, torch.Tensor]) -> dict[int, tuple[torch.Tensor, ...]]:
        """Return the components of gradients, as flat views, by shard."""
        found: dict[int, tuple[torch.Tensor, ...]] = {}
        for shard, grad in values.items():
            flat = grad.reshape(-1)
            found[shard] = halves(flat) if shard in self._halved else (flat,)
        return found

    def _components_of(
        self,
        fsdp_module: int,
        values: Mapping[int, torch.Tensor],
        parts: Mapping[int, Sequence[torch.Tensor]],
        *,
        added: bool,
        later: bool = False,
    ) -> int:
        """Return how many components are needed to store the gradients of an FSDP module exactly.

        Args:
            values: gradients by shard.
            parts: their components.
            added: whether the values are sums, for which all components are assumed to be needed.
            later: whether the result may be too small until `_check_halves` is called.
        """
        lower = [halved[1] for halved in parts.values() if len(halved) == len(HALVES) and halved[1].numel()]
        if not lower:
            return 1
        if added or (self._device.asynchronous and self._summed) or self.components.get(fsdp_module) == len(HALVES):
            return len(HALVES)
        # Sum on the device, so that the host waits only once
        nonzero = reduce(torch.add, map(torch.count_nonzero, lower))
        if self._on_host is None:
            return len(HALVES) if nonzero else 1
        stream = self._device.current()
        self._device.copy_all([self._on_host], [nonzero.reshape(1)], stream)
        unchecked = _Unchecked(fsdp_module, values, self._device.record_event(stream))
        if later and fsdp_module in self.components:
            self._unchecked = unchecked
            return 1
        return len(HALVES) if self._has_lower_halves(unchecked) else 1

    def _has_lower_halves(self, unchecked: _Unchecked) -> bool:
        """Wait until the device has counted the lower halves, and return whether any of them is not zero."""
        assert self._on_host is not None
        self._pager.wait_for_device(unchecked.counted, "look at gradients")
        return bool(self._on_host.item())

    def _check_halves(self) -> None:
        """Check the assumption that the lower halves of the gradients stored last are zero. If not, store them."""
        unchecked = self._unchecked
        if unchecked is None:
            return
        nonzero = self._has_lower_halves(unchecked)  # after an interrupt, the next call checks again
        with interrupts.held():
            self._unchecked = None
            try:
                if nonzero:
                    self._add_components(unchecked.fsdp_module, len(HALVES))
                    for shard, values in unchecked.values.items():
                        self._device.keep(values, self._device.current())
                        self._write_pages(shard, values.reshape(-1), first=1)
            except BaseException:  # some pages lack the lower halves
                for gradient in self._stored.pop(unchecked.fsdp_module, {}).values():
                    gradient.end(CUT_OFF)
                with suppress(Exception):
                    self._discard(unchecked.fsdp_module)
                raise

    def _batches_of(self, fsdp_module: int, stored: int, components: int) -> Sequence[_Batch]:
        """Return the batches in which gradients are stored. For the arguments, see `store_gradient_accesses`."""
        layout, key = self._layout, (fsdp_module, stored, components)
        if key not in self._batches:
            accesses = store_gradient_accesses(layout, fsdp_module, stored=stored, components=components)
            self._batches[key] = [_Batch.of(layout, access, components) for access in accesses]
        return self._batches[key]

    def _copy(
        self,
        batches: Sequence[_Batch],
        stored: Mapping[int, OneGradient],
        totals: Mapping[int, torch.Tensor],
        parts: Mapping[int, Sequence[torch.Tensor]],
    ) -> None:
        """Add stored gradients to new gradients, and store the sums.

        The sums equal those of in-memory training, because adding two values is commutative.

        Args:
            stored: stored gradients by shard.
            totals: new gradients by shard, which are replaced with the sums.
            parts: their components.
        """
        current = self._device.current()
        gpu_resident = bool(batches) and self._pager.gpu_resident(batches[0].fsdp_module)
        back = current if gpu_resident else self._device.stream("back")
        for batch in batches:
            targets: list[torch.Tensor] = []
            sources: list[torch.Tensor] = []
            with self._pager.access(batch.access, copies=partial(self._device.record_event, back)) as contents:
                pages = list(map(array_of, contents, batch.dtypes, batch.counts))
                for number, (_, mode) in enumerate(batch.access):
                    if stored and not mode.fetches:
                        pages[number].zero_()  # shards whose gradient has not arrived
                for shard, first, at, start, stop in batch.slices:
                    if shard not in parts:
                        continue
                    if shard in stored:
                        number = sum(mode.fetches for _, mode in batch.access[first : first + batch.components])
                        before = [page[at] for page in pages[first : first + number]]
                        self._add(totals[shard].reshape(-1)[start:stop], stored[shard], before)
                    for page, part in zip(pages[first : first + batch.components], parts[shard], strict=False):
                        targets.append(page[at])
                        sources.append(part[start:stop])
                self._device.record_event(current).before(back)
                self._device.copy_all(targets, sources, back)
        for total in totals.values():
            self._device.keep(total, back)

    def _add(self, values: torch.Tensor, stored: OneGradient, components: Sequence[torch.Tensor]) -> None:
        """Add a part of a stored gradient to `values`."""
        before = gradient_of(self._layout.format_of(stored.shard), components)
        if stored.edits:
            before = before.clone()
            for edit in stored.edits:
                edit(before)
        values.add_(self._to_device(before, values))

    def _to_device(self, values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Return `values` on the device of `like`.

        The copy runs on the current stream, so it reads the page before later copies overwrite it.
        """
        if not self._device.asynchronous:
            return values
        copied = torch.empty_like(values, device=like.device)
        self._device.copy_all([copied], [values], self._device.current())
        return copied

    def _write(self, gradient: OneGradient, values: torch.Tensor) -> None:
        """Replace the stored elements of one gradient with the flat tensor `values`."""
        with interrupts.held():
            try:
                self._write_whole(gradient, values)
            except BaseException:  # some of its pages may already hold the new elements
                try:
                    self._unstore(gradient)
                finally:
                    gradient.end(CUT_OFF)
                raise

    def _write_whole(self, gradient: OneGradient, values: torch.Tensor) -> None:
        shard = gradient.shard
        fsdp_module = self._layout.shards[shard].fsdp_module
        self._check_halves()
        self.looked_at = self.changed = True
        values = values.contiguous()
        if fsdp_module not in self._stored:
            gradient.held, gradient.zero = values, False
            self._store(fsdp_module, {shard: gradient})
            return
        self._updates.run_pending(fsdp_module)
        components = self._components_of(fsdp_module, {shard: values}, self._parts_of({shard: values}), added=False)
        self._add_components(fsdp_module, components)
        self._write_pages(shard, values)
        gradient.zero, gradient.stored, gradient.edits, gradient.length = False, True, [], None
        self._stored[fsdp_module][shard] = gradient

    def _write_pages(self, shard: int, values: torch.Tensor, first: int = 0) -> None:
        """Write the components of a gradient, from number `first` on, into its pages. `values` is flat."""
        placed = self._layout.shards[shard]
        segment = self._layout.segments[placed.segment]
        pages = segment.grad_pages[first : self.components[placed.fsdp_module]]
        for of_component, component in zip(pages, gradient_components(segment.format, values)[first:], strict=False):
            for page, low, high in overlapping(of_component, placed.start, placed.start + placed.spec.numel):
                with self._pager.access((Use(page.index, Mode.UPDATE),), planned=False) as (content,):
                    part = component[low - placed.start : high - placed.start]
                    section(content, page, self._layout, low, high).copy_(part)

    def _add_components(self, fsdp_module: int, components: int) -> None:
        """Increase the number of stored components of an FSDP module's gradients. New components are zero."""
        before = self.components[fsdp_module]
        if components <= before:
            return
        for segment in self._layout.fsdp_module_segments[fsdp_module]:
            for pages in self._layout.segments[segment].grad_pages[before:components]:
                for page in pages:
                    with self._pager.access((Use(page.index, Mode.WRITE),), planned=False) as (content,):
                        section(content, page, self._layout, page.start, page.stop).zero_()
        self.components[fsdp_module] = components
        self._planner.widen(fsdp_module, components)
