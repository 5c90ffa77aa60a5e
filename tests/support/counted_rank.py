"""Stats files of ranks that do not train."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infinity.telemetry import Stats


def make_stats(
    folder: Path | None,
    run: str = "run-1",
    rank: int = 0,
    world_size: int = 1,
    paths: Sequence[object] = (),
    **info: str,
) -> Stats:
    """Create the stats file of a rank in a folder, or in memory if `folder` is ``None``."""
    devices = [f"nvme{index}" for index in range(max(1, len(paths)))]
    info = {"version": "0.1.0", "io_engine": "threads", "paths": json.dumps(list(map(str, paths))), **info}
    return Stats.create(
        folder, run_id=run, rank=rank, local_rank=rank, world_size=world_size, devices=devices, info=info
    )


class CountedRank:
    """Write the metrics of steps to a stats file; see `make_stats` for the arguments."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self.stats = make_stats(*arguments, **named)

    def step(
        self, *, seconds: float = 0.5, tokens: int = 100, loss: float | None = None, when: float | None = None
    ) -> None:
        """Record a step with a read stall of 20%, 6 MiB read and 4 MiB written."""
        stats = self.stats
        stats.histogram("step_duration_seconds").observe(seconds)
        stats.counter("step_part_seconds_total", part="compute").add(0.8 * seconds)
        stats.counter("step_part_seconds_total", part="read_stall").add(0.2 * seconds)
        stats.counter("prefetch_fetches_total", result="hit").add(9)
        stats.counter("prefetch_fetches_total", result="late").add(1)
        stats.counter("training_tokens_total").add(tokens)
        stats.counter("io_bytes_total", op="read", state="param", device="nvme0").add(6 << 20)
        stats.counter("io_bytes_total", op="write", state="update", device="nvme0").add(4 << 20)
        stats.gauge("tier_capacity_bytes", tier="host").set(64 << 20)
        for role, size in (("param", 8 << 20), ("update", 16 << 20), ("grad", 24 << 20)):
            stats.gauge("tier_used_bytes", tier="host", state=role).set(size)
        stats.gauge("training_learning_rate").set(1e-3)
        if loss is not None:
            stats.gauge("training_loss").set(loss)
        stats.gauge("step_last_completed_timestamp_seconds").set(time.time() if when is None else when)
        stats.counter("steps_total").add()

    def save_checkpoint(self, seconds: float = 2.0, when: float | None = None) -> None:
        """Record a checkpoint."""
        self.stats.histogram("checkpoint_duration_seconds").observe(seconds)
        self.stats.gauge("checkpoint_last_success_timestamp_seconds").set(time.time() if when is None else when)
