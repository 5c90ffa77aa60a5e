"""Selection of the recommended settings, and their TOML representation.

[Note: choice] In this package, a *size* is a request size together with a depth, the number of requests in flight.
Sizes are compared by the total throughput of all folders with half reads and half writes, because a run reads and
writes at the same time. The default size is recommended if it is within `MARGIN` of the best. Otherwise, the candidate
is the size within `MARGIN` of the best with the fewest bytes in flight. Because the best of many measurements is partly
luck, the candidate is measured again in alternation with the default, and recommended only if it is still faster by
more than `MARGIN`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from infinity.config import StorageConfig, check_config, load_config
from infinity.io.probe.points import MARGIN, Load, Measurement
from infinity.units import format_size
from infinity_tools.toml import tree_toml

ROUNDS: Final = 3
"""Number of comparisons with the default size."""
Size = tuple[int, int]
"""Bytes per request, and number of requests in flight."""


def usual_size() -> Size:
    """Return the default request size and depth."""
    usual = StorageConfig()
    return usual.request_bytes, usual.queue_depth


def mixed_speeds(found: Iterable[Iterable[Measurement]]) -> dict[Size, float]:
    """Return the total throughput of all folders for each size, with half reads and half writes."""
    speeds: dict[Size, float] = {}
    for one in (one for measurements in found for one in measurements if one.point.load is Load.BOTH):
        size = one.point.block_bytes, one.point.depth
        speeds[size] = speeds.get(size, 0.0) + one.bytes_per_second
    return speeds


def best_size(speeds: Mapping[Size, float]) -> Size:
    """Return the default size or else the candidate, as defined in [Note: choice]."""
    enough = [size for size, speed in speeds.items() if speed * (1 + MARGIN) >= max(speeds.values())]
    if usual_size() in enough:
        return usual_size()
    return min(enough, key=lambda size: (size[0] * size[1], size))


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Recommended settings, and the measurements on which the recommendation is based."""

    paths: tuple[str, ...]
    block_bytes: int
    depth: int
    engine: str
    """Value for `storage.engine`."""
    bytes_per_second: float
    """Total throughput of all folders with half reads and half writes, in bytes per second."""
    usual_measured: bool
    """``True`` if the default size was measured."""
    gain: float | None
    """Throughput relative to the default size. None if it is the default or was not compared."""

    @property
    def is_usual(self) -> bool:
        """``True`` if all settings except the paths are the defaults."""
        return (self.block_bytes, self.depth, self.engine) == (*usual_size(), StorageConfig().engine)

    def reasons(self) -> list[str]:
        """Return the reasons for the recommendation, one per line of output."""
        size = f"requests of {format_size(self.block_bytes)}, {self.depth} in flight"
        if (self.block_bytes, self.depth) == usual_size():
            said = [f"{size}, the defaults: no other combination is consistently more than {MARGIN:.0%} faster"]
        elif self.gain is not None:
            said = [f"{size}: {self.gain:.2f} times as fast as the defaults (median of alternating rounds)"]
        elif not self.usual_measured:
            usual = usual_size()
            said = [
                f"{size}: the smallest within {MARGIN:.0%} of the best; the defaults "
                f"({format_size(usual[0])}, {usual[1]}) were not measured"
            ]
        else:
            said = [f"{size}: the smallest within {MARGIN:.0%} of the best"]
        if self.is_usual:
            said.append("the defaults are fast enough: only storage.paths must be set")
        return said

    def toml(self) -> str:
        """Return the settings as TOML. Raises `ConfigError` if infinity rejects them."""
        return settings_block(self.paths, self.block_bytes, self.depth, self.engine)

    def document(self) -> dict[str, Any]:
        """Return the recommendation as an object that can be serialized as JSON."""
        return {
            "request_bytes": self.block_bytes,
            "queue_depth": self.depth,
            "engine": self.engine,
            "is_default": self.is_usual,
            "mixed_bytes_per_second": round(self.bytes_per_second),
            "reasons": self.reasons(),
            "over_default": self.gain,
            "toml": self.toml(),
        }


def absolute(paths: Sequence[str]) -> tuple[str, ...]:
    """Return absolute paths, which do not depend on the working directory."""
    return tuple(os.path.abspath(path) for path in paths)


def settings_block(paths: Sequence[str], block_bytes: int, depth: int, engine: str) -> str:
    """Return storage settings as TOML, after checking that infinity accepts them.

    Args:
        paths: Values of `storage.paths`.
        block_bytes: Bytes per request.
        depth: Number of requests in flight.
        engine: Value of `storage.engine`.

    Raises:
        ConfigError: if infinity rejects the settings, for example because a folder name is not valid text.
    """
    storage = {"paths": list(paths), "request_bytes": block_bytes, "queue_depth": depth, "engine": engine}
    check_config(load_config({"storage": storage}))
    return tree_toml({"storage": storage})
