"""Where page versions lie on the NVMe paths.

Every path holds one data file per rank. A file is a row of *slots*; pages of the same length on the same path
share a class of slots, so space never fragments and the whole need is known before the first byte is written.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from threading import Condition
from typing import NamedTuple

from infinity.content.format import Role
from infinity.content.layout import Page
from infinity.deadline import wait_a_while
from infinity.errors import StallError

SPARE_SLOTS = 16
"""Writes of one class that a run may have in flight at once at most, each of which needs a slot more."""
_SPARE_PARTS = 25
"""Spare slots of a class: one for so many pages of it, or a part of them. Further writes wait for one that ends."""


class Extent(NamedTuple):
    """A run of bytes of one path's data file."""

    path: int
    """Number of the NVMe path, in the run's order."""
    offset: int
    """Of its first byte."""
    length: int
    """Bytes."""


def spread(pages: Sequence[Page], stripe_weights: Sequence[float]) -> tuple[int, ...]:
    """Return the path of every page so that bytes follow `shares`, role by role and in page order.

    Consecutive pages alternate between paths, so that any stretch of the trace keeps all drives busy. Only a path that
    is behind its share gets a page, so none is ever further from it than one page (the quota method of Balinski and
    Young, 1975).
    """
    total = sum(stripe_weights)
    given: dict[Role, list[float]] = {role: [0.0] * len(stripe_weights) for role in Role}
    paths: list[int] = []
    for page in pages:
        loads = given[page.role]
        due = sum(loads) + page.nbytes
        behind = [k for k, stripe_weight in enumerate(stripe_weights) if loads[k] * total < stripe_weight * due]
        path = min(behind, key=lambda k: ((loads[k] + page.nbytes) / stripe_weights[k], k))
        loads[path] += page.nbytes
        paths.append(path)
    return tuple(paths)


def respread(pages: Sequence[Page], paths: Sequence[int], stripe_weights: Sequence[float]) -> tuple[int, ...]:
    """Return new paths of pages so that bytes follow `shares`, role by role, and as few pages as possible move.

    The pages that leave a path are spread evenly over those that it has. Fixed pages stay, as they are never written.
    """
    moved = list(paths)
    for role in Role:
        mine = [page for page in pages if page.role is role and not page.fixed]
        loads = [0.0] * len(stripe_weights)
        for page in mine:
            loads[paths[page.index]] += page.nbytes
        # Bytes by which a path has too much.
        surplus = [
            load - sum(loads) * stripe_weight / sum(stripe_weights)
            for load, stripe_weight in zip(loads, stripe_weights, strict=True)
        ]
        leaving = [max(0.0, extra / load) if load else 0.0 for extra, load in zip(surplus, loads, strict=True)]
        due = [0.0] * len(stripe_weights)  # bytes that should have left by now
        for page in mine:
            path = paths[page.index]
            due[path] += leaving[path] * page.nbytes
            target = min(range(len(stripe_weights)), key=lambda k: surplus[k])
            if due[path] >= page.nbytes / 2 and surplus[target] <= -page.nbytes / 2:
                moved[page.index] = target
                due[path] -= page.nbytes
                surplus[target] += page.nbytes
    return tuple(moved)


@dataclass(frozen=True, kw_only=True)
class SlotClass:
    """`count` slots of `length` bytes, from `offset` on, in the file of `path`."""

    path: int
    length: int
    offset: int
    count: int

    def __iter__(self) -> Iterator[Extent]:
        """Yield the slots."""
        return (Extent(self.path, self.offset + k * self.length, self.length) for k in range(self.count))


def plan_slots(pages: Sequence[Page], paths: Sequence[int], spare: int, retained: int) -> tuple[SlotClass, ...]:
    """Return the slots that hold the retained checkpoints, one newer version of every page, and writes in flight.

    A fixed page has one slot, as all checkpoints name the same version of it. Classes for another retained checkpoint
    lie
    behind all others, so that a resumed run may retain more or fewer.

    Args:
        pages: those of the state.
        paths: path of every page.
        spare: writes of a class that may be in flight at once at most; each needs one slot more.
        retained: checkpoints that are kept.
    """
    members, changing = _counted(pages, [(path,) for path in paths])
    newest = {key: count + _spare(changing[key], spare) for key, count in members.items()}
    offsets = [0] * (max(paths, default=0) + 1)
    classes = []
    for counts in (newest, *[changing] * retained):
        for (path, length), count in sorted(counts.items()):
            classes.append(SlotClass(path=path, length=length, offset=offsets[path], count=count))
            offsets[path] += count * length
    return tuple(classes)


def file_sizes(classes: Iterable[SlotClass], paths: int) -> tuple[int, ...]:
    """Return the size in bytes of every path's data file."""
    sizes = [0] * paths
    for item in classes:
        sizes[item.path] = max(sizes[item.path], item.offset + item.count * item.length)
    return tuple(sizes)


def needed_slots(
    pages: Sequence[Page],
    paths: Sequence[Collection[int]],
    spare: int,
    retained: int,
    edited: Collection[int] = (),
) -> Counter[tuple[int, int]]:
    """Return how many slots there must be by (path, length), as `plan_slots`, where pages lie on several paths.

    Args:
        pages: some pages of the rank.
        paths: by page of these, all paths that a version of it lies on, or will.
        spare: writes of a class that may be in flight at once at most.
        retained: checkpoints that are kept.
        edited: fixed pages that are written again all the same.
    """
    members, changing = _counted(pages, paths, edited)
    return Counter(
        {key: count + changing[key] * retained + _spare(changing[key], spare) for key, count in members.items()}
    )


def _counted(
    pages: Sequence[Page], paths: Sequence[Collection[int]], edited: Collection[int] = ()
) -> tuple[Counter[tuple[int, int]], Counter[tuple[int, int]]]:
    """Return how many pages are on each path, by (path, length): all, and those that are written again and again."""
    members: Counter[tuple[int, int]] = Counter()
    changing: Counter[tuple[int, int]] = Counter()
    for page, on in zip(pages, paths, strict=True):
        for path in on:
            members[path, page.nbytes] += 1
            changing[path, page.nbytes] += not page.fixed or page.index in edited
    return members, changing


def _spare(count: int, most: int) -> int:
    """Return the spare slots of a class of so many pages."""
    return min(most, -(-count // _SPARE_PARTS))


def missing_slots(
    classes: Sequence[SlotClass],
    needed: Mapping[tuple[int, int], int],
    used: Collection[Extent] = (),
    behind: Sequence[SlotClass] = (),
) -> tuple[SlotClass, ...]:
    """Return further slots, behind the classes and between what is used there, so that there are as many as needed.

    Args:
        classes: the slots so far.
        needed: how many slots there must be by (path, length).
        used: extents of checkpointed pages; those that are no slots count as such, and slots that they touch do not.
        behind: other slots that they are to lie behind.
    """
    taken = _Used(used)
    there = Counter((extent.path, extent.length) for extent in set(used))
    there.update((slot.path, slot.length) for item in classes for slot in item if not taken.touch(slot))
    more: list[SlotClass] = []
    before = (*classes, *behind)
    paths = {path for path, _ in (*needed, *there)} | {item.path for item in before}
    for path, end in enumerate(file_sizes(before, 1 + max(paths, default=-1))):
        missing = {
            length: count - there[path, length]
            for (on, length), count in sorted(needed.items())
            if on == path and count > there[path, length]
        }
        at = end
        for gap_end, next_at in [*taken.behind(path, end), (math.inf, 0)]:
            for length, count in missing.items():
                fitting = count if gap_end == math.inf else min(count, max(0, (int(gap_end) - at) // length))
                if fitting:
                    more.append(SlotClass(path=path, length=length, offset=at, count=fitting))
                    missing[length] -= fitting
                    at += fitting * length
            at = max(at, next_at)
    return tuple(more)


def further_slots(
    ends: Sequence[int],
    before: Mapping[tuple[int, int], int],
    members: Mapping[tuple[int, int], int],
    spare: int,
) -> tuple[SlotClass, ...]:
    """Return further slots for pages that are more now, without a look at those that there are.

    Args:
        ends: in bytes, by path, where the slots so far end; they suffice for the pages before.
        before: how many pages there were by (path, length).
        members: how many there are now.
        spare: writes of a class that may be in flight at once at most.
    """
    ends, more = list(ends), []
    for (path, length), count in sorted(members.items()):
        were = before.get((path, length), 0)
        missing = count + _spare(count, spare) - were - _spare(were, spare)
        if missing:
            more.append(SlotClass(path=path, length=length, offset=ends[path], count=missing))
            ends[path] += missing * length
    return tuple(more)


class _Used:
    """Extents that do not overlap each other, and what they touch."""

    def __init__(self, used: Iterable[Extent]) -> None:
        self._spans: dict[int, list[tuple[int, int]]] = defaultdict(list)  # sorted (offset, end) by path
        for path, offset, length in sorted(set(used)):
            self._spans[path].append((offset, offset + length))

    def touch(self, slot: Extent) -> bool:
        """Whether one of them has a byte of a slot."""
        spans = self._spans[slot.path]
        before = bisect_left(spans, (slot.offset + slot.length, 0)) - 1  # the last that begins before the slot ends
        return before >= 0 and spans[before][1] > slot.offset

    def behind(self, path: int, offset: int) -> Iterator[tuple[int, int]]:
        """Yield (begin, end) of the extents that end behind `offset`."""
        return (span for span in self._spans[path] if span[1] > offset)


def overlapping(used: Iterable[Extent]) -> Extent | None:
    """Return an extent that shares a byte with another one, if there is one."""
    last = Extent(-1, 0, 0)
    for extent in sorted(set(used)):
        if last.path == extent.path and extent.offset < last.offset + last.length:
            return extent
        last = extent
    return None


class ExtentAllocator:
    """Hands out slots. Safe to call from several threads."""

    def __init__(self, classes: Sequence[SlotClass], used: Iterable[Extent] = ()) -> None:
        """Begin with all slots free but those that are touched by what is in use.

        Args:
            classes: all slots.
            used: extents of checkpointed pages, which do not overlap each other; each is a slot when it is given back,
                wherever it lies.
        """
        taken = _Used(used)
        self._freed = Condition()
        """Lock of `_free`; notified when a slot comes back."""
        self._free: dict[tuple[int, int], list[int]] = {}
        """Offsets in bytes of free slots by (path, length), the lowest last."""
        self.add(classes, taken)

    def add(self, classes: Sequence[SlotClass], taken: _Used | None = None) -> None:
        """Have these slots too, but those that something touches; they are taken after those so far."""
        with self._freed:
            for item in classes:
                free = [slot.offset for slot in item if taken is None or not taken.touch(slot)]
                self._free.setdefault((item.path, item.length), [])[:0] = reversed(free)
            self._freed.notify_all()

    def take(self, path: int, length: int, timeout: float) -> Extent:
        """Return a free slot, waiting for one if all are in use by versions that are being replaced.

        Raises:
            StallError: none was freed within `timeout` seconds.
        """
        with self._freed:
            free = self._free.setdefault((path, length), [])
            until = time.perf_counter() + timeout
            while not free:
                if (left := until - time.perf_counter()) <= 0:
                    raise StallError(f"no slot of {length} bytes on path {path} was freed within {timeout:.0f} s")
                until += wait_a_while(self._freed, left)
            return Extent(path, free.pop(), length)

    def take_free(self, path: int, length: int) -> Extent | None:
        """Return a slot, or None where none is free."""
        with self._freed:
            free = self._free.get((path, length))
            return Extent(path, free.pop(), length) if free else None

    def give(self, extent: Extent) -> None:
        """Take a slot back."""
        with self._freed:
            self._free.setdefault((extent.path, extent.length), []).append(extent.offset)
            self._freed.notify_all()

    def drain(self, classes: Sequence[SlotClass]) -> bool:
        """Have no slots any more, if all of these, which are all that there are, are free; return whether they were."""
        with self._freed:
            if sum(map(len, self._free.values())) < sum(item.count for item in classes):
                return False
            self._free.clear()
            return True
