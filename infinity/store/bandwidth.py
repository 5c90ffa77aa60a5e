"""How much of the pages each NVMe path gets: its share of the bandwidth when all paths are busy at once.

The daemon's profile answers where a daemon runs; else a short probe at the first use of a set of paths, whose
result is kept in the runtime folder.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import struct
import time
from collections.abc import Sequence
from pathlib import Path

from infinity.access import own_folder, read_own, trusted, write_own
from infinity.errors import InfinityError
from infinity.io.probe import Load, measure_paths, points_of
from infinity.units import MIB

SOCKET_NAME = "infinityd.sock"
CACHE_NAME = "path-bandwidth.json"
_PROBE_BYTES = 256 * MIB
_PROBE_SECONDS = 0.5
_ANSWER_SECONDS = 2.0
_MOST_BYTES = 1 << 16
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
_UNUSABLE = (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError)
_log = logging.getLogger("infinity")


def path_shares(paths: Sequence[str], engine: str, runtime: Path) -> list[float]:
    """Return the relative bandwidth of each path (reads and writes together), positive numbers.

    Paths that cannot be measured share equally; that costs speed, never correctness, and is logged.
    """
    if len(paths) == 1:
        return [1.0]
    names = [str(Path(path).resolve()) for path in paths]
    found = _from_daemon(names, runtime) or _from_cache(names, runtime)
    if found is None:
        try:
            found = _probed(names, engine)
        except InfinityError as error:
            _log.warning("the bandwidth of %s was not measured (%s): pages are spread evenly", ", ".join(names), error)
            return [1.0] * len(names)
        _remember(names, found, runtime)
    return found


def _probed(names: Sequence[str], engine: str) -> list[float]:
    points = points_of([Load.BOTH], [MIB], [8])
    measured = measure_paths(names, points, file_bytes=_PROBE_BYTES, seconds=_PROBE_SECONDS, engine=engine)
    return [max(1.0, measured[name][0].bytes_per_second) for name in names]


def _from_daemon(names: Sequence[str], runtime: Path) -> list[float] | None:
    """Ask the daemon; None when there is none of this user or root, or when it does not know all paths."""
    try:
        known = json.loads(_asked(runtime / SOCKET_NAME, {"op": "bandwidth", "paths": list(names)}))["bandwidth"]
        return _usable([float(known[name]["read"]) + float(known[name]["write"]) for name in names])
    except _UNUSABLE:
        return None


def _asked(path: Path, message: object) -> bytes:
    """Return the daemon's answer, one line, within `_ANSWER_SECONDS`.

    Raises:
        OSError: nobody answers in time, or who does is neither this user nor root.
    """
    end = time.monotonic() + _ANSWER_SECONDS

    def left() -> float:
        if (seconds := end - time.monotonic()) <= 0:
            raise TimeoutError(f"{path}: no complete answer in time")
        return seconds

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(left())
        connection.connect(str(path))
        # Who listens, as the kernel knows it: whatever name or link led there, and whoever replaced it meanwhile.
        _, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        if not trusted(uid):
            _log.warning("%s is of user %d and is not asked for the bandwidth of the paths", path, uid)
            raise PermissionError(f"{path} is of user {uid}")
        connection.sendall(json.dumps(message).encode() + b"\n")
        answer = b""
        while not answer.endswith(b"\n") and len(answer) <= _MOST_BYTES:
            connection.settimeout(left())
            if not (part := connection.recv(_MOST_BYTES)):
                break
            answer += part
        return answer


def _usable(shares: list[float]) -> list[float] | None:
    # What a manifest can say, too.
    return shares if all(1e-30 <= share <= 1e30 for share in shares) else None


def _from_cache(names: Sequence[str], runtime: Path) -> list[float] | None:
    try:
        shares = _remembered(runtime)["|".join(names)]
        return _usable([float(share) for share in shares]) if len(shares) == len(names) else None
    except _UNUSABLE:
        return None


def _remembered(runtime: Path) -> dict[str, list[float]]:
    tree = json.loads(read_own(runtime / CACHE_NAME, _MOST_BYTES))
    if not isinstance(tree, dict):
        raise ValueError(f"{CACHE_NAME} is no object")
    return tree


def _remember(names: Sequence[str], shares: Sequence[float], runtime: Path) -> None:
    known: dict[str, list[float]] = {}
    with contextlib.suppress(*_UNUSABLE):  # there is none, or it is worth nothing
        known = _remembered(runtime)
    try:
        own_folder(runtime, parents=True)
        write_own(runtime / CACHE_NAME, json.dumps({**known, "|".join(names): list(shares)}).encode())
    except OSError as error:
        _log.warning("the measured bandwidth could not be kept in %s: %s", runtime / CACHE_NAME, error.strerror)
