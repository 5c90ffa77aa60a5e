"""Tests of bandwidth limits for benchmarks: a drive is slowed down only for the benchmark's processes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from peers.limits import BLKIO, slow_drive

GROUP = BLKIO / f"infinity-peers-{os.getpid()}"


@pytest.mark.skipif(not os.access(BLKIO, os.W_OK), reason="requires a writable blkio controller of cgroup version 1")
def test_the_drive_is_slow_only_within_the_context(tmp_path: Path) -> None:
    """Reads and writes on the folder's drive are limited."""
    try:
        with slow_drive(tmp_path, 600_000_000):
            rates = [(GROUP / f"blkio.throttle.{way}_bps_device").read_text().split() for way in ("read", "write")]
            inside = GROUP.name in Path("/proc/self/cgroup").read_text()
    except FileNotFoundError as error:  # a folder in memory or on several drives
        pytest.skip(f"{tmp_path} is not on a single drive: {error}")
    drive, rate = rates[0]
    assert rates == [[drive, rate]] * 2
    assert Path(f"/sys/dev/block/{drive}").exists()
    assert (rate, inside) == ("600000000", True)
    assert not GROUP.exists()
    assert GROUP.name not in Path("/proc/self/cgroup").read_text()
