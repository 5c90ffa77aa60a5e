"""Bandwidth measurement of idle drives by the daemon.

[Note: when a drive is idle] A drive is in use while a live rank has a path on it or while space on it is reserved. It
is also in use when a rank requests its profile, because that is the first request of a run that is starting. Other
processes are detected through the operating system's I/O counters: a drive that transfers more than `NOISE` bytes per
second is in use. A measurement starts only after all of its drives have been idle for `measure.idle_seconds`, and is
stopped as soon as a run starts. If the counters increase by more than the bytes of the measurement itself, another
process was using the drive, and the result is discarded.

Each drive is measured alone. If there are several drives, they are also measured together. Measurements are repeated
after `measure.every_seconds`.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from infinity.errors import InfinityError
from infinity.io.block_devices import SYSFS, Drive, Place, counters, locate, space
from infinity.io.probe.bench import measure_paths
from infinity.io.probe.points import Load, Measurement, ProbeStoppedError, points_of
from infinity.io.probe.targets import remove_left_over
from infinity.telemetry.stats_file import process_start
from infinity.units import MIB, align_down
from infinity_daemon.daemon_config import MeasureConfig
from infinity_daemon.drive_bandwidth import Measured, Profiles, Rates
from infinity_daemon.log import event
from infinity_daemon.reservations import Owner, Reservations

LOOK_SECONDS: Final = 1.0
"""Interval between two checks for measurements that are due."""
NOISE: Final = 4.0 * MIB
"""Throughput below which a drive counts as idle, in bytes per second; allows for logs and file system maintenance."""
_FOREIGN_SHARE: Final = 0.1
"""Tolerated traffic of other processes, as a fraction of the bytes of the measurement."""
_LEAST_SEEN: Final = 0.25
"""Minimum fraction of the measured bytes that must reach the drive. It is below 1 because a file system may distribute
them across several drives."""
RUN_ID: Final = "infinityd"
"""Run id under which the daemon reserves space for a measurement."""
_POINTS: Final = points_of(list(Load), [MIB], [8])
_PARTS: Final = 6  # files written per round: the test file and two writing loads, both alone and together
_RESERVE_BESIDE: Final = 16 * MIB  # additionally reserved for file system metadata
_AGAIN_SECONDS: Final = 600.0
"""Time until a failed measurement is retried. It doubles after each failure, up to `measure.every_seconds`, because
each attempt writes to the drive."""


@dataclass(kw_only=True)
class _Watched:
    """State of a drive at the last check."""

    place: Place
    """First configured folder on the drive."""
    moved: int | None
    """Bytes read and written since boot, or None if there are no counters for the drive."""
    looked: float
    """Monotonic time of the last check, in seconds."""
    idle_since: float
    """Monotonic time at which the drive became idle, in seconds."""


class Measuring:
    """Measure the drives on which `paths` are stored, while they are idle.

    `look` is called once per second by a single thread; other methods are thread-safe. `settings` and `paths` are
    replaced when the settings are reloaded.
    """

    def __init__(self, profiles: Profiles, reservations: Reservations, sysfs: Path = SYSFS) -> None:
        self.settings = MeasureConfig(enabled=False)
        self.paths: tuple[str, ...] = ()
        self._profiles, self._reservations, self._sysfs = profiles, reservations, sysfs
        self.owner = Owner(uid=os.geteuid(), pid=os.getpid(), process_started=process_start(os.getpid()))
        """Owner of the daemon's own space reservations."""
        self._tidied: set[str] = set()  # paths in which leftover files have been removed; only used in `look`
        self._again: dict[frozenset[str], float] = {}
        """Monotonic time before which a set of drives (by identity) is not measured again; only used in `look`."""
        self._tries: dict[frozenset[str], int] = {}
        """Number of consecutive failed measurements of a set of drives (by identity); only used in `look`."""
        self._said: set[str] = set()  # drives that have been logged as not measurable; only used in `look`
        self._lock = threading.Lock()
        """Protects the attributes below. Held only briefly."""
        self._watched: dict[str, _Watched] = {}  # by drive name; only `look` adds entries
        self._measured: frozenset[str] = frozenset()  # names of the drives being measured
        self._stop = threading.Event()  # stops the current measurement; each measurement has its own event
        self._ended = False  # set by `end`, after which no measurement starts

    def used(self, drives: Iterable[str]) -> None:
        """Record that runs are using the drives with these names, and stop any measurement of them."""
        with self._lock:
            for name in drives:
                if name in self._watched:
                    self._watched[name].idle_since = time.monotonic()
                if name in self._measured:
                    self._stop.set()

    def end(self) -> None:
        """Stop the current measurement, and do not start another one."""
        with self._lock:
            self._ended = True
            self._stop.set()

    def look(self) -> None:
        """Check which drives are idle, and run at most one measurement that is due. Blocks until it has finished."""
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
            with suppress(OSError):  # reported by the `devices` collector
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
        """Return the sets of drives to measure, by location: each drive alone, then all of them."""
        usable = []
        for name, one in self._watched.items():
            if one.place.in_memory or one.moved is None:
                if name not in self._said:
                    self._said.add(name)
                    reason = "memory-backed" if one.place.in_memory else "no kernel I/O counters"
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
            if self._ended or not self._is_idle(target, settings):  # a run has started since the check
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
                self.used(foreign)
                event(logging.INFO, "measure.disturbed", **said, by="other processes on " + ",".join(foreign))
            else:
                del self._tries[drives], self._again[drives]
                self._keep(target, found)
        finally:
            with self._lock:
                self._measured = frozenset()
                for place in target:  # the measurement's own traffic does not count as use
                    self._watched[place.drive.name].moved = self._moved(place.drive)
                    self._watched[place.drive.name].looked = time.monotonic()

    def _results(
        self, target: Sequence[Place], settings: MeasureConfig
    ) -> tuple[list[str], dict[str, tuple[Measurement, ...]]]:
        """Measure the drives. Return the drives on which other processes were active, and the results by path.

        Raises:
            InfinityError: if most bytes did not reach a drive, so that memory was measured instead.
        """
        part = align_down(settings.most_bytes // _PARTS, MIB)
        moved: dict[str, int | None] = {}  # traffic of each drive since boot, at the end of the previous part
        foreign: dict[str, None] = {}

        def compare(latest: Mapping[str, Measurement]) -> None:
            """Compare the traffic of each drive with the traffic of the part of the measurement that has ended."""
            for place in target:
                name, own, path = place.drive.name, latest.get(place.path), place.path
                before, now = moved.get(name), self._moved(place.drive)
                moved[name] = now
                if own is not None and before is not None and now is not None:
                    expected, seen = own.bytes_per_second * own.seconds, now - before
                    if seen < _LEAST_SEEN * expected:
                        raise InfinityError(
                            f"{path}: only {seen:.0f} of {expected:.0f} bytes reached the drive; the rest was cached"
                        )
                    if seen > (1 + _FOREIGN_SHARE) * expected + NOISE * max(own.seconds, LOOK_SECONDS):
                        foreign[name] = None

        with ExitStack() as stack:
            for place in target:
                size, free = part + _RESERVE_BESIDE, space(place.path).free
                self._reservations.reserve(self.owner, RUN_ID, place, size, free)
                stack.callback(self._reservations.release, self.owner, RUN_ID, place.path)
            found = measure_paths(
                [place.path for place in target],
                _POINTS,
                file_bytes=part,
                seconds=settings.load_seconds,
                stop=self._stop,
                on_progress=compare,
            )
        return list(foreign), found

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

    def _moved(self, drive: Drive) -> int | None:
        found = counters(drive, self._sysfs)
        return None if found is None else found.read + found.written


def _identities(target: Iterable[Place]) -> frozenset[str]:
    return frozenset(place.drive.identity for place in target)
