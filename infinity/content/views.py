"""The bytes of pages as tensors: views of what a page holds, and sections of the state from and to their rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch

from infinity.content.encoding import decode, encode, halves, joined
from infinity.content.format import HALVES, MASTER, SHARD_ALIGNMENT, Role, Row, StateFormat
from infinity.content.layout import Layout, Page, Segment, overlapping
from infinity.units import align_down, align_up


@cache
def torch_dtype(name: str) -> torch.dtype:
    """Return a dtype from its name in a `StateFormat`.

    Raises:
        TypeError: it is the name of something else in torch.
    """
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name} is not a dtype")
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype as a `StateFormat` has it."""
    return str(dtype).removeprefix("torch.")


def section(content: memoryview, page: Page, layout: Layout, start: int, stop: int) -> torch.Tensor:
    """Return elements [start, stop) of the segment, of a PARAM or GRAD page: a view, shape (stop - start,)."""
    fmt = layout.segments[page.segment].format
    return _items(
        content, fmt.param if page.role is Role.PARAM else fmt.grads[page.row], 0, start - page.start, stop - page.start
    )


def _items(content: memoryview, dtype: str, offset: int, low: int, high: int) -> torch.Tensor:
    """Return items [low, high) of those of `dtype` that begin `offset` bytes into a page.

    One call, and one that keeps the GIL: each that lets go of it lets another thread in, and that has to be waited for.
    """
    kind = torch_dtype(dtype)
    return torch.frombuffer(content, dtype=kind, count=high - low, offset=offset + low * kind.itemsize)


def row_of(content: memoryview, page: Page, row: Row, start: int, stop: int) -> torch.Tensor:
    """Return the items of a row for elements [start, stop) of the segment, of a page: a view.

    Its shape is ((stop - start) / row.each,); both must be multiples of `row.each`.
    """
    low, high = (start - page.start) // row.each, (stop - page.start) // row.each
    return _items(content, row.dtype, int(row.offset * page.count), low, high)


def put(content: memoryview, page: Page, row: Row, start: int, items: torch.Tensor) -> None:
    """Write those of some items that a page holds; the rest is passed over.

    Args:
        content: of the page.
        items: shape (n,), of one row, from element `start` of the segment on.
    """
    low, high = max(start, page.start), min(start + len(items) * row.each, page.stop)
    if low < high:
        row_of(content, page, row, low, high).copy_(items[(low - start) // row.each : (high - start) // row.each])


def take(content: memoryview, page: Page, row: Row, start: int, items: torch.Tensor) -> None:
    """Read into some items those that a page holds; the rest stays as it is. See `put`."""
    low, high = max(start, page.start), min(start + len(items) * row.each, page.stop)
    if low < high:
        items[(low - start) // row.each : (high - start) // row.each] = row_of(content, page, row, low, high)


def read_section(
    segment: Segment, name: str, start: int, stop: int, visit: Callable[[Page, Callable[[memoryview], None]], None]
) -> torch.Tensor:
    """Return elements [start, stop) of a segment in one section (``master`` or a state kind), decoded.

    Returns:
        A new tensor, shape (stop - start,), in the dtype that the optimizer sees.

    Args:
        visit: calls the function that it is given with the content of a page.
    """
    rows, encoding = segment.format.rows[name], segment.format.encoded.get(name)
    low, high = (align_down(start, SHARD_ALIGNMENT), align_up(stop, SHARD_ALIGNMENT)) if encoding else (start, stop)
    items = [torch.empty((high - low) // row.each, dtype=torch_dtype(row.dtype)) for row in rows]
    for role in dict.fromkeys(row.role for row in rows):
        for page, _, _ in overlapping(segment.pages(role), low, high):

            def copy(content: memoryview, page: Page = page) -> None:
                for row, part in zip(rows, items, strict=True):
                    if row.role is page.role:
                        take(content, page, row, low, part)

            visit(page, copy)
    return decode(items, encoding)[start - low : stop - low] if encoding else items[0]


def stored(
    fmt: StateFormat, name: str, values: torch.Tensor, step: int | None = None
) -> list[tuple[Row, torch.Tensor]]:
    """Return the items of a section's rows; with the master also the weights.

    Args:
        values: flat, of a shard from a multiple of `SHARD_ALIGNMENT` on.
        step: see `encode`.
    """
    if name not in fmt.encoded:
        rows = [*fmt.rows[name], *([fmt.weights] if name == MASTER and fmt.replaces_weights else [])]
        return [(row, values) for row in rows]
    padding = align_up(len(values), SHARD_ALIGNMENT) - len(values)
    padded = torch.nn.functional.pad(values, (0, padding))
    return list(zip(fmt.rows[name], encode(padded, fmt.encoded[name], step), strict=True))


def gradient_rows(fmt: StateFormat, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the rows of a gradient as GRAD pages hold them: views of `values`, shape (n,)."""
    return halves(values) if fmt.grads == HALVES else (values,)


def gradient_of(fmt: StateFormat, rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a gradient, shape (n,), from the rows of it that are stored."""
    return joined(rows) if fmt.grads == HALVES else rows[0]
