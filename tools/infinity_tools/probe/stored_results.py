"""The node's daemon keeps what was measured: what the drives do together, and what each does alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from infinity.daemon_client import NodeDaemon
from infinity_tools.probe.probe_report import DaemonRecord, Found


def end_measuring(daemon: NodeDaemon, paths: Sequence[str]) -> None:
    """Have a daemon that measures these drives by itself end that: it does when somebody asks for their profiles."""
    daemon.ask("bandwidth", paths=[str(Path(path).resolve()) for path in paths])


def tell_daemon(daemon: NodeDaemon, together: Found, alone: Found) -> DaemonRecord:
    """Tell the daemon, if there is one, the best of each load, and return whether it has kept it."""
    asked = [best_rates(together), *(best_rates({path: found}) for path, found in alone.items())]
    answers = [daemon.ask("record_bandwidth", rates=rates, source="probe") for rates in asked if all(rates.values())]
    if answers and all(answers):
        return DaemonRecord(done=True, says="infinityd has kept the result: runs and `infinity status` use it")
    if daemon.ask("status") is None:
        return DaemonRecord(done=False, says="no infinityd of yours or root's runs here: the result is not kept")
    return DaemonRecord(done=False, says="infinityd runs here, but has not kept the result; its log says why")


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
