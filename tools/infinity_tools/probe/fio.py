"""The same measurement by fio, on the same file, for those who trust nothing else.

fio opens the file through our descriptor of it, which has no name any more: there is nothing that it could leave. When
this process is killed, fio ends by itself as soon as its time is over.
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
"""In which fio reads without counting: it gets its memory page by page as it is first read into."""
_LONGEST: Final = 200
"""Of what fio says, in characters."""


_FLAGS: Final = ("--thread", "--group_reporting", "--exitall")


class FioError(InfinityError):
    """fio did not measure; it says why."""


@dataclass(frozen=True, kw_only=True)
class FioRun:
    """What fio did."""

    bytes_per_second: float
    """Both directions together."""
    written: int
    """Bytes."""


def run_fio(program: str, target: Target, point: Point, seconds: float, most_written: int) -> FioRun:
    """Let fio move bytes on the file of a target, and return what it did.

    Raises:
        FioError: it cannot be started, fails, or says something else than was asked.
    """
    words = [program, *_words(target, point, seconds, most_written)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=seconds + _PATIENCE_SECONDS, check=False)
    except OSError as error:
        raise FioError(f"{program}: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise FioError(f"{program} has not ended after {error.timeout:.0f} s") from error
    if done.returncode:
        said = " ".join((done.stderr.strip() or done.stdout.strip()).split())
        raise FioError(f"{program} ended with status {done.returncode}: {said[:_LONGEST]}")
    return found_in(done.stdout)


def found_in(output: str) -> FioRun:
    """Return what fio's JSON says, which warnings may come before. Raises `FioError`."""
    try:
        (job,) = json.loads(output[output.index("{") :])["jobs"]
        if job["error"]:
            raise FioError(f"fio: {os.strerror(int(job['error']))}")
        speed = float(job["read"]["bw_bytes"]) + float(job["write"]["bw_bytes"])
        written = int(job["write"]["io_bytes"])
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
        raise FioError(f"fio printed no measurement: {type(error).__name__} {error}"[:_LONGEST]) from error
    if not 0 < speed < float("inf"):
        raise FioError("fio moved nothing")
    return FioRun(bytes_per_second=speed, written=written)


def _words(target: Target, point: Point, seconds: float, most: int) -> Sequence[str]:
    """Return fio's command line: all jobs share what comes first, as our requests share the file."""
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
    if point.load is Load.BOTH and point.depth == 1:  # both take turns
        both = {"name": "both", "rw": "rw", "size": whole, "iodepth": 1, "io_size": most}
        return [*_FLAGS, *_options(common, both)]
    ramp = {"ramp_time": f"{_RAMP_MILLISECONDS}ms"}  # not where it writes: what it writes by then is not bounded
    jobs: list[dict[str, Any]] = {
        Load.READ: [{"name": "read", "rw": "read", "size": whole, "iodepth": point.depth, "time_based": 1, **ramp}],
        Load.WRITE: [{"name": "write", "rw": "write", "size": whole, "iodepth": point.depth}],
        Load.BOTH: [  # half of the requests read the first half of the file, the others write the second one
            {"name": "read", "rw": "read", "size": half, "iodepth": half_depth, "time_based": 1},
            {"name": "write", "rw": "write", "size": half, "iodepth": half_depth, "offset": half, "io_size": most},
        ],
    }[point.load]  # fmt: skip
    return [*_FLAGS, *_options(common, *jobs)]


def _options(*parts: dict[str, Any]) -> list[str]:
    return [f"--{name}={value}" for part in parts for name, value in part.items()]
