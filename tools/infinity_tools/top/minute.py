"""Throughput of the drives during the last minute."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Final

from infinity_tools.top.reading import Snapshot, figure, word

SECONDS: Final = 60.0

Curve = tuple[tuple[float, float], ...]
"""Samples, oldest first: age in seconds, and throughput in bytes per second."""


class Minute:
    """Read plus write throughput of each drive during the last minute, collected from successive snapshots."""

    def __init__(self) -> None:
        self._seen: dict[str, deque[tuple[float, float]]] = {}
        """Samples by drive name: Unix time, and throughput in bytes per second."""

    def add(self, snapshot: Snapshot) -> Mapping[str, Curve]:
        """Add a snapshot and return the curve of each of its drives."""
        drives = {word(drive, "name"): drive for drive in snapshot.drives}
        self._seen = {name: self._seen.get(name, deque()) for name in drives}
        for name, drive in drives.items():
            seen, rates = self._seen[name], (figure(drive, "read"), figure(drive, "write"))
            if None not in rates and (not seen or snapshot.time > seen[-1][0]):
                seen.append((snapshot.time, sum(filter(None, rates))))
            while seen and snapshot.time - seen[0][0] > SECONDS:
                seen.popleft()
        return {
            name: tuple((snapshot.time - when, rate) for when, rate in seen) for name, seen in self._seen.items()
        }  # fmt: skip


def buckets(curve: Curve, number: int) -> list[float | None]:
    """Divide the minute into `number` equal parts, and return the mean throughput of each, or None without samples."""
    found: list[list[float]] = [[] for _ in range(number)]
    for ago, rate in curve:
        found[max(0, number - 1 - int(ago / SECONDS * number))].append(rate)
    return [sum(rates) / len(rates) if rates else None for rates in found]
