"""A drive that a benchmark has slowed down: for its own processes, as long as it measures."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from peers.limits import BLKIO, slow_drive

GROUP = BLKIO / f"infinity-peers-{os.getpid()}"


@pytest.mark.skipif(
    not os.access(BLKIO, os.W_OK), reason="no block controller of cgroup version 1 in which groups may be made"
)
def test_this_process_is_slowed_down_and_no_longer(tmp_path: Path) -> None:
    """Reads and writes alike, on the drive of the folder."""
    try:
        with slow_drive(tmp_path, 600_000_000):
            rates = [(GROUP / f"blkio.throttle.{way}_bps_device").read_text().split() for way in ("read", "write")]
            inside = GROUP.name in Path("/proc/self/cgroup").read_text()
    except FileNotFoundError as error:  # a folder in memory, or of several drives
        pytest.skip(f"{tmp_path} is on no drive of its own: {error}")
    drive, rate = rates[0]
    assert rates == [[drive, rate]] * 2
    assert Path(f"/sys/dev/block/{drive}").exists()
    assert (rate, inside) == ("600000000", True)
    assert not GROUP.exists()
    assert GROUP.name not in Path("/proc/self/cgroup").read_text()
