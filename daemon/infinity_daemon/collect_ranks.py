"""Collector `ranks`: everything the ranks count, and how many pages there are."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric as Family

from infinity.telemetry import BY_NAME
from infinity.telemetry.exporter import StatsCollector, new_family, select_pages
from infinity_daemon.pages import StatsPages


class RanksCollector:
    """Serves the metrics of the ranks and ``daemon_ranks``."""

    name = "ranks"

    def __init__(self, pages: StatsPages) -> None:
        self._pages = pages

    def collect(self) -> Iterator[Family]:
        """Yield the families of all ranks, live and recently dead."""
        found = self._pages.scan()
        served, hidden = select_pages(found.pages)
        yield from StatsCollector(lambda: served).collect()
        counts = {
            "live": sum(page.alive for page in served),
            "dead": sum(not page.alive for page in served),
            "hidden": len(hidden),
            "broken": found.broken,
        }
        ranks = new_family(BY_NAME["daemon_ranks"])
        for status, count in counts.items():
            ranks.add_sample(ranks.name, {"status": status}, count)
        yield ranks
