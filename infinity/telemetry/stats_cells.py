"""Layout of the cells in a stats file, derived from the metrics table."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from infinity.telemetry.metrics import METRICS, Label, Metric

CLOSED_CELL: Final = 0

CellKey = tuple[str, tuple[str, ...]]


@dataclass(frozen=True, kw_only=True)
class Cells:
    """Layout of the cells in a stats file.

    `first` maps a metric and its label values to the index of their first cell. `length` is the number of cells.
    `counted` holds the indices of cells that cannot be negative. `fingerprint` is a hash of the layout.
    """

    first: Mapping[CellKey, int]
    length: int
    counted: tuple[int, ...]
    fingerprint: str


@lru_cache(maxsize=64)
def cells_of(devices: tuple[str, ...]) -> Cells:
    """Return the layout of a stats file with the given values of the ``device`` label.

    A counter or gauge uses one cell. A histogram uses one cell per bucket (not cumulative), including the unbounded
    one, and one cell for the sum.
    """
    cells: dict[CellKey, int] = {}
    counted = [CLOSED_CELL]
    described: list[object] = []
    at = CLOSED_CELL + 1
    for metric in METRICS:
        if metric.server != "rank" or metric.kind == "info":
            continue
        for values in label_sets(metric, devices):
            cells[metric.name, values] = at
            size = len(metric.buckets) + 2 if metric.kind == "histogram" else 1
            counted += range(at, at + size) if metric.kind != "gauge" else ()
            at += size
            described.append((metric.name, metric.kind, metric.label_names, values, metric.buckets))
    digest = hashlib.sha256(json.dumps(described).encode()).hexdigest()[:32]
    return Cells(first=cells, length=at, counted=tuple(counted), fingerprint=digest)


def label_sets(metric: Metric, devices: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield every combination of label values of a metric, in the order of the metrics table."""

    def values(label: Label) -> tuple[str, ...]:
        return devices if label.name == "device" else label.values

    return itertools.product(*map(values, metric.labels))
