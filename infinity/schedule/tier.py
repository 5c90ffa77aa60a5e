"""Use of device memory for the GPU prefetch buffer, for weights that stay on the device, and for GPU-resident FSDP
modules.

Pure, like the planner.

[Note: savings per byte of device memory] The GPU prefetch buffer has priority, because it saves waiting time rather
than bytes. The remaining memory is used in two ways. The weights of an FSDP module (w bytes) can be *kept* on the
device from one gather of a step to the next. Alternatively, the FSDP module can be *GPU-resident*: its weights, and its
master and moments (together s bytes), never leave the device, and neither do its stored gradients (g bytes). Of the G
gathers in a step, r gathers find kept weights, where usually r = G - 1. Kept weights save r·w bytes of link traffic per
step, so each byte of device memory saves r bytes. A GPU-resident FSDP module saves all of its link traffic: G·w bytes
to the device for gathers; s bytes to the device for the update; w + s bytes back from the device after the update; and
at least 2·g bytes of gradients. Each byte of the w + s + g bytes of device memory saves ((G + 1)·w + 2·s + 2·g) / (w +
s + g) bytes, which is between 2 and G + 1. Therefore, with one gather in forward and one in backward (r is 1), a byte
used for a GPU-resident FSDP module saves more than twice as much, regardless of the sizes. If a step gathers the
weights once for each of many micro-batches (r is large, and w is small compared with s), kept weights save more.

A transfer over the link may also cause a transfer from or to the drives, namely if the page is not in the host cache.
The planner gives priority in the host cache to weights, because they save the most, and then to all other pages.
Therefore the fraction of weights that is read from the drives is roughly the fraction that does not fit into the host
cache, and the fraction of other pages is roughly the fraction that does not fit into the rest of the host cache. Every
saved byte counts as 1 plus the corresponding fraction. The more weights the host cache holds, the less kept weights
save compared with GPU-resident FSDP modules.

FSDP modules that save the same number of bytes per byte of memory, such as the layers of a model, are ranked as
follows. Weights are kept for the FSDP modules that are gathered last in forward, because their second gather follows
soonest. GPU-resident FSDP modules are spread evenly over the step, so that the remaining transfers overlap the
computation of all FSDP modules. The first FSDP modules of a step come before all others (`_FIRST_MODULES`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from infinity.content.format import ITEMSIZE, Role
from infinity.content.layout import Layout, Page
from infinity.schedule.planner import evenly
from infinity.schedule.trace import Event, EventKind, stored_components
from infinity.schedule.update_schedule import UpdateSchedule
from infinity.units import align_up

SLOTS: Final = 2
"""Number of FSDP modules for which the GPU prefetch buffer has room. While the weights of one are copied to the device,
the gather copies the weights of the other out of the buffer.
"""
_FIRST_MODULES: Final = 3
"""Number of FSDP modules at the start of a step, usually the root and two layers, that are the first to become
GPU-resident. Backward computes their gradients last. Otherwise, the next step would begin by waiting until their
updated weights have been copied to the host and back.
"""
_STAGED_ALIGNMENT: Final = 256
"""Alignment of shards in the GPU prefetch buffer in bytes, because CUDA kernels read aligned vectors."""


def shard_bytes(layout: Layout, shard: int) -> int:
    """Return the size in bytes, including padding, of a shard's weights in the GPU prefetch buffer."""
    nbytes = layout.shards[shard].spec.padded * ITEMSIZE[layout.format_of(shard).param]
    return align_up(nbytes, _STAGED_ALIGNMENT)


def fsdp_module_bytes(layout: Layout, fsdp_module: int) -> int:
    """Return the size in bytes of an FSDP module's weights in the GPU prefetch buffer."""
    return sum(shard_bytes(layout, shard) for shard in layout.fsdp_module_shards[fsdp_module])


def prefetched_modules(events: Sequence[Event], update_schedule: UpdateSchedule) -> tuple[int, ...]:
    """Return the FSDP modules whose weights are prefetched to the GPU, in the order of their first prefetch in a step.

    These are all FSDP modules with a gather after the first gather of the step, except GPU-resident ones.
    """
    gathers = [event.fsdp_module for event in events if event.kind is EventKind.GATHER]
    return tuple(
        fsdp_module for fsdp_module in dict.fromkeys(gathers[1:]) if fsdp_module not in update_schedule.gpu_resident
    )


def is_gpu_resident(layout: Layout, page: Page) -> bool:
    """Return ``True`` if a page is on the device while its FSDP module is GPU-resident.

    This is the case for all pages except frozen masters, which steps do not use.
    """
    return page.role is Role.PARAM or layout.segments[page.segment].trainable


@dataclass(frozen=True, kw_only=True)
class _Choice:
    """One possible use of device memory."""

    fsdp_module: int
    gpu_resident: bool
    """``True`` if the whole FSDP module is GPU-resident, or ``False`` if only its weights are kept."""
    nbytes: int
    """Required device memory, in bytes."""
    saved: float
    """Traffic saved per step and byte of memory, over the link and on the drives, in bytes. The first FSDP modules of a
    step count as much as the best GPU-resident ones.
    """
    order: float
    """Rank among choices that save the same. The smallest value comes first."""


def with_device(
    update_schedule: UpdateSchedule,
    events: Sequence[Event],
    layout: Layout,
    device_bytes: int,
    *,
    host_bytes: int = 0,
    update_on_device: bool = False,
) -> UpdateSchedule:
    """Return a copy of an update schedule with the best use of device memory. [Note: savings per byte of device memory]

    If updates do not run on the device, no FSDP module with trained parameters can be GPU-resident.

    Args:
        update_schedule: update schedule that does not use device memory yet.
        device_bytes: available device memory, in bytes.
        host_bytes: size of the host cache, in bytes.
    """
    weights = {module: fsdp_module_bytes(layout, module) for module in prefetched_modules(events, update_schedule)}
    if SLOTS * max(weights.values(), default=0) > device_bytes:
        return update_schedule
    kept: dict[int, int] = {}  # bytes by FSDP module
    gpu_resident: set[int] = set()
    taken = 0
    choices = _choices(update_schedule, events, layout, host_bytes, update_on_device=update_on_device)
    for choice in sorted(choices, key=lambda choice: (-round(choice.saved, 6), choice.order)):
        if choice.fsdp_module in gpu_resident or (choice.fsdp_module in kept and not choice.gpu_resident):
            continue
        away = gpu_resident | {choice.fsdp_module} if choice.gpu_resident else gpu_resident
        slots = SLOTS * max((nbytes for module, nbytes in weights.items() if module not in away), default=0)
        more = choice.nbytes - kept.get(choice.fsdp_module, 0)  # a GPU-resident module includes its kept weights
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
        prefetched=not gpu_resident.issuperset(weights),
        kept=frozenset(kept),
        gpu_resident=frozenset(gpu_resident),
    )


def _choices(
    update_schedule: UpdateSchedule, events: Sequence[Event], layout: Layout, host_bytes: int, *, update_on_device: bool
) -> list[_Choice]:
    gathered = [event.fsdp_module for event in events if event.kind is EventKind.GATHER]
    arrivals = Counter(event.fsdp_module for event in events if event.kind is EventKind.GRADIENTS)
    components = stored_components(events)
    gathers, later = Counter(gathered), Counter(gathered[1:])
    weights, states = layout.bytes_of(Role.PARAM), layout.bytes_of(Role.UPDATE)
    of_weights = 1 + _lacking(weights, host_bytes)
    of_others = 1 + _lacking(states, host_bytes - weights)
    found = []
    for position, fsdp_module in enumerate(
        dict.fromkeys(event.fsdp_module for event in events if event.kind is not EventKind.STEP)
    ):
        kept = fsdp_module_bytes(layout, fsdp_module)
        if later[fsdp_module] > 1 and kept:
            saved = (later[fsdp_module] - 1) * kept * of_weights
            found.append(
                _Choice(fsdp_module=fsdp_module, gpu_resident=False, nbytes=kept, saved=saved / kept, order=-position)
            )
        if layout.fsdp_module_segments[fsdp_module] and not update_on_device:
            continue
        stored = 0 if fsdp_module in update_schedule.in_backward else components.get(fsdp_module, 0)
        nbytes_of = dict.fromkeys(Role, 0)
        for page in layout.fsdp_module_pages[fsdp_module]:
            if is_gpu_resident(layout, page) and (page.role is not Role.GRAD or page.component < stored):
                nbytes_of[page.role] += page.nbytes
        w, s, g = nbytes_of[Role.PARAM], nbytes_of[Role.UPDATE], nbytes_of[Role.GRAD]
        updates = min(arrivals[fsdp_module], 1)
        saved = (gathers[fsdp_module] + updates) * w * of_weights + 2 * (
            updates * s + arrivals[fsdp_module] * g
        ) * of_others
        if not (nbytes := w + s + g):
            continue
        others = position - _FIRST_MODULES  # number of a module after the first ones
        order = evenly(others + 1) if others >= 0 else -1  # + 1, because 0 would select the one after the first modules
        found.append(
            _Choice(fsdp_module=fsdp_module, gpu_resident=True, nbytes=nbytes, saved=saved / nbytes, order=order)
        )
    most = max((choice.saved for choice in found if choice.gpu_resident), default=0.0)
    return [replace(choice, saved=most) if choice.gpu_resident and choice.order < 0 else choice for choice in found]


def _lacking(nbytes: int, room: int) -> float:
    return 1 - min(1.0, max(0, room) / nbytes) if nbytes else 0.0
