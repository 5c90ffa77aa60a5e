"""Which settings to take, and the block of TOML that says them.

[Note: choice] What counts is the mixed bandwidth of all folders together: a run reads and writes at the same time. The
default size and depth are taken if they are within `MARGIN` of the best. Else the smallest that is so, by bytes in
flight, is measured in turn with the defaults, and taken if it is faster by more than `MARGIN` there, too: the best of
many points is partly luck.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from infinity.config import StorageConfig, check_config, load_config
from infinity.io.probe.points import MARGIN, Load, Measurement
from infinity.units import format_size
from infinity_tools.probe.rounds import Turns
from infinity_tools.toml import tree_toml

Size = tuple[int, int]
"""Bytes per request, and requests in flight."""


def usual_size() -> Size:
    """Return what infinity does unless it is told otherwise."""
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
    """Return the size to take. [Note: choice]"""
    enough = [size for size, speed in speeds.items() if speed * (1 + MARGIN) >= max(speeds.values())]
    if usual_size() in enough:
        return usual_size()
    return min(enough, key=lambda size: (size[0] * size[1], size))


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What is recommended, and why."""

    paths: tuple[str, ...]
    block_bytes: int
    depth: int
    engine: str
    """The value of storage.engine."""
    bytes_per_second: float
    """Mixed, all folders together, as the table has it."""
    usual_measured: bool
    """Whether the default size and depth were among what was measured."""
    sizes: Turns | None
    """The recommended size in turn with the default one; None where they are the same, or that was not measured."""
    engines: Turns | None
    """threads in turn with io_uring; None where there was no choice."""

    @property
    def is_usual(self) -> bool:
        """Whether all settings but the paths are the defaults."""
        return (self.block_bytes, self.depth, self.engine) == (*usual_size(), StorageConfig().engine)

    def reasons(self) -> list[str]:
        """Return in words why."""
        size = f"requests of {format_size(self.block_bytes)}, {self.depth} in flight"
        if (self.block_bytes, self.depth) == usual_size():
            said = [f"{size}, the defaults: nothing else is faster by more than {MARGIN:.0%}"]
        elif self.sizes is not None:
            said = [f"{size} are {self.sizes.ratio:.2f} times as fast as the defaults, medians of alternating rounds"]
        elif not self.usual_measured:
            usual = usual_size()
            said = [
                f"{size} are the smallest within {MARGIN:.0%} of the best; the defaults "
                f"({format_size(usual[0])}, {usual[1]}) were not measured"
            ]
        else:
            said = [f"{size} are the smallest within {MARGIN:.0%} of the best"]
        if self.engines is not None:
            faster = self.engines.is_first_faster()
            words = "so they are recommended" if faster else "so auto remains"
            said.append(f"threads are {self.engines.ratio:.2f} times as fast as io_uring: {words}")
        if self.is_usual:
            said.append("the defaults are as fast: only storage.paths has to be set")
        return said

    def toml(self) -> str:
        """Return the block to paste. Raises `ConfigError` as `settings_block`."""
        return settings_block(self.paths, self.block_bytes, self.depth, self.engine)

    def document(self) -> dict[str, Any]:
        """Return it for JSON."""
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
    """Return the folders as settings name them, wherever the run is started."""
    return tuple(os.path.abspath(path) for path in paths)


def settings_block(paths: Sequence[str], block_bytes: int, depth: int, engine: str) -> str:
    """Return settings as TOML that infinity has read back.

    Raises:
        ConfigError: infinity would not take it, such as for a folder whose name is no text.
    """
    storage = {"paths": list(paths), "request_bytes": block_bytes, "queue_depth": depth, "engine": engine}
    check_config(load_config({"storage": storage}))
    return tree_toml({"storage": storage})
