"""Selection of the recommended settings, and their TOML.

[Note: choice] The criterion is the mixed bandwidth of all folders together, because a run reads and writes at the same
time. The default size and depth are recommended if they are within `MARGIN` of the best. Otherwise the candidate is the
size within `MARGIN` of the best that has the fewest bytes in flight. It is measured in alternation with the defaults,
and recommended only if it is faster by more than `MARGIN` there too, because the best of many points is partly luck.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from infinity.config import StorageConfig, check_config, load_config
from infinity.io.probe.points import MARGIN, Load, Measurement
from infinity.units import format_size
from infinity_tools.probe.rounds import AlternatingRounds
from infinity_tools.toml import tree_toml

Size = tuple[int, int]
"""Bytes per request, and requests in flight."""


def usual_size() -> Size:
    """Return the default size and depth."""
    usual = StorageConfig()
    return usual.request_bytes, usual.queue_depth


def mixed_speeds(found: Iterable[Iterable[Measurement]]) -> dict[Size, float]:
    """Return the mixed bandwidth of all folders together at each size."""
    speeds: dict[Size, float] = {}
    for one in (one for measurements in found for one in measurements if one.point.load is Load.BOTH):
        size = one.point.block_bytes, one.point.depth
        speeds[size] = speeds.get(size, 0.0) + one.bytes_per_second
    return speeds


def best_size(speeds: Mapping[Size, float]) -> Size:
    """Return the best size by the criterion in [Note: choice]."""
    enough = [size for size, speed in speeds.items() if speed * (1 + MARGIN) >= max(speeds.values())]
    if usual_size() in enough:
        return usual_size()
    return min(enough, key=lambda size: (size[0] * size[1], size))


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Recommended settings, with the measurements that support them."""

    paths: tuple[str, ...]
    block_bytes: int
    depth: int
    engine: str
    """Value of storage.engine."""
    bytes_per_second: float
    """Mixed throughput of all folders together, as in the table."""
    usual_measured: bool
    """``True`` if the default size and depth were measured."""
    sizes: AlternatingRounds | None
    """The recommended size in alternation with the default. None if they are equal or were not compared."""
    engines: AlternatingRounds | None
    """The threads engine in alternation with io_uring. None if the engine was fixed."""

    @property
    def is_usual(self) -> bool:
        """``True`` if all settings except the paths are the defaults."""
        return (self.block_bytes, self.depth, self.engine) == (*usual_size(), StorageConfig().engine)

    def reasons(self) -> list[str]:
        """Return the reasons as sentences."""
        size = f"requests of {format_size(self.block_bytes)}, {self.depth} in flight"
        if (self.block_bytes, self.depth) == usual_size():
            said = [f"{size}, the defaults: no other size is faster by more than {MARGIN:.0%}"]
        elif self.sizes is not None:
            said = [f"{size}: {self.sizes.ratio:.2f} times as fast as the defaults (medians of alternating rounds)"]
        elif not self.usual_measured:
            usual = usual_size()
            said = [
                f"{size}: the smallest within {MARGIN:.0%} of the best; the defaults "
                f"({format_size(usual[0])}, {usual[1]}) were not measured"
            ]
        else:
            said = [f"{size}: the smallest within {MARGIN:.0%} of the best"]
        if self.engines is not None:
            faster = self.engines.is_first_faster()
            words = "so it is recommended" if faster else "so storage.engine stays auto"
            said.append(f"the threads engine is {self.engines.ratio:.2f} times as fast as io_uring: {words}")
        if self.is_usual:
            said.append("the defaults are fast enough: only storage.paths must be set")
        return said

    def toml(self) -> str:
        """Return the TOML of the settings. Raises `ConfigError` as `settings_block`."""
        return settings_block(self.paths, self.block_bytes, self.depth, self.engine)

    def document(self) -> dict[str, Any]:
        """Return the recommendation as a JSON document."""
        return {
            "request_bytes": self.block_bytes,
            "queue_depth": self.depth,
            "engine": self.engine,
            "is_default": self.is_usual,
            "mixed_bytes_per_second": round(self.bytes_per_second),
            "reasons": self.reasons(),
            "against_default": self.sizes and self.sizes.document("recommended", "default"),
            "threads_against_io_uring": self.engines and self.engines.document("threads", "io_uring"),
            "toml": self.toml(),
        }


def absolute(paths: Sequence[str]) -> tuple[str, ...]:
    """Return absolute paths, which hold in any working directory."""
    return tuple(os.path.abspath(path) for path in paths)


def settings_block(paths: Sequence[str], block_bytes: int, depth: int, engine: str) -> str:
    """Return settings as TOML, after checking that infinity accepts them.

    Raises:
        ConfigError: If infinity rejects them, for example because the name of a folder is not valid text.
    """
    storage = {"paths": list(paths), "request_bytes": block_bytes, "queue_depth": depth, "engine": engine}
    check_config(load_config({"storage": storage}))
    return tree_toml({"storage": storage})
