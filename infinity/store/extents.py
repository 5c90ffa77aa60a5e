"""Assignment of page versions to extents of the data files.

Each rank has one data file per NVMe path. A file consists of *slots*. Pages of the same length on the same path form
a class, whose slots are interchangeable. Therefore space never fragments, and the required size is known before the
first byte is written.
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
"""Maximum number of writes in flight per class. Each of them needs an additional slot."""
_SPARE_PARTS = 25
"""Number of pages in a class per spare slot, rounded up. A write that finds no free slot waits until another write
ends.
"""


class Extent(NamedTuple):
    """Range of bytes in the data file on one path."""

    path: int
    """Index of the NVMe path, in the order of the run."""
    offset: int
    """Offset of the first byte."""
    length: int
    """Length in bytes."""


def spread(pages: Sequence[Page], stripe_weights: Sequence[float]) -> tuple[int, ...]:
    """Return the path for each page, so that the bytes of each role are distributed by `stripe_weights`.

    Consecutive pages alternate between paths, so that any part of the trace uses all drives. Only a path that holds
    less than its share of the bytes receives a page, so no path deviates from its share by more than one page (the
    quota method of Balinski and Young, 1975).
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


@dataclass(frozen=True, kw_only=True)
class SlotClass:
    """Class of `count` slots of `length` bytes in the data file on `path`, starting at `offset`."""

    path: int
    length: int
    offset: int
    count: int

    def __iter__(self) -> Iterator[Extent]:
        return (Extent(self.path, self.offset + k * self.length, self.length) for k in range(self.count))


def plan_slots(pages: Sequence[Page], paths: Sequence[int], spare: int, retained: int) -> tuple[SlotClass, ...]:
    """Return the slots for the retained checkpoints, one newer version of each page, and writes in flight.

    A fixed page has one slot, because all checkpoints refer to the same version of it. The slots of each additional
    retained checkpoint follow all others, so that a resumed run can retain more or fewer checkpoints.

    Args:
        pages: pages of the state.
        paths: path of each page.
        spare: maximum number of writes in flight per class. Each of them needs an additional slot.
        retained: number of checkpoints to keep.
    """
    members, changing = _counted(pages, paths)
    # One slot per retained checkpoint plus one for the current version, so that a write always finds a slot to which no
    # checkpoint refers.
    newest = {key: count + _spare(changing[key], spare) for key, count in members.items()}
    offsets = [0] * (max(paths, default=0) + 1)
    classes = []
    for counts in (newest, *[changing] * retained):
        for (path, length), count in sorted(counts.items()):
            classes.append(SlotClass(path=path, length=length, offset=offsets[path], count=count))
            offsets[path] += count * length
    return tuple(classes)


def file_sizes(classes: Iterable[SlotClass], paths: int) -> tuple[int, ...]:
    """Return the size of the data file on each path, in bytes."""
    sizes = [0] * paths
    for item in classes:
        sizes[item.path] = max(sizes[item.path], item.offset + item.count * item.length)
    return tuple(sizes)


def needed_slots(
    pages: Sequence[Page],
    paths: Sequence[int],
    spare: int,
    retained: int,
    edited: Collection[int] = (),
) -> Counter[tuple[int, int]]:
    """Return the number of slots by (path, length), as in `plan_slots`.

    Args:
        pages: some or all pages of the rank.
        paths: path of each of these pages.
        spare: maximum number of writes in flight per class.
        retained: number of checkpoints to keep.
        edited: fixed pages that may be rewritten.
    """
    members, changing = _counted(pages, paths, edited)
    return Counter(
        {key: count + changing[key] * retained + _spare(changing[key], spare) for key, count in members.items()}
    )


def _counted(
    pages: Sequence[Page], paths: Sequence[int], edited: Collection[int] = ()
) -> tuple[Counter[tuple[int, int]], Counter[tuple[int, int]]]:
    """Return the number of pages by (path, length): for all pages, and for the pages that are rewritten."""
    members: Counter[tuple[int, int]] = Counter()
    changing: Counter[tuple[int, int]] = Counter()
    for page, path in zip(pages, paths, strict=True):
        members[path, page.nbytes] += 1
        changing[path, page.nbytes] += not page.fixed or page.index in edited
    return members, changing


def _spare(count: int, most: int) -> int:
    return min(most, -(-count // _SPARE_PARTS))


def missing_slots(
    classes: Sequence[SlotClass],
    needed: Mapping[tuple[int, int], int],
    used: Collection[Extent] = (),
    behind: Sequence[SlotClass] = (),
) -> tuple[SlotClass, ...]:
    """Return the additional slots that are needed. They follow the existing slots and fill gaps between used extents.

    Args:
        classes: existing slots.
        needed: required number of slots by (path, length).
        used: extents of checkpointed pages. Each of them counts as a slot, whether or not it is one. Slots that
            overlap one of them are not counted.
        behind: unrelated slots that the additional ones must follow.
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
    """Return the slots that an increased number of pages needs, without inspecting existing slots.

    Args:
        ends: end of the existing slots on each path, in bytes. The existing slots suffice for the pages in `before`.
        before: previous number of pages by (path, length).
        members: new number of pages by (path, length).
        spare: maximum number of writes in flight per class.
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
    """Set of extents that do not overlap each other."""

    def __init__(self, used: Iterable[Extent]) -> None:
        self._spans: dict[int, list[tuple[int, int]]] = defaultdict(list)  # sorted (offset, end) by path
        for path, offset, length in sorted(set(used)):
            self._spans[path].append((offset, offset + length))

    def touch(self, slot: Extent) -> bool:
        spans = self._spans[slot.path]
        # the last extent that begins before the slot ends
        before = bisect_left(spans, (slot.offset + slot.length, 0)) - 1
        return before >= 0 and spans[before][1] > slot.offset

    def behind(self, path: int, offset: int) -> Iterator[tuple[int, int]]:
        return (span for span in self._spans[path] if span[1] > offset)


def overlapping(used: Iterable[Extent]) -> Extent | None:
    """Return an extent that overlaps another one, or ``None`` if no extents overlap."""
    last = Extent(-1, 0, 0)
    for extent in sorted(set(used)):
        if last.path == extent.path and extent.offset < last.offset + last.length:
            return extent
        last = extent
    return None


class ExtentAllocator:
    """Allocator of slots. Thread-safe."""

    def __init__(self, classes: Sequence[SlotClass], used: Iterable[Extent] = ()) -> None:
        """Mark all slots as free except those that overlap a used extent.

        Args:
            classes: all slots.
            used: extents of checkpointed pages, which do not overlap each other. Each becomes a slot when it is
                freed, wherever it is located.
        """
        taken = _Used(used)
        self._freed = Condition()
        """Lock for `_free`. Notified when a slot is freed."""
        self._free: dict[tuple[int, int], list[int]] = {}
        """Offsets of free slots, in bytes, by (path, length). The lowest offset comes last."""
        self.add(classes, taken)

    def add(self, classes: Sequence[SlotClass], taken: _Used | None = None) -> None:
        """Add slots, except those that overlap an extent in `taken`. Existing free slots are used first."""
        with self._freed:
            for item in classes:
                # A slot that overlaps a checkpointed page is never handed out, because a write to it would destroy the
                # checkpoint.
                free = [slot.offset for slot in item if taken is None or not taken.touch(slot)]
                self._free.setdefault((item.path, item.length), [])[:0] = reversed(free)
            self._freed.notify_all()

    def take(self, path: int, length: int, timeout: float) -> Extent:
        """Return a free slot. If there is none, wait until a version that is being replaced frees its slot.

        Raises:
            StallError: if no slot is freed within `timeout` seconds.
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
        """Return a free slot, or ``None`` if no slot is free."""
        with self._freed:
            free = self._free.get((path, length))
            return Extent(path, free.pop(), length) if free else None

    def give(self, extent: Extent) -> None:
        """Free a slot."""
        with self._freed:
            self._free.setdefault((extent.path, extent.length), []).append(extent.offset)
            self._freed.notify_all()

    def drain(self, classes: Sequence[SlotClass]) -> bool:
        """Remove all slots if all of them are free. Return whether they were removed.

        Args:
            classes: all existing slot classes.
        """
        with self._freed:
            if sum(map(len, self._free.values())) < sum(item.count for item in classes):
                return False
            self._free.clear()
            return True
