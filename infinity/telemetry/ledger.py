"""The ledger of a run: where every second of a step went, and every byte.

The training thread is in one phase at a time; a stall is a stretch of it in which the thread stood still.
What is left of a step after stalls and updates is compute (collectives and Python included).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock

from infinity.telemetry.metrics import CAUSES, FETCH_RESULTS, OPS, PHASES, ROLES, error_reason
from infinity.telemetry.stats import Stats

_log = logging.getLogger("infinity")


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One step of this rank: seconds that add up to `seconds`, and NVMe bytes."""

    step: int
    seconds: float
    compute_seconds: float
    update_seconds: float
    read_stall_seconds: float
    write_stall_seconds: float
    read_bytes: int
    written_bytes: int

    @property
    def stall_seconds(self) -> float:
        """Seconds in which the training thread stood still."""
        return self.read_stall_seconds + self.write_stall_seconds


class Ledger:
    """Counts what the pager and the store do, by phase; fills the rank's stats page."""

    def __init__(self, stats: Stats) -> None:
        self._bytes = {
            (op, role, device): stats.counter("io_bytes_total", op=op, state=role, device=device)
            for op in OPS
            for role in ROLES
            for device in stats.header.devices
        }
        self._requests = {op: stats.counter("io_requests_total", op=op) for op in OPS}
        self._retries = {op: stats.counter("io_retries_total", op=op) for op in OPS}
        self._inflight = {op: stats.gauge("io_inflight_requests", op=op) for op in OPS}
        self._transfers = {
            (source, target): stats.counter("transfer_bytes_total", source_tier=source, target_tier=target)
            for source, target in (("nvme", "host"), ("host", "nvme"), ("host", "device"), ("device", "host"))
        }
        self._held = {role: stats.gauge("tier_used_bytes", tier="host", state=role) for role in ROLES}
        self._durations = {op: stats.histogram("io_request_duration_seconds", op=op) for op in OPS}
        self._stalls = {
            (phase, cause): stats.counter("stall_seconds_total", phase=phase, cause=cause)
            for phase in PHASES
            for cause in CAUSES
        }
        self._fetches = {result: stats.counter("prefetch_fetches_total", result=result) for result in FETCH_RESULTS}
        self._phases = {phase: stats.counter("step_phase_seconds_total", phase=phase) for phase in PHASES}
        self._pool_wait = stats.counter("pool_wait_seconds_total")
        self._divergences = stats.counter("plan_divergences_total")
        self._steps = stats.counter("steps_total")
        self._skipped = stats.counter("steps_skipped_total")
        self._step_duration = stats.histogram("step_duration_seconds")
        self._last_step = stats.gauge("step_last_completed_timestamp_seconds")
        self._updated = stats.counter("optimizer_updated_parameters_total")
        self._commit_duration = stats.histogram("commit_duration_seconds")
        self._last_commit = stats.gauge("commit_last_success_timestamp_seconds")
        self._pool = {
            status: stats.gauge("pool_frames", status=status) for status in ("free", "resident", "streaming", "writing")
        }
        self._predicted = {op: stats.gauge("plan_predicted_bytes_per_step", op=op) for op in OPS}
        self._stats = stats
        self._lock = Lock()
        self._warned = False
        self._phase = "other"
        self._since = self._step_start = time.perf_counter()
        self._update_seconds = 0.0
        self._update_stall = 0.0
        self._stalled = dict.fromkeys(CAUSES, 0.0)
        self._moved = dict.fromkeys(OPS, 0)
        self._moved_before = dict.fromkeys(OPS, 0)

    # The store and the pager report here #

    def moved(
        self, op: str, role: str, device: int, nbytes: int, seconds: float, retries: int, error: Exception | None
    ) -> None:
        """Count one finished transfer of a page. Called from any thread."""
        with self._lock:
            self._requests[op].add()
            self._durations[op].observe(seconds)
            self._retries[op].add(retries)
            if error is None:
                self._bytes[op, role, f"nvme{device}"].add(nbytes)
                self._transfers[("nvme", "host") if op == "read" else ("host", "nvme")].add(nbytes)
                self._moved[op] += nbytes
            else:
                self._stats.counter("io_errors_total", op=op, reason=error_reason(error)).add()

    def copied(self, source: str, target: str, nbytes: int) -> None:
        """Count a copy of the training thread between the tiers ``host`` and ``device``."""
        self._transfers[source, target].add(nbytes)

    def stalled(self, cause: str, seconds: float) -> None:
        """Count a wait of the training thread; one for an update on another thread counts as update."""
        if cause == "update":
            self._update_seconds += seconds
            self._phases["update"].add(seconds)
            self._since += seconds
            return
        self._stalls[self._phase, cause].add(seconds)
        self._stalled[cause] += seconds
        if self._phase == "update":
            self._update_stall += seconds
        if cause == "arena":
            self._pool_wait.add(seconds)

    def fetched(self, result: str) -> None:
        """Count a page that was needed: ``hit``, ``late`` or ``miss``."""
        self._fetches[result].add()

    def diverged(self, detail: str) -> None:
        """Count a departure from the plan; the first one is logged."""
        self._divergences.add()
        if not self._warned:
            self._warned = True
            _log.warning(
                "this step departs from the recorded one (%s): its pages are fetched on demand, and the plan is "
                "made anew if the next steps look like it; said once",
                detail,
            )

    def skipped(self) -> None:
        """Count a step without an update: the norm of its gradients was not finite."""
        self._skipped.add()

    # Phases and steps #

    def enter(self, phase: str) -> str:
        """Switch to a phase; return the one before."""
        now = time.perf_counter()
        self._phases[self._phase].add(now - self._since)
        if self._phase == "update":
            self._update_seconds += now - self._since
        before, self._phase, self._since = self._phase, phase, now
        return before

    @contextmanager
    def phase(self, phase: str) -> Iterator[None]:
        """Be in a phase for the length of a block."""
        before = self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def predicted(self, read: int, written: int) -> None:
        """Publish what the plan predicts for one step, in bytes."""
        self._predicted["read"].set(read)
        self._predicted["write"].set(written)

    def end_step(
        self, step: int, updated: int, frames: Mapping[str, int], held: Mapping[str, int], inflight: Mapping[str, int]
    ) -> StepRecord:
        """Close the books of a step.

        Args:
            updated: parameters updated in it.
            frames: frames of the arena by status.
            held: bytes in the arena by role.
            inflight: page transfers under way by operation.
        """
        self.enter("other")
        now = time.perf_counter()
        seconds = now - self._step_start
        with self._lock:
            moved = dict(self._moved)
        read_stall = self._stalled["read"]
        write_stall = self._stalled["write"] + self._stalled["arena"]
        update = self._update_seconds - self._update_stall
        record = StepRecord(
            step=step,
            seconds=seconds,
            compute_seconds=max(0.0, seconds - update - read_stall - write_stall),
            update_seconds=update,
            read_stall_seconds=read_stall,
            write_stall_seconds=write_stall,
            read_bytes=moved["read"] - self._moved_before["read"],
            written_bytes=moved["write"] - self._moved_before["write"],
        )
        self._moved_before = moved
        self._step_start = now
        self._update_seconds = self._update_stall = 0.0
        self._stalled = dict.fromkeys(CAUSES, 0.0)
        self._steps.add()
        self._step_duration.observe(seconds)
        self._last_step.set(time.time())
        self._updated.add(updated)
        for status, number in frames.items():
            self._pool[status].set(number)
        for role, nbytes in held.items():
            self._held[role].set(nbytes)
        for op, number in inflight.items():
            self._inflight[op].set(number)
        return record

    def restart_step(self) -> None:
        """Begin the books of a step now: what came before (set-up, a commit) belongs to none."""
        self.enter("other")
        self._step_start = time.perf_counter()
        self._update_seconds = self._update_stall = 0.0
        self._stalled = dict.fromkeys(CAUSES, 0.0)
        with self._lock:
            self._moved_before = dict(self._moved)

    def committed(self, seconds: float) -> None:
        """Count a durable commit."""
        self._commit_duration.observe(seconds)
        self._last_commit.set(time.time())

    @property
    def total_bytes(self) -> dict[str, int]:
        """NVMe bytes since the start, by ``read`` and ``write``."""
        with self._lock:
            return dict(self._moved)
