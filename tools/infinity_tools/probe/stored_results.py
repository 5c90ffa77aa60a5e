"""Reporting of results to the node's daemon, which stores the bandwidth of drives, measured together and alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from infinity.daemon_client import NodeDaemon
from infinity_tools.probe.probe_report import DaemonRecord, Found


def end_measuring(daemon: NodeDaemon, paths: Sequence[str]) -> None:
    """Stop measurements of these drives by the daemon, which it does when their profiles are requested."""
    daemon.ask("bandwidth", paths=[str(Path(path).resolve()) for path in paths])


def tell_daemon(daemon: NodeDaemon, together: Found, alone: Found) -> DaemonRecord:
    """Report to the daemon the best result for each I/O workload. Return whether it stored all of them."""
    asked = [best_rates(together), *(best_rates({path: found}) for path, found in alone.items())]
    answers = [daemon.ask("record_bandwidth", rates=rates, source="probe") for rates in asked if all(rates.values())]
    if answers and all(answers):
        return DaemonRecord(done=True, says="infinityd stored the result for use by runs and `infinity status`")
    if daemon.ask("state") is None:
        return DaemonRecord(
            done=False,
            says="the result was not stored, because no infinityd of this user or root is running on this node",
        )
    return DaemonRecord(done=False, says="infinityd did not store the result; see its log for the reason")


def best_rates(found: Found) -> dict[str, dict[str, float]]:
    """Return the best throughput for each load in bytes per second, by folder."""
    rates: dict[str, dict[str, float]] = {}
    for path, measurements in found.items():
        best = rates.setdefault(str(Path(path).resolve()), {})
        for one in measurements:
            if one.bytes_per_second > 0:
                load = one.point.load.value
                best[load] = max(best.get(load, 0.0), one.bytes_per_second)
    return rates
