"""Which bytes of this rank's state lie in which page. Pure arithmetic: no I/O, no torch.

A unit's shards are grouped into *segments*: shards that share dtype and state format. A segment is one
element space, shards back to back, each starting at a multiple of `SHARD_ALIGNMENT` elements. Its PARAM
pages cut that space evenly; its UPDATE pages cut it again, and hold for their range of elements master and
moments one after the other; its GRAD pages cut it a third time.

[Note: alignment and bits] Vectorised kernels treat the last few elements of a tensor with scalar code.
Because every cut is a multiple of `RANGE_ALIGNMENT` elements from the segment's start, and every shard starts
at a multiple of `SHARD_ALIGNMENT`, a slice of a shard is cut at a multiple of the widest vector: an element is
treated by the same code whether the shard is updated whole or in slices.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from functools import cached_property

from infinity.units import align_down, align_up

SHARD_ALIGNMENT = 64
RANGE_ALIGNMENT = 1024
PAGE_ALIGNMENT = 4096
MASTER = "master"
ITEMSIZE = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
    "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip


class Role(Enum):
    """What a page is for."""

    PARAM = "param"
    UPDATE = "update"
    GRAD = "grad"


@dataclass(frozen=True, kw_only=True)
class StateFormat:
    """Persistent state of one element; dtypes by their torch names.

    `master` is empty where the parameters are trained in the dtype they are computed in: then the PARAM pages are
    the master. `kinds` are the optimizer's own element-wise states, in order, as (name, dtype); parameters that are
    not trained have none, and no `grad`.
    """

    param: str
    master: str = ""
    kinds: tuple[tuple[str, str], ...] = ()
    grad: str = ""

    @cached_property
    def sections(self) -> tuple[tuple[str, str], ...]:
        """What an update page holds, in order, as (name, dtype)."""
        return ((MASTER, self.master), *self.kinds) if self.master else self.kinds

    @cached_property
    def update_bytes(self) -> int:
        """Bytes of one element in an update page."""
        return sum(ITEMSIZE[dtype] for _, dtype in self.sections)

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Where each section starts in an update page, in bytes per element of the page."""
        offsets, position = {}, 0
        for name, dtype in self.sections:
            offsets[name] = position
            position += ITEMSIZE[dtype]
        return offsets

    @property
    def state_bytes(self) -> int:
        """Persistent bytes of one element, gradients left out."""
        return ITEMSIZE[self.param] + self.update_bytes


@dataclass(frozen=True, kw_only=True)
class ShardSpec:
    """This rank's slice of one parameter, in elements: `padded` is what is gathered, `numel` what is real."""

    name: str
    numel: int
    padded: int
    segment_key: str
    trainable: bool


@dataclass(frozen=True, kw_only=True)
class UnitSpec:
    """One `fully_shard` group: its shards in the order in which they are gathered."""

    name: str
    shards: tuple[ShardSpec, ...]


@dataclass(frozen=True, kw_only=True)
class Placed:
    """Where a shard lies: elements [start, start + padded) of a segment."""

    spec: ShardSpec
    unit: int
    segment: int
    start: int


@dataclass(frozen=True, kw_only=True)
class Page:
    """Elements [start, start + count) of a segment in one role; `nbytes` is a multiple of PAGE_ALIGNMENT."""

    index: int
    role: Role
    unit: int
    segment: int
    start: int
    count: int
    nbytes: int

    @property
    def stop(self) -> int:
        """First element behind the page."""
        return self.start + self.count


@dataclass(frozen=True, kw_only=True)
class Segment:
    """One element space of a unit and the pages over it, each tuple in element order."""

    unit: int
    format: StateFormat
    trainable: bool
    numel: int
    shards: tuple[int, ...]
    param_pages: tuple[Page, ...]
    update_pages: tuple[Page, ...]
    grad_pages: tuple[Page, ...]

    @property
    def ranges(self) -> tuple[Page, ...]:
        """Pages whose element ranges the update walks over: one kernel call each."""
        return self.update_pages or self.param_pages


@dataclass(frozen=True)
class Layout:
    """All pages of one rank."""

    units: tuple[UnitSpec, ...]
    segments: tuple[Segment, ...]
    shards: tuple[Placed, ...]
    pages: tuple[Page, ...]
    page_bytes: int

    @cached_property
    def unit_shards(self) -> tuple[tuple[int, ...], ...]:
        """Indices into `shards` for every unit, in gather order."""
        members: list[list[int]] = [[] for _ in self.units]
        for index, shard in enumerate(self.shards):
            members[shard.unit].append(index)
        return tuple(map(tuple, members))

    @cached_property
    def unit_segments(self) -> tuple[tuple[int, ...], ...]:
        """Indices of the trainable segments of every unit."""
        members: list[list[int]] = [[] for _ in self.units]
        for index, segment in enumerate(self.segments):
            if segment.trainable:
                members[segment.unit].append(index)
        return tuple(map(tuple, members))

    @cached_property
    def fingerprint(self) -> str:
        """Digest of everything that decides where bytes lie; equal layouts can read each other's pages."""
        text = json.dumps([[asdict(unit) for unit in self.units], self.page_bytes,
                           [asdict(segment.format) for segment in self.segments]], sort_keys=True)  # fmt: skip
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @cached_property
    def state_bytes(self) -> int:
        """Persistent bytes of this rank: PARAM and UPDATE pages, padding included."""
        return sum(page.nbytes for page in self.pages if page.role is not Role.GRAD)

    @cached_property
    def parameters(self) -> int:
        """Elements of this rank, padding left out."""
        return sum(shard.spec.numel for shard in self.shards)

    def bytes_of(self, role: Role) -> int:
        """Bytes of all pages of one role."""
        return sum(page.nbytes for page in self.pages if page.role is role)

    def home_of(self, shard: int, name: str) -> tuple[tuple[Page, ...], str]:
        """Return the pages that hold one section (``master`` or a state kind) of a shard, and its dtype."""
        segment = self.segments[self.shards[shard].segment]
        if name == MASTER and not segment.format.master:
            return segment.param_pages, segment.format.param
        return segment.update_pages, dict(segment.format.sections)[name]

    @cached_property
    def _numbers(self) -> tuple[int, ...]:
        """Number of every page among those of its unit and role."""
        count: Counter[tuple[int, Role]] = Counter()
        numbers = []
        for page in self.pages:
            numbers.append(count[page.unit, page.role])
            count[page.unit, page.role] += 1
        return tuple(numbers)

    def page_name(self, index: int) -> str:
        """Name of a page in errors and listings, such as ``layers.3/update[2]``."""
        page = self.pages[index]
        return f"{self.units[page.unit].name}/{page.role.value}[{self._numbers[index]}]"


def overlapping(pages: Sequence[Page], start: int, stop: int) -> Iterator[tuple[Page, int, int]]:
    """Yield (page, first, last) for the pages that hold elements of [start, stop), in order."""
    if not pages or stop <= start:
        return
    low, high = 0, len(pages)
    while low < high:
        middle = (low + high) // 2
        if pages[middle].stop <= start:
            low = middle + 1
        else:
            high = middle
    for page in pages[low:]:
        if page.start >= stop:
            return
        yield page, max(start, page.start), min(stop, page.stop)


def build_layout(units: Sequence[UnitSpec], formats: dict[str, StateFormat], page_bytes: int) -> Layout:
    """Place every shard and cut every segment into pages.

    Args:
        units: in the order in which they are first gathered.
        formats: state format of every `segment_key`.
        page_bytes: largest page, in bytes.
    """
    pages: list[Page] = []
    segments: list[Segment] = []
    shards: list[Placed] = []
    for unit_index, unit in enumerate(units):
        keys = list(dict.fromkeys(spec.segment_key for spec in unit.shards))
        extent = dict.fromkeys(keys, 0)
        members: dict[str, list[int]] = {key: [] for key in keys}
        for spec in unit.shards:
            key = spec.segment_key
            members[key].append(len(shards))
            shards.append(
                Placed(spec=spec, unit=unit_index, segment=len(segments) + keys.index(key), start=extent[key])
            )
            extent[key] = align_up(extent[key] + spec.padded, SHARD_ALIGNMENT)
        for key in keys:
            trainable = shards[members[key][0]].spec.trainable
            numel = align_up(extent[key], RANGE_ALIGNMENT)
            fmt = formats[key]

            def cut(role: Role, itemsize: int, *, numel: int = numel, unit_index: int = unit_index) -> tuple[Page, ...]:
                made = _cut(role, unit_index, len(segments), numel, itemsize, page_bytes, len(pages))
                pages.extend(made)
                return made

            segments.append(
                Segment(
                    unit=unit_index,
                    format=fmt,
                    trainable=trainable,
                    numel=numel,
                    shards=tuple(members[key]),
                    param_pages=cut(Role.PARAM, ITEMSIZE[fmt.param]),
                    update_pages=cut(Role.UPDATE, fmt.update_bytes),
                    grad_pages=cut(Role.GRAD, ITEMSIZE[fmt.grad]) if trainable else (),
                )
            )
    return Layout(tuple(units), tuple(segments), tuple(shards), tuple(pages), page_bytes)


def _cut(
    role: Role, unit: int, segment: int, numel: int, itemsize: int, page_bytes: int, first: int
) -> tuple[Page, ...]:
    if itemsize == 0 or numel == 0:
        return ()
    most = align_down(page_bytes // itemsize, RANGE_ALIGNMENT)
    number = -(-numel // most)
    count = align_up(-(-numel // number), RANGE_ALIGNMENT)  # even cuts: no tiny last page
    return tuple(
        Page(
            index=first + position,
            role=role,
            unit=unit,
            segment=segment,
            start=start,
            count=min(count, numel - start),
            nbytes=align_up(min(count, numel - start) * itemsize, PAGE_ALIGNMENT),
        )
        for position, start in enumerate(range(0, numel, count))
    )
