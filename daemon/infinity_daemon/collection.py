"""Collection of all metrics on each scrape. Collectors are timed and isolated from each other."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from infinity.telemetry import BY_NAME
from infinity.telemetry.exporter import new_family
from infinity_daemon.log import event

_TIMEOUT_SECONDS: Final = 5.0


class NodeCollector(Protocol):
    """Source of metric families."""

    @property
    def name(self) -> str:
        """Value of the ``collector`` label."""

    def collect(self) -> Iterable[Family]:
        """Yield metric families. If an exception is raised, the families already yielded are still served."""


@dataclass(kw_only=True)
class _Outcome:
    """Result of running a collector: the families that it yielded, the exception that it raised (or None), and its
    duration in seconds."""

    families: list[Family] = field(default_factory=list)
    error: Exception | None = None
    seconds: float = 0.0


class _Isolated:
    """Run a collector in a separate thread, so that it can be abandoned if it is blocked by an unresponsive drive.

    `Collection` calls `run` with its lock held, so calls do not overlap. While the thread of an abandoned run is
    blocked, later runs return an error. Its `_Outcome` is discarded.
    """

    def __init__(self, collector: NodeCollector, timeout: float) -> None:
        self.name = collector.name
        self.success = True  # whether the last run succeeded; read without a lock by ``/healthz``
        self._collector, self._timeout = collector, timeout
        self._thread: threading.Thread | None = None  # thread of the last run

    def run(self) -> _Outcome:
        if self._thread is not None and self._thread.is_alive():
            return self._judged(_Outcome(error=TimeoutError("an earlier run is still blocked"), seconds=self._timeout))
        outcome = _Outcome()
        self._thread = threading.Thread(target=self._fill, args=(outcome,), name=f"collector-{self.name}", daemon=True)
        begin = time.perf_counter()
        self._thread.start()
        self._thread.join(self._timeout)
        seconds = time.perf_counter() - begin
        if self._thread.is_alive():
            late = TimeoutError(f"no answer after {self._timeout:g} s")
            return self._judged(_Outcome(error=late, seconds=seconds))
        outcome.seconds = seconds
        return self._judged(outcome)

    def _fill(self, outcome: _Outcome) -> None:
        try:
            for family in self._collector.collect():
                outcome.families.append(family)
        except Exception as error:  # no exception may affect the other collectors
            outcome.error = error

    def _judged(self, outcome: _Outcome) -> _Outcome:
        if outcome.error is not None and self.success:  # logged once, not at every scrape
            reason = f"{type(outcome.error).__name__}: {outcome.error}"
            event(logging.WARNING, "collector.failed", collector=self.name, reason=reason)
        self.success = outcome.error is None
        return outcome


class Collection(Collector):
    """Combination of all collectors, with additional metrics for the success and duration of each."""

    def __init__(self, collectors: Sequence[NodeCollector], timeout: float = _TIMEOUT_SECONDS) -> None:
        """Initialize without collecting.

        Args:
            collectors: Collectors, in output order.
            timeout: Maximum duration of each collector per scrape, in seconds.
        """
        self._isolated = [_Isolated(collector, timeout) for collector in collectors]
        self._lock = threading.Lock()  # one scrape at a time

    def describe(self) -> Iterable[Family]:
        """Return no families, because the served metrics are known only when they are read."""
        return ()

    @property
    def health(self) -> dict[str, bool]:
        """Success of the last run of each collector, by name."""
        return {one.name: one.success for one in self._isolated}

    def collect(self) -> Iterator[Family]:
        """Yield the families of all collectors, then the metrics about the collectors."""
        success = new_family(BY_NAME["daemon_collector_success"])
        duration = new_family(BY_NAME["daemon_collector_duration_seconds"])
        with self._lock:
            outcomes = [(one.name, one.run()) for one in self._isolated]
        for name, outcome in outcomes:
            yield from outcome.families
            success.add_sample(success.name, {"collector": name}, float(outcome.error is None))
            duration.add_sample(duration.name, {"collector": name}, outcome.seconds)
        yield success
        yield duration
