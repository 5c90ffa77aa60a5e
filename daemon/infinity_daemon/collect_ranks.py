"""`ranks` collector: all metrics of the ranks, the number of stats files, and the dead ranks of each run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import Metric as Family

from infinity.telemetry import BY_NAME
from infinity.telemetry.exporter import StatsCollector, new_family
from infinity.telemetry.metrics import STATS_FILE_STATUSES
from infinity_daemon.stats_files import StatsFiles


class RanksCollector:
    """Collector of the metrics of the ranks, ``daemon_ranks`` and ``daemon_dead_ranks``."""

    name = "ranks"

    def __init__(self, stats_files: StatsFiles) -> None:
        self._stats_files = stats_files

    def collect(self) -> Iterator[Family]:
        """Yield the metric families of the ranks that are live or have exited recently."""
        found = self._stats_files.scan()
        yield from StatsCollector(lambda: found.exported).collect()
        counts = Counter({"broken": found.broken})
        counts.update(snapshot.status for snapshot in found.snapshots)
        ranks = new_family(BY_NAME["daemon_ranks"])
        for status in STATS_FILE_STATUSES:
            ranks.add_sample(ranks.name, {"status": status}, counts[status])
        yield ranks
        dead = new_family(BY_NAME["daemon_dead_ranks"])
        runs = Counter(
            (snapshot.header.run_id, snapshot.header.name) for snapshot in found.snapshots if snapshot.status == "dead"
        )
        for (run, name), count in runs.items():
            dead.add_sample(dead.name, {"run": run, "name": name}, count)
        yield dead
