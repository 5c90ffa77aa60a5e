"""How much of the pages each NVMe path gets: its share of the bandwidth when all paths are busy at once.

The daemon's profile answers where a daemon runs; else a short probe at the first use of a set of paths, whose
result is kept in the runtime folder.
"""

from __future__ import annotations

import json
import logging
import math
import socket
from collections.abc import Sequence
from pathlib import Path

from infinity.errors import InfinityError
from infinity.io.probe import Load, measure_paths, points_of
from infinity.units import MIB

SOCKET_NAME = "infinityd.sock"
CACHE_NAME = "path-bandwidth.json"
_PROBE_BYTES = 256 * MIB
_PROBE_SECONDS = 0.5
_ANSWER_SECONDS = 2.0
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
    """Ask the daemon; None when there is none, or when it does not know all paths."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_ANSWER_SECONDS)
            connection.connect(str(runtime / SOCKET_NAME))
            connection.sendall(json.dumps({"op": "bandwidth", "paths": list(names)}).encode() + b"\n")
            with connection.makefile("rb") as answers:
                known = json.loads(answers.readline(64 * 1024))["bandwidth"]
        shares = [float(known[name]["read"]) + float(known[name]["write"]) for name in names]
        return shares if all(0 < share < math.inf for share in shares) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _from_cache(names: Sequence[str], runtime: Path) -> list[float] | None:
    try:
        shares = json.loads((runtime / CACHE_NAME).read_text())["|".join(names)]
        return [float(share) for share in shares] if len(shares) == len(names) and min(shares) > 0 else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _remember(names: Sequence[str], shares: Sequence[float], runtime: Path) -> None:
    file = runtime / CACHE_NAME
    try:
        known = json.loads(file.read_text()) if file.exists() else {}
        runtime.mkdir(parents=True, exist_ok=True)
        temporary = file.with_suffix(".tmp")
        temporary.write_text(json.dumps({**known, "|".join(names): list(shares)}))
        temporary.rename(file)
    except (OSError, ValueError) as error:
        _log.warning("the measured bandwidth could not be kept in %s: %s", file, error)
