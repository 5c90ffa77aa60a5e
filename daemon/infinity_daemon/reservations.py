"""Who has reserved how much space: the arithmetic, without any I/O.

A reservation is a promise between asking for space and taking it (`fallocate`): the sum of reservations on
a file system never exceeds what is free on it. A rank releases its reservation once the space is taken,
because from then on the file system itself says so (`infinity.daemon_client.NodeDaemon.space_reserved`).
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from infinity.errors import BudgetError, ConfigError
from infinity.io.block_devices import Place
from infinity.units import format_size

_MAX_RESERVATIONS: Final = 4096
_MOST_NAMED: Final = 3
"""Runs that an error names."""


@dataclass(frozen=True, kw_only=True)
class Owner:
    """Whose reservation it is.

    A process, told by number and start (clock ticks since boot); or, where the number is not visible here
    (`pid` 0, another container), the connection it came over.
    """

    pid: int
    process_started: int
    connection: int = 0


@dataclass(frozen=True, kw_only=True)
class Reservation:
    """Space promised to an owner, in bytes."""

    owner: Owner
    run_id: str
    place: Place
    size: int


class Reservations:
    """All reservations of the node. Safe to share by threads."""

    def __init__(self) -> None:
        self._entries: dict[tuple[Owner, str, str], Reservation] = {}
        """By owner, run and path. Changed by the event loop, read by the exporter's threads; all under `_lock`."""
        self._lock = threading.Lock()  # nothing is waited for under it

    def reserve(self, owner: Owner, run_id: str, place: Place, size: int, free: int) -> int:
        """Reserve `size` bytes at a place with `free` bytes left, and return what then remains free.

        Asking again for the same owner, run and path replaces the earlier amount, so a retry is harmless.

        Raises:
            BudgetError: it does not fit beside the other reservations of the file system, which it names.
            ConfigError: too many reservations.
        """
        key = (owner, run_id, place.path)
        with self._lock:
            others = [entry for name, entry in self._entries.items() if name != key]
            here = [entry for entry in others if entry.place.file_system == place.file_system]
            remaining = free - sum(entry.size for entry in here) - size
            if remaining < 0:
                raise BudgetError(_no_room(place, size, free, here))
            if len(others) >= _MAX_RESERVATIONS:
                raise ConfigError(f"there are {_MAX_RESERVATIONS} reservations already; release some")
            self._entries[key] = Reservation(owner=owner, run_id=run_id, place=place, size=size)
            return remaining

    def release(self, owner: Owner, run_id: str, path: str) -> int:
        """End the owner's reservation for a run and path and return its size; 0 if there is none."""
        with self._lock:
            entry = self._entries.pop((owner, run_id, path), None)
            return entry.size if entry else 0

    def expire(self, is_alive: Callable[[Owner], bool]) -> list[Reservation]:
        """End and return the reservations of owners that are gone."""
        with self._lock:
            gone = {key: entry for key, entry in self._entries.items() if not is_alive(entry.owner)}
            for key in gone:
                del self._entries[key]
            return list(gone.values())

    def entries(self) -> tuple[Reservation, ...]:
        """Return all reservations."""
        with self._lock:
            return tuple(self._entries.values())

    def by_drive(self) -> dict[str, int]:
        """Return the bytes reserved per drive name."""
        total: dict[str, int] = defaultdict(int)
        for entry in self.entries():
            total[entry.place.drive.name] += entry.size
        return dict(total)


def _no_room(place: Place, size: int, free: int, others: Sequence[Reservation]) -> str:
    by_run: dict[str, int] = defaultdict(int)
    for entry in others:
        by_run[entry.run_id] += entry.size
    largest = sorted(by_run.items(), key=lambda pair: -pair[1])
    named = [f"{format_size(of)} reserved by run {run}" for run, of in largest[:_MOST_NAMED]]
    if len(largest) > _MOST_NAMED:
        named.append(f"{format_size(sum(of for _, of in largest[_MOST_NAMED:]))} by others")
    taken = f", of which {', '.join(named)}" if named else ""
    return (
        f"{place.path} has {format_size(free)} free{taken}, but this run needs {format_size(size)} more there; free "
        "space, add a path to storage.paths, or remove earlier runs with `infinity store rm`"
    )
