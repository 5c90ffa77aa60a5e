"""The memory budget of a rank: page size, cache slots, and the error when they do not suffice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from infinity.config import ActivationsConfig
from infinity.content.format import ITEMSIZE, MASTER, Role, StateFormat
from infinity.content.layout import PAGE_ALIGNMENT, FSDPModuleSpec, Layout, build_layout
from infinity.errors import BudgetError
from infinity.schedule.planner import least_cache_slots
from infinity.schedule.stack import LEAST_CACHE_SLOTS
from infinity.schedule.trace import range_access
from infinity.units import KIB, MIB, align_up, format_setting, format_size

_LARGEST_PAGE = 8 * MIB
"""Larger pages move no faster, so they are taken only where pages are too many."""
_MOST_PAGES = 4096
"""Pages above which larger ones are taken: the time of planning and the Python of a step go with their number."""
_LARGEST_OF_MANY = 256 * MIB
"""Largest page of a state of many pages. That is still a small part of an FSDP module where a state has so many."""
_MOST_PAGES_OF_DEVICE = 1024
_LARGEST_OF_DEVICE = 64 * MIB
"""The same where a GPU computes: it is faster, so Python for each page shows sooner, and has room for several of them
in updates. [ACCESS_SECONDS of infinity/estimate/machine.py]"""
_CACHE_SLOTS_OF_MANY = 256
"""Cache slots that the host cache keeps where pages are made larger for their number: so few more bytes move for it."""
_SMALLEST_PAGE = 64 * KIB
_WANTED_CACHE_SLOTS = 32
_LEAST_FILLED = 0.8
_ACTIVATION_PART: Final = 8
"""The host cache over what of it is for activations, if nothing else is set: a resident page of weights saves as much.
"""
TOGETHER: Final = 4
"""Ranges that are updated in one call of the optimizer at most, to share what a call costs beside the arithmetic.

What has to be decoded takes several calls for each range, so there is nothing to share.
"""
BATCHES: Final = 2
"""Such calls whose pages are on a device that updates at once: one is computed, the pages of the other are copied."""
FETCHED: Final = 6
"""Ranges whose gradients have room in host memory beside the host cache, where a device computes: those of one call of
the
optimizer, and two that come in meanwhile."""


@dataclass(frozen=True)
class Budget:
    """How a rank's host memory is used."""

    layout: Layout
    """The pages of this rank."""
    cache_slots: int
    """How many of the largest page the host cache has room for."""
    activation_cache_slots: int = 0
    """Further cache slots, for activations."""

    @property
    def host_bytes(self) -> int:
        """Size of the host cache."""
        return (self.cache_slots + self.activation_cache_slots) * self.layout.page_bytes


def choose_budget(
    fsdp_modules: Sequence[FSDPModuleSpec],
    formats: dict[str, StateFormat],
    host_bytes: int,
    page_bytes: int,
    *,
    device: bool = False,
    activations: ActivationsConfig | None = None,
) -> Budget:
    """Return page size and number of cache slots for at most `host_bytes`.

    Args:
        activations: the settings for these, which may get a part of the memory.
        device: whether another device than the CPU computes; gradients on their way from it take a part of the memory.
        page_bytes: largest page; 0 takes the largest of 8 MiB, 4 MiB, … 64 KiB with which the host cache has enough
            cache slots and the pages fill them well, or more than 8 MiB where a state has very many pages, sooner with
            a
            device, or where the optimizer updates whole rows that need it, such as the matrices of a stack.

    Raises:
        BudgetError: the host cache is too small; the need and the setting to change are in the message.
    """
    if page_bytes:
        layout = build_layout(fsdp_modules, formats, page_bytes)
    else:
        layout = _with_room_for_rows(fsdp_modules, formats)
        page_bytes = layout.page_bytes
        while page_bytes > _SMALLEST_PAGE and not _good(layout, host_bytes):
            try:
                layout = build_layout(fsdp_modules, formats, page_bytes // 2)
            except BudgetError:  # there are rows that smaller pages have no room for
                break
            page_bytes //= 2
        if page_bytes == _LARGEST_PAGE:
            layout = _with_fewer_pages(layout, host_bytes, device=device)
            page_bytes = layout.page_bytes
    beside = (FETCHED * range_gradient_bytes(layout) if device else 0) + whole_bytes(layout)
    of_activations = activation_cache_slots(activations, host_bytes, page_bytes) if activations else 0
    beside += of_activations * page_bytes
    cache_slots = max(0, host_bytes - beside) // page_bytes
    least = least_cache_slots(widest_access(layout))
    if cache_slots < min(least, len(layout.pages)):
        raise BudgetError(_explain(layout, host_bytes, least, beside - of_activations * page_bytes, activations))
    return Budget(layout, min(cache_slots, len(layout.pages)), of_activations)


def activation_cache_slots(settings: ActivationsConfig, host_bytes: int, page_bytes: int) -> int:
    """Return how many cache slots of a host cache are for activations.

    Raises:
        BudgetError: they are too few.
    """
    if settings.tier == "device":
        return 0
    wanted = settings.host_bytes or host_bytes // _ACTIVATION_PART
    cache_slots = wanted // page_bytes
    if settings.host_bytes and cache_slots < LEAST_CACHE_SLOTS:
        raise BudgetError(
            f"activations.host_bytes = {format_size(wanted)} has room for {cache_slots} pages of {format_size(page_bytes)}, "
            f"the least is {LEAST_CACHE_SLOTS}; set it to "
            f"{format_setting(LEAST_CACHE_SLOTS * page_bytes)} or more, or memory.page_bytes lower"
        )
    return max(cache_slots, LEAST_CACHE_SLOTS)


def _with_room_for_rows(fsdp_modules: Sequence[FSDPModuleSpec], formats: dict[str, StateFormat]) -> Layout:
    """Return a layout of the largest pages, or of larger ones where rows that no page may cut need them.

    Raises:
        BudgetError: a row does not fit any page.
    """
    page_bytes = _LARGEST_PAGE
    while True:
        try:
            return build_layout(fsdp_modules, formats, page_bytes)
        except BudgetError:
            if page_bytes >= _LARGEST_OF_MANY:
                raise
            page_bytes *= 2


def _with_fewer_pages(layout: Layout, host_bytes: int, *, device: bool) -> Layout:
    """Return a layout whose pages are doubled until they are no longer too many, as far as the host cache allows."""
    formats = {shard.spec.segment_key: layout.segments[shard.segment].format for shard in layout.shards}
    most, largest = (_MOST_PAGES_OF_DEVICE, _LARGEST_OF_DEVICE) if device else (_MOST_PAGES, _LARGEST_OF_MANY)
    while len(layout.pages) > most and layout.page_bytes < largest:
        if host_bytes // (2 * layout.page_bytes) < _CACHE_SLOTS_OF_MANY:
            break
        doubled = build_layout(layout.fsdp_modules, formats, 2 * layout.page_bytes)
        if not _good(doubled, host_bytes):
            break
        layout = doubled
    return layout


def _good(layout: Layout, host_bytes: int) -> bool:
    cache_slots = host_bytes // layout.page_bytes
    filled = sum(page.nbytes for page in layout.pages) / (len(layout.pages) * layout.page_bytes)
    return cache_slots >= _WANTED_CACHE_SLOTS and (filled >= _LEAST_FILLED or cache_slots >= 4 * len(layout.pages))


def range_gradient_bytes(layout: Layout) -> int:
    """Return the bytes of the gradients of the longest range; they have the dtype that is trained."""
    longest = max(
        (
            item.count * ITEMSIZE[segment.format.dtypes[MASTER]]
            for segment in layout.segments
            if segment.trainable
            for item in segment.ranges
        ),
        default=0,
    )
    return align_up(longest, PAGE_ALIGNMENT)


def whole_bytes(layout: Layout) -> int:
    """Return the bytes of the largest parameter that is updated whole, beside its pages; 0 where none is.

    That is its master, gradient and states, put together, and about as much again for what an optimizer makes of them,
    as Muon does; and this rank's slice of one of them, on its way to the others.
    """
    return align_up(max((_whole_bytes(layout, shard) for shard in _whole_shards(layout)), default=0), PAGE_ALIGNMENT)


def _whole_shards(layout: Layout) -> list[int]:
    return [shard for segment in layout.segments if segment.trainable and segment.whole for shard in segment.shards]


def _whole_bytes(layout: Layout, shard: int) -> int:
    spec, sizes = layout.shards[shard].spec, [ITEMSIZE[dtype] for dtype in layout.format_of(shard).dtypes.values()]
    gradient = ITEMSIZE[layout.format_of(shard).dtypes[MASTER]]
    return 2 * spec.whole * (sum(sizes) + gradient) + (spec.padded * max(sizes) if spec.padded < spec.whole else 0)


def device_update_bytes(layout: Layout) -> int:
    """Return how much of a device updates take at most: pages of `BATCHES`, and what the optimizer makes beside one."""
    return (BATCHES + 1) * TOGETHER * widest_access(layout) * layout.page_bytes


def widest_access(layout: Layout) -> int:
    """Return the largest number of pages that are needed at the same moment."""
    return max(
        (
            len(range_access(segment, position, components=len(segment.grad_pages)))
            for segment in layout.segments
            if segment.trainable
            for position in range(len(segment.ranges))
        ),
        default=1,
    )


def _explain(layout: Layout, host_bytes: int, least: int, beside: int, settings: ActivationsConfig | None) -> str:
    page_bytes = layout.page_bytes
    least = min(least, len(layout.pages))
    need, activations = least * page_bytes + beside, 0
    # The part for activations may grow with the host cache, though by less.
    while (
        settings
        and (more := activation_cache_slots(settings, need + activations, page_bytes) * page_bytes) > activations
    ):
        activations = more
    need += activations
    lower = "" if layout.page_bytes <= _SMALLEST_PAGE else ", or memory.page_bytes lower"
    whole = whole_bytes(layout)
    gradients = beside - whole
    others = f", and {format_size(gradients)} for gradients that come from the device" if gradients else ""
    others += f", and {format_size(activations)} for activations" if activations else ""
    if whole:
        largest = max(_whole_shards(layout), key=lambda shard: _whole_bytes(layout, shard))
        others += (
            f", and {format_size(whole)} to update {layout.shards[largest].spec.name} whole, as the optimizer needs it"
        )
    weights, update, stored = (format_size(layout.bytes_of(role)) for role in (Role.PARAM, Role.UPDATE, Role.GRAD))
    return (
        f"the host cache is too small for this model: it has {format_size(host_bytes)}, the least is "
        f"{format_size(need)} ({least} pages of {format_size(layout.page_bytes)}{others}); set "
        "memory.host_bytes to "
        f"{format_setting(need)} or more{lower}\n"
        f"  what is paged: {weights} of weights in the compute dtype, {update} of master weights and moments, "
        f"{stored} of gradients"
    )
