"""Vector clocks, which determine whether two memory accesses are ordered."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

Clock = dict[int, int]
"""Number of preceding accesses of each actor, by actor number."""


def merge(clock: Clock, other: Clock) -> None:
    """Update `clock` to include everything that precedes `other`."""
    for actor, count in other.items():
        if count > clock.get(actor, 0):
            clock[actor] = count


class Actor:
    """Sequence of ordered accesses: a stream, a thread or a transfer of the page store."""

    _numbers = itertools.count()

    def __init__(self, name: str) -> None:
        self.name = name  # used in messages
        self.number = next(Actor._numbers)  # unique number
        self.clock: Clock = {}  # accesses that precede its next access

    def follow(self, clock: Clock) -> None:
        """Order all later accesses after the accesses of a clock."""
        merge(self.clock, clock)

    def is_before(self, clock: Clock) -> bool:
        """Return whether an actor with this clock is ordered after all accesses of this one."""
        return self.clock.get(self.number, 0) <= clock.get(self.number, 0)


@dataclass(frozen=True)
class Access:
    """An access to memory."""

    actor: Actor
    count: int
    """Number of the access of this actor."""
    what: str
    writes: bool
    low: int
    """Address of the first byte."""
    high: int
    """Address after the last byte."""

    def is_before(self, clock: Clock) -> bool:
        """Return whether an actor with this clock is ordered after the access."""
        return self.count <= clock.get(self.actor.number, 0)

    def __str__(self) -> str:
        return f"{self.what} ({'writes' if self.writes else 'reads'}, {self.actor.name})"


@dataclass(eq=False)
class Memory:
    """A memory allocation, and its accesses since the last writes."""

    name: str
    owner: Actor | None = None
    """Stream in whose order the memory is allocated and freed. ``None``: host memory, or unknown."""
    on_host: bool = False
    """Whether only the host and copies may use the memory. Without an owner, this is not yet known."""
    birth: tuple[Actor, Clock, int] | None = None
    """Current stream at allocation, its clock, and the number of storages freed before."""
    uses: list[Access] = field(default_factory=list)
    """Accesses after which later accesses may have to be ordered."""
    kept: set[Actor] = field(default_factory=set)
    """Streams for which the allocator keeps the memory (`record_stream`)."""


class Span(NamedTuple):
    """A range of bytes of an allocation."""

    memory: Memory
    low: int
    high: int


class Races:
    """Check all accesses, and record races."""

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()  # messages that describe both accesses
        self.accesses = 0  # number of checked accesses

    def access(self, actor: Actor, span: Span, what: str, *, writes: bool) -> None:
        """Record an access, and check that it is ordered after conflicting accesses."""
        self.accesses += 1
        memory, low, high = span
        count = actor.clock[actor.number] = actor.clock.get(actor.number, 0) + 1
        access = Access(actor, count, what, writes, low, high)
        kept = []
        for before in memory.uses:
            overlaps = before.low < high and low < before.high
            if overlaps and (writes or before.writes) and not before.is_before(actor.clock):
                self.found[f"{memory.name}: {access} is not ordered after {before}"] += 1
            inside = low <= before.low and before.high <= high
            if not inside or (not writes and (before.writes or before.actor is not actor)):
                kept.append(before)
        memory.uses = [*kept, access]

    def mixed(self, what: str, device: Memory, host: Memory | None) -> None:
        """Record a host operation on device memory, which is an error on an accelerator."""
        where = f"{host.name} and " if host else ""
        self.found[f"{what} runs on the host with {where}{device.name}, which is on the device"] += 1

    def end(self, clock: Clock, memory: Memory, what: str) -> None:
        """Record that an actor with this clock may reuse the memory."""
        for before in memory.uses:
            if before.actor not in memory.kept and not before.is_before(clock):
                self.found[f"{memory.name}: {what} is not ordered after {before}"] += 1
