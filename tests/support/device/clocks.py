"""Vector clocks: which accesses of memory are ordered behind which, whoever made them."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

Clock = dict[int, int]
"""By number of an actor, how many of its accesses came before."""


def merge(clock: Clock, other: Clock) -> None:
    """Let what came before `other` have come before `clock` too."""
    for actor, count in other.items():
        if count > clock.get(actor, 0):
            clock[actor] = count


class Actor:
    """Whose accesses are in order: a stream, a thread, a transfer of the store."""

    _numbers = itertools.count()

    def __init__(self, name: str) -> None:
        self.name = name  # for messages
        self.number = next(Actor._numbers)  # of it alone
        self.clock: Clock = {}  # what its next access comes behind

    def follow(self, clock: Clock) -> None:
        """Be behind all of a clock from now on."""
        merge(self.clock, clock)


@dataclass(frozen=True)
class Access:
    """One access of some memory."""

    actor: Actor
    count: int
    """Which one of the actor's."""
    what: str
    writes: bool
    low: int
    """Address of its first byte."""
    high: int
    """Of the first one behind."""

    def is_before(self, clock: Clock) -> bool:
        """Whether somebody with this clock is ordered behind it."""
        return self.count <= clock.get(self.actor.number, 0)

    def __str__(self) -> str:
        return f"{self.what} ({'writes' if self.writes else 'reads'}, {self.actor.name})"


@dataclass(eq=False)
class Memory:
    """Memory that is allocated as one, and who has used what of it since that was written last."""

    name: str
    owner: Actor | None = None
    """The stream in whose order it is allocated and freed; None for that of the host."""
    on_host: bool = False
    """Whether only the host, and copies, may use it. Without an owner it may be either: nobody has shown which."""
    birth: tuple[Actor, Clock, int] | None = None
    """The stream that was current when it was allocated, behind what that was, and how much had been freed."""
    uses: list[Access] = field(default_factory=list)
    """All that somebody may have to be ordered behind."""
    kept: set[Actor] = field(default_factory=set)
    """Streams for which the allocator keeps it."""


class Span(NamedTuple):
    """Some bytes of some memory."""

    memory: Memory
    low: int
    high: int


class Races:
    """Looks at every access, and keeps what is not ordered."""

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()  # messages, which name both sides
        self.accesses = 0  # that were looked at

    def access(self, actor: Actor, span: Span, what: str, *, writes: bool) -> None:
        """Note an access, and whether those before that it must come behind do."""
        self.accesses += 1
        memory, low, high = span
        count = actor.clock[actor.number] = actor.clock.get(actor.number, 0) + 1
        access = Access(actor, count, what, writes, low, high)
        kept = []
        for before in memory.uses:
            overlaps = before.low < high and low < before.high
            if overlaps and (writes or before.writes) and not before.is_before(actor.clock):
                self.found[f"{memory.name}: {access} is not ordered behind {before}"] += 1
            inside = low <= before.low and before.high <= high
            if not inside or (not writes and (before.writes or before.actor is not actor)):
                kept.append(before)
        memory.uses = [*kept, access]

    def mixed(self, what: str, device: Memory, host: Memory | None) -> None:
        """Note an operation of the host on memory of the device, which an accelerator refuses."""
        where = f"{host.name} and " if host else ""
        self.found[f"{what} computes on the host with {where}{device.name}, which is on the device"] += 1

    def end(self, clock: Clock, memory: Memory, what: str) -> None:
        """Note that memory may be used for something else, by somebody with this clock."""
        for before in memory.uses:
            if before.actor not in memory.kept and not before.is_before(clock):
                self.found[f"{memory.name}: {what} is not ordered behind {before}"] += 1
