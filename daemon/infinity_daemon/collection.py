"""Runs the collectors of a scrape, each isolated from the others and timed."""

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
    """One source of metric families."""

    @property
    def name(self) -> str:
        """Value of the label ``collector``."""

    def collect(self) -> Iterable[Family]:
        """Yield families; whatever is yielded before an exception is still served."""


@dataclass(kw_only=True)
class _Outcome:
    """What a run has yielded, what ended it (None: nothing), and how long it took."""

    families: list[Family] = field(default_factory=list)
    error: Exception | None = None
    seconds: float = 0.0


class _Isolated:
    """Runs a collector in a thread, so that one that hangs on a dead drive is left behind.

    One run at a time (`Collection` holds its lock). A run that hangs keeps its `_Outcome` to itself: the next ones get
    one that says so, until its thread has ended.
    """

    def __init__(self, collector: NodeCollector, timeout: float) -> None:
        self.name = collector.name
        self.success = True  # of the last run; read without a lock, by ``/healthz``
        self._collector, self._timeout = collector, timeout
        self._thread: threading.Thread | None = None  # of the last run

    def run(self) -> _Outcome:
        if self._thread is not None and self._thread.is_alive():
            return self._judged(_Outcome(error=TimeoutError("an earlier run still hangs"), seconds=self._timeout))
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
        except Exception as error:  # the point of isolation: whatever it is, the other collectors go on
            outcome.error = error

    def _judged(self, outcome: _Outcome) -> _Outcome:
        if outcome.error is not None and self.success:  # said once, not at every scrape
            reason = f"{type(outcome.error).__name__}: {outcome.error}"
            event(logging.WARNING, "collector.failed", collector=self.name, reason=reason)
        self.success = outcome.error is None
        return outcome


class Collection(Collector):
    """All collectors as one; also tells which of them succeeded and how long each took."""

    def __init__(self, collectors: Sequence[NodeCollector], timeout: float = _TIMEOUT_SECONDS) -> None:
        """Collect nothing yet.

        Args:
            collectors: in the order in which they are served.
            timeout: seconds that each may take in one scrape.
        """
        self._isolated = [_Isolated(collector, timeout) for collector in collectors]
        self._lock = threading.Lock()  # one scrape at a time

    def describe(self) -> Iterable[Family]:
        """Return nothing: what is served is known only when it is read."""
        return ()

    @property
    def health(self) -> dict[str, bool]:
        """Whether the last run of each collector succeeded."""
        return {one.name: one.success for one in self._isolated}

    def collect(self) -> Iterator[Family]:
        """Yield the families of all collectors, then the two about the collectors."""
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
