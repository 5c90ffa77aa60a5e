"""Warns once, when the first steps have been measured, of a run that uses its drives up faster than is wanted."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from infinity.daemon_client import NodeDaemon
from infinity.schema import Mismatch, integer, number, printable, record
from infinity.telemetry import BY_NAME, Stats
from infinity.telemetry.metrics import ROLES

_log = logging.getLogger("infinity")
_DAY: Final = 86_400.0
_LOOK_SECONDS: Final = 1.0
_FIRST_STEP: Final = 2
"""From its end on it is measured: the first step is the recording, and the second has its updates too."""
_STEPS, _SECONDS = 5, 20.0
"""So many at least are measured."""
_WRITTEN: Final = BY_NAME["io_bytes_total"]


@dataclass(frozen=True, kw_only=True)
class _Moment:
    """What this rank had done at a time."""

    time: float
    """Monotonic seconds."""
    steps: float
    written: Sequence[float]
    """Bytes, by path."""


@dataclass(frozen=True, kw_only=True)
class _Drive:
    """What the daemon says of a drive."""

    device: str
    """Its name."""
    rated_bytes: int
    """What it may be written with in its life."""
    left_bytes: int
    """Of these, what it has not been."""
    daily_share: float
    """Of the rated bytes, what a run may write in a day without a warning; 0: any."""


_DRIVE: Final = record(
    _Drive, more=True, device=printable(1, 64), rated_bytes=integer(1), left_bytes=integer(0), daily_share=number(0, 1)
)


class WearWarning:
    """A thread from `__init__` until it has measured and asked the daemon, or until `close`.

    The daemon knows what drives are rated for and how much of that is left; without one there is no warning. One rank
    of a node speaks for all of them, which write about the same.
    """

    def __init__(self, daemon: NodeDaemon, stats: Stats, paths: Sequence[str], ranks: int) -> None:
        """Begin to measure.

        Args:
            stats: counters of this rank.
            paths: the run's NVMe paths, absolute.
            ranks: of the run on this node.
        """
        self._daemon, self._stats, self._paths, self._ranks = daemon, stats, list(paths), ranks
        self._ended = threading.Event()  # set by `close`
        self._thread = threading.Thread(target=self._measure, name="infinity-wear", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread. Idempotent."""
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
        return _Moment(time=time.monotonic(), steps=page.value("steps_total"), written=written)

    def _warning(self, written: Mapping[str, float]) -> str:
        """Return what to say of bytes per day, by path; nothing where there is no daemon, or all is well."""
        answer = (self._daemon.ask("bandwidth", paths=self._paths) or {}).get("wear")
        by_drive: dict[str, float] = defaultdict(float)
        drives: dict[str, _Drive] = {}
        for path, nbytes in written.items():
            with suppress(Mismatch):  # an older daemon, or of a drive of which nobody has said what it is rated for
                drive = _DRIVE(answer.get(path) if isinstance(answer, dict) else None)
                drives[drive.device] = drive
                by_drive[drive.device] += nbytes
        shares = {name: by_drive[name] / drive.rated_bytes for name, drive in drives.items() if drive.daily_share}
        worst = max(shares, key=lambda name: shares[name] / drives[name].daily_share, default=None)
        if worst is None or shares[worst] <= drives[worst].daily_share:
            return ""
        drive, nbytes = drives[worst], by_drive[worst]
        return (
            f"this run writes {nbytes / 1e12:.3g} TB per day to drive {worst}: {100 * shares[worst]:.2g} % of what the "
            f"drive is rated for, above the {100 * drive.daily_share:.2g} % of drives.daily_share of infinityd. It "
            f"lasts {drive.left_bytes / nbytes:.3g} days more. Write less with more tokens per step, a larger "
            "memory.host_bytes or a smaller state.format, or spread over more drives in storage.paths"
        )
