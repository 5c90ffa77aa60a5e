"""Which bytes of this rank's state lie in which page. Pure arithmetic: no I/O, no torch.

An FSDP module's shards are grouped into *segments*: shards that share dtype and state format. A segment is one
element space, shards back to back, each starting at a multiple of `SHARD_ALIGNMENT` elements. Its UPDATE
pages cut that space evenly, and hold for their range of elements master and moments one after the other; its
PARAM pages cut it again, and its GRAD pages, once for each component of the gradient. All join pieces of the finest of
these cuts.

[Note: alignment and bits] Vectorised kernels treat the last few elements of a tensor with scalar code.
Because every cut is a multiple of `RANGE_ALIGNMENT` elements from the segment's start, and every shard starts
at a multiple of `SHARD_ALIGNMENT`, a slice of a shard is cut at a multiple of the widest vector: an element is
treated by the same code whether the shard is updated whole or in slices.

[Note: whole rows] Some optimizers need whole rows of a matrix (`ShardSpec.row`). Such shards have segments of their
own, in which cuts are where a row ends: at a multiple of the row and of `SHARD_ALIGNMENT` from the shard's start, and
never before its last row: reductions over a single row may be divided among threads otherwise than over several.

[Note: whole parameters] Others need all of a matrix at once (`ShardSpec.whole`). Such shards have segments of their own
too, in which pages end anywhere, and an update takes all pages of a shard together: its ranges are shards, not pages.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

from infinity.content.format import ITEMSIZE, SHARD_ALIGNMENT, Role, StateFormat
from infinity.errors import BudgetError
from infinity.units import align_up

RANGE_ALIGNMENT = 2048
PAGE_ALIGNMENT = 4096


@dataclass(frozen=True, kw_only=True)
class ShardSpec:
    """This rank's slice of one parameter."""

    name: str
    """The first of the parameter's names."""
    numel: int
    """Elements that it has."""
    padded: int
    """Elements that are gathered: more than it has where the slices of all ranks are padded to one size."""
    segment_key: str
    """Key of its format; shards of an FSDP module with the same one form a segment."""
    trainable: bool
    """Whether it is trained."""
    row: int = 1
    """Elements, counted from its start, inside of which no page ends."""
    whole: int = 0
    """Elements of the whole parameter, of all ranks, where its update needs them at once; 0 where it does not."""

    @property
    def tree(self) -> dict[str, object]:
        """Plain data: what decides where bytes lie; the row only where it is one."""
        return {key: value for key, value in asdict(self).items() if key != "whole" and (key != "row" or value > 1)}


@dataclass(frozen=True, kw_only=True)
class FSDPModuleSpec:
    """One `fully_shard` group: its shards in the order in which they are gathered."""

    name: str
    shards: tuple[ShardSpec, ...]

    @property
    def tree(self) -> dict[str, object]:
        """Plain data."""
        return {"name": self.name, "shards": [shard.tree for shard in self.shards]}


@dataclass(frozen=True, kw_only=True)
class Placed:
    """Where a shard lies: elements [start, start + padded) of a segment."""

    spec: ShardSpec
    fsdp_module: int
    segment: int
    start: int


@dataclass(frozen=True, kw_only=True)
class Page:
    """Some elements of a segment in one role: what is moved as a whole."""

    index: int
    """Number in the layout."""
    role: Role
    """What of the elements it holds."""
    fsdp_module: int
    """Number of the FSDP module in the layout."""
    segment: int
    """Number of the segment in the layout."""
    start: int
    """Its first element in the segment."""
    count: int
    """How many elements it holds."""
    nbytes: int
    """Its length, a multiple of `PAGE_ALIGNMENT`."""
    component: int = 0
    """Which part of the gradient a GRAD page holds, where that is stored in several."""
    fixed: bool = False
    """Whether it is written once: it holds what is not trained."""

    @property
    def stop(self) -> int:
        """First element behind the page."""
        return self.start + self.count


@dataclass(frozen=True, kw_only=True)
class Range:
    """Some elements of a segment that are updated at once."""

    start: int
    """Its first element in the segment."""
    stop: int
    """First element behind it."""
    shards: tuple[int, ...]
    """Indices of the shards of which it holds elements; a shard that is updated whole also where it has none."""

    @property
    def count(self) -> int:
        """How many elements it holds."""
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True)
class Segment:
    """One element space of an FSDP module and the pages over it, each tuple in element order.

    Attributes:
        FSDP module: index of it.
        format: of all its elements.
        trainable: whether its shards are trained; if not there are no update and gradient pages.
        numel: elements, a multiple of `RANGE_ALIGNMENT`.
        shards: indices into `Layout.shards`.
        param_pages: weights.
        update_pages: master and states; none where there are neither.
        grad_pages: one tuple for each component of the gradient; all are cut alike.
        ranges: what the update walks over, one after the other: pages, or shards where it needs whole parameters.
        whole: whether it does.
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

    def pages(self, role: Role) -> tuple[Page, ...]:
        """The pages of weights, or of master and moments."""
        return {Role.PARAM: self.param_pages, Role.UPDATE: self.update_pages}[role]


@dataclass(frozen=True)
class Layout:
    """All pages of one rank; nothing of it changes.

    Attributes:
        FSDP modules: in the order in which they are first gathered.
        segments: FSDP module by FSDP module.
        shards: FSDP module by FSDP module, in the order in which an FSDP module gathers them.
        pages: by index.
        page_bytes: of the largest page, at most.
    """

    fsdp_modules: tuple[FSDPModuleSpec, ...]
    segments: tuple[Segment, ...]
    shards: tuple[Placed, ...]
    pages: tuple[Page, ...]
    page_bytes: int

    @cached_property
    def fsdp_module_shards(self) -> tuple[tuple[int, ...], ...]:
        """Indices into `shards` for every FSDP module, in gather order."""
        members: list[list[int]] = [[] for _ in self.fsdp_modules]
        for index, shard in enumerate(self.shards):
            members[shard.fsdp_module].append(index)
        return tuple(map(tuple, members))

    def begins_fsdp_module(self, shard: int) -> bool:
        """Whether a shard is the first one of its FSDP module that is gathered."""
        return self.fsdp_module_shards[self.shards[shard].fsdp_module][0] == shard

    def ends_fsdp_module(self, shard: int) -> bool:
        """Whether a shard is the last one of its FSDP module that is gathered."""
        return self.fsdp_module_shards[self.shards[shard].fsdp_module][-1] == shard

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
        """All ranges of every FSDP module as (segment, position), in the order in which an update walks over them."""
        return tuple(
            tuple((self.segments[s], position) for s in indices for position in range(len(self.segments[s].ranges)))
            for indices in self.fsdp_module_segments
        )

    @cached_property
    def page_shards(self) -> tuple[tuple[int, ...], ...]:
        """Indices of the shards of which each page holds elements."""
        placed = [[(shard, self.shards[shard]) for shard in segment.shards] for segment in self.segments]
        return tuple(_within(placed[page.segment], page) for page in self.pages)

    @cached_property
    def fingerprint(self) -> str:
        """Digest of everything that decides where bytes lie; equal layouts can read each other's pages."""
        text = json.dumps([[fsdp_module.tree for fsdp_module in self.fsdp_modules], self.page_bytes, RANGE_ALIGNMENT,
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

    def format_of(self, shard: int) -> StateFormat:
        """Return the state format of a shard."""
        return self.segments[self.shards[shard].segment].format

    @cached_property
    def _numbers(self) -> tuple[int, ...]:
        """Number of every page among those of its FSDP module and role."""
        count: Counter[tuple[int, Role]] = Counter()
        numbers = []
        for page in self.pages:
            numbers.append(count[page.fsdp_module, page.role])
            count[page.fsdp_module, page.role] += 1
        return tuple(numbers)

    def page_name(self, index: int) -> str:
        """Name of a page in errors and listings, such as ``layers.3/update[2]``."""
        page = self.pages[index]
        return f"{self.fsdp_modules[page.fsdp_module].name}/{page.role.value}[{self._numbers[index]}]"


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
    for position in range(low, len(pages)):
        page = pages[position]
        if page.start >= stop:
            return
        yield page, max(start, page.start), min(stop, page.stop)


def build_layout(fsdp_modules: Sequence[FSDPModuleSpec], formats: dict[str, StateFormat], page_bytes: int) -> Layout:
    """Place every shard and cut every segment into pages.

    Args:
        FSDP modules: in the order in which they are first gathered.
        formats: state format of every `segment_key`.
        page_bytes: largest page, in bytes; has room for `RANGE_ALIGNMENT` elements.

    Raises:
        BudgetError: a page has no room for a row that must not be cut.
    """
    pages: list[Page] = []
    segments: list[Segment] = []
    shards: list[Placed] = []
    for fsdp_module_index, fsdp_module in enumerate(fsdp_modules):
        keys = list(dict.fromkeys(spec.segment_key for spec in fsdp_module.shards))
        extent = dict.fromkeys(keys, 0)
        members: dict[str, list[int]] = {key: [] for key in keys}
        for spec in fsdp_module.shards:
            key = spec.segment_key
            members[key].append(len(shards))
            shards.append(
                Placed(
                    spec=spec, fsdp_module=fsdp_module_index, segment=len(segments) + keys.index(key), start=extent[key]
                )
            )
            extent[key] = align_up(extent[key] + spec.padded, SHARD_ALIGNMENT)
        for key in keys:
            fmt, segment, trainable = formats[key], len(segments), shards[members[key][0]].spec.trainable
            numel = align_up(extent[key], RANGE_ALIGNMENT)
            sizes = (ITEMSIZE[fmt.param], fmt.update_bytes, *(ITEMSIZE[dtype] for dtype in fmt.grads))
            whole = any(shards[member].spec.row > 1 for member in members[key])
            join = _filled if whole else _joined
            most = int(page_bytes / max(sizes))
            finest = (
                _between_rows([shards[member] for member in members[key]], numel, most)
                if whole
                else _joined(range(0, numel + 1, RANGE_ALIGNMENT), most)
            )

            def cut(
                role: Role,
                size: float,
                component: int = 0,
                *,
                fsdp_module: int = fsdp_module_index,
                segment: int = segment,
                fixed: bool = not trainable,
                finest: Sequence[int] = finest,
                join: Callable[[Sequence[int], int], Sequence[int]] = join,
            ) -> tuple[Page, ...]:
                joined = itertools.pairwise(join(finest, int(page_bytes / size)))
                made = tuple(
                    Page(
                        index=len(pages) + position,
                        role=role,
                        fsdp_module=fsdp_module,
                        segment=segment,
                        start=start,
                        count=stop - start,
                        nbytes=align_up(int((stop - start) * size), PAGE_ALIGNMENT),
                        component=component,
                        fixed=fixed,
                    )
                    for position, (start, stop) in enumerate(joined)
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


def _within(shards: Sequence[tuple[int, Placed]], page: Page) -> tuple[int, ...]:
    """Return the indices of the shards of a segment of which a page holds elements."""
    return tuple(index for index, at in shards if max(at.start, page.start) < min(at.start + at.spec.numel, page.stop))


def _shard_ranges(shards: Sequence[tuple[int, Placed]], numel: int) -> tuple[Range, ...]:
    """Return a range for every shard, up to where the next one begins: together they are the segment."""
    starts = [placed.start for _, placed in shards]
    return tuple(
        Range(start=start, stop=stop, shards=(index,))
        for (index, _), start, stop in zip(shards, starts, [*starts[1:], numel], strict=True)
        if start < stop
    )


def _joined(cut: Sequence[int], most: int) -> Sequence[int]:
    """Join neighbours among the pages of a cut: as few pages as `most` elements allow, of about the same length.

    A cut is a list of elements: where its pages begin, and where the last one ends. ``[0, 2, 4, 6, 8, 10]`` has five
    pages of 2; with `most` = 6 they become two, of 6 and 4: ``[0, 6, 10]``.

    Args:
        cut: none of whose pages is longer than the first.
        most: elements of a page, at least those of the first.
    """
    pieces = len(cut) - 1
    if not pieces:
        return cut
    number = -(-pieces // (most // cut[1]))
    # Rounded up: so the first page is the longest, on which joining what was joined relies.
    return [cut[-(-pieces * page // number)] for page in range(number + 1)]


def _between_rows(shards: Sequence[Placed], numel: int, most: int) -> Sequence[int]:
    """Cut a segment of `numel` elements into pages of at most `most`, none of which ends inside of a row.

    Raises:
        BudgetError: a row, or the last rows of a shard, do not fit a page.
    """
    cuts = [0]
    for placed, after in itertools.zip_longest(shards, shards[1:]):
        start, spec = placed.start, placed.spec
        fsdp_module = math.lcm(spec.row, SHARD_ALIGNMENT)
        last = start + max(0, spec.numel - 2 * spec.row) // fsdp_module * fsdp_module
        end = after.start if after is not None else numel
        while end - cuts[-1] > most:
            point = min(last, start + max(0, cuts[-1] + most - start) // fsdp_module * fsdp_module)
            if point <= cuts[-1]:
                raise BudgetError(
                    f"the optimizer updates whole rows of {spec.name}, and {end - cuts[-1]} elements of it (a row has "
                    f"{spec.row}) do not fit a page, which holds {most}; set memory.page_bytes higher, or use an "
                    "element-wise optimizer such as AdamW"
                )
            cuts.append(point)
    return [*cuts, numel] if numel else cuts


def _filled(cut: Sequence[int], most: int) -> Sequence[int]:
    """Join neighbours among the pages of a cut, each with as many of the next as `most` elements allow.

    ``[0, 3, 6, 8, 10]`` with `most` = 7 becomes ``[0, 6, 10]``. For cuts of uneven pages; see `_joined`.
    """
    found = [cut[0]]
    for before, point in itertools.pairwise(cut):
        if point - found[-1] > most:
            found.append(before)
    return [*found, cut[-1]] if len(cut) > 1 else found
