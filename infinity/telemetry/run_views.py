"""Current figures for the runs on a node and their ranks, computed from stats files for `infinityd` and commands.

Counters start at 0 when a rank starts, so a rate is computed from the difference between two readings of the stats
file. Transferred bytes are counted continuously; their rate covers the last five seconds. Values that are counted once
per step cannot use such a fixed interval, because a step may take a tenth of a second or a minute. They are divided by
the total duration of the steps that ended within the last ten seconds, or of the last step if it took longer.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from infinity.telemetry.history import History
from infinity.telemetry.metrics import BY_NAME, CACHE_SLOT_STATUSES, FETCH_RESULTS, OPS, PARTS, ROLES, STALLS
from infinity.telemetry.stats_file import Snapshot, run_status
from infinity.telemetry.trees import Tree, known
from infinity.untrusted_files import user_name

DriveOf = Callable[[str], str | None]

COLUMNS: Final = ("step", "loss", "tokens_per_second", "stalled")
"""Columns of a run's history."""
_IO_SECONDS: Final = 5.0
_STEP_SECONDS: Final = 10.0
_MOST_SAMPLES: Final = 32
_MOST_RUNS: Final = 64
"""Maximum number of runs in a report, so that the dashboard stays readable."""
_IDLE_STEPS: Final = 5.0
_IDLE_SECONDS: Final = 15.0
"""A run is idle if no step has ended for both `_IDLE_STEPS` step durations and `_IDLE_SECONDS`."""


@dataclass(frozen=True)
class _Sample:
    """Snapshot of a stats file and the monotonic time, in seconds, at which it was read."""

    when: float
    snapshot: Snapshot


class _Rank:
    """Recent readings of the stats file of one rank."""

    def __init__(self, sample: _Sample) -> None:
        self.last = sample  # the newest reading
        self._looks = deque([sample], maxlen=_MOST_SAMPLES)  # readings of the last `_IO_SECONDS`, or the last two
        self._ends: deque[_Sample] = deque(maxlen=_MOST_SAMPLES)  # the first reading after the end of each step
        self._before: Snapshot | None = None  # start of the window of steps; None: the start of the rank
        self.stepped = False  # whether a step ended since the previous reading

    def is_of(self, snapshot: Snapshot) -> bool:
        """Return whether a stats file was written by the same process. Resuming a run starts new processes."""
        old, new = self.last.snapshot.header, snapshot.header
        return (old.started, old.pid, old.devices) == (new.started, new.pid, new.devices)

    def look(self, sample: _Sample) -> None:
        """Record a new reading of the stats file."""
        self.stepped = sample.snapshot.value("steps_total") != self.last.snapshot.value("steps_total")
        if self.stepped:
            self._ends.append(sample)
            old = [end for end in self._ends if sample.when - end.when >= _STEP_SECONDS]
            # A rank is first seen in the middle of a step, so its figures begin at the end of that step.
            self._before = (old[-1] if old else self._ends[0]).snapshot if len(self._ends) > 1 else None
        self.last = sample
        self._looks.append(sample)
        while len(self._looks) > 2 and sample.when - self._looks[0].when > _IO_SECONDS + 0.5:
            self._looks.popleft()

    def total(self, name: str, **labels: str) -> float:
        """Return the current value of a counter or gauge."""
        return self.last.snapshot.value(name, **labels)

    def rate(self, name: str, **labels: str) -> float | None:
        """Return the increase of a counter per second, or None if the stats file has been read only once."""
        first, last = self._looks[0], self._looks[-1]
        if last.when <= first.when:
            return None
        return max(0.0, last.snapshot.value(name, **labels) - first.snapshot.value(name, **labels)) / (
            last.when - first.when
        )

    def in_steps(self, name: str, **labels: str) -> float:
        """Return the increase of a counter in recent steps (see the module docstring)."""
        return self._in_steps(lambda snapshot: snapshot.value(name, **labels))

    def step_seconds(self) -> float:
        """Return the total duration of recent steps in seconds (see the module docstring)."""
        return self._in_steps(_seconds_of_steps)

    def last_stretch(self, name: str) -> tuple[float, float]:
        """Return the increase of a counter and of the step time in seconds between the last two observed steps."""
        count, seconds = self.total(name), _seconds_of_steps(self.last.snapshot)
        if len(self._ends) < 2:
            return count, seconds
        before = self._ends[-2].snapshot
        return count - before.value(name), seconds - _seconds_of_steps(before)

    def _in_steps(self, of: Callable[[Snapshot], float]) -> float:
        if self._before is None:
            return of(self.last.snapshot)
        return max(0.0, of(self._ends[-1].snapshot) - of(self._before))


def _seconds_of_steps(snapshot: Snapshot) -> float:
    return snapshot.histogram_at(BY_NAME["step_duration_seconds"]).sum


@dataclass
class _Run:
    """State of a watched run."""

    ranks: dict[int, _Rank] = field(default_factory=dict)
    history: History = field(default_factory=History)


class Runs:
    """Compute figures for the runs on a node from successive readings of their stats files. Not thread-safe."""

    def __init__(self, drive_of: DriveOf) -> None:
        """Initialize without runs. `drive_of` returns the name of the drive that stores a path, or None if unknown."""
        self._drive_of = drive_of
        self._runs: dict[str, _Run] = {}
        """Runs with stats files, by id."""
        self.omitted = 0
        """Number of runs that the last report omitted, because it contains at most `_MOST_RUNS` runs."""

    def look(
        self, snapshots: Iterable[Snapshot], limits: Mapping[str, Mapping[str, float]], now: float, unix: float
    ) -> list[Tree]:
        """Record new readings of the stats files and return the figures for each run, live runs and newer runs first.

        Args:
            snapshots: Snapshots of the stats files on this node.
            limits: Bandwidth limit per rank in bytes per second, by run id and drive. Unlimited drives are absent.
            now: Current monotonic time in seconds.
            unix: Current Unix time in seconds.
        """
        found: dict[str, list[Snapshot]] = defaultdict(list)
        for snapshot in snapshots:
            found[snapshot.header.run_id].append(snapshot)
        order = {"live": 0, "dead": 1, "ended": 2}
        # Run ids sort in the order of the runs even if the clock was set back, unlike start times.
        newest_first = sorted(found.items(), key=lambda item: item[0], reverse=True)
        newest_first.sort(key=lambda item: min(order[snapshot.status] for snapshot in item[1]))
        turns: dict[int, int] = defaultdict(int)  # number of runs by user, so that no user displaces all others
        places = {}
        for name, snapshots_of_run in newest_first:
            places[name] = turns[snapshots_of_run[0].uid]
            turns[snapshots_of_run[0].uid] += 1
        shown = set(sorted(places, key=lambda name: places[name])[:_MOST_RUNS])
        self.omitted = len(places) - len(shown)
        known, self._runs = self._runs, {}
        for name, snapshots_of_run in newest_first:
            if name not in shown:
                continue
            self._runs[name] = run = known.get(name, _Run())
            _look_at(run, snapshots_of_run, now)
        return [_run_tree(name, run, limits.get(name, {}), self._drive_of, unix) for name, run in self._runs.items()]


def _look_at(run: _Run, snapshots: Iterable[Snapshot], now: float) -> None:
    known, run.ranks = run.ranks, {}
    for snapshot in sorted(snapshots, key=lambda snapshot: snapshot.header.rank):
        sample, rank = _Sample(now, snapshot), known.get(snapshot.header.rank)
        if rank is None or not rank.is_of(snapshot):
            if rank is not None:
                run.history = History()  # the run was resumed, so its step counters start again
            rank = _Rank(sample)
        else:
            rank.look(sample)
        run.ranks[snapshot.header.rank] = rank
    ranks = list(run.ranks.values())
    if any(rank.stepped for rank in ranks):
        stretches = [rank.last_stretch("training_tokens_total") for rank in ranks]
        tokens = [count / seconds for count, seconds in stretches if count > 0 and seconds > 0]
        steps = ranks[0].last.snapshot.header.steps_before + _steps(ranks)
        run.history.add((steps, _loss(ranks), sum(tokens) if tokens else None, _stalled(ranks)))


def _run_tree(name: str, run: _Run, limits: Mapping[str, float], drive_of: DriveOf, unix: float) -> Tree:
    ranks = list(run.ranks.values())
    first = ranks[0].last.snapshot.header
    # Several containers of a node may have different host names.
    every = [host for rank in ranks for host in rank.last.snapshot.header.hosts]
    hosts = list(dict.fromkeys(host for rank in ranks for host in rank.last.snapshot.header.hosts[:1]))
    steps, seconds = _steps(ranks), _mean(_per_step(rank) for rank in ranks)
    target = max(rank.total("training_target_steps") for rank in ranks)
    target = target if math.isfinite(target) and target > 0 else 0.0
    last_step = min(filter(None, (rank.total("step_last_completed_timestamp_seconds") for rank in ranks)), default=None)
    running = any(rank.last.snapshot.alive for rank in ranks)
    idle = bool(
        running and last_step and seconds and unix - last_step > max(_IDLE_SECONDS, _IDLE_STEPS * seconds)
    )  # fmt: skip
    return known(
        id=name,
        name=first.name,
        user=user_name(ranks[0].last.snapshot.uid),
        status=run_status(rank.last.snapshot for rank in ranks),
        started=first.started,
        world_size=first.world_size,
        hosts=hosts or None,
        other_hosts=[host for host in dict.fromkeys(every) if host not in hosts] or None,
        version=first.info.get("version"),
        io_engine=first.info.get("io_engine"),
        steps=first.steps_before + steps,
        target_steps=first.steps_before + target if target else None,
        remaining_seconds=max(0.0, target - steps) * seconds if running and not idle and target and seconds else None,
        steps_skipped=max(rank.total("steps_skipped_total") for rank in ranks),
        step_seconds=seconds,
        last_step=last_step,
        idle=idle,
        tokens=_sum(rank.total("training_tokens_total") or None for rank in ranks),
        tokens_per_second=None if idle else _sum(_tokens_per_second(rank) for rank in ranks),
        loss=_loss(ranks),
        learning_rate=ranks[0].total("training_learning_rate") if steps else None,
        gradient_norm=ranks[0].total("training_gradient_norm") or None,
        parts=_parts(ranks),
        stalled=_stalled(ranks),
        fetches=_fetches(ranks),
        io=_io(ranks),
        plan=_plan(ranks),
        checkpoint=_checkpoint(ranks),
        host_cache=_host_cache(ranks),
        nvme=_tier(ranks, "nvme"),
        limits=dict(limits) or None,
        drives=_by_drive(ranks, drive_of) or None,
        ranks=[_rank_tree(rank, unix) for rank in ranks],
        history={"columns": COLUMNS, "rows": run.history.rows()},
    )


def _rank_tree(rank: _Rank, unix: float) -> Tree:
    header = rank.last.snapshot.header
    stepped = rank.total("steps_total") > 0
    return known(
        rank=header.rank,
        pid=header.pid,
        status=rank.last.snapshot.status,
        steps=header.steps_before + rank.total("steps_total"),
        step_seconds=_per_step(rank),
        last_step=rank.total("step_last_completed_timestamp_seconds") or None,
        tokens_per_second=_tokens_per_second(rank),
        parts=_parts([rank]),
        stalled=_stalled([rank]),
        read=_io_rate([rank], "read"),
        write=_io_rate([rank], "write"),
        host_cache_used=rank.total("tier_used_bytes", tier="host") if stepped else None,
        host_cache_capacity=rank.total("tier_capacity_bytes", tier="host") or None,
        errors=rank.total("io_errors_total"),
    )


# Figures computed from one or more ranks #


def _steps(ranks: Sequence[_Rank]) -> float:
    return min(rank.total("steps_total") for rank in ranks)


def _per_step(rank: _Rank) -> float | None:
    steps = rank.in_steps("steps_total")
    return rank.step_seconds() / steps if steps else None


def _tokens_per_second(rank: _Rank) -> float | None:
    tokens, seconds = rank.in_steps("training_tokens_total"), rank.step_seconds()
    return tokens / seconds if tokens and seconds else None


def _loss(ranks: Sequence[_Rank]) -> float | None:
    """Return the mean loss across ranks. A value of 0 means that no loss has been reported."""
    return _mean(rank.total("training_loss") or None for rank in ranks)


def _parts(ranks: Sequence[_Rank]) -> dict[str, float] | None:
    """Return the fraction of the step time spent in each part (sum: 1), or None before the first step."""
    return _shares({part: sum(rank.in_steps("step_part_seconds_total", part=part) for rank in ranks) for part in PARTS})


def _stalled(ranks: Sequence[_Rank]) -> float | None:
    parts = _parts(ranks)
    return sum(parts[part] for part in STALLS) if parts else None


def _fetches(ranks: Sequence[_Rank]) -> dict[str, float] | None:
    return _shares(
        {name: sum(rank.in_steps("prefetch_fetches_total", result=name) for rank in ranks) for name in FETCH_RESULTS}
    )


def _shares(values: Mapping[str, float]) -> dict[str, float] | None:
    total = sum(values.values())
    return {name: value / total for name, value in values.items()} if total else None


def _io(ranks: Sequence[_Rank]) -> Tree:
    steps = _mean(rank.in_steps("steps_total") for rank in ranks)
    moved = {op: sum(rank.in_steps("io_bytes_total", op=op) for rank in ranks) for op in OPS}
    return known(
        read=_io_rate(ranks, "read"),
        write=_io_rate(ranks, "write"),
        read_total=sum(rank.total("io_bytes_total", op="read") for rank in ranks),
        written_total=sum(rank.total("io_bytes_total", op="write") for rank in ranks),
        read_per_step=moved["read"] / steps if steps else None,
        written_per_step=moved["write"] / steps if steps else None,
        errors=sum(rank.total("io_errors_total") for rank in ranks),
        retries=sum(rank.total("io_retries_total") for rank in ranks),
    )


def _io_rate(ranks: Sequence[_Rank], op: str) -> float | None:
    """Return the current throughput of the live ranks in bytes per second."""
    return _sum(rank.rate("io_bytes_total", op=op) for rank in ranks if rank.last.snapshot.alive)


def _by_drive(ranks: Sequence[_Rank], drive_of: DriveOf) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for rank in ranks:
        header = rank.last.snapshot.header
        for device, path in zip(header.devices, header.paths, strict=False):
            drive = drive_of(path)
            if drive is None or not rank.last.snapshot.alive:
                continue
            sums = found.setdefault(drive, dict.fromkeys(OPS, 0.0))
            for op in OPS:
                sums[op] += rank.rate("io_bytes_total", op=op, device=device) or 0.0
    return found


def _plan(ranks: Sequence[_Rank]) -> Tree:
    predicted = {op: sum(rank.total("plan_predicted_bytes_per_step", op=op) for rank in ranks) for op in OPS}
    made = any(predicted.values())
    return known(
        read=predicted["read"] if made else None,
        written=predicted["write"] if made else None,
        divergences=sum(rank.total("plan_divergences_total") for rank in ranks),
    )


def _checkpoint(ranks: Sequence[_Rank]) -> Tree:
    found = [rank.last.snapshot.histogram_at(BY_NAME["checkpoint_duration_seconds"]) for rank in ranks]
    times = [rank.total("checkpoint_last_success_timestamp_seconds") for rank in ranks]
    count = min(sum(checkpoints.counts) for checkpoints in found)
    return known(
        last=min(times) or None,
        count=count,
        seconds=max(checkpoints.sum / sum(checkpoints.counts) for checkpoints in found) if count else None,
    )


def _host_cache(ranks: Sequence[_Rank]) -> Tree | None:
    tier = _tier(ranks, "host") if _steps(ranks) else None  # ranks report the host cache at the end of each step
    if tier is None:
        return None
    cache_slots = {
        status: sum(rank.total("cache_slots", status=status) for rank in ranks) for status in CACHE_SLOT_STATUSES
    }
    return {**tier, "cache_slots": cache_slots}


def _tier(ranks: Sequence[_Rank], tier: str) -> Tree | None:
    """Return the capacity of a tier and the bytes in use by role, or None if the capacity is unknown."""
    capacity = sum(rank.total("tier_capacity_bytes", tier=tier) for rank in ranks)
    if not capacity:
        return None
    roles = {role: sum(rank.total("tier_used_bytes", tier=tier, state=role) for rank in ranks) for role in ROLES}
    return {"capacity": capacity, "roles": roles}


def _sum(values: Iterable[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return sum(there) if there else None


def _mean(values: Iterable[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return sum(there) / len(there) if there else None
