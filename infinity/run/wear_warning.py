"""Warn once, after measuring the first steps, if a run would wear out its drives faster than the configured limit."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, NamedTuple

from infinity.daemon_client import NodeDaemon
from infinity.schema import Mismatch, integer, number, printable, record
from infinity.telemetry import BY_NAME, Stats
from infinity.telemetry.metrics import ROLES
from infinity.units import format_number

_log = logging.getLogger("infinity")
_DAY: Final = 86_400.0
_LOOK_SECONDS: Final = 1.0
_FIRST_STEP: Final = 2
"""Number of steps to skip: the first step records the trace, and the second also runs the first step's updates."""
_STEPS, _SECONDS = 5, 20.0
"""Minimum number of steps and seconds to measure."""
_WRITTEN: Final = BY_NAME["io_bytes_total"]


class _Moment(NamedTuple):
    """Counters of this rank at a point in time."""

    time: float
    steps: float
    written: Sequence[float]
    """Bytes written, by path."""


@dataclass(frozen=True, kw_only=True)
class _Drive:
    """Endurance of a drive, as reported by the daemon."""

    device: str
    """Name of the drive."""
    rated_bytes: int
    """Rated endurance, in bytes written."""
    left_bytes: int
    """Remaining endurance, in bytes."""
    daily_share: float
    """Fraction of the rated bytes that a run may write per day without a warning; 0 disables the warning."""


_DRIVE: Final = record(
    _Drive, more=True, device=printable(1, 64), rated_bytes=integer(1), left_bytes=integer(0), daily_share=number(0, 1)
)


class WearWarning:
    """A thread that measures the bytes written and warns if a drive would wear out too fast.

    Only the daemon knows the drives' endurance, so there is no warning without it. One rank per node reports for all
    ranks on the node, because they write about the same amount. The thread ends after the measurement or when `close`
    is called.
    """

    def __init__(self, daemon: NodeDaemon, stats: Stats, paths: Sequence[str], ranks: int) -> None:
        """Start measuring.

        Args:
            paths: absolute NVMe paths of the run.
            ranks: number of ranks of the run on this node.
        """
        self._daemon, self._stats, self._paths, self._ranks = daemon, stats, list(paths), ranks
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._measure, name="infinity-wear", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread. Idempotent."""
        self._ended.set()
        self._thread.join()

    def _measure(self) -> None:
        begin: _Moment | None = None
        while not self._ended.wait(_LOOK_SECONDS):
            now = self._now()
            if begin is None:
                begin = now if now.steps >= _FIRST_STEP else None
            elif now.steps - begin.steps >= _STEPS and now.time - begin.time >= _SECONDS:
                days = (now.time - begin.time) / _DAY
                written = {
                    path: self._ranks * (end - start) / days
                    for path, start, end in zip(self._paths, begin.written, now.written, strict=True)
                }
                if warning := self._warning(written):
                    _log.warning("%s", warning)
                return

    def _now(self) -> _Moment:
        page = self._stats.snapshot()
        written = [
            sum(page.value_at(_WRITTEN, ("write", role, device)) for role in ROLES) for device in page.header.devices
        ]
        return _Moment(time.monotonic(), page.value("steps_total"), written)

    def _warning(self, written: Mapping[str, float]) -> str:
        """Return the warning about bytes written per day by path, or an empty string."""
        answer = (self._daemon.ask("bandwidth", paths=self._paths) or {}).get("wear")
        by_drive: dict[str, float] = defaultdict(float)
        drives: dict[str, _Drive] = {}
        for path, nbytes in written.items():
            with suppress(Mismatch):  # an older daemon, or a drive whose endurance is not configured
                drive = _DRIVE(answer.get(path) if isinstance(answer, dict) else None)
                drives[drive.device] = drive
                by_drive[drive.device] += nbytes
        shares = {name: by_drive[name] / drive.rated_bytes for name, drive in drives.items() if drive.daily_share}
        worst = max(shares, key=lambda name: shares[name] / drives[name].daily_share, default=None)
        if worst is None or shares[worst] <= drives[worst].daily_share:
            return ""
        drive, nbytes = drives[worst], by_drive[worst]
        return (
            f"this run writes {format_number(nbytes / 1e12)} TB per day to drive {worst}: "
            f"{format_number(100 * shares[worst])} % of its rated endurance, above the limit of "
            f"{format_number(100 * drive.daily_share)} % (drives.daily_share in the infinityd settings). "
            f"At this rate, the drive lasts {format_number(drive.left_bytes / nbytes)} more days. To write less, use "
            "more tokens per step, a larger memory.host_bytes, a smaller state.format, or more drives in storage.paths."
        )
