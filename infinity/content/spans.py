"""Slices of full parameters, as ranges of indices. This module does not import torch.

The *spans* of a slice are, for each dimension of the parameter, the ranges [first, last) of the indices that the slice
contains, in order. The slice contains every element whose indices are all within these ranges. Usually, each dimension
has one range. Tensor parallelism of fused weights, such as the gate and up projections, takes one range of each part.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise, product

Ranges = tuple[tuple[int, int], ...]
Spans = tuple[Ranges, ...]


def full_spans(shape: Sequence[int]) -> Spans:
    """Return the spans of a full parameter."""
    return tuple(((0, size),) for size in shape)


def sizes_of(spans: Spans) -> tuple[int, ...]:
    """Return the shape of a slice."""
    return tuple(sum(last - first for first, last in ranges) for ranges in spans)


def numel(spans: Spans) -> int:
    """Return the number of elements of a slice."""
    return math.prod(sizes_of(spans))


def chunk(spans: Spans, dim: int, index: int, count: int, parts: int = 1) -> Spans:
    """Return one of the slices into which `torch.chunk` divides a slice.

    Args:
        spans: Slice to divide.
        dim: Dimension to divide.
        index: Index of the slice to return. It is empty if there are fewer slices.
        count: Number of slices.
        parts: Number of parts into which `torch.chunk` divides the dimension first. The slices contain a chunk of each
            part.
    """
    found: list[tuple[int, int]] = []
    size = sizes_of(spans)[dim]
    of_part = -(-size // parts)
    for start in range(0, size, of_part or 1):
        stop = min(start + of_part, size)
        each = -(-(stop - start) // count)
        found += _select(spans[dim], min(start + index * each, stop), min(start + (index + 1) * each, stop))
    joined: list[tuple[int, int]] = []
    for first, last in found:
        if joined and joined[-1][1] == first:
            first = joined.pop()[0]
        joined.append((first, last))
    return (*spans[:dim], tuple(joined) or ((0, 0),), *spans[dim + 1 :])


def _select(ranges: Ranges, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of the indices at positions [start, stop) of `ranges`."""
    position = 0
    for first, last in ranges:
        low, high = max(start, position), min(stop, position + last - first)
        if low < high:
            yield first + low - position, first + high - position
        position += last - first


def overlaps(one: Spans, other: Spans) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Yield the parts that two slices of a parameter have in common, as slices of both, one per dimension."""
    yield from (
        (tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs))
        for pairs in product(*(list(_common(*ranges)) for ranges in zip(one, other, strict=True)))
    )


def _common(one: Ranges, other: Ranges) -> Iterator[tuple[slice, slice]]:
    for (low, high), position in _placed(one):
        for (first, last), start in _placed(other):
            begin, end = max(low, first), min(high, last)
            if begin < end:
                yield (
                    slice(begin - low + position, end - low + position),
                    slice(begin - first + start, end - first + start),
                )


def _placed(ranges: Ranges) -> Iterator[tuple[tuple[int, int], int]]:
    """Yield each range and its position in the slice."""
    position = 0
    for each in ranges:
        yield each, position
        position += each[1] - each[0]


def tile(shape: Sequence[int], slices: Collection[Spans]) -> bool:
    """Return whether slices, none of which is empty or repeated, contain each element of a parameter exactly once."""
    for dim in range(len(shape)):
        ranges = sorted({each for spans in slices for each in spans[dim]})
        if any(last > first for (_, last), (first, _) in pairwise(ranges)):
            return False
    # The ranges of each dimension are disjoint, and so are the boxes that they form.
    boxes = [box for spans in slices for box in product(*spans)]
    held = sum(math.prod(last - first for first, last in box) for box in boxes)
    return len(set(boxes)) == len(boxes) and held == math.prod(shape)
