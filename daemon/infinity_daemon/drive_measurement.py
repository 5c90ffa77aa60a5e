"""The daemon measures drives by itself, while nobody uses them.

[Note: when a drive is idle] A drive is used while a live rank has a path on it, while space on it is reserved, or when
a rank has just asked for its profile, which is the first thing a start does. Others are seen in the kernel's counters:
more than `NOISE` per second is use. Only when all that is to be measured has been idle for `measure.idle_seconds` does
a measurement begin. It ends at once when a run comes. What the counters then show beyond its own bytes was somebody
else: such a measurement is thrown away.

What is measured: each drive alone, then all together, if there are several; each again `measure.every_seconds` later.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from infinity.errors import InfinityError
from infinity.io.block_devices import SYSFS, Drive, Place, counters, locate, space
from infinity.io.probe.bench import measure_paths
from infinity.io.probe.points import Load, Measurement, ProbeStoppedError, Progress, points_of
from infinity.io.probe.targets import remove_left_over
from infinity.telemetry.stats_file import process_start
from infinity.units import MIB, align_down
from infinity_daemon.daemon_config import MeasureConfig
from infinity_daemon.drive_bandwidth import Measured, Profiles, Rates
from infinity_daemon.log import event
from infinity_daemon.reservations import Owner, Reservations

LOOK_SECONDS: Final = 1.0
"""How often it is looked whether there is something to do."""
NOISE: Final = 4.0 * MIB
"""Bytes per second that are no use of a drive: logs, and what the file system does by itself."""
_FOREIGN_SHARE: Final = 0.1
"""Of a measurement's own bytes: so many of somebody else are too few to change its result."""
_LEAST_SEEN: Final = 0.25
"""Share of a measurement's bytes that the counters must show; a file system on several drives shows a part of them."""
RUN_ID: Final = "infinityd"
"""In whose name space is reserved while a drive is measured."""
_POINTS: Final = points_of(list(Load), [MIB], [8])
_PARTS: Final = 6  # a round writes the file and measures two loads that write, for each drive alone and all together
_RESERVE_BESIDE: Final = 16 * MIB  # for the file system's own records
_AGAIN_SECONDS: Final = 600.0
"""When it is tried again what came to nothing; twice as long after each further time, up to `measure.every_seconds`:
each writes to the drive."""


@dataclass(kw_only=True)
class _Watched:
    """A drive, as it was seen last."""

    place: Place
    """The first configured folder on it."""
    moved: int | None
    """Bytes read and written since boot; None: the kernel does not count them."""
    looked: float
    """When, in monotonic seconds."""
    idle_since: float
    """The same clock: since when nobody uses it."""


@dataclass(frozen=True, kw_only=True)
class _Foreign:
    """Tells whether others moved bytes on the drives of a measurement; called after each of its parts."""

    places: Mapping[str, Place]
    """By path."""
    moved: Callable[[Drive], int | None]
    """Bytes over a drive since boot."""
    before: dict[str, int | None] = field(default_factory=dict)
    """By path, as the part before ended."""
    found: list[str] = field(default_factory=list)
    """Names of drives that somebody else has used."""

    def look(self, progress: Progress) -> None:
        """Compare what went over the drives with what was measured.

        Raises:
            InfinityError: the bytes did not reach the drive, so nothing was measured but memory.
        """
        for path, place in self.places.items():
            before, now = self.before.get(path), self.moved(place.drive)
            self.before[path] = now
            own = progress.latest.get(path)
            if own is not None and before is not None and now is not None:
                expected, seen = own.bytes_per_second * own.seconds, now - before
                if seen < _LEAST_SEEN * expected:
                    raise InfinityError(f"{path}: the drive saw {seen:.0f} of {expected:.0f} bytes: they are cached")
                if seen > (1 + _FOREIGN_SHARE) * expected + NOISE * max(own.seconds, LOOK_SECONDS):
                    self.found.append(place.drive.name)


class Measuring:
    """Measures the drives of some folders. `look` is called once a second by a thread; `used` and `end` by any.

    `settings` and `paths` are replaced when settings are read again.
    """

    def __init__(self, profiles: Profiles, reservations: Reservations, sysfs: Path = SYSFS) -> None:
        self.settings = MeasureConfig(enabled=False)
        self.paths: tuple[str, ...] = ()
        self._profiles, self._reservations, self._sysfs = profiles, reservations, sysfs
        self.owner = Owner(pid=os.getpid(), process_started=process_start(os.getpid()))
        """In whose name space is reserved."""
        self._tidied: set[str] = set()  # paths from which what was left over is removed; of the thread
        self._again: dict[frozenset[str], float] = {}
        """When drives, by identity, may be tried again, in monotonic seconds; of the thread."""
        self._tries: dict[frozenset[str], int] = {}
        """How often in succession measuring drives, by identity, came to nothing; of the thread."""
        self._said: set[str] = set()  # what the thread has said about drives that it cannot measure
        self._lock = threading.Lock()
        """Guards what follows; held for moments."""
        self._watched: dict[str, _Watched] = {}  # by name of the drive; added and looked at by the thread
        self._measured: frozenset[str] = frozenset()  # names of the drives that are being measured
        self._stop = threading.Event()  # ends the measurement that is under way; replaced by the next
        self._ended = False  # set by `end`: none begins any more

    def used(self, drives: Iterable[str]) -> None:
        """Note that runs use these drives now, by name: a measurement of one of them ends."""
        with self._lock:
            for name in drives:
                if name in self._watched:
                    self._watched[name].idle_since = time.monotonic()
                if name in self._measured:
                    self._stop.set()

    def end(self) -> None:
        """End the measurement that is under way, and begin no other."""
        with self._lock:
            self._ended = True
            self._stop.set()

    def look(self) -> None:
        """See which drives are idle, and measure what is due; returns when that has ended."""
        settings, now = self.settings, time.monotonic()
        if not settings.enabled:
            return
        self._watch(now)
        for target in self._targets():
            if self._is_due(target, settings, now):
                self._measure(target, settings)
                return

    def _watch(self, now: float) -> None:
        found: dict[str, Place] = {}
        for path in self.paths:
            with suppress(OSError):  # the collector of drives says so
                place = locate(path, self._sysfs)
                found.setdefault(place.drive.name, place)
                if path not in self._tidied:
                    self._tidied.add(path)
                    for file in remove_left_over(path):
                        event(logging.INFO, "measure.tidied", file=file)
        with self._lock:
            self._watched = {name: one for name, one in self._watched.items() if name in found}
            for name, place in found.items():
                moved = self._moved(place.drive)
                one = self._watched.setdefault(name, _Watched(place=place, moved=moved, looked=now, idle_since=now))
                quiet = NOISE * max(now - one.looked, LOOK_SECONDS)
                if moved is None or one.moved is None or moved - one.moved > quiet:
                    one.idle_since = now
                one.place, one.moved, one.looked = place, moved, now

    def _targets(self) -> list[list[Place]]:
        """Return what is to be measured: each drive, and all."""
        usable = []
        for name, one in self._watched.items():
            if one.place.in_memory or one.moved is None:
                if name not in self._said:
                    self._said.add(name)
                    reason = "it is memory" if one.place.in_memory else "the kernel does not tell who uses it"
                    event(logging.INFO, "measure.never", device=name, reason=reason)
            else:
                usable.append(one.place)
        return [[place] for place in usable] + ([usable] if len(usable) > 1 else [])

    def _is_due(self, target: Sequence[Place], settings: MeasureConfig, now: float) -> bool:
        drives = _identities(target)
        age = time.time() - self._profiles.measured(drives, "daemon")
        if 0 <= age < settings.every_seconds or now < self._again.get(drives, 0.0):
            return False
        with self._lock:
            return self._is_idle(target, settings)

    def _is_idle(self, target: Sequence[Place], settings: MeasureConfig) -> bool:
        now = time.monotonic()
        return all(now - self._watched[place.drive.name].idle_since >= settings.idle_seconds for place in target)

    def _measure(self, target: Sequence[Place], settings: MeasureConfig) -> None:
        names = [place.drive.name for place in target]
        with self._lock:
            if self._ended or not self._is_idle(target, settings):  # a run has come just now
                return
            self._stop, self._measured = threading.Event(), frozenset(names)
        drives, said = _identities(target), {"devices": ",".join(names)}
        tries = self._tries[drives] = self._tries.get(drives, -1) + 1
        self._again[drives] = time.monotonic() + min(settings.every_seconds, _AGAIN_SECONDS * 2 ** min(tries, 20))
        try:
            foreign, found = self._results(target, settings)
        except ProbeStoppedError:
            event(logging.INFO, "measure.stopped", **said)
        except (InfinityError, OSError) as error:
            event(logging.WARNING, "measure.failed", **said, reason=str(error))
        else:
            if foreign:
                self._touched(foreign)
                event(logging.INFO, "measure.disturbed", **said, by="others that use " + ",".join(foreign))
            else:
                del self._tries[drives], self._again[drives]
                self._keep(target, found)
        finally:
            with self._lock:
                self._measured = frozenset()
                for place in target:  # its own bytes are nobody's use
                    self._watched[place.drive.name].moved = self._moved(place.drive)
                    self._watched[place.drive.name].looked = time.monotonic()

    def _results(
        self, target: Sequence[Place], settings: MeasureConfig
    ) -> tuple[list[str], dict[str, tuple[Measurement, ...]]]:
        """Measure; return the drives that others have used meanwhile, and what was found by path."""
        paths = [place.path for place in target]
        part = align_down(settings.most_bytes // _PARTS, MIB)
        foreign = _Foreign(places=dict(zip(paths, target, strict=True)), moved=self._moved)
        with ExitStack() as stack:
            for place in target:
                size, free = part + _RESERVE_BESIDE, space(place.path).free
                self._reservations.reserve(self.owner, RUN_ID, place, size, free)
                stack.callback(self._reservations.release, self.owner, RUN_ID, place.path)
            found = measure_paths(
                paths,
                _POINTS,
                file_bytes=part,
                seconds=settings.load_seconds,
                most_written=part,
                stop=self._stop,
                on_progress=foreign.look,
            )
        return list(dict.fromkeys(foreign.found)), found

    def _keep(self, target: Sequence[Place], found: Mapping[str, Sequence[Measurement]]) -> None:
        rates = {}
        for place in target:
            by_load = {one.point.load: one.bytes_per_second for one in found[place.path]}
            rates[place.drive.identity] = Rates(
                read=by_load[Load.READ], write=by_load[Load.WRITE], mixed=by_load[Load.BOTH]
            )
            shown = {load: f"{speed / 1e9:.3f}GB/s" for load, speed in asdict(rates[place.drive.identity]).items()}
            event(logging.INFO, "measure.done", device=place.drive.name, together=len(target), **shown)
        self._profiles.record(Measured(rates=rates, source="daemon", measured=time.time()))

    def _touched(self, drives: Iterable[str]) -> None:
        with self._lock:
            for name in drives:
                self._watched[name].idle_since = time.monotonic()

    def _moved(self, drive: Drive) -> int | None:
        found = counters(drive, self._sysfs)
        return None if found is None else found.read + found.written


def _identities(target: Iterable[Place]) -> frozenset[str]:
    return frozenset(place.drive.identity for place in target)
