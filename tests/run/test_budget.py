"""Tests of the default page size, which depends on the host cache and the model."""

from __future__ import annotations

import pytest
from hypothesis import given

from infinity.budget import choose_budget, widest_access
from infinity.content.layout import FSDPModuleSpec, Layout, ShardSpec
from infinity.errors import BudgetError
from infinity.schedule.trace import range_access
from support.layouts import FORMATS, layouts

MIB, GIB = 1 << 20, 1 << 30


def model(fsdp_modules: int, elements: int) -> list[FSDPModuleSpec]:
    """Return equal FSDP modules with one trainable matrix each."""
    return [
        FSDPModuleSpec(
            name=f"u{fsdp_module}",
            shards=(
                ShardSpec(
                    name=f"u{fsdp_module}.w", numel=elements, padded=elements, segment_key="halves", trainable=True
                ),
            ),
        )
        for fsdp_module in range(fsdp_modules)
    ]


@pytest.mark.parametrize(
    ("fsdp_modules", "elements", "host", "expected"),
    [
        (16, 7_000_000, GIB, 8 * MIB),  # few pages: default size
        (32, 218_000_000, 32 * GIB, 32 * MIB),  # 7 billion parameters: doubled until there are at most 4096 pages
        (32, 218_000_000, 4 * GIB, 16 * MIB),  # the host cache keeps 256 cache slots
        (32, 218_000_000, 3 * GIB, 8 * MIB),  # 16 MiB pages would leave fewer than 256 cache slots
        (80, 856_000_000, 512 * GIB, 256 * MIB),  # 70 billion parameters: maximum size
        (500, 6 * 341 * 2048, 16 * GIB, 8 * MIB),  # 16 MiB pages would be less than 80% full
    ],
)
def test_page_size_grows_with_the_state(fsdp_modules: int, elements: int, host: int, expected: int) -> None:
    """Pages grow as long as the host cache keeps enough cache slots and the pages are well filled."""
    budget = choose_budget(model(fsdp_modules, elements), FORMATS, host, 0)
    assert budget.layout.page_bytes == expected


@pytest.mark.parametrize(
    ("fsdp_modules", "elements", "host", "expected"),
    [
        (8, 51_000_000, 10 * GIB, 64 * MIB),  # 412 million parameters: all pages fit in the host cache
        (8, 51_000_000, 2 * GIB, 8 * MIB),  # larger pages would leave fewer than 256 cache slots
        (32, 218_000_000, 4 * GIB, 16 * MIB),  # the host cache keeps 256 cache slots
        (32, 218_000_000, 128 * GIB, 64 * MIB),  # 7 billion parameters: maximum size
    ],
)
def test_page_size_grows_earlier_on_a_gpu(fsdp_modules: int, elements: int, host: int, expected: int) -> None:
    """The Python overhead per page is a larger part of a GPU step."""
    assert choose_budget(model(fsdp_modules, elements), FORMATS, host, 0, device=True).layout.page_bytes == expected


def test_configured_page_size_is_used() -> None:
    assert choose_budget(model(32, 218_000_000), FORMATS, 32 * GIB, 8 * MIB).layout.page_bytes == 8 * MIB


def test_page_size_fits_long_rows() -> None:
    """Long rows, such as stacked expert matrices, raise the page size to the size that they need, up to a limit."""

    def stack(row: int) -> list[FSDPModuleSpec]:
        spec = ShardSpec(name="w", numel=8 * row, padded=8 * row, segment_key="plain", trainable=True, row=row)
        return [FSDPModuleSpec(name="u", shards=(spec,))]

    assert choose_budget(stack(1 << 21), FORMATS, 4 * GIB, 0).layout.page_bytes == 32 * MIB
    with pytest.raises(BudgetError, match=r"whole rows of w, .*memory\.page_bytes"):
        choose_budget(stack(1 << 26), FORMATS, 64 * GIB, 0)


@given(layouts())
def test_widest_access_is_the_longest_access_of_an_update(layout: Layout) -> None:
    """The number of pages of each access is counted without building the access."""
    accesses = [
        range_access(segment, position, components=len(segment.grad_pages))
        for fsdp_module in layout.fsdp_module_ranges
        for segment, position in fsdp_module
    ]
    assert widest_access(layout) == max(map(len, accesses), default=1)
