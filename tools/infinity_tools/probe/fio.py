"""The same measurement by fio, on the same file, as an independent check.

fio opens the file through a file descriptor of this process. The file no longer has a name, so fio leaves no
file on the drive. If this process is killed, fio exits as soon as its time is over.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from infinity.errors import InfinityError
from infinity.io.probe.points import Load, Point
from infinity.io.probe.targets import Target
from infinity.units import align_down

_PATIENCE_SECONDS: Final = 60.0
_RAMP_MILLISECONDS: Final = 300
"""Time during which fio reads without counting, because the memory of its buffers is allocated page by page on the
first read.
"""
_LONGEST: Final = 200
"""Maximum length of quoted fio output, in characters."""


_FLAGS: Final = ("--thread", "--group_reporting", "--exitall")


class FioError(InfinityError):
    """A measurement by fio failed."""


@dataclass(frozen=True, kw_only=True)
class FioRun:
    """Result of one fio run."""

    bytes_per_second: float
    """Combined throughput of reads and writes."""
    written: int
    """Bytes written."""


def run_fio(program: str, target: Target, point: Point, seconds: float, most_written: int) -> FioRun:
    """Run fio on the file of a target and return its result.

    Raises:
        FioError: If fio cannot be started, fails, or prints an unexpected result.
    """
    words = [program, *_words(target, point, seconds, most_written)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=seconds + _PATIENCE_SECONDS, check=False)
    except OSError as error:
        raise FioError(f"{program}: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise FioError(f"{program} did not exit within {error.timeout:.0f} s") from error
    if done.returncode:
        said = " ".join((done.stderr.strip() or done.stdout.strip()).split())
        raise FioError(f"{program} exited with status {done.returncode}: {said[:_LONGEST]}")
    return found_in(done.stdout)


def found_in(output: str) -> FioRun:
    """Return the result in fio's JSON, which warnings may precede. Raises `FioError`."""
    try:
        (job,) = json.loads(output[output.index("{") :])["jobs"]
        if job["error"]:
            raise FioError(f"fio: {os.strerror(int(job['error']))}")
        speed = float(job["read"]["bw_bytes"]) + float(job["write"]["bw_bytes"])
        written = int(job["write"]["io_bytes"])
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
        raise FioError(f"fio printed no usable result: {type(error).__name__} {error}"[:_LONGEST]) from error
    if not 0 < speed < float("inf"):
        raise FioError("fio transferred no data")
    return FioRun(bytes_per_second=speed, written=written)


def _words(target: Target, point: Point, seconds: float, most: int) -> Sequence[str]:
    """Return fio's command line. All jobs share the first options, as our requests share the file."""
    common = {
        "output-format": "json",
        "filename": f"/proc/{os.getpid()}/fd/{target.file.fd}",
        "direct": int(target.file.direct),
        "ioengine": "io_uring" if target.engine.name == "io_uring" else "libaio",
        "bs": point.block_bytes,
        "allow_file_create": 0,
        "fallocate": "none",
        "invalidate": 0,
        "runtime": f"{max(1, round(seconds * 1000))}ms",
    }
    whole = align_down(target.file_bytes, point.block_bytes)
    half = align_down(target.file_bytes // 2, point.block_bytes)
    half_depth = max(1, point.depth // 2)
    if point.load is Load.BOTH and point.depth == 1:  # reads and writes alternate
        both = {"name": "both", "rw": "rw", "size": whole, "iodepth": 1, "io_size": most}
        return [*_FLAGS, *_options(common, both)]
    ramp = {"ramp_time": f"{_RAMP_MILLISECONDS}ms"}  # only for reads, because writes during the ramp are unbounded
    jobs: list[dict[str, Any]] = {
        Load.READ: [{"name": "read", "rw": "read", "size": whole, "iodepth": point.depth, "time_based": 1, **ramp}],
        Load.WRITE: [{"name": "write", "rw": "write", "size": whole, "iodepth": point.depth}],
        Load.BOTH: [  # half of the requests read the first half of the file, the others write the second half
            {"name": "read", "rw": "read", "size": half, "iodepth": half_depth, "time_based": 1},
            {"name": "write", "rw": "write", "size": half, "iodepth": half_depth, "offset": half, "io_size": most},
        ],
    }[point.load]  # fmt: skip
    return [*_FLAGS, *_options(common, *jobs)]


def _options(*parts: dict[str, Any]) -> list[str]:
    return [f"--{name}={value}" for part in parts for name, value in part.items()]
