"""Reservations of space on the drives, without any I/O.

A reservation is valid between the request for space and its allocation (`fallocate`): the sum of reservations on a file
system never exceeds its free space. A rank releases its reservation once the space is allocated, because from then on
the file system itself accounts for it (`infinity.daemon_client.NodeDaemon.space_reserved`).
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
"""Maximum number of runs named in an error."""


@dataclass(frozen=True, kw_only=True)
class Owner:
    """Owner of a reservation.

    This is a process, identified by PID and start time (clock ticks since boot). If its PID is not visible here (`pid`
    is 0, for a process in another container), it is the connection of the request.
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
    """Reservations of the node. Threads may share an instance."""

    def __init__(self) -> None:
        self._entries: dict[tuple[Owner, str, str], Reservation] = {}
        """By owner, run and path. Changed by the event loop and read by the exporter's threads, under `_lock`."""
        self._lock = threading.Lock()  # held only briefly

    def reserve(self, owner: Owner, run_id: str, place: Place, size: int, free: int) -> int:
        """Reserve `size` bytes at a place with `free` bytes left, and return the free bytes that remain.

        A repeated request for the same owner, run and path replaces the earlier amount, so a retry is harmless.

        Raises:
            BudgetError: if `size` does not fit next to the other reservations on the file system, which the message
            names. ConfigError: if there are too many reservations.
        """
        key = (owner, run_id, place.path)
        with self._lock:
            others = [entry for name, entry in self._entries.items() if name != key]
            here = [entry for entry in others if entry.place.file_system == place.file_system]
            remaining = free - sum(entry.size for entry in here) - size
            if remaining < 0:
                raise BudgetError(_no_room(place, size, free, here))
            if len(others) >= _MAX_RESERVATIONS:
                raise ConfigError(f"the limit of {_MAX_RESERVATIONS} reservations is reached; release some")
            self._entries[key] = Reservation(owner=owner, run_id=run_id, place=place, size=size)
            return remaining

    def release(self, owner: Owner, run_id: str, path: str) -> int:
        """End the owner's reservation for a run and path, and return its size, or 0 if it does not exist."""
        with self._lock:
            entry = self._entries.pop((owner, run_id, path), None)
            return entry.size if entry else 0

    def expire(self, is_alive: Callable[[Owner], bool]) -> list[Reservation]:
        """End and return the reservations of owners that no longer exist."""
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
        """Return the reserved bytes by drive name."""
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
        f"{place.path} has {format_size(free)} free{taken}, but this run needs {format_size(size)} more. Free "
        "space, add a path to storage.paths, or remove earlier runs with `infinity store rm`"
    )
