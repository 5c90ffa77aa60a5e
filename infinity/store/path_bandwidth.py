"""Stripe weights of the NVMe paths: their shares of the total bandwidth when all paths are busy at once.

If a daemon is running, its profile is used: the bandwidth of the drives when used together if it was measured,
otherwise the bandwidth of each drive. Without a daemon, a short probe measures a set of paths when it is first used.
The result is stored in the runtime folder and reported to the daemon.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from infinity.daemon_client import NodeDaemon
from infinity.errors import InfinityError
from infinity.io.probe.points import Load
from infinity.io.probe.quick import quick_rates
from infinity.untrusted_files import own_folder, read_own, write_own

CACHE_NAME = "path-bandwidth.json"
_MOST_BYTES = 1 << 16
_UNUSABLE = (OSError, ValueError, KeyError, TypeError, ArithmeticError, RecursionError)
"""Exceptions that can occur when the answer of the daemon or the file is read and interpreted. It then counts as
missing.
"""
_log = logging.getLogger("infinity")


def path_stripe_weights(paths: Sequence[str], engine: str, runtime: Path) -> list[float]:
    """Return the relative bandwidth of each path, for reads and writes together, as positive numbers.

    If the paths cannot be measured, they get equal weights, and a warning is logged. This may be slower, but never
    affects results.

    Args:
        paths: NVMe paths of the run.
        engine: value of `storage.engine`.
        runtime: runtime folder.
    """
    if len(paths) == 1:
        return [1.0]
    names = [str(Path(path).resolve()) for path in paths]
    found = _from_daemon(names, runtime) or _from_cache(names, runtime)
    if found is None:
        try:
            found = [rates["mixed"] for rates in quick_rates(names, engine, [Load.BOTH]).values()]
        except InfinityError as error:
            _log.warning("could not measure the bandwidth of %s (%s); spreading pages evenly", ", ".join(names), error)
            return [1.0] * len(names)
        remember(runtime, names, found)
        measured = {name: {"mixed": stripe_weight} for name, stripe_weight in zip(names, found, strict=True)}
        NodeDaemon(runtime).ask("record_bandwidth", rates=measured, source="run")
    return found


def _from_daemon(names: Sequence[str], runtime: Path) -> list[float] | None:
    answer = NodeDaemon(runtime).ask("bandwidth", paths=list(names)) or {}
    try:
        known = answer["together"] or answer["bandwidth"]
        beside = Counter(str(known[name]["device"]) for name in names)  # paths on the same drive share its bandwidth
        return _usable([_mixed(known[name]) / beside[str(known[name]["device"])] for name in names])
    except _UNUSABLE:
        return None


def _mixed(profile: Mapping[str, Any]) -> float:
    """Return the bandwidth, in bytes per second, of half reads and half writes.

    If it was not measured, reads and writes are assumed to alternate.
    """
    if profile["mixed"] is not None:
        return float(profile["mixed"])
    return 2 / (1 / float(profile["read"]) + 1 / float(profile["write"]))


def _usable(stripe_weights: list[float]) -> list[float] | None:
    # A manifest has the same limits.
    return stripe_weights if all(1e-30 <= stripe_weight <= 1e30 for stripe_weight in stripe_weights) else None


def _from_cache(names: Sequence[str], runtime: Path) -> list[float] | None:
    try:
        found = _recall(runtime)["|".join(names)]
        return _usable([float(stripe_weight) for stripe_weight in found]) if len(found) == len(names) else None
    except _UNUSABLE:
        return None


def _recall(runtime: Path) -> dict[str, Any]:
    """Return the contents of the file. Values are not validated. Raises one of the exceptions in `_UNUSABLE`."""
    tree = json.loads(read_own(runtime / CACHE_NAME, _MOST_BYTES))
    if not isinstance(tree, dict):
        raise ValueError(f"{CACHE_NAME} is not a JSON object")
    return tree


def remember(runtime: Path, names: Sequence[str], found: Sequence[float]) -> None:
    """Store the bandwidth of a set of paths for later runs. If this fails, log a warning."""
    known: dict[str, Any] = {}
    with contextlib.suppress(*_UNUSABLE):  # missing or damaged
        known = _recall(runtime)
    try:
        own_folder(runtime, parents=True)
        write_own(runtime / CACHE_NAME, json.dumps({**known, "|".join(names): found}).encode())
    except OSError as error:
        _log.warning("could not store the measured bandwidth in %s: %s", runtime / CACHE_NAME, error.strerror)
