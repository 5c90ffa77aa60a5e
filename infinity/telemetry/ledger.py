"""Accounting of the time and NVMe traffic of each step.

[Note: parts] At any moment, the training thread is in one *phase* and in one *part* of the step. The phase is the stage
of the step (forward, backward, ...). The part is the activity that the time is attributed to (computation, copies, a
stall, ...). If no part is set, the phase determines it (`_PART_OF`). The time of a stall is subtracted from the part in
which the thread was blocked. Every switch ends one interval and begins the next at the same instant, so the parts of a
step always add up to its duration.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from threading import Lock

from infinity.telemetry.metrics import CAUSES, FETCH_RESULTS, LINK_DIRECTIONS, OPS, PARTS, PHASES, ROLES, error_reason
from infinity.telemetry.stats import Stats
from infinity.telemetry.timeline import Timeline

_log = logging.getLogger("infinity")

_PART_OF = {"forward": "compute", "backward": "compute", "update": "update", "checkpoint": "python", "other": "python"}


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """Time and NVMe traffic of one step on this rank.

    A step begins at the end of the previous step or checkpoint and takes `seconds`, which is the sum of the parts from
    `compute_seconds` to `python_seconds`. `compute_seconds` is the time in forward and backward that no other part
    covers. `collective_seconds` covers all-gathers, reduce-scatters and the all-reduce of the gradient norm.
    `copy_seconds` covers copies of weights out of pages and copies of gradients into pages. `update_seconds` covers
    gradient clipping and the optimizer. The three stalls are waits for a page to be read, for a page to be written, and
    for a free cache slot. `python_seconds` covers the training loop between `step()` and the next forward, and the
    bookkeeping of this library. `transfer_seconds` is the time during which page transfers were in flight; it overlaps
    with the parts.
    """

    step: int
    seconds: float
    compute_seconds: float
    collective_seconds: float
    copy_seconds: float
    update_seconds: float
    read_stall_seconds: float
    write_stall_seconds: float
    host_cache_stall_seconds: float
    python_seconds: float
    transfer_seconds: float
    read_bytes: int
    written_bytes: int

    @property
    def stall_seconds(self) -> float:
        """Seconds during which the training thread was stalled on storage."""
        return self.read_stall_seconds + self.write_stall_seconds + self.host_cache_stall_seconds


class _Stretch:
    """Context manager that enters a phase or a part. It is a class because a generator would be slower, and it is
    entered hundreds of times per step."""

    __slots__ = ("_before", "_ledger", "_name", "_part", "_phase", "_start", "_what")

    def __init__(self, ledger: Ledger, phase: str, part: str, name: str, what: str) -> None:
        """Create a context manager.

        Args:
            ledger: Ledger that records the time.
            phase: Phase to enter, or an empty string to keep the current phase.
            part: Part to enter, or an empty string to let the phase determine it.
            name: Name of the block in the timeline.
            what: Name of the FSDP module in the timeline.
        """
        self._ledger, self._phase, self._part, self._name, self._what = ledger, phase, part, name, what
        self._before = ("", "")  # phase and part outside the block; set when it is entered
        self._start = 0.0  # start of the block in seconds of `time.perf_counter`

    def __enter__(self) -> None:
        ledger = self._ledger
        self._before = ledger._phase, ledger._part
        ledger._switch(self._phase or ledger._phase, self._part)
        self._start = ledger._since

    def __exit__(self, *_: object) -> None:
        ledger, (phase, part) = self._ledger, self._before
        ledger._switch(phase if self._phase else ledger._phase, part)
        if ledger._timeline is not None:
            ledger._timeline.span("thread", self._name, self._what, self._start, ledger._since)


class Ledger:
    """Account for the time and traffic of each step, and record both in the rank's stats file.

    A step runs from `restart_step`, or from the end of the previous step, to `end_step`. Only the training thread
    modifies the phase, the part and the per-step sums. Each cell of the stats file has one writer at a time: the
    methods that the store calls from its threads (`moved`, `gave_up`) hold `_lock`, and callers of `moving`,
    `fetched`, `spared` and `diverged` hold the pager's condition.
    """

    def __init__(self, stats: Stats, timeline: Timeline | None = None) -> None:
        self._timeline = timeline  # None: no timeline is recorded
        # Cells of the stats file, by label values. The first three dictionaries are protected by `_lock`.
        self._bytes = {
            (op, role, number): stats.counter("io_bytes_total", op=op, state=role, device=device)
            for op in OPS
            for role in ROLES
            for number, device in enumerate(stats.header.devices)
        }
        self._retries = {op: stats.counter("io_retries_total", op=op) for op in OPS}
        self._durations = {op: stats.histogram("io_request_duration_seconds", op=op) for op in OPS}
        # Not protected by `_lock`: each of these cells has one writer at a time (see the class docstring).
        self._copied = stats.counter("gather_copied_bytes_total")
        self._link = {way: stats.counter("link_bytes_total", direction=way) for way in LINK_DIRECTIONS}
        self._transferring = stats.counter("transfer_seconds_total")
        self._stalls = {
            (phase, cause): stats.counter("stall_seconds_total", phase=phase, cause=cause)
            for phase in PHASES
            for cause in CAUSES
        }
        self._fetches = {result: stats.counter("prefetch_fetches_total", result=result) for result in FETCH_RESULTS}
        self._phases = {phase: stats.counter("step_phase_seconds_total", phase=phase) for phase in PHASES}
        self._parts = {part: stats.counter("step_part_seconds_total", part=part) for part in PARTS}
        self._pool_wait = stats.counter("cache_slot_wait_seconds_total")
        self._spared = stats.counter("prefetch_spared_bytes_total")
        self._planned: dict[str, int] = {}  # planned bytes per step, by ``read`` and ``write``; empty without a plan
        self._planned_link: dict[str, int] = {}  # planned bytes per step, by direction of the host-GPU link
        self._activations = dict.fromkeys((*OPS, *LINK_DIRECTIONS), 0)  # bytes per step added by activations
        self._stats = stats  # cells that change at most once per step, and those of errors, are looked up
        self._lock = Lock()
        """Held while a finished transfer is counted, and while `_moved` is copied."""
        self._warned = False  # whether a divergence from the plan has been logged
        self._phase, self._part = "other", ""
        """Current phase and part of the training thread; an empty part is determined by the phase. [Note: parts]"""
        self._fsdp_module = ""  # name of the FSDP module being computed, for the timeline
        # Start times of the current interval, phase and step, in seconds of `time.perf_counter`.
        self._since = self._phase_since = self._step_start = time.perf_counter()
        self._spent = dict.fromkeys(PARTS, 0.0)
        """Seconds of this step by part. A value may temporarily be negative, because the time of a stall is subtracted
        before the surrounding interval is added."""
        self._moved = dict.fromkeys(OPS, 0)  # NVMe bytes since the start; protected by `_lock`
        self._moved_before = dict.fromkeys(OPS, 0)  # value of `_moved` at the start of this step
        self._moving = 0.0  # seconds with page transfers in flight since the start; see `moving`
        self._moving_before = 0.0  # value of `_moving` at the start of this step

    # Methods called by the store and the pager #

    def moved(
        self, op: str, role: str, device: int, nbytes: int, seconds: float, retries: int, error: Exception | None
    ) -> None:
        """Record a page transfer that has succeeded or failed. Thread-safe."""
        with self._lock:
            self._durations[op].observe(seconds)
            if retries:
                self._retries[op].add(retries)
            if error is None:
                self._bytes[op, role, device].add(nbytes)
                self._moved[op] += nbytes
            else:
                self._count_error(op, error)

    def gave_up(self, op: str, error: Exception) -> None:
        """Record a page transfer that timed out. Thread-safe."""
        with self._lock:
            self._count_error(op, error)

    def _count_error(self, op: str, error: Exception) -> None:
        self._stats.counter("io_errors_total", op=op, reason=error_reason(error)).add()

    def copied(self, nbytes: int) -> None:
        """Record the number of weight bytes that the training thread copied to the device."""
        self._copied.add(nbytes)

    def stalled(self, cause: str, page: int, seconds: float) -> None:
        """Record a wait of the training thread that has just ended.

        Waits for an update on another thread or for a copy on the device (`cause` is ``update`` or ``copy``) count as
        update or copy time. All others are storage stalls.

        Args:
            cause: Cause of the wait.
            page: Index of the page that the thread waited for, or -1.
            seconds: Duration of the wait.
        """
        self._spent[self._part or _PART_OF[self._phase]] -= seconds
        if self._timeline is not None:
            self._timeline.stalled(cause, page, seconds)
        if cause in ("update", "copy"):
            self._spent[cause] += seconds
            return
        self._stalls[self._phase, cause].add(seconds)
        self._spent[f"{cause}_stall"] += seconds
        if cause == "host_cache":
            self._pool_wait.add(seconds)

    def fetched(self, result: str, pages: int = 1) -> None:
        """Record the result of requests for pages: ``hit``, ``late`` or ``miss``."""
        self._fetches[result].add(pages)

    def moving(self, seconds: float) -> None:
        """Record time during which page transfers were in flight. Callers from different threads must not overlap."""
        self._moving += seconds
        self._transferring.add(seconds)

    def spared(self, nbytes: int) -> None:
        """Record a planned read that turned out to be unnecessary."""
        self._spared.add(nbytes)

    def diverged(self, detail: str) -> None:
        """Record a divergence from the plan, and log the first one."""
        self._stats.counter("plan_divergences_total").add()
        if not self._warned:
            self._warned = True
            _log.warning(
                "this step differs from the recorded step (%s). Its pages are read on demand, and the plan is rebuilt "
                "if the next steps use the same sequence. This warning is logged once",
                detail,
            )

    def skipped(self) -> None:
        """Record a step that was skipped because the gradient norm was not finite."""
        self._stats.counter("steps_skipped_total").add()

    # Training metrics #

    def reported(self, loss: float | None, tokens: int, target_steps: int | None) -> None:
        """Record the number of tokens and, if they are not None, the loss and the number of steps to take."""
        if loss is not None:
            self._stats.gauge("training_loss").set(loss)
        if target_steps is not None:
            self._stats.gauge("training_target_steps").set(target_steps)
        self._stats.counter("training_tokens_total").add(tokens)

    def learned_at(self, rate: float) -> None:
        """Record the learning rate of the step."""
        self._stats.gauge("training_learning_rate").set(rate)

    def clipped(self, norm: float) -> None:
        """Record the gradient norm before clipping."""
        self._stats.gauge("training_gradient_norm").set(norm)

    # Phases and steps #

    def enter(self, phase: str, fsdp_module: str = "") -> None:
        """Switch to a phase. `fsdp_module` is the name of the FSDP module that is about to be computed."""
        self._switch(phase, self._part)
        self._fsdp_module = fsdp_module

    def phase(self, phase: str, what: str = "") -> AbstractContextManager[None]:
        """Return a context manager that enters a phase. The timeline shows `what`, the name of an FSDP module."""
        return _Stretch(self, phase, "", phase, what)

    def part(self, part: str, what: str = "", *, name: str = "") -> AbstractContextManager[None]:
        """Return a context manager that accounts the time spent in its block to `part`.

        Args:
            part: part of the step, e.g. ``copy``.
            what: label of the span in the timeline, e.g. the FSDP module.
            name: name of the span in the timeline; `part` by default.
        """
        return _Stretch(self, "", part, name or part, what)

    def _switch(self, phase: str, part: str) -> None:
        now = time.perf_counter()
        passed = now - self._since
        spent = self._part or _PART_OF[self._phase]
        self._spent[spent] += passed
        if self._timeline is not None and spent == "compute" and not self._part:
            self._timeline.span("thread", "compute", self._fsdp_module, self._since, now)
        self._part, self._since = part, now
        if phase != self._phase:
            self._end_phase()
            self._phase = phase

    def _end_phase(self) -> None:
        self._phases[self._phase].add(self._since - self._phase_since)
        if self._timeline is not None:
            self._timeline.span("phase", self._phase, "", self._phase_since, self._since)
        self._phase_since = self._since

    def predicted(self, read: int, written: int) -> None:
        """Publish the plan's prediction of the NVMe bytes per step."""
        self._planned = {"read": read, "write": written}
        self._publish()

    def predicted_link(self, to_device: int, from_device: int) -> None:
        """Publish the plan's prediction of the bytes copied to and from the device per step."""
        self._planned_link = dict(zip(LINK_DIRECTIONS, (to_device, from_device), strict=True))
        self._publish()

    def predicted_activations(self, read: int, written: int, to_device: int, from_device: int) -> None:
        """Add the traffic of activations to the published predictions, in bytes per step."""
        found = dict(zip(self._activations, (read, written, to_device, from_device), strict=True))
        if found != self._activations:
            self._activations = found
            self._publish()

    def _publish(self) -> None:
        for op, nbytes in self._planned.items():
            self._stats.gauge("plan_predicted_bytes_per_step", op=op).set(nbytes + self._activations[op])
        for way, nbytes in self._planned_link.items():
            self._stats.gauge("plan_predicted_link_bytes_per_step", direction=way).set(nbytes + self._activations[way])

    def linked(self, to_device: int, from_device: int) -> None:
        """Record bytes copied to and from the device."""
        for way, nbytes in zip(LINK_DIRECTIONS, (to_device, from_device), strict=True):
            self._link[way].add(nbytes)

    def end_step(
        self,
        step: int,
        updated: int,
        cache_slots: Mapping[str, int],
        held: Mapping[str, int],
        inflight: Mapping[str, int],
    ) -> StepRecord:
        """Finish the accounting of a step and return its record.

        Args:
            step: Index of the step.
            updated: Number of parameters updated in the step.
            cache_slots: Number of host cache slots by status.
            held: Bytes in the host cache by role.
            inflight: Page transfers in flight by operation.
        """
        self._switch("other", self._part)
        seconds = self._since - self._step_start
        with self._lock:
            moved = dict(self._moved)
        spent = self._spent
        record = StepRecord(
            step=step,
            seconds=seconds,
            **{f"{part}_seconds": spent[part] for part in PARTS},
            transfer_seconds=self._moving - self._moving_before,
            read_bytes=moved["read"] - self._moved_before["read"],
            written_bytes=moved["write"] - self._moved_before["write"],
        )
        for part, counter in self._parts.items():
            counter.add(max(0.0, spent[part]))
        if self._timeline is not None:
            self._timeline.span("phase", f"step {step}", "", self._step_start, self._since)
        self._begin_step(moved)
        self._stats.counter("steps_total").add()
        self._stats.histogram("step_duration_seconds").observe(seconds)
        self._stats.gauge("step_last_completed_timestamp_seconds").set(time.time())
        self._stats.counter("optimizer_updated_parameters_total").add(updated)
        for status, number in cache_slots.items():
            self._stats.gauge("cache_slots", status=status).set(number)
        for role, nbytes in held.items():
            self._stats.gauge("tier_used_bytes", tier="host", state=role).set(nbytes)
        for op, number in inflight.items():
            self._stats.gauge("io_inflight_requests", op=op).set(number)
        return record

    def restart_step(self) -> None:
        """Start the accounting of a step now, so that it excludes earlier work such as setup or a checkpoint."""
        self._switch("other", self._part)
        with self._lock:
            self._begin_step(dict(self._moved))

    def _begin_step(self, moved: dict[str, int]) -> None:
        self._end_phase()
        self._moved_before, self._moving_before = moved, self._moving
        self._step_start = self._since
        self._spent = dict.fromkeys(PARTS, 0.0)

    def checkpointed(self, seconds: float) -> None:
        """Record a checkpoint that has become durable. `seconds` is its duration."""
        self._stats.histogram("checkpoint_duration_seconds").observe(seconds)
        self._stats.gauge("checkpoint_last_success_timestamp_seconds").set(time.time())

    @property
    def total_bytes(self) -> dict[str, int]:
        """NVMe bytes since the start, by ``read`` and ``write``."""
        with self._lock:
            return dict(self._moved)
