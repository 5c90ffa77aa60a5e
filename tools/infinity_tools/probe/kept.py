"""The node's daemon keeps what was measured: what the drives do together, and what each does alone."""

from __future__ import annotations

from pathlib import Path

from infinity.config import TelemetryConfig, runtime_dir
from infinity.node import NodeDaemon
from infinity_tools.probe.report import Found


def tell_daemon(together: Found, alone: Found) -> str:
    """Tell the daemon, if there is one, the best of each load, and return in a sentence whether it has kept it."""
    node = NodeDaemon(runtime_dir(TelemetryConfig()))
    asked = [best_rates(together), *(best_rates({path: found}) for path, found in alone.items())]
    answers = [node.ask("record_bandwidth", rates=rates, source="probe") for rates in asked if all(rates.values())]
    if answers and all(answers):
        return "infinityd has kept the result: runs and `infinity status` use it"
    if node.ask("status") is None:
        return "no infinityd of yours or root's runs here: the result is not kept"
    return "infinityd runs here, but has not kept the result; its log says why"


def best_rates(found: Found) -> dict[str, dict[str, float]]:
    """Return the best of each load that was measured, by folder."""
    rates: dict[str, dict[str, float]] = {}
    for path, measurements in found.items():
        best = rates.setdefault(str(Path(path).resolve()), {})
        for one in measurements:
            if one.bytes_per_second > 0:
                load = one.point.load.value
                best[load] = max(best.get(load, 0.0), one.bytes_per_second)
    return rates
