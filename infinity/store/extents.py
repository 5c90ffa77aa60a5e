"""Where page versions lie on the NVMe paths.

Every path holds one data file per rank. A file is a row of *slots*; pages of the same length on the same path
share a class of slots, so space never fragments and the whole need is known before the first byte is written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from threading import Condition
from typing import NamedTuple

from infinity.content.format import Role
from infinity.content.layout import Page
from infinity.errors import StallError


class Extent(NamedTuple):
    """A run of bytes of one path's data file."""

    path: int
    """Number of the NVMe path, in the run's order."""
    offset: int
    """Of its first byte."""
    length: int
    """Bytes."""


def spread(pages: Sequence[Page], shares: Sequence[float]) -> tuple[int, ...]:
    """Return the path of every page so that bytes follow `shares`, role by role and in page order.

    Consecutive pages alternate between paths, so that any stretch of the trace keeps all drives busy. Only a path that
    is behind its share gets a page, so none is ever further from it than one page (the quota method of Balinski and
    Young, 1975).
    """
    total = sum(shares)
    given: dict[Role, list[float]] = {role: [0.0] * len(shares) for role in Role}
    paths: list[int] = []
    for page in pages:
        loads = given[page.role]
        due = sum(loads) + page.nbytes
        behind = [k for k, share in enumerate(shares) if loads[k] * total < share * due]
        path = min(behind, key=lambda k: ((loads[k] + page.nbytes) / shares[k], k))
        loads[path] += page.nbytes
        paths.append(path)
    return tuple(paths)


@dataclass(frozen=True, kw_only=True)
class SlotClass:
    """`count` slots of `length` bytes, from `offset` on, in the file of `path`."""

    path: int
    length: int
    offset: int
    count: int


def plan_slots(pages: Sequence[Page], paths: Sequence[int], spare: int, retained: int) -> tuple[SlotClass, ...]:
    """Return the slots that hold the retained commits, one newer version of every page, and writes in flight.

    Classes for another retained commit lie behind all others, so that a resumed run may retain more or fewer.

    Args:
        pages: all pages of the rank.
        paths: path of every page.
        spare: writes that may be in flight at once; each needs one slot more.
        retained: commits that are kept.
    """
    members: Counter[tuple[int, int]] = Counter()
    committed: Counter[tuple[int, int]] = Counter()
    for page, path in zip(pages, paths, strict=True):
        members[path, page.nbytes] += 1
        committed[path, page.nbytes] += page.role is not Role.GRAD
    newest = {key: count + min(spare, count) for key, count in members.items()}
    offsets = [0] * (max(paths, default=0) + 1)
    classes = []
    for counts in (newest, *[committed] * retained):
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


def misplaced(classes: Iterable[SlotClass], used: Iterable[Extent]) -> Extent | None:
    """Return an extent that is neither a slot nor behind all slots and clear of the other extents, if there is one."""
    classes = tuple(classes)
    slots = {
        Extent(item.path, item.offset + k * item.length, item.length) for item in classes for k in range(item.count)
    }
    ends = file_sizes(classes, 1 + max((item.path for item in classes), default=-1))
    last = Extent(-1, 0, 0)
    for extent in sorted(set(used) - slots):
        behind = last.offset + last.length if last.path == extent.path else ends[extent.path]
        if extent.offset < behind:
            return extent
        last = extent
    return None


class ExtentAllocator:
    """Hands out slots. Safe to call from several threads."""

    def __init__(self, classes: Sequence[SlotClass], used: Iterable[Extent] = ()) -> None:
        """Begin with all slots free but those in use.

        Args:
            classes: all slots.
            used: extents of committed pages; those that are in no slot are passed over.
        """
        taken = set(used)
        self._freed = Condition()
        """Lock of `_free`; notified when a slot comes back."""
        self._free: dict[tuple[int, int], list[int]] = {}
        """Offsets in bytes of free slots by (path, length), the lowest last."""
        for item in reversed(classes):  # the lowest offsets are taken first
            slots = (Extent(item.path, item.offset + k * item.length, item.length) for k in range(item.count))
            free = [slot.offset for slot in slots if slot not in taken]
            self._free.setdefault((item.path, item.length), []).extend(reversed(free))

    def take(self, path: int, length: int, timeout: float) -> Extent:
        """Return a free slot, waiting for one if all are in use by versions that are being replaced.

        Raises:
            StallError: none was freed within `timeout` seconds.
        """
        with self._freed:
            free = self._free[path, length]
            if not self._freed.wait_for(lambda: bool(free), timeout):
                raise StallError(f"no slot of {length} bytes on path {path} was freed within {timeout:.0f} s")
            return Extent(path, free.pop(), length)

    def give(self, extent: Extent) -> None:
        """Take a slot back."""
        with self._freed:
            self._free[extent.path, extent.length].append(extent.offset)
            self._freed.notify_all()
