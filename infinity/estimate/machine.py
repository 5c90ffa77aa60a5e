"""A machine as far as an estimate needs it: what moves bytes, and what computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from infinity.units import GIB


@dataclass(frozen=True, kw_only=True)
class Drives:
    """The NVMe drives of a node, all of them together."""

    count: int
    """How many; pages are spread over them."""
    read: float
    """Bytes per second that all of them read."""
    write: float
    """That they write."""
    mixed: float = 0.0
    """That they move where half of them are written; 0: not known, as if reads and writes took turns."""
    space_bytes: int = 0
    """What is free on all of them; 0: not known."""
    endurance_bytes: float = 0.0
    """What they may be written with in their lives; 0: not known."""

    def bandwidth(self, written_share: float) -> float:
        """Return bytes per second of a load of which so much is written.

        The time per byte is taken to be linear between only reads, half and half, and only writes.
        """
        half = 1 / self.mixed if self.mixed else (1 / self.read + 1 / self.write) / 2
        if written_share <= 0.5:
            each = 1 / self.read + (half - 1 / self.read) * 2 * written_share
        else:
            each = half + (1 / self.write - half) * (2 * written_share - 1)
        return 1 / each


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """What computes: one device of a rank."""

    name: str
    """What to call it."""
    flops: float
    """Floating-point operations per second that training reaches, not the peak."""
    memory_bytes: int = 0
    """Its own memory; 0: it computes in the host's."""
    link: float = 0.0
    """Bytes per second between host and device, each way; 0: nothing has to be copied."""


REACHED = 0.4
"""Share of its peak at which an accelerator is taken to compute: what well-tuned training of large models reaches."""

_PEAKS: Mapping[str, tuple[float, float, float]] = {
    "a10g": (125e12, 24, 25e9),
    "a100-40gb": (312e12, 40, 25e9),
    "a100": (312e12, 80, 25e9),
    "b200": (2250e12, 180, 55e9),
    "gh200": (989e12, 96, 300e9),
    "h100": (989e12, 80, 55e9),
    "h200": (989e12, 141, 55e9),
    "l4": (121e12, 24, 25e9),
    "l40s": (362e12, 48, 25e9),
    "mi250x": (383e12, 128, 25e9),
    "mi300x": (1307e12, 192, 55e9),
    "rtx3090": (71e12, 24, 25e9),
    "rtx4090": (165e12, 24, 25e9),
    "rtx5090": (209e12, 32, 55e9),
    "v100": (125e12, 32, 12e9),
}
"""By name, from the makers' data sheets: peak FLOP/s of dense bf16 (fp16 for the V100) with fp32 accumulation, memory
in GiB, and bytes per second of the link to the host that copies reach (PCIe 3, 4 and 5 with 16 lanes; NVLink-C2C)."""

ACCELERATORS: Mapping[str, Accelerator] = {
    name: Accelerator(name=name, flops=REACHED * peak, memory_bytes=int(memory * GIB), link=link)
    for name, (peak, memory, link) in _PEAKS.items()
}
"""What `infinity plan --gpu` knows."""

UPDATE_SECONDS: Mapping[str, float] = {"fp32": 2.9e-9, "split": 8.9e-9, "bf16-moments": 24e-9, "8bit": 34e-9}
"""Seconds in which one core updates one parameter with AdamW, by `state.format`: of the benchmarks' machine, from
benchmarks/results/plan.json (`make bench-plan`)."""

HASH_RATE = 10e9
"""Bytes per second of one thread's checksums, about: XXH3 of pages that come from memory, 5e9 to 15e9 on servers."""

ACCESS_SECONDS = 500e-6
"""Python of one access to pages where a GPU computes, about: with it the steps of benchmarks/results/gpu.json take as
long as they did. Threads of a process take turns with Python, so it is for all of them together."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What one rank has, of a node with others or alone."""

    drives: Drives
    """Of its node."""
    ranks_per_node: int = 1
    """Ranks that share them."""
    device: Accelerator
    """That computes."""
    update_seconds: Mapping[str, float]
    """Seconds to update one parameter, by `state.format`: of one core of `update_cores`, or of all that compute."""
    update_cores: int = 0
    """Cores of the thread for updates; 0: there is none, updates take the cores that compute."""
    fixed_seconds: float = 0.0
    """Of a step, beside computation, copies and updates: what does not depend on the tokens."""
    hash_rate: float = 0.0
    """Bytes per second of checksums, of the thread for pages that are read and of the other for those that are written;
    0: they take no time."""
    access_seconds: float = 0.0
    """Of Python for each access to pages; 0: it takes no time, or is a part of `fixed_seconds`."""
    interconnect: float = 0.0
    """Bytes per second at which a rank exchanges weights and gradients with the others; 0: takes no time."""

    @property
    def threaded(self) -> bool:
        """Whether updates run beside computation."""
        return self.update_cores > 0

    def update(self, state_format: str) -> float:
        """Return the seconds to update one parameter."""
        return self.update_seconds[state_format] / max(1, self.update_cores)

    def with_drives(self, count: int) -> Machine:
        """Return the machine with another number of drives like these."""
        drives = self.drives

        def scaled(value: float) -> float:
            return value * count / drives.count

        more = Drives(
            count=count,
            read=scaled(drives.read),
            write=scaled(drives.write),
            mixed=scaled(drives.mixed),
            space_bytes=int(scaled(drives.space_bytes)),
            endurance_bytes=scaled(drives.endurance_bytes),
        )
        return replace(self, drives=more)

    def bandwidth(self, written_share: float) -> float:
        """Return bytes per second that the rank's transfers get, of which so much is written."""
        return self.drives.bandwidth(written_share) / self.ranks_per_node
