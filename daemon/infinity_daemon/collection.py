"""Collection of all metrics on each scrape. Collectors are timed and isolated from each other."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from infinity_daemon.collectors import family_of
from infinity_daemon.log import event

_TIMEOUT_SECONDS: Final = 5.0

Collect = Callable[[], Iterable[Family]]
"""Source of metric families. If it raises an exception, the families that it has already yielded are still served."""


class _Isolated:
    """Run a collector in a separate thread, so that it can be abandoned if it is blocked by an unresponsive drive.

    `Collection` calls `run` with its lock held, so calls do not overlap. While the thread of an abandoned run is
    blocked, later runs fail. The results of an abandoned run are discarded.
    """

    def __init__(self, name: str, collect: Collect, timeout: float) -> None:
        self.name = name
        self.success = True  # whether the last run succeeded; read without a lock by ``/healthz``
        self._collect, self._timeout = collect, timeout
        self._thread: threading.Thread | None = None  # thread of the last run

    def run(self) -> tuple[list[Family], float]:
        """Return the families and the duration in seconds, and set `success`."""
        begin = time.perf_counter()
        families: list[Family] = []
        errors: list[Exception] = []
        blocked = self._thread is not None and self._thread.is_alive()  # in an earlier run
        if not blocked:
            run, name = (families, errors), f"collector-{self.name}"
            thread = self._thread = threading.Thread(target=self._fill, args=run, name=name, daemon=True)
            thread.start()
            thread.join(self._timeout)
            blocked = thread.is_alive()
        if blocked:
            families, errors = [], [TimeoutError(f"no answer after {self._timeout:g} s")]
        if errors and self.success:  # logged once, not at every scrape
            reason = f"{type(errors[0]).__name__}: {errors[0]}"
            event(logging.WARNING, "collector.failed", collector=self.name, reason=reason)
        self.success = not errors
        return families, time.perf_counter() - begin

    def _fill(self, families: list[Family], errors: list[Exception]) -> None:
        try:
            for family in self._collect():
                families.append(family)
        except Exception as error:  # no exception may affect the other collectors
            errors.append(error)


class Collection(Collector):
    """Combination of all collectors, with additional metrics for the success and duration of each."""

    def __init__(self, collectors: Mapping[str, Collect], timeout: float = _TIMEOUT_SECONDS) -> None:
        """Initialize without collecting.

        Args:
            collectors: Collectors by the value of the ``collector`` label, in output order.
            timeout: Maximum duration of each collector per scrape, in seconds.
        """
        self._isolated = [_Isolated(name, collect, timeout) for name, collect in collectors.items()]
        self._lock = threading.Lock()  # one scrape at a time

    @property
    def health(self) -> dict[str, bool]:
        """Success of the last run of each collector, by name."""
        return {one.name: one.success for one in self._isolated}

    def collect(self) -> Iterator[Family]:
        """Yield the families of all collectors, then the metrics about the collectors."""
        with self._lock:
            found = [(one.name, *one.run(), one.success) for one in self._isolated]
        for _, families, _, _ in found:
            yield from families
        yield family_of("daemon_collector_success", (((name,), float(success)) for name, _, _, success in found))
        yield family_of("daemon_collector_duration_seconds", (((name,), seconds) for name, _, seconds, _ in found))
