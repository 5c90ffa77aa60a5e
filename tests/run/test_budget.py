"""The page size that is derived from host cache and model, by arithmetic alone."""

from __future__ import annotations

import pytest

from infinity.budget import choose_budget
from infinity.content.layout import FSDPModuleSpec, ShardSpec
from infinity.errors import BudgetError
from support.layouts import FORMATS

MIB, GIB = 1 << 20, 1 << 30


def model(fsdp_modules: int, elements: int) -> list[FSDPModuleSpec]:
    """Return equal FSDP modules of one trained matrix."""
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
        (16, 7_000_000, GIB, 8 * MIB),  # few pages stay as they are
        (32, 218_000_000, 32 * GIB, 32 * MIB),  # 7 billion parameters: doubled until no more than 4096
        (32, 218_000_000, 4 * GIB, 16 * MIB),  # the host cache keeps 256 cache slots
        (32, 218_000_000, 3 * GIB, 8 * MIB),  # it would not with pages of 16 MiB
        (80, 856_000_000, 512 * GIB, 256 * MIB),  # 70 billion: never more than this
        (500, 6 * 341 * 2048, 16 * GIB, 8 * MIB),  # pages of 16 MiB would be less than 80 % full
    ],
)
def test_a_state_of_many_pages_has_larger_ones(fsdp_modules: int, elements: int, host: int, expected: int) -> None:
    """As large as it takes, as far as the host cache keeps enough cache slots and pages fill them."""
    budget = choose_budget(model(fsdp_modules, elements), FORMATS, host, 0)
    assert budget.layout.page_bytes == expected


@pytest.mark.parametrize(
    ("fsdp_modules", "elements", "host", "expected"),
    [
        (8, 51_000_000, 10 * GIB, 8 * MIB),  # 412 million parameters: fewer than 1024 pages
        (32, 218_000_000, 4 * GIB, 16 * MIB),  # the host cache keeps 256 cache slots
        (32, 218_000_000, 128 * GIB, 64 * MIB),  # 7 billion: never more than this
    ],
)
def test_pages_that_a_gpu_computes_with_are_larger_sooner(
    fsdp_modules: int, elements: int, host: int, expected: int
) -> None:
    """Python for each of them shows sooner."""
    assert choose_budget(model(fsdp_modules, elements), FORMATS, host, 0, device=True).layout.page_bytes == expected


def test_a_page_size_that_is_set_is_taken() -> None:
    """However many pages there are."""
    assert choose_budget(model(32, 218_000_000), FORMATS, 32 * GIB, 8 * MIB).layout.page_bytes == 8 * MIB


def test_rows_that_need_larger_pages_get_them() -> None:
    """Such as the matrices of a stack of experts; no larger than they need, and not without end."""

    def stack(row: int) -> list[FSDPModuleSpec]:
        spec = ShardSpec(name="w", numel=8 * row, padded=8 * row, segment_key="plain", trainable=True, row=row)
        return [FSDPModuleSpec(name="u", shards=(spec,))]

    assert choose_budget(stack(1 << 21), FORMATS, 4 * GIB, 0).layout.page_bytes == 32 * MIB
    with pytest.raises(BudgetError, match=r"whole rows of w, .*memory\.page_bytes"):
        choose_budget(stack(1 << 26), FORMATS, 64 * GIB, 0)
