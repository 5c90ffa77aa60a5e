"""`build` collector: version and start time of the daemon."""

from __future__ import annotations

import platform
from collections.abc import Iterator

from prometheus_client.core import Metric as Family

from infinity import __version__
from infinity.telemetry import BY_NAME
from infinity.telemetry.exporter import new_family


class BuildCollector:
    """Collector of ``daemon_build_info`` and ``daemon_start_time_seconds``. `started` is a Unix time."""

    name = "build"

    def __init__(self, started: float) -> None:
        self._started = started

    def collect(self) -> Iterator[Family]:
        """Yield both metric families."""
        info = new_family(BY_NAME["daemon_build_info"])
        info.add_sample(info.name, {"version": __version__, "python_version": platform.python_version()}, 1)
        yield info
        start = new_family(BY_NAME["daemon_start_time_seconds"])
        start.add_sample(start.name, {}, self._started)
        yield start
