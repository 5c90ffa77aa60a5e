"""Stripe weights of the NVMe paths: their shares of the total bandwidth when all paths are busy at once.

If a daemon is running, its profile is used: the bandwidth of the drives when used together if it was measured,
otherwise the bandwidth of each drive. Without a daemon, a short probe measures a set of paths when it is first used.
The result is stored in the runtime folder and reported to the daemon.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from infinity.daemon_client import NodeDaemon
from infinity.errors import InfinityError
from infinity.io.probe.quick import quick_mixed
from infinity.store.host_records import UNUSABLE, recall, remember

CACHE_NAME = "path-bandwidth.json"
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
            found = list(quick_mixed(names, engine).values())
        except InfinityError as error:
            _log.warning("could not measure the bandwidth of %s (%s); spreading pages evenly", ", ".join(names), error)
            return [1.0] * len(names)
        remember(runtime / CACHE_NAME, "|".join(names), found, "the measured bandwidth")
        measured = {name: {"mixed": stripe_weight} for name, stripe_weight in zip(names, found, strict=True)}
        NodeDaemon(runtime).ask("record_bandwidth", rates=measured, source="run")
    return found


def _from_daemon(names: Sequence[str], runtime: Path) -> list[float] | None:
    answer = NodeDaemon(runtime).ask("bandwidth", paths=list(names)) or {}
    try:
        known = answer["together"] or answer["bandwidth"]
        beside = Counter(str(known[name]["device"]) for name in names)  # paths on the same drive share its bandwidth
        return _usable([_mixed(known[name]) / beside[str(known[name]["device"])] for name in names])
    except UNUSABLE:
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
        stripe_weights = recall(runtime / CACHE_NAME)["|".join(names)]
        return (
            _usable([float(stripe_weight) for stripe_weight in stripe_weights])
            if len(stripe_weights) == len(names)
            else None
        )
    except UNUSABLE:
        return None
