"""Bookkeeping of the drive space that ranks have reserved.

A rank reserves space before it allocates files (with `fallocate`), so that ranks that start at the same time do not
claim the same free space: the reservations on a file system never exceed its free space. Once the files are allocated,
the file system accounts for them, and the rank releases the reservation
(`infinity.daemon_client.NodeDaemon.space_reserved`).
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
from infinity.untrusted_files import user_name

_MAX_RESERVATIONS: Final = 1024
"""Maximum number of reservations per user."""
_MOST_SHOWN: Final = 256
"""Maximum number of reservations in a response."""
_MOST_NAMED: Final = 3
"""Maximum number of runs listed in an error message."""


@dataclass(frozen=True, kw_only=True)
class Owner:
    """Owner of a reservation.

    The owner is a process, identified by its PID and start time (clock ticks since boot). If the PID is not visible to
    the daemon (`pid` is 0), for example because the process is in another container, the owner is its connection.
    All values come from the kernel, so a reservation can only be released by its owner. Root can end the process.
    """

    uid: int
    pid: int
    process_started: int
    connection: int = 0


@dataclass(frozen=True, kw_only=True)
class Reservation:
    """Space reserved by an owner, in bytes."""

    owner: Owner
    run_id: str
    place: Place
    size: int


class Reservations:
    """All reservations on the node. Thread-safe."""

    def __init__(self) -> None:
        self._entries: dict[tuple[Owner, str, str], Reservation] = {}
        """Reservations by owner, run id and path. Protected by `_lock`, because several threads use them."""
        self._lock = threading.Lock()  # held only briefly

    def reserve(self, owner: Owner, run_id: str, place: Place, size: int, free: int) -> int:
        """Reserve space and return the number of unreserved free bytes that remain on the file system.

        A reservation replaces an earlier one for the same owner, run and path, so retrying is safe.

        Args:
            owner: Owner of the reservation.
            run_id: Id of the run.
            place: Location of the space.
            size: Number of bytes to reserve.
            free: Number of free bytes on the file system.

        Raises:
            BudgetError: if the free space minus other reservations is less than `size`. The message lists the largest
                reservations.
            ConfigError: if there are too many reservations.
        """
        key = (owner, run_id, place.path)
        with self._lock:
            others = [entry for name, entry in self._entries.items() if name != key]
            own = [entry for entry in others if entry.owner.uid == owner.uid]
            here = [entry for entry in others if entry.place.file_system == place.file_system]
            remaining = free - sum(entry.size for entry in here) - size
            if remaining < 0:
                raise BudgetError(_no_room(place, size, free, here, owner.uid))
            if len(own) >= _MAX_RESERVATIONS:
                raise ConfigError(
                    f"the limit of {_MAX_RESERVATIONS} reservations per user is reached; wait until other runs have "
                    "started"
                )
            self._entries[key] = Reservation(owner=owner, run_id=run_id, place=place, size=size)
            return remaining

    def release(self, owner: Owner, run_id: str, path: str) -> int:
        """Release a reservation and return its size in bytes, or 0 if it does not exist."""
        with self._lock:
            entry = self._entries.pop((owner, run_id, path), None)
            return entry.size if entry else 0

    def expire(self, is_alive: Callable[[Owner], bool]) -> list[Reservation]:
        """Release and return the reservations of owners that no longer exist."""
        with self._lock:
            gone = {key: entry for key, entry in self._entries.items() if not is_alive(entry.owner)}
            for key in gone:
                del self._entries[key]
            return list(gone.values())

    def entries(self) -> tuple[Reservation, ...]:
        """Return all reservations."""
        with self._lock:
            return tuple(self._entries.values())

    def largest(self) -> list[dict[str, object]]:
        """Return the largest reservations as plain data, for a response of limited length."""
        return [
            {
                "run_id": entry.run_id,
                "user": user_name(entry.owner.uid),
                "path": entry.place.path,
                "device": entry.place.drive.name,
                "bytes": entry.size,
                "pid": entry.owner.pid,
            }
            for entry in sorted(self.entries(), key=lambda entry: -entry.size)[:_MOST_SHOWN]
        ]

    def by_drive(self) -> dict[str, int]:
        """Return the reserved bytes by drive name."""
        total: dict[str, int] = defaultdict(int)
        for entry in self.entries():
            total[entry.place.drive.name] += entry.size
        return dict(total)


def _no_room(place: Place, size: int, free: int, others: Sequence[Reservation], uid: int) -> str:
    by_run: dict[str, int] = defaultdict(int)
    for entry in others:
        user = "" if entry.owner.uid == uid else f" of {user_name(entry.owner.uid)}"
        by_run[entry.run_id + user] += entry.size
    largest = sorted(by_run.items(), key=lambda pair: -pair[1])
    named = [f"{format_size(of)} reserved by run {run}" for run, of in largest[:_MOST_NAMED]]
    if len(largest) > _MOST_NAMED:
        named.append(f"{format_size(sum(of for _, of in largest[_MOST_NAMED:]))} by other runs")
    taken = f", of which {', '.join(named)}" if named else ""
    return (
        f"{place.path} has {format_size(free)} free{taken}, but this run needs {format_size(size)} more. Free "
        "space, add a path to storage.paths, or remove earlier runs with `infinity store rm`"
    )
