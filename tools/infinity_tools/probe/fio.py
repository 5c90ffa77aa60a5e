"""Measurement with fio, on the same file and with the same requests, as an independent check.

The test file has no name, so fio opens it through a file descriptor of this process and leaves no file on the drive. If
this process is killed, fio exits at the end of its time limit.
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
"""Initial time that fio excludes from the result, because the first read into a buffer is slow: its memory is allocated
page by page.
"""
_LONGEST: Final = 200
"""Maximum length of quoted fio output, in characters."""


_FLAGS: Final = ("--thread", "--group_reporting", "--exitall")


class FioError(InfinityError):
    """Raised if a measurement with fio fails."""


@dataclass(frozen=True, kw_only=True)
class FioRun:
    """Result of one fio run."""

    bytes_per_second: float
    """Total throughput of reads and writes, in bytes per second."""
    written: int
    """Number of bytes written."""


def run_fio(program: str, target: Target, point: Point, seconds: float, most_written: int) -> FioRun:
    """Run fio on the test file of a target.

    Args:
        program: Path of fio.
        target: Target whose test file is used.
        point: Load, request size and number of requests in flight.
        seconds: Duration of the measurement.
        most_written: Maximum number of bytes to write.

    Raises:
        FioError: if fio cannot be started, fails, or prints an unexpected result.
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
    """Return the result from fio's JSON output, which may begin with warnings. Raises `FioError` if there is none."""
    try:
        (job,) = json.loads(output[output.index("{") :])["jobs"]
        if job["error"]:
            raise FioError(f"fio: {os.strerror(int(job['error']))}")
        speed = float(job["read"]["bw_bytes"]) + float(job["write"]["bw_bytes"])
        written = int(job["write"]["io_bytes"])
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
        raise FioError(f"fio did not print a valid result: {type(error).__name__} {error}"[:_LONGEST]) from error
    if not 0 < speed < float("inf"):
        raise FioError("fio transferred no data")
    return FioRun(bytes_per_second=speed, written=written)


def _words(target: Target, point: Point, seconds: float, most: int) -> Sequence[str]:
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
    ramp = {
        "ramp_time": f"{_RAMP_MILLISECONDS}ms"
    }  # only for reads, because fio does not limit the bytes written during the ramp
    jobs: list[dict[str, Any]] = {
        Load.READ: [{"name": "read", "rw": "read", "size": whole, "iodepth": point.depth, "time_based": 1, **ramp}],
        Load.WRITE: [{"name": "write", "rw": "write", "size": whole, "iodepth": point.depth}],
        Load.BOTH: [  # half of the requests read the first half of the file; the others write the second half
            {"name": "read", "rw": "read", "size": half, "iodepth": half_depth, "time_based": 1},
            {"name": "write", "rw": "write", "size": half, "iodepth": half_depth, "offset": half, "io_size": most},
        ],
    }[point.load]  # fmt: skip
    return [*_FLAGS, *_options(common, *jobs)]


def _options(*parts: dict[str, Any]) -> list[str]:
    return [f"--{name}={value}" for part in parts for name, value in part.items()]
