"""Memory budget of a rank: page size, number of cache slots, and the error for insufficient host memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from infinity.config import ActivationsConfig
from infinity.content.format import ITEMSIZE, MASTER, Role, StateFormat
from infinity.content.layout import (
    LARGEST_GPU_RESIDENT_BATCH,
    PAGE_ALIGNMENT,
    FSDPModuleSpec,
    Layout,
    PageTotals,
    Segment,
    build_layout,
    page_totals,
)
from infinity.errors import BudgetError
from infinity.schedule.planner import least_cache_slots
from infinity.schedule.stack import LEAST_CACHE_SLOTS
from infinity.units import KIB, MIB, align_up, format_setting, format_size

_LARGEST_PAGE = 8 * MIB
"""Default maximum page size. Larger pages are not faster to transfer, so they are used only to reduce the number of
pages.
"""
_MOST_PAGES = 4096
"""Number of pages above which larger pages are used. Planning time and Python overhead per step grow with it."""
_MOST_SMALL_PAGES = 1 << 18
"""Maximum number of pages that are smaller than the default. More of them would take minutes to plan, and a step would
consist mostly of Python overhead.
"""
_LARGEST_OF_MANY = 256 * MIB
"""Maximum page size for a state with many pages, whose FSDP modules are much larger than such a page."""
_MOST_PAGES_OF_DEVICE = 128
_LARGEST_OF_DEVICE = 64 * MIB
"""The same limits for training on a GPU. A GPU is faster, so Python overhead per page matters earlier, and an update
needs GPU memory for several of these pages. With 412M parameters and 64 MiB pages, a step on an H200 takes 1.2 times as
long as in memory; with 8 MiB pages, it took 2.6 times as long. [benchmarks/results/gpu.json]
"""
_CACHE_SLOTS_OF_MANY = 256
"""Minimum number of cache slots when pages are enlarged, unless all pages fit in the host cache, so that NVMe traffic
increases only slightly."""
_SMALLEST_PAGE = 64 * KIB
_WANTED_CACHE_SLOTS = 32
_LEAST_FILLED = 0.8
_ACTIVATION_PART: Final = 8
"""Default size of the host cache relative to its part for activations. A cache slot that permanently holds a page of
weights saves as much traffic as one for activations, so a larger part has no advantage."""
_BATCH_PART: Final = 16
"""Size of the host cache relative to a batch, so that batches leave room for resident pages."""
_LARGEST_BATCH: Final = 256 * MIB
"""Maximum size of a batch. Copying it to a GPU at 50 GB/s takes 5.4 ms, much longer than its Python code."""
BATCHES_ON_DEVICE: Final = 2
"""Number of batches whose pages are on the device at the same time: one is computed while the pages of the other are
copied.
"""
FETCHED: Final = 6
"""Number of ranges whose gradients fit in host memory in addition to the host cache, for updates on a device: the
ranges of one optimizer call, and two more that arrive in the meantime.
"""


@dataclass(frozen=True)
class Budget:
    """Division of a rank's host memory."""

    layout: Layout
    """Page layout of the rank."""
    cache_slots: int
    """Number of cache slots, each as large as the largest page."""
    activation_cache_slots: int = 0
    """Number of additional cache slots for activations."""

    @property
    def host_bytes(self) -> int:
        """Size of the host cache in bytes."""
        return (self.cache_slots + self.activation_cache_slots) * self.layout.page_bytes


def choose_budget(
    fsdp_modules: Sequence[FSDPModuleSpec],
    formats: dict[str, StateFormat],
    host_bytes: int,
    page_bytes: int,
    *,
    device: bool = False,
    activations: ActivationsConfig | None = None,
    known: Layout | None = None,
) -> Budget:
    """Choose the page size and the number of cache slots for at most `host_bytes` of host memory.

    Args:
        fsdp_modules: FSDP modules of the model, with the shards of this rank.
        formats: state formats by segment key.
        host_bytes: host memory available to this rank.
        page_bytes: maximum page size. 0 chooses the largest size from 8 MiB, 4 MiB, … 64 KiB for which the host cache
            has enough cache slots and pages are well filled. Pages are larger for a state with very many pages (with
            fewer pages if a device is used), and for optimizers that update whole rows that do not fit in 8 MiB, such
            as the matrices of a stack.
        device: whether the model trains on a device other than the CPU. Gradients in transit from the device then use
            part of the memory.
        activations: settings of activations, which may use part of the memory.
        known: layout for the same FSDP modules and formats. If given, it is reused instead of being built again.

    Raises:
        BudgetError: if the host cache is too small. The message contains the required size and the setting to change.
    """

    def divide(*, fits: bool) -> Budget:
        """Divide the memory. If `fits`, pages may be larger if all of them fit."""
        totals = (
            page_totals(fsdp_modules, formats, page_bytes)
            if page_bytes
            else _page_size(fsdp_modules, formats, host_bytes, device=device, fits=fits)
        )
        if totals.page_bytes < _LARGEST_PAGE and totals.number > _MOST_SMALL_PAGES:
            raise BudgetError(_too_many(fsdp_modules, formats, host_bytes, totals, given=page_bytes > 0))
        if known and known.page_bytes == totals.page_bytes:
            layout = known
        else:
            layout = build_layout(fsdp_modules, formats, totals.page_bytes)
        other_bytes = (FETCHED * range_gradient_bytes(layout) if device else 0) + whole_bytes(layout)
        of_activations = activation_cache_slots(activations, host_bytes, totals.page_bytes) if activations else 0
        cache_slots = max(0, (host_bytes - other_bytes) // totals.page_bytes - of_activations)
        least = least_cache_slots(widest_access(layout))
        if cache_slots < min(least, len(layout.pages)):
            raise BudgetError(_explain(layout, host_bytes, least, other_bytes, activations))
        batch_pages = min(cache_slots // _BATCH_PART, _LARGEST_BATCH // layout.page_bytes)
        cache_slots = min(cache_slots, len(layout.pages))
        if cache_slots < len(layout.pages):  # three threads may hold a batch each, in addition to the widest access
            batch_pages = min(batch_pages, max(1, (cache_slots - least) // 3))
        return Budget(replace(layout, batch_pages=batch_pages), cache_slots, of_activations)

    budget = divide(fits=True)
    enlarged = not page_bytes and budget.layout.page_bytes > _LARGEST_PAGE
    if enlarged and budget.cache_slots < min(_CACHE_SLOTS_OF_MANY, len(budget.layout.pages)):
        return divide(fits=False)  # activations or full parameters leave too little memory
    return budget


def activation_cache_slots(settings: ActivationsConfig, host_bytes: int, page_bytes: int) -> int:
    """Return the number of cache slots for activations.

    Raises:
        BudgetError: if `activations.host_bytes` is set and too small for the minimum number of cache slots.
    """
    if settings.tier == "device":
        return 0
    wanted = settings.host_bytes or host_bytes // _ACTIVATION_PART
    cache_slots = wanted // page_bytes
    if settings.host_bytes and cache_slots < LEAST_CACHE_SLOTS:
        raise BudgetError(
            f"activations.host_bytes = {format_size(wanted)} is too small: it holds {cache_slots} instead of "
            f"at least {LEAST_CACHE_SLOTS} pages of {format_size(page_bytes)}; set it to "
            f"{format_setting(LEAST_CACHE_SLOTS * page_bytes)} or more, or reduce memory.page_bytes"
        )
    return max(cache_slots, LEAST_CACHE_SLOTS)


def _page_size(
    fsdp_modules: Sequence[FSDPModuleSpec],
    formats: dict[str, StateFormat],
    host_bytes: int,
    *,
    device: bool,
    fits: bool,
) -> PageTotals:
    """Choose the page size as described in `choose_budget`, and return the totals of the layout."""
    totals = _with_room_for_rows(fsdp_modules, formats)
    while totals.page_bytes > _SMALLEST_PAGE and not _good(totals, host_bytes):
        try:
            totals = page_totals(fsdp_modules, formats, totals.page_bytes // 2)
        except BudgetError:  # some rows do not fit in smaller pages
            break
        if totals.number > _MOST_SMALL_PAGES:  # an error in `choose_budget`; smaller pages would be even more
            break
    may_grow = totals.page_bytes == _LARGEST_PAGE
    most, largest = (_MOST_PAGES_OF_DEVICE, _LARGEST_OF_DEVICE) if device else (_MOST_PAGES, _LARGEST_OF_MANY)
    while may_grow and totals.number > most and totals.page_bytes < largest:
        doubled = page_totals(fsdp_modules, formats, 2 * totals.page_bytes)
        cache_slots = host_bytes // doubled.page_bytes
        # Gradients in transit from a device (`FETCHED`) take at most a third of a page each.
        all_fit = fits and cache_slots >= doubled.number + FETCHED // 3
        if not all_fit and (cache_slots < _CACHE_SLOTS_OF_MANY or not _good(doubled, host_bytes)):
            break
        totals = doubled
    return totals


def _with_room_for_rows(fsdp_modules: Sequence[FSDPModuleSpec], formats: dict[str, StateFormat]) -> PageTotals:
    """Return the totals for the default page size, or for larger pages if an indivisible row requires them.

    Raises:
        BudgetError: if a row does not fit in a page of any size.
    """
    page_bytes = _LARGEST_PAGE
    while True:
        try:
            return page_totals(fsdp_modules, formats, page_bytes)
        except BudgetError:
            if page_bytes >= _LARGEST_OF_MANY:
                raise
            page_bytes *= 2


def _good(totals: PageTotals, host_bytes: int) -> bool:
    cache_slots = host_bytes // totals.page_bytes
    return cache_slots >= _WANTED_CACHE_SLOTS and (totals.filled >= _LEAST_FILLED or cache_slots >= 4 * totals.number)


def _too_many(
    fsdp_modules: Sequence[FSDPModuleSpec],
    formats: dict[str, StateFormat],
    host_bytes: int,
    totals: PageTotals,
    *,
    given: bool,
) -> str:
    """Return the error for a state that would be divided into too many small pages."""
    enough, divided = totals.page_bytes, f"{totals.number:,} pages of {format_size(totals.page_bytes)}"
    while enough < _LARGEST_PAGE and page_totals(fsdp_modules, formats, enough).number > _MOST_SMALL_PAGES:
        enough *= 2
    if given:
        return (
            f"memory.page_bytes = {format_size(totals.page_bytes)} would divide the state into {divided}; set it to "
            f"{format_setting(enough)} or more, or remove the setting"
        )
    return (
        f"the host cache of {format_size(host_bytes)} is too small for this model: it would divide the state into "
        f"at least {divided}; set memory.host_bytes to {format_setting(_WANTED_CACHE_SLOTS * enough)} or more"
    )


def range_gradient_bytes(layout: Layout) -> int:
    """Return the size, in bytes, of the gradients of the longest range, in the dtype of the master weights."""
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
    """Return the number of bytes needed in addition to pages to update the largest full parameter, or 0.

    The memory holds the parameter's assembled master weights, gradient and optimizer state, about as much again for
    temporaries of the optimizer (as in Muon), and this rank's slice of one of these tensors while it is sent to other
    ranks.
    """
    return align_up(max((_whole_bytes(layout, shard) for shard in _whole_shards(layout)), default=0), PAGE_ALIGNMENT)


def _whole_shards(layout: Layout) -> list[int]:
    return [shard for segment in layout.segments if segment.trainable and segment.whole for shard in segment.shards]


def _whole_bytes(layout: Layout, shard: int) -> int:
    spec, sizes = layout.shards[shard].spec, [ITEMSIZE[dtype] for dtype in layout.format_of(shard).dtypes.values()]
    gradient = ITEMSIZE[layout.format_of(shard).dtypes[MASTER]]
    return 2 * spec.whole * (sum(sizes) + gradient) + (spec.padded * max(sizes) if spec.padded < spec.whole else 0)


def device_update_bytes(layout: Layout) -> int:
    """Return the maximum device memory, in bytes, that updates use.

    It consists of the pages of `BATCHES_ON_DEVICE` batches, and the temporaries of one optimizer call: copies of stored
    gradients, and intermediate results if the optimizer is not fused. The temporaries are assumed to take as much
    memory as a batch, or half as much as a batch of GPU-resident pages, whichever is larger.
    """
    module_pages = max(map(len, layout.fsdp_module_pages), default=0)
    batch = min(module_pages, max(layout.batch_pages, widest_access(layout))) * layout.page_bytes
    resident_batch = min(module_pages * layout.page_bytes, LARGEST_GPU_RESIDENT_BATCH)
    return BATCHES_ON_DEVICE * batch + max(batch, resident_batch // 2)


def widest_access(layout: Layout) -> int:
    """Return the maximum number of pages of a range, which must be in memory at the same time."""
    return max((_widest(segment) for segment in layout.segments if segment.trainable and segment.ranges), default=1)


def _widest(segment: Segment) -> int:
    """Return the maximum number of pages in one access of `range_access`."""
    starts, stops = [item.start for item in segment.ranges], [item.stop for item in segment.ranges]
    pages = [*segment.grad_pages, segment.param_pages, *([segment.update_pages] if segment.whole else [])]
    number = np.full(len(starts), 0 if segment.whole or not segment.update_pages else 1)
    for begins in ([page.start for page in group] for group in pages if group):
        number += np.searchsorted(begins, stops) - np.searchsorted(begins, starts, "right") + 1
    return int(number.max())


def _explain(layout: Layout, host_bytes: int, least: int, other_bytes: int, settings: ActivationsConfig | None) -> str:
    page_bytes = layout.page_bytes
    least = min(least, len(layout.pages))
    need, activations = least * page_bytes + other_bytes, 0
    # The part for activations may grow with the host cache, but more slowly, so this loop converges.
    while (
        settings
        and (more := activation_cache_slots(settings, need + activations, page_bytes) * page_bytes) > activations
    ):
        activations = more
    need += activations
    lower = "" if layout.page_bytes <= _SMALLEST_PAGE else ", or reduce memory.page_bytes"
    whole = whole_bytes(layout)
    gradients = other_bytes - whole
    others = f", plus {format_size(gradients)} for gradients copied from the device" if gradients else ""
    others += f", plus {format_size(activations)} for activations" if activations else ""
    if whole:
        largest = max(_whole_shards(layout), key=lambda shard: _whole_bytes(layout, shard))
        others += f", plus {format_size(whole)} to update {layout.shards[largest].spec.name} as a full parameter"
    weights, update, stored = (format_size(layout.bytes_of(role)) for role in (Role.PARAM, Role.UPDATE, Role.GRAD))
    return (
        f"the host cache is too small for this model: its size is {format_size(host_bytes)}, but it needs at least "
        f"{format_size(need)} ({least} pages of {format_size(layout.page_bytes)}{others}); set "
        "memory.host_bytes to "
        f"{format_setting(need)} or more{lower}\n"
        f"  paged tensors: {weights} of weights in the compute dtype, {update} of master weights and moments, "
        f"{stored} of gradients"
    )
