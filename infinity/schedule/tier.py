"""What the memory of a device is used for: slots, weights that stay there, and FSDP modules that live there. Pure.

[Note: what a byte of the device saves] Slots to stage in come first: they save waiting, not bytes. With what is left, a
FSDP module can be *kept*, where its weights (w bytes) stay from one gather of a step to the next, or be *GPU-resident*,
where they
and its master and moments (s bytes) never leave, as do its gradients (g bytes) where those are stored. Of G gathers in
a step, r find weights that are kept, mostly G - 1. Kept weights save r·w bytes over the link in a step, each byte r. At
home an FSDP module saves all there is: G·w there, w and s back from the update that changes them, s there for it, and
2·g or
more: each byte of w + s + g saves ((G + 1)·w + 2·s + 2·g) / (w + s + g), which is between 2 and G + 1. So with a gather
in forward and one in backward (r = 1) a byte GPU-resident saves more than twice as much, whatever the sizes; with many
micro-batches that are gathered one by one (r large, w small beside s) kept weights save more.

Each transfer over the link may stand for one of the drives, too: of what the host's host cache has no room for. The
planner
keeps weights there first, since they save most, then all else. So the share of pages that comes from the drives is
about what the host cache lacks of the weights, and what the rest of it lacks of the others, and what is saved counts 1
plus
that share. The more of the weights the host cache has, the less do kept weights save beside what FSDP modules GPU-
resident save.

FSDP modules that save the same for each byte are alike, such as the layers of a model. Those are kept first that are
first
gathered last: their second gather comes soonest. Those GPU-resident are spread over the step, so that what still moves
hides
behind the computation of every FSDP module.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from infinity.content.format import ITEMSIZE, Role
from infinity.content.layout import Layout, Page
from infinity.schedule.planner import evenly
from infinity.schedule.trace import Event, EventKind, stored_components
from infinity.schedule.update_schedule import UpdateSchedule
from infinity.units import align_up

SLOTS: Final = 2
"""FSDP modules whose weights are staged at once: one is copied to the device while the other is copied out of its slot.
"""
_STAGED_ALIGNMENT: Final = 256
"""Bytes; kernels read aligned vectors."""


def shard_bytes(layout: Layout, shard: int) -> int:
    """Return the bytes of a shard's weights, padding included, as they are staged."""
    placed = layout.shards[shard]
    itemsize = ITEMSIZE[layout.segments[placed.segment].format.param]
    return align_up(placed.spec.padded * itemsize, _STAGED_ALIGNMENT)


def fsdp_module_bytes(layout: Layout, fsdp_module: int) -> int:
    """Return the bytes of the weights of an FSDP module, as they are staged."""
    return sum(shard_bytes(layout, shard) for shard in layout.fsdp_module_shards[fsdp_module])


def prefetched_modules(events: Sequence[Event], update_schedule: UpdateSchedule) -> tuple[int, ...]:
    """Return the FSDP modules that are staged, in the order in which they first are gathered.

    That are those which are gathered behind the first gather of a step, and are not GPU-resident.
    """
    gathers = [event.fsdp_module for event in events if event.kind is EventKind.GATHER]
    return tuple(
        fsdp_module for fsdp_module in dict.fromkeys(gathers[1:]) if fsdp_module not in update_schedule.gpu_resident
    )


def is_gpu_resident(layout: Layout, page: Page) -> bool:
    """Whether a page is on the device where its FSDP module is GPU-resident:

    not what steps do not use, masters that are frozen.
    """
    return page.role is Role.PARAM or layout.segments[page.segment].trainable


@dataclass(frozen=True, kw_only=True)
class _Choice:
    """Something that memory of the device can be used for."""

    fsdp_module: int
    gpu_resident: bool
    """Whether the FSDP module lives there; else its weights are kept."""
    nbytes: int
    """What it takes."""
    saved: float
    """Bytes of a step that it saves, over the link and the drives."""
    order: float
    """The least comes first of those that save the same for each byte."""


def with_device(
    update_schedule: UpdateSchedule,
    events: Sequence[Event],
    layout: Layout,
    device_bytes: int,
    *,
    host_bytes: int = 0,
    update_on_device: bool = False,
) -> UpdateSchedule:
    """Return the update schedule with what the memory of a device is used for. [Note: what a byte of the device saves]

    Args:
        device_bytes: what there is for that.
        host_bytes: of the host cache.
        update_on_device: whether pages are updated there; only then can an FSDP module be GPU-resident that is trained.
    """
    fsdp_modules = prefetched_modules(events, update_schedule)
    if _slot_bytes(layout, fsdp_modules) > device_bytes:
        return update_schedule
    kept: dict[int, int] = {}  # bytes by FSDP module
    gpu_resident: set[int] = set()
    taken = 0
    choices = _choices(update_schedule, events, layout, host_bytes, update_on_device=update_on_device)
    for choice in sorted(choices, key=lambda choice: (-round(choice.saved / choice.nbytes, 6), choice.order)):
        if choice.fsdp_module in gpu_resident or (choice.fsdp_module in kept and not choice.gpu_resident):
            continue
        away = gpu_resident | {choice.fsdp_module} if choice.gpu_resident else gpu_resident
        slots = _slot_bytes(layout, [fsdp_module for fsdp_module in fsdp_modules if fsdp_module not in away])
        more = choice.nbytes - kept.get(
            choice.fsdp_module, 0
        )  # weights that stay are a part of an FSDP module that lives there
        if taken + more + slots > device_bytes:
            continue
        taken += more
        if choice.gpu_resident:
            gpu_resident.add(choice.fsdp_module)
            kept.pop(choice.fsdp_module, None)
        else:
            kept[choice.fsdp_module] = choice.nbytes
    return replace(
        update_schedule,
        prefetched=not gpu_resident.issuperset(fsdp_modules),
        kept=frozenset(kept),
        gpu_resident=frozenset(gpu_resident),
    )


def _slot_bytes(layout: Layout, fsdp_modules: Iterable[int]) -> int:
    """Return what the slots for some FSDP modules take."""
    return SLOTS * max((fsdp_module_bytes(layout, fsdp_module) for fsdp_module in fsdp_modules), default=0)


def _choices(
    update_schedule: UpdateSchedule, events: Sequence[Event], layout: Layout, host_bytes: int, *, update_on_device: bool
) -> list[_Choice]:
    """Return what the memory of a device can be used for, beside slots."""
    gathered = [event.fsdp_module for event in events if event.kind is EventKind.GATHER]
    arrivals = Counter(event.fsdp_module for event in events if event.kind is EventKind.GRADIENTS)
    components = stored_components(events)
    gathers, later = Counter(gathered), Counter(gathered[1:])
    weights, states = layout.bytes_of(Role.PARAM), layout.bytes_of(Role.UPDATE)
    of_weights = 1 + _lacking(weights, host_bytes)
    of_others = 1 + _lacking(states, host_bytes - weights)
    of_fsdp_module: dict[int, list[Page]] = defaultdict(list)
    for page in layout.pages:
        if is_gpu_resident(layout, page):
            of_fsdp_module[page.fsdp_module].append(page)
    found = []
    for position, fsdp_module in enumerate(
        dict.fromkeys(event.fsdp_module for event in events if event.kind is not EventKind.STEP)
    ):
        if later[fsdp_module] > 1:
            kept = fsdp_module_bytes(layout, fsdp_module)
            saved = (later[fsdp_module] - 1) * kept * of_weights
            found.append(
                _Choice(fsdp_module=fsdp_module, gpu_resident=False, nbytes=kept, saved=saved, order=-position)
            )
        if layout.fsdp_module_segments[fsdp_module] and not update_on_device:
            continue
        w, s, g = _bytes_by_role(
            of_fsdp_module[fsdp_module],
            0 if fsdp_module in update_schedule.in_backward else components.get(fsdp_module, 0),
        )
        updates = min(arrivals[fsdp_module], 1)
        saved = (gathers[fsdp_module] + updates) * w * of_weights + 2 * (
            updates * s + arrivals[fsdp_module] * g
        ) * of_others
        found.append(
            _Choice(fsdp_module=fsdp_module, gpu_resident=True, nbytes=w + s + g, saved=saved, order=evenly(position))
        )
    return found


def _lacking(nbytes: int, room: int) -> float:
    """Return which part of some bytes has no room."""
    return 1 - min(1.0, max(0, room) / nbytes) if nbytes else 0.0


def _bytes_by_role(pages: Iterable[Page], components: int) -> tuple[int, int, int]:
    """Return the bytes of weights, of the state, and of so many components of gradients, of an FSDP module's pages."""
    found = dict.fromkeys(Role, 0)
    for page in pages:
        found[page.role] += page.nbytes if page.role is not Role.GRAD or page.component < components else 0
    return found[Role.PARAM], found[Role.UPDATE], found[Role.GRAD]
