"""`stale` collector: stale runs on the configured drives."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric as Family

from infinity.telemetry import BY_NAME
from infinity.telemetry.exporter import new_family
from infinity_daemon.stale import StaleRuns, by_drive


class StaleCollector:
    """Collector of ``device_stale_runs`` and ``device_stale_bytes``, as found by the last search for stale runs."""

    name = "stale"

    def __init__(self, stale: StaleRuns) -> None:
        self._stale = stale

    def collect(self) -> Iterator[Family]:
        """Yield both metric families."""
        counted = by_drive(self._stale.drives, self._stale.found)
        for position, name in enumerate(("device_stale_runs", "device_stale_bytes")):
            family = new_family(BY_NAME[name])
            for drive, values in counted.items():
                family.add_sample(family.name, {"device": drive}, values[position])
            yield family
