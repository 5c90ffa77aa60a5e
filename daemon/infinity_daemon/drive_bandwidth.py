"""What drives can do: a history of measurements in one JSON file, and the profiles that are made of it.

[Note: profiles] A measurement has the bytes per second of one drive, or of several that were busy at the same time,
under one to three loads: reads, writes, and both mixed. The daemon measures by itself (`measure.py`); `infinity probe`
and runs that have measured tell it what they found. All count the same. The profile of a drive is, for each load, the
median of the `RECENT` newest measurements of that drive alone: so one that was disturbed, or taken with a full SLC
cache, does not change it. A drive that was only measured together with others has those. Drives that are asked for
together have a profile together if exactly these were measured at the same time: they may share a bus that gives each
of them less.
"""

from __future__ import annotations

import json
import logging
import math
import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, Final

from infinity.io.block_devices import Drive
from infinity.schema import Mismatch, one_of, optional, record, sequence, table, text
from infinity.untrusted_files import read_own, write_own
from infinity_daemon.log import event

FILE_NAME: Final = "bandwidth.json"
RECENT: Final = 5
"""Measurements that a profile is made of."""
LOADS: Final = ("read", "write", "mixed")
SOURCES: Final = ("daemon", "probe", "run")
_MOST_KEPT: Final = 512
"""Measurements of all drives; of each combination of drives `RECENT` of each source."""
_MAX_FILE: Final = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Bytes per second under each load, None where it was not measured; `mixed` is of both directions together."""

    read: float | None = None
    write: float | None = None
    mixed: float | None = None


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What somebody measured, on all drives at the same time."""

    rates: Mapping[str, Rates]
    """By identity of the drive."""
    source: str
    """Who it was: one of `SOURCES`."""
    measured: float
    """When, in Unix time."""

    @property
    def drives(self) -> frozenset[str]:
        """Their identities."""
        return frozenset(self.rates)


@dataclass(frozen=True, kw_only=True)
class Profile(Rates):
    """What a drive can do, and the Unix time of the newest measurement that it is made of. [Note: profiles]"""

    measured: float


def rate(value: Any) -> float:
    """Bytes per second, or another finite number above 0. Raises `Mismatch`."""
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise Mismatch(value, "must be bytes per second above 0")
    return float(value)


def rates(value: Any) -> Rates:
    """An object with one to three loads. Raises `Mismatch`."""
    found: Rates = _RATES(value)
    if found == Rates():
        raise Mismatch(value, f"must have one of {', '.join(LOADS)}")
    return found


_RATES = record(Rates, lacking=LOADS, read=optional(rate), write=optional(rate), mixed=optional(rate))
_MEASURED = record(Measured, rates=table(text(), rates), source=one_of(*SOURCES), measured=rate)
_FILE = record(measurements=sequence(_MEASURED, most=_MOST_KEPT))


class Profiles:
    """The history in a file of `folder`, and the profiles. Threads may share it."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / FILE_NAME
        self._kept: tuple[Measured, ...] = ()
        """The newest first. Never changed in place but replaced, under `_lock`, so that it is read without one."""
        self._lock = threading.Lock()
        """Held while a measurement is added and the file written: the last write has the newest."""

    def of(self, drive: Drive) -> Profile | None:
        """Return the profile of a drive, or None if it was never measured."""
        name = drive.identity
        return _profile(name, [one for one in self._kept if one.drives == {name}]) or _profile(name, self._kept)

    def together(self, drives: Collection[str]) -> dict[str, Profile] | None:
        """Return the profiles of drives, all busy, by identity as they are given; None if never measured."""
        same = [one for one in self._kept if one.drives == frozenset(drives)]
        found = {drive: _profile(drive, same) for drive in drives}
        known = {drive: profile for drive, profile in found.items() if profile is not None}
        return known if known and len(known) == len(found) else None

    def measured(self, drives: Collection[str], source: str) -> float:
        """Return the Unix time at which somebody measured exactly these drives last; 0 if never."""
        wanted = frozenset(drives)
        return max((one.measured for one in self._kept if one.drives == wanted and one.source == source), default=0.0)

    def load(self) -> None:
        """Read the file; one that is missing or malformed leaves the history empty, and is said."""
        try:
            found = _FILE(json.loads(read_own(self._file, _MAX_FILE)))["measurements"]
        except FileNotFoundError:
            return
        except (OSError, ValueError, OverflowError, RecursionError) as error:
            event(logging.WARNING, "bandwidth.unreadable", file=self._file, reason=error)
            return
        with self._lock:
            self._kept = _newest([*self._kept, *found])

    def record(self, measured: Measured) -> None:
        """Keep a measurement, and write the file.

        Raises:
            OSError: the file cannot be written; the measurement is then kept in memory only.
        """
        with self._lock:
            self._kept = _newest([measured, *self._kept])
            while len(data := _encoded(self._kept)) > _MAX_FILE:
                self._kept = self._kept[: len(self._kept) // 2]
            write_own(self._file, data, durable=True)


def _newest(measurements: Iterable[Measured]) -> tuple[Measured, ...]:
    """Return what is to be kept, the newest first."""
    kept, counts = [], dict[tuple[frozenset[str], str], int]()
    for one in sorted(measurements, key=lambda one: -one.measured):
        key = one.drives, one.source
        counts[key] = counts.get(key, 0) + 1
        if counts[key] <= RECENT:
            kept.append(one)
    return tuple(kept[:_MOST_KEPT])


def _profile(drive: str, measurements: Iterable[Measured]) -> Profile | None:
    """Make a profile of measurements, of which the newest come first. [Note: profiles]"""
    found = [(one.measured, one.rates[drive]) for one in measurements if drive in one.rates]
    recent = {load: list(islice(((t, r) for t, one in found if (r := getattr(one, load))), RECENT)) for load in LOADS}
    times = [when for values in recent.values() for when, _ in values]
    if not times:
        return None
    middle = {load: median(value for _, value in values) for load, values in recent.items() if values}
    return Profile(**middle, measured=max(times))


def _encoded(measurements: Iterable[Measured]) -> bytes:
    return json.dumps({"measurements": [asdict(one) for one in measurements]}, indent=1).encode() + b"\n"
