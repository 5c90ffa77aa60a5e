"""Options, planned cost and results of `infinity probe`, and their JSON representation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from infinity.io.probe.points import Load, Measurement, Point
from infinity.io.probe.sustained import FALLEN, Sustained
from infinity.units import format_size
from infinity_tools.probe.recommendation import ROUNDS, Choice

Found = Mapping[str, tuple[Measurement, ...]]
"""Measurements by folder."""


@dataclass(frozen=True, kw_only=True)
class Ask:
    """Options of `infinity probe`."""

    paths: tuple[str, ...]
    file_bytes: int
    """Size of the test file in each folder, and maximum number of bytes that a measurement writes to it."""
    points: tuple[Point, ...]
    seconds: float
    """Duration of each measurement, in seconds."""
    engine: str
    sustained_bytes: int | None
    """Maximum bytes of sustained writes per folder, or None for no sustained writes."""
    sustained_seconds: float
    runtime: Path
    """Runtime folder of the node's daemon."""

    @property
    def alone_points(self) -> int:
        """Number of points at which each folder is measured alone, if there are several."""
        return len(Load) if len(self.paths) > 1 else 0

    @property
    def plan(self) -> Plan:
        """Upper bounds for the duration and the bytes written."""
        writes = sum(point.load is not Load.READ for point in self.points)
        compared = ROUNDS * 2  # recommended and default settings
        count = len(self.points) + compared + self.alone_points * len(self.paths)
        files = 1 + writes + compared + (2 if self.alone_points else 0)
        return Plan(
            measurements=count,
            seconds=count * self.seconds,
            written={path: self.file_bytes * files + (self.sustained_bytes or 0) for path in self.paths},
            sustained_seconds=self.sustained_seconds if self.sustained_bytes else 0.0,
        )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Upper bounds for the duration and the bytes written of a probe."""

    measurements: int
    seconds: float
    """Total duration in seconds, without creating the test files and without sustained writes."""
    written: dict[str, int]
    """Bytes written, by folder."""
    sustained_seconds: float


@dataclass(frozen=True, kw_only=True)
class DaemonRecord:
    """Outcome of reporting the results to the node's daemon, with a message for the user."""

    done: bool
    says: str


@dataclass(frozen=True, kw_only=True)
class Report:
    """Results of `infinity probe`."""

    ask: Ask
    engine: str
    """I/O engine used for the measurements: ``io_uring`` or ``threads``."""
    together: Found
    """Measurements of all folders at the same time."""
    alone: Found
    """Measurements of each folder alone. Empty if there is only one folder."""
    choice: Choice
    sustained: Mapping[str, Sustained]
    """Results of sustained writes, by folder. Empty if not requested."""
    written: Mapping[str, int]
    """Bytes written, by folder."""
    kept: DaemonRecord
    """Outcome of reporting the results to the node's daemon."""

    def at_choice(self, found: Found, path: str, load: Load) -> Measurement | None:
        """Return the measurement of a folder with the recommended settings, or None if there is none."""
        wanted = Point(load=load, block_bytes=self.choice.block_bytes, depth=self.choice.depth)
        return next((one for one in found.get(path, ()) if one.point == wanted), None)

    def share(self, load: Load) -> float | None:
        """Return the throughput of all folders together, divided by the sum of their throughput when measured alone.

        None if a measurement is missing.
        """
        both = [
            (self.at_choice(self.together, path, load), self.at_choice(self.alone, path, load))
            for path in self.ask.paths
        ]
        pairs = [(one, other) for one, other in both if one and other]
        if len(pairs) < len(both):
            return None
        return sum(one.bytes_per_second for one, _ in pairs) / sum(one.bytes_per_second for _, one in pairs)

    def document(self) -> dict[str, Any]:
        """Return the results as an object that can be serialized as JSON."""
        return {
            "engine": self.engine,
            "file_bytes": self.ask.file_bytes,
            "seconds": self.ask.seconds,
            "plan": asdict(self.ask.plan),
            "paths": _measurements(self.together),
            "alone": _measurements(self.alone),
            "together_of_alone": {load.value: self.share(load) for load in Load} if self.alone else {},
            "recommended": self.choice.document(),
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
    """Return a description of whether and when sustained throughput drops."""
    size, fall = format_size(one.written), one.fall
    if not one.long_enough:
        return f"too short to detect a drop: only {size} in {one.measurement.seconds:.1f} s; increase --sustained-bytes"
    if fall is None:
        return f"no drop within {size}: {one.measurement.write_bytes_per_second / 1e9:.2f} GB/s"
    after = format_size(fall.written)
    return f"drops from {fall.before / 1e9:.2f} to {fall.after / 1e9:.2f} GB/s after {after}"
