"""Metric families that the daemon serves: its version, the ranks, the drives, and stale runs."""

from __future__ import annotations

import platform
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from prometheus_client.core import Metric as Family

from infinity import __version__
from infinity.telemetry import BY_NAME
from infinity.telemetry.exporter import StatsCollector, new_family
from infinity.telemetry.metrics import STATS_FILE_STATUSES
from infinity_daemon.configured_drives import Drives
from infinity_daemon.drive_bandwidth import LOADS
from infinity_daemon.stale import StaleRuns, by_drive
from infinity_daemon.stats_files import StatsFiles

_FIGURES: Final = {
    "device_read_bytes_total": ("counters", "read"),
    "device_written_bytes_total": ("counters", "written"),
    "device_read_operations_total": ("counters", "reads"),
    "device_write_operations_total": ("counters", "writes"),
    "device_read_seconds_total": ("counters", "read_seconds"),
    "device_write_seconds_total": ("counters", "write_seconds"),
    "device_busy_seconds_total": ("counters", "busy_seconds"),
    "device_wear_ratio": ("wear", "ratio"),
    "device_endurance_days": ("wear", "days"),
}
"""Place of each metric in the tree of a drive (`Drives.found`)."""
_MOST_SECONDS: Final = 10.0
"""Age from which the figures of the drives are outdated."""

Sample = tuple[tuple[str, ...], float | None]
"""Values of the labels, in table order, and the value, which is None if it is unknown."""


def family_of(name: str, samples: Iterable[Sample]) -> Family:
    """Return the family of a metric of the daemon. Unknown values are omitted."""
    family = new_family(BY_NAME[name])
    for labels, value in samples:
        if value is not None:
            family.add_metric(labels, value)  # type: ignore[call-arg,arg-type]
    return family


def build_families(started: float) -> Iterator[Family]:
    """Yield the version of the daemon and its start as a Unix time."""
    yield family_of("daemon_build_info", [((__version__, platform.python_version()), 1)])
    yield family_of("daemon_start_time_seconds", [((), started)])


def rank_families(stats_files: StatsFiles) -> Iterator[Family]:
    """Yield the metrics of ranks that are live or have exited recently, and the number of ranks by status."""
    found = stats_files.scan()
    yield from StatsCollector(lambda: found.exported).collect()
    counts = Counter({"broken": found.broken})
    counts.update(snapshot.status for snapshot in found.snapshots)
    yield family_of("daemon_ranks", (((status,), counts[status]) for status in STATS_FILE_STATUSES))
    dead = (snapshot.header for snapshot in found.snapshots if snapshot.status == "dead")
    yield family_of("daemon_dead_ranks", Counter((header.run_id, header.name) for header in dead).items())
    # After a crash, the files of ended and dead ranks expire at different times. Without a live rank, the difference
    # would look like a node that is not monitored.
    sizes = {(one.header.run_id,): one.header.world_size for one in found.snapshots if one.alive}
    yield family_of("daemon_run_world_size", sizes.items())


def stale_families(stale: StaleRuns) -> Iterator[Family]:
    """Yield the number and size of the stale runs that the last search found."""
    counted = by_drive(stale.drives, stale.found)
    for position, name in enumerate(("device_stale_runs", "device_stale_bytes")):
        yield family_of(name, (((drive,), values[position]) for drive, values in counted.items()))


class DeviceFamilies:
    """The ``device_*`` metrics, once per drive even if several paths are on the same drive.

    `reserved` returns the reserved bytes by drive name.
    """

    def __init__(self, *, stats_files: StatsFiles, drives: Drives, reserved: Callable[[], Mapping[str, int]]) -> None:
        self.paths: tuple[str, ...] = ()
        """Configured paths. Replaced when the settings are reloaded."""
        self._stats_files, self._drives, self._reserved = stats_files, drives, reserved

    def collect(self) -> Iterator[Family]:
        """Yield the metric families, then raise `OSError` if a configured path could not be read.

        Raises:
            TimeoutError: instead of yielding outdated figures, if a drive does not respond.
        """
        looked, trees = self._drives.found
        if (age := time.time() - looked) > _MOST_SECONDS:
            raise TimeoutError(f"the drives have not responded for {age:.0f} s")
        drives = {tree["name"]: tree for tree in trees if tree["paths"] != [tree["name"]]}  # without missing paths
        for metric, (section, key) in _FIGURES.items():
            yield family_of(metric, (((name,), tree.get(section, {}).get(key)) for name, tree in drives.items()))
        for metric, key in (("device_capacity_bytes", "capacity"), ("device_free_bytes", "free")):
            yield family_of(metric, (((name,), tree.get(key)) for name, tree in drives.items()))
        speeds = (((name, load), tree.get("profile", {}).get(load)) for name, tree in drives.items() for load in LOADS)
        yield family_of("device_bandwidth_bytes_per_second", speeds)
        reserved = dict.fromkeys(drives, 0) | dict(self._reserved())
        yield family_of("device_reserved_bytes", (((name,), size) for name, size in reserved.items()))
        drive_of = {path: name for name, tree in drives.items() for path in tree["paths"]}
        yield family_of("rank_device_info", self._owners(drive_of))
        for tree in trees:
            if "error" in tree and not set(self.paths).isdisjoint(tree["paths"]):
                raise OSError(f"{', '.join(tree['paths'])}: {tree['error']}")

    def _owners(self, drive_of: Mapping[str, str]) -> Iterator[Sample]:
        for snapshot in self._stats_files.scan().exported:
            header = snapshot.header
            for device, path in zip(header.devices, header.paths, strict=False):
                if path in drive_of:
                    yield (header.run_id, str(header.rank), device, drive_of[path]), 1
