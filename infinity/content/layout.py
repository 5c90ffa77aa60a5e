"""Assign this rank's state to pages, by arithmetic alone: no I/O, no torch.

The shards of an FSDP module are grouped into *segments* of shards that share a dtype and a state format. A segment is a
single range of elements in which the shards follow one another, each starting at a multiple of `SHARD_ALIGNMENT`
elements. UPDATE pages divide that range evenly, and each holds the master and the moments of its elements, one after
another. PARAM pages divide the range separately, and so do GRAD pages, once per component of the gradient. Every
division joins pieces of the finest division.

[Note: alignment and bits] Vectorized kernels process the last few elements of a tensor with scalar code. Every page
boundary is a multiple of `RANGE_ALIGNMENT` elements from the start of the segment, and every shard starts at a multiple
of `SHARD_ALIGNMENT`. A shard is therefore cut only at multiples of the widest vector, and each element is processed by
the same code whether the shard is updated as a whole or in slices.

[Note: whole rows] Some optimizers need whole rows of a matrix (`ShardSpec.row`). Such shards have segments of their
own, whose page boundaries are at the ends of rows: at a multiple of both the row length and `SHARD_ALIGNMENT` from the
start of the shard. No boundary separates the last row of a shard from the row before it, because a reduction over a
single row may be divided among threads differently from a reduction over several rows.

[Note: whole parameters] Other optimizers need a full matrix at once (`ShardSpec.whole`). Such shards also have segments
of their own. Their pages may end anywhere, and an update processes all pages of a shard together, so the ranges that it
updates are shards rather than pages.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from operator import attrgetter
from typing import NamedTuple

from infinity.content.format import ITEMSIZE, SHARD_ALIGNMENT, Role, StateFormat
from infinity.errors import BudgetError
from infinity.units import align_up

LARGEST_GPU_RESIDENT_BATCH = 512 << 20
"""Maximum number of bytes of GPU-resident pages that are updated together."""
RANGE_ALIGNMENT = 2048
PAGE_ALIGNMENT = 4096


@dataclass(frozen=True, kw_only=True)
class ShardSpec:
    """This rank's slice of one parameter."""

    name: str
    """First name of the parameter."""
    numel: int
    """Number of elements."""
    padded: int
    """Number of elements in the all-gather input. It exceeds `numel` if slices are padded to the same size on all
    ranks.
    """
    segment_key: str
    """Key of the state format. Shards of an FSDP module with the same key form a segment."""
    trainable: bool
    """Whether the parameter is trained."""
    row: int = 1
    """Number of elements per row, counted from the start of the shard. No page ends inside a row."""
    whole: int = 0
    """Number of elements of the full parameter across all ranks if its update needs them at once, otherwise 0."""

    @property
    def tree(self) -> dict[str, object]:
        """Plain data that determines where bytes are stored. It includes `row` only if it is greater than 1."""
        return {key: value for key, value in asdict(self).items() if key != "whole" and (key != "row" or value > 1)}


@dataclass(frozen=True, kw_only=True)
class FSDPModuleSpec:
    """An FSDP module and its shards, in all-gather order."""

    name: str
    shards: tuple[ShardSpec, ...]

    @property
    def tree(self) -> dict[str, object]:
        """The specification as plain data."""
        return {"name": self.name, "shards": [shard.tree for shard in self.shards]}


@dataclass(frozen=True, kw_only=True)
class ShardLocation:
    """Location of a shard: elements [start, start + padded) of a segment."""

    spec: ShardSpec
    fsdp_module: int
    segment: int
    start: int


@dataclass(frozen=True, kw_only=True)
class Page:
    """Range of elements of a segment, in one role. A page is always transferred as a whole."""

    index: int
    """Index in the layout."""
    role: Role
    """Kind of data that the page holds."""
    fsdp_module: int
    """Index of the FSDP module in the layout."""
    segment: int
    """Index of the segment in the layout."""
    start: int
    """Index of the first element in the segment."""
    count: int
    """Number of elements."""
    nbytes: int
    """Length in bytes, a multiple of `PAGE_ALIGNMENT`."""
    component: int = 0
    """Index of the gradient component in a GRAD page, if the gradient is stored as several components."""
    fixed: bool = False
    """Whether the page holds frozen parameters and is written only once."""

    @cached_property
    def stop(self) -> int:
        """Index after the last element in the segment."""
        return self.start + self.count


@dataclass(frozen=True, kw_only=True)
class Range:
    """Range of elements in a segment that are updated together."""

    start: int
    """Index of the first element in the segment."""
    stop: int
    """Index after the last element in the segment."""
    shards: tuple[int, ...]
    """Indices of the shards that have elements in the range. A shard that is updated as a whole is listed even if it
    has no elements.
    """

    @property
    def count(self) -> int:
        """Number of elements."""
        return self.stop - self.start


class WeightPart(NamedTuple):
    """Part of a shard's weights that is stored in one page."""

    shard: int
    """Index of the shard."""
    page: int
    """Index of the page."""
    offset: int
    """Offset in the page, in bytes."""
    begin: int
    """Offset in the shard, in bytes."""
    nbytes: int
    """Length in bytes."""


@dataclass(frozen=True, kw_only=True)
class Segment:
    """One segment of an FSDP module and its pages. Each tuple of pages is in element order.

    Attributes:
        fsdp_module: Index of the FSDP module.
        format: State format of all elements.
        trainable: Whether the shards are trained. Frozen segments have no gradient pages, and have update pages only if
            there is a master.
        numel: Number of elements, a multiple of `RANGE_ALIGNMENT`.
        shards: Indices into `Layout.shards`.
        param_pages: Pages of weights.
        update_pages: Pages of the master and the optimizer states. Empty if there are neither.
        grad_pages: Pages of gradients, one tuple per gradient component.
        ranges: Ranges that the update processes one after another: pages, or shards if it needs full parameters.
        whole: Whether the ranges are shards rather than pages.
    """

    fsdp_module: int
    format: StateFormat
    trainable: bool
    numel: int
    shards: tuple[int, ...]
    param_pages: tuple[Page, ...]
    update_pages: tuple[Page, ...]
    grad_pages: tuple[tuple[Page, ...], ...]
    ranges: tuple[Range, ...]
    whole: bool = False

    @cached_property
    def range_pages(self) -> tuple[tuple[Page, ...], ...]:
        """All pages of each range: pages of gradients, then pages of the update, and then pages of weights."""
        groups = (*self.grad_pages, self.update_pages, self.param_pages)
        return tuple(
            tuple(page for pages in groups for page, _, _ in overlapping(pages, item.start, item.stop))
            for item in self.ranges
        )

    def pages(self, role: Role) -> tuple[Page, ...]:
        """Return the pages of weights (PARAM), or of the master and the optimizer states (UPDATE)."""
        return {Role.PARAM: self.param_pages, Role.UPDATE: self.update_pages}[role]


@dataclass(frozen=True)
class Layout:
    """All pages of one rank. Immutable.

    Attributes:
        fsdp_modules: FSDP modules in the order in which they are first gathered.
        segments: Segments, grouped by FSDP module.
        shards: Shards, grouped by FSDP module, in all-gather order within each.
        pages: Pages by index.
        page_bytes: Maximum size of a page, in bytes.
        batch_pages: Maximum number of pages in a batch. A single range of an update may have more pages, and a gather
            or a stored gradient uses at least one page, with all of its components.
    """

    fsdp_modules: tuple[FSDPModuleSpec, ...]
    segments: tuple[Segment, ...]
    shards: tuple[ShardLocation, ...]
    pages: tuple[Page, ...]
    page_bytes: int
    batch_pages: int = 0

    @cached_property
    def fsdp_module_shards(self) -> tuple[tuple[int, ...], ...]:
        """Indices into `shards` for every FSDP module, in all-gather order."""
        members: list[list[int]] = [[] for _ in self.fsdp_modules]
        for index, shard in enumerate(self.shards):
            members[shard.fsdp_module].append(index)
        return tuple(map(tuple, members))

    @cached_property
    def fsdp_module_pages(self) -> tuple[tuple[Page, ...], ...]:
        """Pages of every FSDP module."""
        members: list[list[Page]] = [[] for _ in self.fsdp_modules]
        for page in self.pages:
            members[page.fsdp_module].append(page)
        return tuple(map(tuple, members))

    @cached_property
    def fsdp_module_gathers(self) -> tuple[tuple[tuple[WeightPart, ...], ...], ...]:
        """Weights of every FSDP module in all-gather order, divided into batches whose pages are held together.

        A page that contains parts of several shards may occur in several batches.
        """
        return tuple(tuple(self._gather_batches(shards)) for shards in self.fsdp_module_shards)

    def _gather_batches(self, shards: Iterable[int]) -> Iterator[tuple[WeightPart, ...]]:
        batch: list[WeightPart] = []
        held: set[int] = set()
        for shard in shards:
            placed = self.shards[shard]
            segment = self.segments[placed.segment]
            size = ITEMSIZE[segment.format.param]
            for page, first, last in overlapping(segment.param_pages, placed.start, placed.start + placed.spec.padded):
                if page.index not in held and len(held) >= max(1, self.batch_pages):
                    yield tuple(batch)
                    batch, held = [], set()
                offset, begin = size * (first - page.start), size * (first - placed.start)
                batch.append(WeightPart(shard, page.index, offset, begin, size * (last - first)))
                held.add(page.index)
        if batch:
            yield tuple(batch)

    @cached_property
    def fsdp_module_segments(self) -> tuple[tuple[int, ...], ...]:
        """Indices of the trainable segments of every FSDP module."""
        members: list[list[int]] = [[] for _ in self.fsdp_modules]
        for index, segment in enumerate(self.segments):
            if segment.trainable:
                members[segment.fsdp_module].append(index)
        return tuple(map(tuple, members))

    @cached_property
    def fsdp_module_ranges(self) -> tuple[tuple[tuple[Segment, int], ...], ...]:
        """All ranges of every FSDP module as (segment, position), in the order of the update."""
        return tuple(
            tuple((self.segments[s], position) for s in indices for position in range(len(self.segments[s].ranges)))
            for indices in self.fsdp_module_segments
        )

    @cached_property
    def fsdp_module_batches(self) -> tuple[tuple[RangeBatch, ...], ...]:
        """Batches of every FSDP module: consecutive ranges whose pages an update holds at the same time.

        A range that needs full parameters is a batch of its own.
        """
        return tuple(tuple(self._batches(ranges, self.batch_pages)) for ranges in self.fsdp_module_ranges)

    def gpu_resident_batches(self, fsdp_module: int) -> tuple[RangeBatch, ...]:
        """Batches of an FSDP module while it is GPU-resident. Their size limits the temporary memory of an update."""
        most = max(self.batch_pages, LARGEST_GPU_RESIDENT_BATCH // self.page_bytes)
        return tuple(self._batches(self.fsdp_module_ranges[fsdp_module], most))

    def _batches(self, ranges: RangeBatch, most: int) -> Iterator[RangeBatch]:
        begin = last = 0  # first range of the batch, and the last range so far that shares no page with earlier ones
        held: set[int] = set()
        for number, (segment, position) in enumerate(ranges):
            pages = {page.index for page in segment.range_pages[position]}
            before = ranges[number - 1][0]
            if number > begin and held.isdisjoint(pages):
                last = number
            if number > begin and (segment.whole or before.whole or len(held | pages) > most):
                end = last if last > begin and not (segment.whole or before.whole) else number
                yield ranges[begin:end]
                begin = end
                held = {page.index for of, at in ranges[begin:number] for page in of.range_pages[at]}
            held |= pages
        if begin < len(ranges):
            yield ranges[begin:]

    @cached_property
    def page_shards(self) -> tuple[tuple[int, ...], ...]:
        """Indices of the shards that have elements in each page."""
        placed = [[(shard, self.shards[shard]) for shard in segment.shards] for segment in self.segments]
        return tuple(_within(placed[page.segment], page) for page in self.pages)

    @cached_property
    def fingerprint(self) -> str:
        """Digest of all properties that determine where bytes are stored.

        Runs with equal layouts can read each other's pages.
        """
        text = json.dumps([[fsdp_module.tree for fsdp_module in self.fsdp_modules], self.page_bytes, RANGE_ALIGNMENT,
                           [asdict(segment.format) for segment in self.segments]], sort_keys=True)  # fmt: skip
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of the persistent state of this rank: PARAM and UPDATE pages, including padding."""
        return sum(page.nbytes for page in self.pages if page.role is not Role.GRAD)

    @cached_property
    def parameters(self) -> int:
        """Number of elements that this rank holds, excluding padding."""
        return sum(shard.spec.numel for shard in self.shards)

    def bytes_of(self, role: Role) -> int:
        """Return the total size in bytes of all pages with one role."""
        return sum(page.nbytes for page in self.pages if page.role is role)

    def format_of(self, shard: int) -> StateFormat:
        """Return the state format of a shard."""
        return self.segments[self.shards[shard].segment].format

    @cached_property
    def _numbers(self) -> tuple[int, ...]:
        """Position of every page among the pages of the same FSDP module and role."""
        count: Counter[tuple[int, Role]] = Counter()
        numbers = []
        for page in self.pages:
            numbers.append(count[page.fsdp_module, page.role])
            count[page.fsdp_module, page.role] += 1
        return tuple(numbers)

    def page_name(self, index: int) -> str:
        """Return the name of a page for error messages and listings, such as ``layers.3/update[2]``."""
        page = self.pages[index]
        return f"{self.fsdp_modules[page.fsdp_module].name}/{page.role.value}[{self._numbers[index]}]"


RangeBatch = tuple[tuple[Segment, int], ...]
"""Consecutive ranges that are updated together, as (segment, position of the range)."""
_START = attrgetter("start")


def overlapping(pages: Sequence[Page], start: int, stop: int) -> Iterator[tuple[Page, int, int]]:
    """Yield (page, first, last) for the pages that have elements in [start, stop), in order.

    The pages are contiguous, and one of them contains `start`.
    """
    if not pages or stop <= start:
        return
    for position in range(bisect_right(pages, start, key=_START) - 1, len(pages)):
        page = pages[position]
        if page.start >= stop:
            return
        yield page, max(start, page.start), min(stop, page.stop)


def build_layout(fsdp_modules: Sequence[FSDPModuleSpec], formats: dict[str, StateFormat], page_bytes: int) -> Layout:
    """Place every shard, and divide every segment into pages.

    Args:
        fsdp_modules: FSDP modules in the order in which they are first gathered.
        formats: State format for each `segment_key`.
        page_bytes: Maximum size of a page in bytes, with space for at least `RANGE_ALIGNMENT` elements.

    Raises:
        BudgetError: If a row that must not be divided does not fit in a page.
    """
    pages: list[Page] = []
    segments: list[Segment] = []
    shards: list[ShardLocation] = []
    for fsdp_module_index, fsdp_module in enumerate(fsdp_modules):
        keys = list(dict.fromkeys(spec.segment_key for spec in fsdp_module.shards))
        extent = dict.fromkeys(keys, 0)
        members: dict[str, list[int]] = {key: [] for key in keys}
        for spec in fsdp_module.shards:
            key = spec.segment_key
            members[key].append(len(shards))
            shards.append(
                ShardLocation(
                    spec=spec, fsdp_module=fsdp_module_index, segment=len(segments) + keys.index(key), start=extent[key]
                )
            )
            extent[key] = align_up(extent[key] + spec.padded, SHARD_ALIGNMENT)
        for key in keys:
            fmt, segment, trainable = formats[key], len(segments), shards[members[key][0]].spec.trainable
            numel = align_up(extent[key], RANGE_ALIGNMENT)
            cuts = iter(_cuts([shards[member] for member in members[key]], fmt, numel, page_bytes))

            def cut(
                role: Role,
                size: float,
                component: int = 0,
                *,
                fsdp_module: int = fsdp_module_index,
                segment: int = segment,
                fixed: bool = not trainable,
                cuts: Iterator[Sequence[int]] = cuts,
            ) -> tuple[Page, ...]:
                made = tuple(
                    Page(
                        index=len(pages) + position,
                        role=role,
                        fsdp_module=fsdp_module,
                        segment=segment,
                        start=start,
                        count=stop - start,
                        nbytes=_page_bytes(stop - start, size),
                        component=component,
                        fixed=fixed,
                    )
                    for position, (start, stop) in enumerate(itertools.pairwise(next(cuts)))
                )
                pages.extend(made)
                return made

            param_pages = cut(Role.PARAM, ITEMSIZE[fmt.param])
            update_pages = cut(Role.UPDATE, fmt.update_bytes) if fmt.update_bytes else ()
            of_segment = [(shard, shards[shard]) for shard in members[key]]
            at_once = any(placed.spec.whole for _, placed in of_segment)
            segments.append(
                Segment(
                    fsdp_module=fsdp_module_index,
                    format=fmt,
                    trainable=trainable,
                    numel=numel,
                    shards=tuple(members[key]),
                    param_pages=param_pages,
                    update_pages=update_pages,
                    grad_pages=tuple(cut(Role.GRAD, ITEMSIZE[dtype], number) for number, dtype in enumerate(fmt.grads)),
                    ranges=_shard_ranges(of_segment, numel)
                    if at_once
                    else tuple(
                        Range(start=page.start, stop=page.stop, shards=_within(of_segment, page))
                        for page in update_pages or param_pages
                    ),
                    whole=at_once,
                )
            )
    return Layout(tuple(fsdp_modules), tuple(segments), tuple(shards), tuple(pages), page_bytes)


class PageTotals(NamedTuple):
    """Number and total size of the pages that a layout would have."""

    page_bytes: int
    """Maximum size of a page, in bytes."""
    number: int
    """Number of pages."""
    nbytes: int
    """Size of all pages together, in bytes."""

    @property
    def filled(self) -> float:
        """Mean size of a page relative to the maximum."""
        return self.nbytes / (self.number * self.page_bytes)


def page_totals(fsdp_modules: Sequence[FSDPModuleSpec], formats: dict[str, StateFormat], page_bytes: int) -> PageTotals:
    """Return the totals of the layout that `build_layout` would return for the same arguments, without building it.

    A large model has tens of thousands of pages, but few different FSDP modules.

    Raises:
        BudgetError: If a row that must not be divided does not fit in a page.
    """
    number = nbytes = 0
    found: dict[tuple[tuple[object, ...], ...], tuple[int, int]] = {}  # totals of FSDP modules that differ in names
    for fsdp_module in fsdp_modules:
        key = tuple((spec.segment_key, spec.numel, spec.padded, spec.row) for spec in fsdp_module.shards)
        if key not in found:
            found[key] = _totals_of(fsdp_module, formats, page_bytes)
        number, nbytes = number + found[key][0], nbytes + found[key][1]
    return PageTotals(page_bytes, number, nbytes)


def _totals_of(fsdp_module: FSDPModuleSpec, formats: dict[str, StateFormat], page_bytes: int) -> tuple[int, int]:
    """Return the number of pages of one FSDP module, and their total size in bytes."""
    members: dict[str, list[ShardLocation]] = {}
    extent: Counter[str] = Counter()
    for spec in fsdp_module.shards:
        key = spec.segment_key
        members.setdefault(key, []).append(ShardLocation(spec=spec, fsdp_module=0, segment=0, start=extent[key]))
        extent[key] = align_up(extent[key] + spec.padded, SHARD_ALIGNMENT)
    number = nbytes = 0
    for key, shards in members.items():
        fmt = formats[key]
        cuts = _cuts(shards, fmt, align_up(extent[key], RANGE_ALIGNMENT), page_bytes)
        for cut, size in zip(cuts, _element_bytes(fmt), strict=True):
            number += len(cut) - 1
            nbytes += sum(_page_bytes(stop - start, size) for start, stop in itertools.pairwise(cut))
    return number, nbytes


def _element_bytes(fmt: StateFormat) -> list[float]:
    """Return the size of an element in the pages of each kind: PARAM, UPDATE if there are any, and GRAD."""
    update = [fmt.update_bytes] if fmt.update_bytes else []
    return [ITEMSIZE[fmt.param], *update, *(ITEMSIZE[dtype] for dtype in fmt.grads)]


def _page_bytes(count: int, size: float) -> int:
    return align_up(int(count * size), PAGE_ALIGNMENT)


def _cuts(shards: Sequence[ShardLocation], fmt: StateFormat, numel: int, page_bytes: int) -> list[Sequence[int]]:
    """Return the cut of a segment for each kind of page, in the order of `_element_bytes`."""
    sizes = _element_bytes(fmt)
    most = int(page_bytes / max(sizes))
    if any(placed.spec.row > 1 for placed in shards):
        finest = _between_rows(shards, numel, most)
        return [_filled(finest, int(page_bytes / size)) for size in sizes]
    return _even_cuts(numel, most, tuple(int(page_bytes / size) for size in sizes))


@lru_cache(maxsize=8)  # the layers of a model are alike
def _even_cuts(numel: int, most: int, each: tuple[int, ...]) -> list[Sequence[int]]:
    finest = _joined(range(0, numel + 1, RANGE_ALIGNMENT), most)
    return [_joined(finest, length) for length in each]


def _within(shards: Sequence[tuple[int, ShardLocation]], page: Page) -> tuple[int, ...]:
    """Return the indices of the given shards that have elements in a page."""
    return tuple(index for index, at in shards if max(at.start, page.start) < min(at.start + at.spec.numel, page.stop))


def _shard_ranges(shards: Sequence[tuple[int, ShardLocation]], numel: int) -> tuple[Range, ...]:
    """Return one range per shard.

    Each range ends where the next one begins, so that together they cover the segment.
    """
    starts = [placed.start for _, placed in shards]
    return tuple(
        Range(start=start, stop=stop, shards=(index,))
        for (index, _), start, stop in zip(shards, starts, [*starts[1:], numel], strict=True)
        if start < stop
    )


def _joined(cut: Sequence[int], most: int) -> Sequence[int]:
    """Join neighboring pages of a cut into as few pages as possible, of about equal length and at most `most` elements.

    A cut is a list of element indices: the start of each page, and the end of the last one. ``[0, 2, 4, 6, 8, 10]`` has
    five pages of 2 elements. With `most` = 6, they become two pages of 6 and 4 elements: ``[0, 6, 10]``.

    Args:
        cut: Cut in which no page is longer than the first.
        most: Maximum number of elements per page, which must be at least the length of the first page.
    """
    pieces = len(cut) - 1
    if not pieces:
        return cut
    number = -(-pieces // (most // cut[1]))
    # Rounded up, so that the first page is the longest: a precondition for joining the result again.
    return [cut[-(-pieces * page // number)] for page in range(number + 1)]


def _between_rows(shards: Sequence[ShardLocation], numel: int, most: int) -> Sequence[int]:
    """Divide a segment of `numel` elements into pages of at most `most` elements, none of which ends inside a row.

    Raises:
        BudgetError: If a row, or the last rows of a shard, do not fit in a page.
    """
    cuts = [0]
    for placed, after in itertools.zip_longest(shards, shards[1:]):
        start, spec = placed.start, placed.spec
        alignment = math.lcm(spec.row, SHARD_ALIGNMENT)
        last = start + max(0, spec.numel - 2 * spec.row) // alignment * alignment
        end = after.start if after is not None else numel
        while end - cuts[-1] > most:
            point = min(last, start + max(0, cuts[-1] + most - start) // alignment * alignment)
            if point <= cuts[-1]:
                raise BudgetError(
                    f"the optimizer updates whole rows of {spec.name}, but {end - cuts[-1]} elements (a row has "
                    f"{spec.row}) do not fit in a page of {most} elements; increase memory.page_bytes, or use an "
                    "element-wise optimizer such as AdamW"
                )
            cuts.append(point)
    return [*cuts, numel] if numel else cuts


def _filled(cut: Sequence[int], most: int) -> Sequence[int]:
    """Join neighboring pages of a cut greedily into pages of at most `most` elements.

    ``[0, 3, 6, 8, 10]`` with `most` = 7 becomes ``[0, 6, 10]``. Used for cuts whose pages differ in length; see
    `_joined`.
    """
    found = [cut[0]]
    for before, point in itertools.pairwise(cut):
        if point - found[-1] > most:
            found.append(before)
    return [*found, cut[-1]] if len(cut) > 1 else found
