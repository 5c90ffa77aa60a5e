"""Collection of all metrics on each scrape. A collector that fails does not affect the others."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from infinity_daemon.collectors import family_of
from infinity_daemon.log import event

Collect = Callable[[], Iterable[Family]]
"""Function that yields metric families. It must not access monitored drives, because a scrape waits for it. If it
raises an exception, the families that it has already yielded are still served."""


class Collection(Collector):
    """Combination of all collectors, with additional metrics for the success and duration of each."""

    def __init__(self, collectors: Mapping[str, Collect]) -> None:
        """Initialize without collecting. `collectors` are in output order."""
        self._collectors = collectors
        self.health = dict.fromkeys(collectors, True)
        """Success of the last run of each collector, by name; read without a lock by ``/healthz``."""
        self._lock = threading.Lock()  # one scrape at a time

    def collect(self) -> Iterator[Family]:
        """Yield the families of all collectors, then the metrics about the collectors."""
        families: list[Family] = []
        seconds: dict[str, float] = {}
        with self._lock:
            for name, collect in self._collectors.items():
                begin = time.perf_counter()
                try:
                    for family in collect():
                        families.append(family)
                except Exception as error:  # no exception may affect the other collectors
                    if self.health[name]:  # logged once, not at every scrape
                        reason = f"{type(error).__name__}: {error}"
                        event(logging.WARNING, "collector.failed", collector=name, reason=reason)
                    self.health[name] = False
                else:
                    self.health[name] = True
                seconds[name] = time.perf_counter() - begin
            success = [((name,), float(well)) for name, well in self.health.items()]
        yield from families
        yield family_of("daemon_collector_success", success)
        yield family_of("daemon_collector_duration_seconds", (((name,), took) for name, took in seconds.items()))
