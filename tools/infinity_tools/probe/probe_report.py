"""What is asked for, how much that is, and all that was found; also as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

from infinity.io.probe.points import Load, Measurement, Point
from infinity.io.probe.sustained import FALLEN, Sustained
from infinity.units import format_size
from infinity_tools.probe.recommendation import Choice
from infinity_tools.probe.rounds import ROUNDS, Turns

Found = Mapping[str, tuple[Measurement, ...]]
"""By folder."""
FIO_START_SECONDS: Final = 0.8
"""What fio needs to start and to end, about."""


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What is to be measured."""

    paths: tuple[str, ...]
    file_bytes: int
    """Of the file in each folder, and what each measurement writes to it at most."""
    points: tuple[Point, ...]
    seconds: float
    """Of each measurement."""
    engine: str
    alone: Literal["point", "all", "no"]
    """Where each of several folders is measured alone, too: at the recommended point, at all, nowhere."""
    sustained_bytes: int | None
    """To each folder, at most; None: no sustained writes."""
    sustained_seconds: float
    fio: str | None
    """The program; None: it is not used."""
    runtime: Path
    """Runtime folder of the node's daemon."""

    @property
    def alone_points(self) -> int:
        """At how many points each folder is measured alone."""
        return {"point": len(Load), "all": len(self.points), "no": 0}[self.alone] if len(self.paths) > 1 else 0

    @property
    def plan(self) -> Plan:
        """How long all takes, and what is written, at most."""
        writes = sum(point.load is not Load.READ for point in self.points)
        alone_writes = writes if self.alone == "all" else 2
        compared = ROUNDS * 2 * (1 + (self.engine == "auto"))  # sizes against the usual ones, and the engines
        fio = ROUNDS * 2 * len(Load) if self.fio else 0
        count = len(self.points) + compared + fio + self.alone_points * len(self.paths)
        files = 1 + writes + compared + (alone_writes if self.alone_points else 0)
        return Plan(
            measurements=count,
            seconds=count * self.seconds + fio / 2 * FIO_START_SECONDS,
            written={
                path: self.file_bytes * (files + (ROUNDS * 2 * 2 if self.fio and number == 0 else 0))
                + (self.sustained_bytes or 0)
                for number, path in enumerate(self.paths)
            },
            sustained_seconds=self.sustained_seconds if self.sustained_bytes else 0.0,
        )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much a probe does, at most."""

    measurements: int
    seconds: float
    """Without the writing of the files, and without sustained writes."""
    written: dict[str, int]
    """Bytes to each folder."""
    sustained_seconds: float


@dataclass(frozen=True, kw_only=True)
class DaemonRecord:
    """Whether the node's daemon has kept the result, also as a sentence."""

    done: bool
    says: str


@dataclass(frozen=True, kw_only=True)
class Report:
    """All that was found."""

    ask: Ask
    engine: str
    """That measured: ``io_uring`` or ``threads``."""
    together: Found
    """All folders busy at once."""
    alone: Found
    """Each folder alone; empty if there is one folder only."""
    choice: Choice
    fio: Mapping[Load, Turns]
    """Bytes per second of infinity and of fio in turn, on the first folder; empty without fio."""
    fio_error: str
    """Why there is no comparison with fio; empty if there is one, or was to be none."""
    sustained: Mapping[str, Sustained]
    """By folder; empty if it was not asked for."""
    written: Mapping[str, int]
    """Bytes that were written to each folder."""
    kept: DaemonRecord
    """Whether the node's daemon has kept the result."""

    def at_choice(self, found: Found, path: str, load: Load) -> Measurement | None:
        """Return what a folder did at the recommended point; None where that was not measured."""
        wanted = Point(load=load, block_bytes=self.choice.block_bytes, depth=self.choice.depth)
        return next((one for one in found.get(path, ()) if one.point == wanted), None)

    def share(self, load: Load) -> float | None:
        """Return what all folders together do, relative to the sum of each alone; None where that was not measured."""
        both = [
            (self.at_choice(self.together, path, load), self.at_choice(self.alone, path, load))
            for path in self.ask.paths
        ]
        pairs = [(one, other) for one, other in both if one and other]
        if len(pairs) < len(both):
            return None
        return sum(one.bytes_per_second for one, _ in pairs) / sum(one.bytes_per_second for _, one in pairs)

    def document(self) -> dict[str, Any]:
        """Return all of it for JSON."""
        return {
            "engine": self.engine,
            "file_bytes": self.ask.file_bytes,
            "seconds": self.ask.seconds,
            "plan": asdict(self.ask.plan),
            "paths": _measurements(self.together),
            "alone": _measurements(self.alone),
            "together_of_alone": {load.value: self.share(load) for load in Load} if self.alone else {},
            "recommended": self.choice.document(),
            "fio": {load.value: turns.document("infinity", "fio") for load, turns in self.fio.items()},
            "fio_error": self.fio_error,
            "sustained": {path: _sustained(one) for path, one in self.sustained.items()},
            "written_bytes": dict(self.written),
            "daemon": {"kept": self.kept.done, "says": self.kept.says},
        }


def _measurements(found: Found) -> dict[str, list[dict[str, Any]]]:
    return {
        path: [
            {
                "load": one.point.load.value,
                "block_bytes": one.point.block_bytes,
                "depth": one.point.depth,
                "read_bytes_per_second": round(one.read_bytes_per_second),
                "write_bytes_per_second": round(one.write_bytes_per_second),
                "bytes_per_second": round(one.bytes_per_second),
                "seconds": one.seconds,
                "latency_seconds": asdict(one.latency),
            }
            for one in measurements
        ]
        for path, measurements in found.items()
    }


def _sustained(one: Sustained) -> dict[str, Any]:
    fall = one.fall
    return {
        "written_bytes": one.written,
        "seconds": one.measurement.seconds,
        "bytes_per_second": round(one.measurement.write_bytes_per_second),
        "latency_seconds": asdict(one.measurement.latency),
        "bytes_each_second": list(one.slices),
        "long_enough": one.long_enough,
        "cliff": None if fall is None else {**asdict(fall), "threshold": FALLEN},
        "says": sustained_words(one),
    }


def sustained_words(one: Sustained) -> str:
    """Return in words whether a drive has a cliff."""
    size, fall = format_size(one.written), one.fall
    if not one.long_enough:
        return f"too short to tell: {size} in {one.measurement.seconds:.1f} s; write more (--sustained-bytes)"
    if fall is None:
        return f"no cliff within {size}: {one.measurement.write_bytes_per_second / 1e9:.2f} GB/s"
    after = format_size(fall.written)
    return f"falls from {fall.before / 1e9:.2f} to {fall.after / 1e9:.2f} GB/s after {after}"
