"""The ledger of a run: where every second of a step went, and every byte.

[Note: parts] The training thread is in one *phase* of the step and in one *part* of the ledger at any moment. The
phase says when (forward, backward, ...), the part what the thread does; where nobody has said, the phase decides
(`_PART_OF`). A stall is taken out of the part in which the thread stood still. Every switch closes one stretch of time
and begins the next at the same instant, so the parts of a step add up to its seconds by construction.
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
    """One step of this rank: parts of the training thread's time, which add up to `seconds`, and NVMe bytes.

    A step begins where the one before (or a checkpoint) ended. `compute` is forward and backward outside of all else;
    `collective` all-gathers, reduce-scatters and the reduction of the norm; `copy` weights out of pages and gradients
    into them; `update` clipping and the optimizer; the stalls are waits for a page to be read, for one to be written,
    and for a free cache slot; `python` is the user's loop between `step()` and the next forward, and our bookkeeping.
    `transfer_seconds` is beside them: the time in which pages were on their way.
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
        """Seconds in which the training thread stood still."""
        return self.read_stall_seconds + self.write_stall_seconds + self.host_cache_stall_seconds


class _Stretch:
    """A block in which the training thread is in a phase or in a part of one; hundreds per step, so no generator."""

    __slots__ = ("_before", "_ledger", "_name", "_part", "_phase", "_start", "_what")

    def __init__(self, ledger: Ledger, phase: str, part: str, name: str, what: str) -> None:
        """Nothing is counted yet.

        Args:
            phase: to be in; empty: that in which the block begins.
            part: to be in; empty: the one that the phase decides.
            name: in the timeline.
            what: for which FSDP module, in the timeline.
        """
        self._ledger, self._phase, self._part, self._name, self._what = ledger, phase, part, name, what
        self._before = ("", "")  # phase and part around the block; set at its begin
        self._start = 0.0  # when it began, in seconds of `time.perf_counter`

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
    """Counts what the pager and the store do, by phase; fills the rank's stats page.

    The books of a step are open from `restart_step` or the end of the step before until `end_step`. The training thread
    owns phase, part and books. Each cell of the stats page has one writer at a time: what the store's threads report
    (`moved`, `gave_up`) goes under `_lock`, and `moving`, `fetched`, `spared` and `diverged` come from any thread that
    uses the pager, but under its condition.
    """

    def __init__(self, stats: Stats, timeline: Timeline | None = None) -> None:
        self._timeline = timeline  # None: none is written
        # Cells of the stats page, by the values of their labels. Under `_lock`: these.
        self._bytes = {
            (op, role, number): stats.counter("io_bytes_total", op=op, state=role, device=device)
            for op in OPS
            for role in ROLES
            for number, device in enumerate(stats.header.devices)
        }
        self._retries = {op: stats.counter("io_retries_total", op=op) for op in OPS}
        self._durations = {op: stats.histogram("io_request_duration_seconds", op=op) for op in OPS}
        # Not under it: these have one caller at a time, see above.
        self._inflight = {op: stats.gauge("io_inflight_requests", op=op) for op in OPS}
        self._copied = stats.counter("gather_copied_bytes_total")
        self._link = {way: stats.counter("link_bytes_total", direction=way) for way in LINK_DIRECTIONS}
        self._transferring = stats.counter("transfer_seconds_total")
        self._held = {role: stats.gauge("tier_used_bytes", tier="host", state=role) for role in ROLES}
        self._stalls = {
            (phase, cause): stats.counter("stall_seconds_total", phase=phase, cause=cause)
            for phase in PHASES
            for cause in CAUSES
        }
        self._fetches = {result: stats.counter("prefetch_fetches_total", result=result) for result in FETCH_RESULTS}
        self._phases = {phase: stats.counter("step_phase_seconds_total", phase=phase) for phase in PHASES}
        self._parts = {part: stats.counter("step_part_seconds_total", part=part) for part in PARTS}
        self._pool_wait = stats.counter("pool_wait_seconds_total")
        self._spared = stats.counter("prefetch_spared_bytes_total")
        self._divergences = stats.counter("plan_divergences_total")
        self._steps = stats.counter("steps_total")
        self._skipped = stats.counter("steps_skipped_total")
        self._step_duration = stats.histogram("step_duration_seconds")
        self._last_step = stats.gauge("step_last_completed_timestamp_seconds")
        self._updated = stats.counter("optimizer_updated_parameters_total")
        self._checkpoint_duration = stats.histogram("checkpoint_duration_seconds")
        self._last_checkpoint = stats.gauge("checkpoint_last_success_timestamp_seconds")
        self._pool = {
            status: stats.gauge("pool_frames", status=status) for status in ("free", "resident", "streaming", "writing")
        }
        self._loss = stats.gauge("training_loss")
        self._tokens = stats.counter("training_tokens_total")
        self._learning_rate = stats.gauge("training_learning_rate")
        self._gradient_norm = stats.gauge("training_gradient_norm")
        self._predicted = {op: stats.gauge("plan_predicted_bytes_per_step", op=op) for op in OPS}
        self._predicted_link = {
            way: stats.gauge("plan_predicted_link_bytes_per_step", direction=way) for way in LINK_DIRECTIONS
        }
        self._planned: dict[str, int] = {}  # bytes of a step by ``read`` and ``write``, of the plan; empty without one
        self._planned_link: dict[str, int] = {}  # the same by direction of the link
        self._activations = dict.fromkeys((*OPS, *LINK_DIRECTIONS), 0)  # bytes that these add to each of them
        self._stats = stats  # for the cells of errors, which are looked up when there is one
        self._lock = Lock()
        """Held while a finished transfer is counted, and while `_moved` is copied."""
        self._warned = False  # whether a departure from the plan was logged
        self._phase, self._part = "other", ""
        """Where the training thread is; no part: the one that the phase decides. [Note: parts]"""
        self._fsdp_module = ""  # what is computed, for the timeline
        # Seconds of `time.perf_counter`: when the current stretch, the current phase and the step began.
        self._since = self._phase_since = self._step_start = time.perf_counter()
        self._spent = dict.fromkeys(PARTS, 0.0)
        """Seconds of this step by part. A stall is taken out of its part before the stretch that it lies in is added,
        so one may be below zero for a while."""
        self._moved = dict.fromkeys(OPS, 0)  # NVMe bytes since the start; under `_lock`
        self._moved_before = dict.fromkeys(OPS, 0)  # the same as this step began
        self._moving = 0.0  # seconds since the start in which pages were on their way; see `moving`
        self._moving_before = 0.0  # the same as this step began

    # The store and the pager report here #

    def moved(
        self, op: str, role: str, device: int, nbytes: int, seconds: float, retries: int, error: Exception | None
    ) -> None:
        """Count one finished transfer of a page. Called from any thread."""
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
        """Count a transfer that has not ended in time. Called from any thread."""
        with self._lock:
            self._count_error(op, error)

    def _count_error(self, op: str, error: Exception) -> None:
        self._stats.counter("io_errors_total", op=op, reason=error_reason(error)).add()

    def copied(self, nbytes: int) -> None:
        """Count weights that the training thread has copied to the device."""
        self._copied.add(nbytes)

    def stalled(self, cause: str, page: int, seconds: float) -> None:
        """Count a wait of the training thread that has just ended; `page` is what it needed, or -1.

        One for an update on another thread, or for a device to copy (`cause` is ``update`` or ``copy``), is no stall of
        storage: it is update, or copy.
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

    def fetched(self, result: str) -> None:
        """Count a page that was needed: ``hit``, ``late`` or ``miss``."""
        self._fetches[result].add()

    def moving(self, seconds: float) -> None:
        """Count time in which pages were on their way. Called from any thread, by one at a time."""
        self._moving += seconds
        self._transferring.add(seconds)

    def spared(self, nbytes: int) -> None:
        """Count a planned read that was not needed."""
        self._spared.add(nbytes)

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

    # What is trained #

    def reported(self, loss: float | None, tokens: int) -> None:
        """Note the loss, where one is given, and count tokens."""
        if loss is not None:
            self._loss.set(loss)
        self._tokens.add(tokens)

    def learned_at(self, rate: float) -> None:
        """Note the learning rate of a step."""
        self._learning_rate.set(rate)

    def clipped(self, norm: float) -> None:
        """Note the norm of the gradients, before they were clipped."""
        self._gradient_norm.set(norm)

    # Phases and steps #

    def enter(self, phase: str, fsdp_module: str = "") -> None:
        """Switch to a phase; `fsdp_module` is what is computed from now on."""
        self._switch(phase, self._part)
        self._fsdp_module = fsdp_module

    def phase(self, phase: str, what: str = "") -> AbstractContextManager[None]:
        """Be in a phase for the length of a block; `what` says in the timeline for which FSDP module."""
        return _Stretch(self, phase, "", phase, what)

    def part(self, part: str, what: str = "", *, name: str = "") -> AbstractContextManager[None]:
        """Be in a part for the length of a block; the timeline shows it as `name`, by default that of the part."""
        return _Stretch(self, "", part, name or part, what)

    def _switch(self, phase: str, part: str) -> None:
        now = time.perf_counter()
        passed = now - self._since
        self._phases[self._phase].add(passed)
        spent = self._part or _PART_OF[self._phase]
        self._spent[spent] += passed
        if self._timeline is not None:
            if spent == "compute" and not self._part:
                self._timeline.span("thread", "compute", self._fsdp_module, self._since, now)
            if phase != self._phase:
                self._timeline.span("phase", self._phase, "", self._phase_since, now)
                self._phase_since = now
        self._phase, self._part, self._since = phase, part, now

    def predicted(self, read: int, written: int) -> None:
        """Publish what the plan predicts for one step, in bytes."""
        self._planned = {"read": read, "write": written}
        self._publish()

    def predicted_link(self, to_device: int, from_device: int) -> None:
        """Publish what the plan predicts to be copied to the device and from it in one step, in bytes."""
        self._planned_link = dict(zip(LINK_DIRECTIONS, (to_device, from_device), strict=True))
        self._publish()

    def predicted_activations(self, read: int, written: int, to_device: int, from_device: int) -> None:
        """Publish with both what activations add to them, in bytes."""
        found = dict(zip(self._activations, (read, written, to_device, from_device), strict=True))
        if found != self._activations:
            self._activations = found
            self._publish()

    def _publish(self) -> None:
        for op, nbytes in self._planned.items():
            self._predicted[op].set(nbytes + self._activations[op])
        for way, nbytes in self._planned_link.items():
            self._predicted_link[way].set(nbytes + self._activations[way])

    def linked(self, to_device: int, from_device: int) -> None:
        """Count what has been copied to the device and from it, in bytes."""
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
        """Close the books of a step.

        Args:
            updated: parameters updated in it.
            cache slots: cache slots of the host cache by status.
            held: bytes in the host cache by role.
            inflight: page transfers under way by operation.
        """
        self._switch("other", self._part)
        seconds = self._since - self._step_start
        with self._lock:
            moved = dict(self._moved)
        spent = self._spent
        record = StepRecord(
            step=step,
            seconds=seconds,
            compute_seconds=spent["compute"],
            collective_seconds=spent["collective"],
            copy_seconds=spent["copy"],
            update_seconds=spent["update"],
            read_stall_seconds=spent["read_stall"],
            write_stall_seconds=spent["write_stall"],
            host_cache_stall_seconds=spent["host_cache_stall"],
            python_seconds=spent["python"],
            transfer_seconds=self._moving - self._moving_before,
            read_bytes=moved["read"] - self._moved_before["read"],
            written_bytes=moved["write"] - self._moved_before["write"],
        )
        for part, counter in self._parts.items():
            counter.add(max(0.0, spent[part]))
        if self._timeline is not None:
            self._timeline.span("phase", f"step {step}", "", self._step_start, self._since)
        self._begin_step(moved)
        self._steps.add()
        self._step_duration.observe(seconds)
        self._last_step.set(time.time())
        self._updated.add(updated)
        for status, number in cache_slots.items():
            self._pool[status].set(number)
        for role, nbytes in held.items():
            self._held[role].set(nbytes)
        for op, number in inflight.items():
            self._inflight[op].set(number)
        return record

    def restart_step(self) -> None:
        """Begin the books of a step now: what came before (set-up, a checkpoint) belongs to none."""
        self._switch("other", self._part)
        with self._lock:
            self._begin_step(dict(self._moved))

    def _begin_step(self, moved: dict[str, int]) -> None:
        if self._timeline is not None:
            self._timeline.span("phase", self._phase, "", self._phase_since, self._since)
        self._moved_before, self._moving_before = moved, self._moving
        self._step_start = self._phase_since = self._since
        self._spent = dict.fromkeys(PARTS, 0.0)

    def checkpointed(self, seconds: float) -> None:
        """Count a durable checkpoint."""
        self._checkpoint_duration.observe(seconds)
        self._last_checkpoint.set(time.time())

    @property
    def total_bytes(self) -> dict[str, int]:
        """NVMe bytes since the start, by ``read`` and ``write``."""
        with self._lock:
            return dict(self._moved)
