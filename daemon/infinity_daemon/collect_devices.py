"""`devices` collector: drives of the configured paths and of the paths that ranks use."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from prometheus_client.core import Metric as Family

from infinity.io.block_devices import SYSFS, Drive, Place, counters, locate, space
from infinity.telemetry import BY_NAME
from infinity.telemetry.exporter import new_family
from infinity_daemon.drive_bandwidth import LOADS, Profile
from infinity_daemon.drive_wear import WearWatch
from infinity_daemon.stats_files import StatsFiles

_COUNTERS: Final = {
    "device_read_bytes_total": "read",
    "device_written_bytes_total": "written",
    "device_read_operations_total": "reads",
    "device_write_operations_total": "writes",
    "device_read_seconds_total": "read_seconds",
    "device_write_seconds_total": "write_seconds",
    "device_busy_seconds_total": "busy_seconds",
}
"""Attribute of `DriveCounters` for each metric that is an operating system counter."""

Samples = Iterable[tuple[dict[str, str], float]]


class DevicesCollector:
    """Collector of the ``device_*`` metrics, once per drive even if several paths are on the same drive.

    `reserved` returns the reserved bytes by drive name, and `bandwidth` returns the profile of a drive, or None. Each
    collection also takes a sample of `wear`.
    """

    name = "devices"

    def __init__(
        self,
        *,
        paths: Sequence[str],
        stats_files: StatsFiles,
        reserved: Callable[[], Mapping[str, int]],
        bandwidth: Callable[[Drive], Profile | None],
        wear: WearWatch,
        sysfs: Path = SYSFS,
    ) -> None:
        self.paths = tuple(paths)
        """Configured paths. Replaced when the settings are reloaded."""
        self._stats_files = stats_files
        self._reserved, self._bandwidth, self._wear, self._sysfs = reserved, bandwidth, wear, sysfs

    def collect(self) -> Iterator[Family]:
        """Yield the metric families, then raise `OSError` if a configured path could not be read."""
        places: dict[str, Place] = {}
        failed: list[OSError] = []
        for path in self.known_paths():
            try:
                places[path] = locate(path, self._sysfs)
            except OSError as error:
                failed += [error] if path in self.paths else []
        drives = {place.drive.name: place.drive for place in places.values()}
        self._wear.look(drives.values())
        worn = {name: self._wear.of(drive) for name, drive in drives.items()}
        for name, samples in {
            **self._counters(drives),
            "device_bandwidth_bytes_per_second": self._profiles(drives),
            "device_capacity_bytes": _spaces(places.values(), "capacity"),
            "device_free_bytes": _spaces(places.values(), "free"),
            "device_reserved_bytes": self._reservations(drives),
            "device_wear_ratio": _known((name, wear.ratio) for name, wear in worn.items()),
            "device_endurance_days": _known((name, wear.days) for name, wear in worn.items()),
            "rank_device_info": self._owners(places),
        }.items():
            family = new_family(BY_NAME[name])
            for labels, value in samples:
                family.add_sample(family.name + ("_total" if family.type == "counter" else ""), labels, value)
            yield family
        if failed:
            raise failed[0]

    def known_paths(self) -> tuple[str, ...]:
        """Return the configured paths and the paths of all ranks with a stats file, without duplicates."""
        used = (path for snapshot in self._stats_files.scan().exported for path in snapshot.header.paths)
        return tuple(dict.fromkeys((*self.paths, *filter(None, used))))

    def _counters(self, drives: Mapping[str, Drive]) -> dict[str, Samples]:
        found = {name: counters(drive, self._sysfs) for name, drive in drives.items()}
        known = [(name, counted) for name, counted in found.items() if counted is not None]
        return {
            metric: [({"device": name}, getattr(counted, side)) for name, counted in known]
            for metric, side in _COUNTERS.items()
        }

    def _profiles(self, drives: Mapping[str, Drive]) -> Samples:
        for name, drive in drives.items():
            found = self._bandwidth(drive)
            for load in LOADS if found is not None else ():
                if (speed := getattr(found, load)) is not None:
                    yield {"device": name, "op": load}, speed

    def _reservations(self, drives: Mapping[str, Drive]) -> Samples:
        reserved = self._reserved()
        for name in dict.fromkeys((*drives, *reserved)):
            yield {"device": name}, reserved.get(name, 0)

    def _owners(self, places: Mapping[str, Place]) -> Samples:
        for snapshot in self._stats_files.scan().exported:
            who = {"run": snapshot.header.run_id, "rank": str(snapshot.header.rank)}
            for device, path in zip(snapshot.header.devices, snapshot.header.paths, strict=False):
                if path in places:
                    block = places[path].drive.name
                    yield {**who, "device": device, "block_device": block}, 1


def _known(values: Iterable[tuple[str, float | None]]) -> Samples:
    for name, value in values:
        if value is not None:
            yield {"device": name}, value


def _spaces(places: Iterable[Place], side: str) -> Samples:
    """Yield the bytes of each drive, summed over its file systems. A file system with several paths is counted once."""
    one_path = {place.file_system: place for place in places}
    total: dict[str, float] = defaultdict(float)
    for place in one_path.values():
        total[place.drive.name] += getattr(space(place.path), side)
    for name, size in total.items():
        yield {"device": name}, size
