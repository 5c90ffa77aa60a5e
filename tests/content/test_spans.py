"""Tests of slices of parameters as ranges of indices."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from infinity.content.spans import Spans, chunk, full_spans, overlaps, sizes_of, tile

DIVISIONS = st.lists(
    st.tuples(st.integers(0, 1), st.integers(1, 4), st.sampled_from([1, 1, 2, 3])), min_size=1, max_size=3
)
"""Dimension, number of slices, and number of parts of a fused weight, one division after the other."""


def divided(values: torch.Tensor, dim: int, count: int, parts: int) -> list[torch.Tensor]:
    """Return the slices of a tensor, each with a chunk of every part."""
    of_part = [torch.chunk(part, count, dim) for part in torch.chunk(values, parts, dim)]
    empty = values.narrow(dim, 0, 0)
    return [torch.cat([empty, *(one[index] for one in of_part if index < len(one))], dim) for index in range(count)]


def every_slice(shape: tuple[int, int], divisions: list[tuple[int, int, int]]) -> list[tuple[Spans, torch.Tensor]]:
    """Return the spans and the elements of all slices."""
    slices = [(full_spans(shape), torch.arange(math.prod(shape)).view(shape))]
    for dim, count, parts in divisions:
        slices = [
            (chunk(spans, dim, index, count, parts), part)
            for spans, values in slices
            for index, part in enumerate(divided(values, dim, count, parts))
        ]
    return slices


@given(st.tuples(st.integers(1, 9), st.integers(1, 9)), DIVISIONS, DIVISIONS)
def test_slices_are_those_of_torch_chunk_and_can_be_divided_differently(
    shape: tuple[int, int], before: list[tuple[int, int, int]], after: list[tuple[int, int, int]]
) -> None:
    slices = every_slice(shape, before)
    held = [spans for spans, values in slices if values.numel()]
    assert tile(shape, held)
    assert len(held) == 1 or not tile(shape, held[1:])
    assert len(held) == 1 or not tile(shape, [*held[1:], held[1]])
    for spans, values in every_slice(shape, after):
        assert sizes_of(spans) == tuple(values.shape)
        found = torch.full_like(values, -1)
        for other, there in slices:
            for source, target in overlaps(other, spans):
                found[target] = there[source]
        assert torch.equal(found, values)


def test_scalar_has_one_slice() -> None:
    assert tile((), [()])
    assert not tile((), [])
    assert list(overlaps((), ())) == [((), ())]


def test_overlapping_slices_of_the_right_size_do_not_tile() -> None:
    one, other = (((0, 2),), ((0, 2),)), (((1, 3),), ((0, 2),))
    assert not tile((4, 2), [one, other])
