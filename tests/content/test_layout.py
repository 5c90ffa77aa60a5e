"""Tests of the layout: every byte has one location, and page boundaries are aligned for vectorized kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.content.format import ITEMSIZE, SHARD_ALIGNMENT, Role
from infinity.content.layout import (
    PAGE_ALIGNMENT,
    RANGE_ALIGNMENT,
    FSDPModuleSpec,
    Layout,
    Page,
    ShardSpec,
    build_layout,
    overlapping,
)
from infinity.errors import BudgetError
from support.layouts import FORMATS, layouts


def element_bytes(layout: Layout, page: Page) -> float:
    """Return the number of bytes per element of a page."""
    fmt = layout.segments[page.segment].format
    if page.role is Role.UPDATE:
        parts = [part for section in fmt.components.values() for part in section if part.role is Role.UPDATE]
        return sum(ITEMSIZE[part.dtype] / part.each for part in parts)
    return ITEMSIZE[fmt.param if page.role is Role.PARAM else fmt.grads[page.component]]


@settings(max_examples=40)
@given(layouts())
def test_every_element_is_in_exactly_one_page_per_role(layout: Layout) -> None:
    """The pages of a role cover the elements of the segment, and no page belongs to two segments."""
    seen: list[int] = []
    for index, segment in enumerate(layout.segments):
        fmt = segment.format
        wanted = {
            (Role.PARAM, 0): (segment.param_pages, True),
            (Role.UPDATE, 0): (segment.update_pages, bool(fmt.master or fmt.kinds)),
            **{(Role.GRAD, number): (pages, True) for number, pages in enumerate(segment.grad_pages)},
        }
        assert len(segment.grad_pages) == len(fmt.grads)
        for (role, component), (pages, exists) in wanted.items():
            covered = [n for page in pages for n in (page.start, page.stop)]
            if exists:
                assert covered[0] == 0
                assert covered[-1] == segment.numel
                assert all(a.stop == b.start for a, b in pairwise(pages))
            else:
                assert pages == ()
            assert all((page.role, page.component) == (role, component) and page.segment == index for page in pages)
            assert all(page.fsdp_module == segment.fsdp_module for page in pages)
            seen += [page.index for page in pages]
    assert sorted(seen) == list(range(len(layout.pages)))
    assert all(layout.pages[page.index] is page for page in layout.pages)


@settings(max_examples=40)
@given(layouts())
def test_pages_fit_cache_slots_and_are_aligned(layout: Layout) -> None:
    """Sizes suit O_DIRECT, boundaries suit vectorized kernels, and names are unique."""
    for page in layout.pages:
        assert 0 < page.nbytes <= layout.page_bytes
        assert page.nbytes % PAGE_ALIGNMENT == 0
        assert 0 <= page.nbytes - page.count * element_bytes(layout, page) < PAGE_ALIGNMENT
        assert page.start % RANGE_ALIGNMENT == 0
        assert page.count % RANGE_ALIGNMENT == 0
        assert layout.page_name(page.index).startswith(layout.fsdp_modules[page.fsdp_module].name)
    assert len({layout.page_name(page.index) for page in layout.pages}) == len(layout.pages)


@settings(max_examples=40)
@given(layouts())
def test_shards_of_a_segment_do_not_overlap(layout: Layout) -> None:
    """A segment contains all padded elements of its shards, and formats are preserved.

    Shards are listed by FSDP module in gather order, and trainable segments by FSDP module.
    """
    assert [placed.spec for placed in layout.shards] == [
        spec for fsdp_module in layout.fsdp_modules for spec in fsdp_module.shards
    ]
    for number, segment in enumerate(layout.segments):
        placed = [layout.shards[index] for index in segment.shards]
        assert placed
        assert all(shard.segment == number and shard.fsdp_module == segment.fsdp_module for shard in placed)
        assert all(FORMATS[shard.spec.segment_key] == segment.format for shard in placed)
        assert all(shard.start % SHARD_ALIGNMENT == 0 for shard in placed)
        assert all(a.start + a.spec.padded <= b.start for a, b in pairwise(placed))
        assert placed[-1].start + placed[-1].spec.padded <= segment.numel
    assert layout.parameters == sum(spec.numel for fsdp_module in layout.fsdp_modules for spec in fsdp_module.shards)
    for fsdp_module in range(len(layout.fsdp_modules)):
        expected = [index for index, shard in enumerate(layout.shards) if shard.fsdp_module == fsdp_module]
        assert list(layout.fsdp_module_shards[fsdp_module]) == expected
        trained = {layout.shards[index].segment for index in expected if layout.shards[index].spec.trainable}
        assert set(layout.fsdp_module_segments[fsdp_module]) == trained


@settings(max_examples=40)
@given(layouts(), st.data())
def test_overlapping_finds_the_pages_of_a_range(layout: Layout, data: st.DataObject) -> None:
    """The result matches a search over all pages."""
    segment = data.draw(st.sampled_from(layout.segments))
    pages = segment.param_pages
    start = data.draw(st.integers(0, segment.numel))
    stop = data.draw(st.integers(start, segment.numel))
    found = list(overlapping(pages, start, stop))
    assert found == brute_force(pages, start, stop)
    assert sum(last - first for _, first, last in found) == stop - start


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 400)), min_size=1, max_size=4), st.sampled_from([64, 128]))
def test_pages_contain_complete_rows(shapes: list[tuple[int, int]], kib: int) -> None:
    """A page boundary never isolates the last row; pages are aligned, fit their slots and leave no gaps."""
    specs = tuple(
        ShardSpec(
            name=str(index), numel=rows * 8 * row, padded=rows * 8 * row, segment_key="plain", trainable=True, row=row
        )
        for index, (rows, row) in enumerate(shapes)
    )
    try:
        layout = build_layout([FSDPModuleSpec(name="fsdp_module", shards=specs)], FORMATS, kib << 10)
    except BudgetError:  # an odd row needs a page of 64 rows
        assert max(math.lcm(row, SHARD_ALIGNMENT) + 2 * row for _, row in shapes) > (kib << 10) / 12 - RANGE_ALIGNMENT
        return
    for segment in layout.segments:
        for pages in (segment.param_pages, segment.update_pages, *segment.grad_pages):
            assert [page.start for page in pages] == [0, *(page.stop for page in pages)][:-1]
            assert not pages or pages[-1].stop == segment.numel
            for page in pages:
                assert page.nbytes <= layout.page_bytes
                assert page.start % SHARD_ALIGNMENT == 0
                for placed in layout.shards:
                    inside = page.start - placed.start
                    if 0 < inside < placed.spec.numel:
                        assert inside % placed.spec.row == 0
                        assert placed.spec.numel - inside >= 2 * placed.spec.row


def brute_force(pages: Sequence[Page], start: int, stop: int) -> list[tuple[Page, int, int]]:
    """Return (page, first, last) by testing the boundaries of every page."""
    cut = [(page, max(start, page.start), min(stop, page.stop)) for page in pages]
    return [(page, first, last) for page, first, last in cut if first < last]


@settings(max_examples=40)
@given(layouts())
def test_fingerprint_identifies_a_layout(layout: Layout) -> None:
    """It changes with the page size, names and lengths."""
    fsdp_modules, page_bytes = layout.fsdp_modules, layout.page_bytes
    assert build_layout(fsdp_modules, FORMATS, page_bytes).fingerprint == layout.fingerprint
    assert build_layout(fsdp_modules, FORMATS, 2 * page_bytes).fingerprint != layout.fingerprint
    spec = fsdp_modules[0].shards[0]
    for changed in (replace(spec, name="other"), replace(spec, padded=spec.padded + 1)):
        other = (
            FSDPModuleSpec(name=fsdp_modules[0].name, shards=(changed, *fsdp_modules[0].shards[1:])),
            *fsdp_modules[1:],
        )
        assert build_layout(other, FORMATS, page_bytes).fingerprint != layout.fingerprint
