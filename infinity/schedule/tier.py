"""Use of device memory: the GPU prefetch buffer, weights that stay on the device, and GPU-resident FSDP modules. Pure.

[Note: savings per byte of device memory] The GPU prefetch buffer comes first: it saves waiting time, not bytes. With
the remaining memory, an FSDP module can be *kept*: its weights (w bytes) stay on the device from one gather of a step
to the next. Or it can be *GPU-resident*: its weights and its master and moments (s bytes) never leave the device, and
neither do its gradients (g bytes) if they are stored. Of the G gathers in a step, r gathers find kept weights, usually
r = G - 1. Kept weights save r·w bytes of link traffic per step, so each byte saves r. A GPU-resident FSDP module saves
all of its traffic: G·w to the device; w and s back from the update that changes them, and s to the device for it; and
2·g or more. Each byte of w + s + g saves ((G + 1)·w + 2·s + 2·g) / (w + s + g), which is between 2 and G + 1. So with
one gather in forward and one in backward (r = 1), a GPU-resident byte saves more than twice as much, whatever the
sizes. With many micro-batches that are gathered one by one (r large, w small compared with s), kept weights save more.

A transfer over the link may also cause a transfer of the drives, if the host cache has no room for the page. The
planner keeps weights in the host cache first, because they save most, and then all other pages. So the fraction of
weights that comes from the drives is about the fraction that does not fit into the host cache, and the fraction of
other pages is about the fraction that does not fit into the rest. Every saved byte counts 1 plus that fraction. The
more weights the host cache holds, the less kept weights save compared with GPU-resident FSDP modules.

FSDP modules that save the same number of bytes per byte of memory are alike, such as the layers of a model. Among them,
FSDP modules whose first gather is the latest are kept first, because their second gather follows soonest. GPU-resident
FSDP modules are spread over the step, so that the remaining transfers overlap the computation of every FSDP module.
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
"""Number of FSDP modules in the GPU prefetch buffer: one is being copied to the device while the other is copied out of
the buffer.
"""
_STAGED_ALIGNMENT: Final = 256
"""Alignment in bytes. Kernels read aligned vectors."""


def shard_bytes(layout: Layout, shard: int) -> int:
    """Return the size of a shard's weights in the GPU prefetch buffer, including padding, in bytes."""
    placed = layout.shards[shard]
    itemsize = ITEMSIZE[layout.segments[placed.segment].format.param]
    return align_up(placed.spec.padded * itemsize, _STAGED_ALIGNMENT)


def fsdp_module_bytes(layout: Layout, fsdp_module: int) -> int:
    """Return the size of an FSDP module's weights in the GPU prefetch buffer, in bytes."""
    return sum(shard_bytes(layout, shard) for shard in layout.fsdp_module_shards[fsdp_module])


def prefetched_modules(events: Sequence[Event], update_schedule: UpdateSchedule) -> tuple[int, ...]:
    """Return the FSDP modules whose weights are prefetched to the GPU, in the order of their first such gather.

    These are the FSDP modules that are gathered after the first gather of a step and are not GPU-resident.
    """
    gathers = [event.fsdp_module for event in events if event.kind is EventKind.GATHER]
    return tuple(
        fsdp_module for fsdp_module in dict.fromkeys(gathers[1:]) if fsdp_module not in update_schedule.gpu_resident
    )


def is_gpu_resident(layout: Layout, page: Page) -> bool:
    """Return ``True`` if a page is on the device when its FSDP module is GPU-resident.

    Steps do not use frozen masters, so these are not on the device.
    """
    return page.role is Role.PARAM or layout.segments[page.segment].trainable


@dataclass(frozen=True, kw_only=True)
class _Choice:
    """A possible use of device memory."""

    fsdp_module: int
    gpu_resident: bool
    """``True`` if the FSDP module is GPU-resident; ``False`` if its weights are kept."""
    nbytes: int
    """Required device memory, in bytes."""
    saved: float
    """Bytes per step that it saves, over the link and on the drives."""
    order: float
    """Order among choices that save the same per byte of memory; the smallest value comes first."""


def with_device(
    update_schedule: UpdateSchedule,
    events: Sequence[Event],
    layout: Layout,
    device_bytes: int,
    *,
    host_bytes: int = 0,
    update_on_device: bool = False,
) -> UpdateSchedule:
    """Return the update schedule together with a use of device memory. [Note: savings per byte of device memory]

    Args:
        update_schedule: where updates run.
        events: one step.
        layout: pages of this rank.
        device_bytes: available device memory, in bytes.
        host_bytes: size of the host cache, in bytes.
        update_on_device: whether updates run on the device. Otherwise no trained FSDP module can be GPU-resident.
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
        more = choice.nbytes - kept.get(choice.fsdp_module, 0)  # a GPU-resident FSDP module includes its kept weights
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
    """Return the size of the GPU prefetch buffer for some FSDP modules, in bytes."""
    return SLOTS * max((fsdp_module_bytes(layout, fsdp_module) for fsdp_module in fsdp_modules), default=0)


def _choices(
    update_schedule: UpdateSchedule, events: Sequence[Event], layout: Layout, host_bytes: int, *, update_on_device: bool
) -> list[_Choice]:
    """Return the possible uses of device memory besides the GPU prefetch buffer."""
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
    """Return the fraction of `nbytes` that does not fit into `room`."""
    return 1 - min(1.0, max(0, room) / nbytes) if nbytes else 0.0


def _bytes_by_role(pages: Iterable[Page], components: int) -> tuple[int, int, int]:
    """Return the bytes of weights, of the state, and of a number of gradient components, of an FSDP module's pages."""
    found = dict.fromkeys(Role, 0)
    for page in pages:
        found[page.role] += page.nbytes if page.role is not Role.GRAD or page.component < components else 0
    return found[Role.PARAM], found[Role.UPDATE], found[Role.GRAD]
