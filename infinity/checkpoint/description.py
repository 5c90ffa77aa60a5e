"""Description of a rank's pages. Every manifest contains it, so that the pages can be read without the model.

docs/reference/on-disk-format.md describes the fields.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from infinity.content.format import ENCODINGS, HALVES, ITEMSIZE, MASTER, StateFormat
from infinity.content.layout import RANGE_ALIGNMENT, FSDPModuleSpec, Layout, ShardSpec, build_layout
from infinity.content.spans import Ranges, Spans, numel
from infinity.errors import BudgetError
from infinity.schema import MOST, brief, distinct, flag, integer, one_of, record, row, sequence, table, text

_MOST_BLOCKS = 1 << 12  # blocks of adjacent elements that the spans of a slice form
_MOST_PAGES = 1 << 22  # 16 TiB per rank in pages of 4 MiB; larger layouts are rejected


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """A full parameter and the slice that this rank holds."""

    names: tuple[str, ...]
    """All names of the parameter in the model. A tied parameter has several."""
    shape: tuple[int, ...]
    """Shape of the full parameter."""
    spans: Spans
    """Spans of the slice that this rank holds."""

    @property
    def parameters(self) -> int:
        """Number of elements of the full parameter."""
        return math.prod(self.shape)

    @property
    def held(self) -> int:
        """Number of elements of the slice that this rank holds."""
        return numel(self.spans)


_SIZE = integer(0, 1 << 48)
_DTYPE = one_of(*ITEMSIZE)
_SHARD = record(
    ShardSpec,
    lacking=("row",),  # absent where pages may end anywhere
    name=text(),
    numel=_SIZE,
    padded=_SIZE,
    segment_key=text(),
    trainable=flag,
    row=integer(1, 1 << 48),
)
_FORMAT = record(
    StateFormat,
    param=_DTYPE,
    master=one_of("", *ITEMSIZE),
    kinds=sequence(row(text(rf"(?!{MASTER}$).+"), _DTYPE)),
    grads=sequence(one_of(*ITEMSIZE), most=len(HALVES)),
    encodings=sequence(row(text(), one_of(*ENCODINGS))),
)
_TENSOR = record(
    TensorSpec,
    names=sequence(text(), least=1),
    shape=sequence(_SIZE, most=64),
    spans=sequence(sequence(row(_SIZE, _SIZE), least=1), most=64),
)
DESCRIPTION = record(
    fsdp_modules=sequence(record(FSDPModuleSpec, name=text(), shards=sequence(_SHARD))),
    formats=table(text(), _FORMAT),
    tensors=sequence(_TENSOR),
    buffers=distinct(sequence(text())),
)


@dataclass(frozen=True, kw_only=True)
class RunDescription:
    """The pages of one rank and the parameters that they belong to, shard by shard.

    `buffers` contains the names of the model's persistent buffers, whose values are in the state files.
    """

    layout: Layout
    tensors: tuple[TensorSpec, ...]
    buffers: tuple[str, ...]

    @cached_property
    def plain(self) -> dict[str, Any]:
        """The description as JSON data, without the page size."""
        layout = self.layout
        formats = {
            layout.shards[shard].spec.segment_key: asdict(segment.format)
            for segment in layout.segments
            for shard in segment.shards
        }
        return {
            "fsdp_modules": [fsdp_module.tree for fsdp_module in layout.fsdp_modules],
            "formats": formats,
            "tensors": [asdict(tensor) for tensor in self.tensors],
            "buffers": self.buffers,
        }

    @classmethod
    def from_plain(cls, values: Mapping[str, Any], page_bytes: int) -> RunDescription:
        """Return the description for values that `DESCRIPTION` has validated.

        Raises:
            ValueError: if the values contradict each other or exceed a limit.
        """
        fsdp_modules, tensors = values["fsdp_modules"], values["tensors"]
        _check_layout(fsdp_modules, values["formats"], page_bytes)
        _check_tensors(tensors, [shard for fsdp_module in fsdp_modules for shard in fsdp_module.shards])
        try:
            layout = build_layout(fsdp_modules, values["formats"], page_bytes)
        except BudgetError as error:  # a row does not fit into a page
            raise ValueError(f"page_bytes: {error}") from error
        return cls(layout=layout, tensors=tensors, buffers=values["buffers"])


def _check_layout(fsdp_modules: tuple[FSDPModuleSpec, ...], formats: dict[str, StateFormat], page_bytes: int) -> None:
    """Check that a layout can be built from these values, before memory is allocated for it."""
    nbytes, number = 0.0, 0
    for fmt in formats.values():
        fmt.check()
        sizes = (ITEMSIZE[fmt.param], fmt.update_bytes, *(ITEMSIZE[dtype] for dtype in fmt.grads))
        if max(sizes) * RANGE_ALIGNMENT > page_bytes:
            raise ValueError(f"page_bytes: {page_bytes} is too small for the state of {RANGE_ALIGNMENT} elements")
    for shard in (shard for fsdp_module in fsdp_modules for shard in fsdp_module.shards):
        if shard.segment_key not in formats or shard.numel > shard.padded:
            raise ValueError(f"FSDP modules: {brief(shard)} is not a valid shard")
        fmt = formats[shard.segment_key]
        if shard.trainable != bool(fmt.grads):
            raise ValueError(f"fsdp_modules: shard {brief(shard)} is invalid for the state format {brief(fmt)}")
        nbytes += (shard.padded + RANGE_ALIGNMENT) * (fmt.state_bytes + sum(ITEMSIZE[dtype] for dtype in fmt.grads))
        number += 2 + len(fmt.grads)
    # `layout` divides pages about evenly, so all but one per role and segment are at least one eighth full.
    if 8 * nbytes // page_bytes + number > _MOST_PAGES:
        raise ValueError(f"FSDP modules: they need more than {_MOST_PAGES} pages")


def _check_tensors(tensors: tuple[TensorSpec, ...], shards: list[ShardSpec]) -> None:
    """Check that every tensor matches its shard, and that names are unique."""
    if len(tensors) != len(shards):
        raise ValueError(f"{len(tensors)} tensors for {len(shards)} shards")
    names = [name for tensor in tensors for name in tensor.names]
    if len(set(names)) != len(names):
        raise ValueError("tensors: duplicate name")
    for tensor, shard in zip(tensors, shards, strict=True):
        blocks = math.prod(map(len, tensor.spans))
        inside = len(tensor.spans) == len(tensor.shape) and all(map(_inside, tensor.spans, tensor.shape))
        countable = math.prod(max(1, size) for size in tensor.shape) <= MOST
        if (
            not (inside and countable and blocks <= _MOST_BLOCKS)
            or tensor.held != shard.numel
            or tensor.names[0] != shard.name
        ):
            raise ValueError(f"tensors: {brief(tensor.names[0])} does not match its shard")


def _inside(ranges: Ranges, size: int) -> bool:
    """Return whether ranges are in order, separate, not empty and within a dimension of the given size."""
    bounds = [bound for each in ranges for bound in each]
    return ranges == ((0, 0),) or (bounds == sorted(set(bounds)) and bounds[-1] <= size)
