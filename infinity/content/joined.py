"""Joined pages: consecutive pages of one kind, whose arrays are contiguous across the pages.

On a GPU, updates process joined pages, so that the optimizer updates each parameter in one piece.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from infinity.content.format import ITEMSIZE, Component, Role
from infinity.content.layout import Layout, Page
from infinity.units import align_up

_ALIGNMENT = 256
"""Alignment of joined pages in bytes, as in PyTorch's CUDA allocator."""


class Array(NamedTuple):
    """Contiguous items of one kind in a page."""

    page: int
    """Index of the page, or -1 for a gap between joined pages."""
    offset: int
    """Offset in the page, in bytes."""
    nbytes: int
    """Length in bytes."""


class JoinedPages:
    """Arrangement of pages in contiguous memory.

    Attributes:
        arrays: content of the memory, in order.
        sizes: lengths of `arrays`, in bytes.
        nbytes: total length, in bytes.
        pages: joined pages, each with its first byte and the byte after its last one in the memory. A joined page has
            the index of its first page.

    Args:
        pages: pages of one FSDP module, in element order within each kind.
        within: elements [start, stop) to which pages of weights and gradients are limited, by segment. By default, all
            elements.
    """

    def __init__(
        self, layout: Layout, pages: Iterable[Page], within: Mapping[int, tuple[int, int]] | None = None
    ) -> None:
        runs: list[list[Page]] = []
        last: dict[tuple[int, Role, int], list[Page]] = {}  # by kind
        for page in pages:
            kind = page.segment, page.role, page.component
            if kind not in last or last[kind][-1].stop != page.start:
                last[kind] = []
                runs.append(last[kind])
            last[kind].append(page)
        self.arrays: list[Array] = []
        self.pages: list[tuple[Page, int, int]] = []
        end = 0
        for run in runs:
            begin, start, stop = end, run[0].start, run[-1].stop
            if within and run[0].role is not Role.UPDATE:
                lowest, highest = within[run[0].segment]
                start, stop = max(start, lowest), min(stop, highest)
            for component in _components(layout, run[0]):
                for page in run:
                    low, high = max(start, page.start) - page.start, min(stop, page.stop) - page.start
                    size = ITEMSIZE[component.dtype]
                    offset = int(component.offset * page.count) + low // component.each * size
                    self.arrays.append(Array(page.index, offset, (high - low) // component.each * size))
                    end += self.arrays[-1].nbytes
            joined = replace(run[0], start=start, count=stop - start, nbytes=end - begin)
            self.pages.append((joined, begin, end))
            self.arrays.append(Array(-1, 0, align_up(end, _ALIGNMENT) - end))
            end = align_up(end, _ALIGNMENT)
        self.sizes = [array.nbytes for array in self.arrays]
        self.nbytes = end


def _components(layout: Layout, page: Page) -> Sequence[Component]:
    """Return the arrays in a page, in order."""
    fmt = layout.segments[page.segment].format
    if page.role is Role.PARAM:
        return (fmt.weights,)
    if page.role is Role.GRAD:
        return (Component(Role.GRAD, fmt.grads[page.component], 1, 0.0),)
    found = {component for part in fmt.components.values() for component in part if component.role is Role.UPDATE}
    return sorted(found, key=lambda component: component.offset)
