"""Hardware description for estimates: drives, accelerators and update speeds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from infinity.estimate.network import ALONE, Network
from infinity.units import GIB


@dataclass(frozen=True, kw_only=True)
class Drives:
    """Combined properties of all NVMe drives of a node."""

    count: int
    """Number of drives. Pages are striped across them."""
    read: float
    """Combined read bandwidth, in bytes per second."""
    write: float
    """Combined write bandwidth, in bytes per second."""
    mixed: float = 0.0
    """Combined bandwidth, in bytes per second, if half of the bytes are written. 0: unknown; reads and writes are
    assumed to alternate.
    """
    space_bytes: int = 0
    """Combined free space, in bytes. 0: unknown."""
    endurance_bytes: float = 0.0
    """Combined rated endurance, in bytes written. 0: unknown."""

    def bandwidth(self, written_share: float) -> float:
        """Return the bandwidth for a mix of reads and writes, in bytes per second.

        The time per byte is interpolated linearly between reads only, an even mix, and writes only.

        Args:
            written_share: Fraction of the bytes that are written.
        """
        half = 1 / self.mixed if self.mixed else (1 / self.read + 1 / self.write) / 2
        if written_share <= 0.5:
            each = 1 / self.read + (half - 1 / self.read) * 2 * written_share
        else:
            each = half + (1 / self.write - half) * (2 * written_share - 1)
        return 1 / each


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """The device on which a rank computes."""

    name: str
    """Name shown in messages."""
    flops: float
    """Floating-point operations per second that training achieves, which is less than the peak."""
    memory_bytes: int = 0
    """Device memory, in bytes. 0: the device computes in host memory."""
    link: float = 0.0
    """Bandwidth between host and device in each direction, in bytes per second. 0: no copies are needed."""
    fabric: float = 0.0
    """Bandwidth in collectives over links between the accelerators of a node, in bytes per second. 0: there are none.
    """
    cores: int = 0
    """Number of CPU cores per accelerator in a typical node. 0: unknown."""

    @property
    def interconnect(self) -> float:
        """Bandwidth in collectives between the ranks of a node, in bytes per second. 0: unknown.

        Without links between accelerators, data passes through host memory, so each byte is copied twice.
        """
        return self.fabric or self.link / 2


REACHED = 0.4
"""Assumed fraction of an accelerator's peak that training achieves. It is typical of well-tuned training of large
models.
"""

REACHED_IN_COLLECTIVES = 0.8
"""Assumed fraction of the one-way bandwidth of links between accelerators that collectives achieve. NCCL's tests report
a bus bandwidth of 230 to 250 GB/s on eight A100, whose NVLink transfers 300 GB/s in each direction.
"""

_DATA_SHEETS: Mapping[str, tuple[float, float, float, float, int]] = {
    "a10g": (125e12, 24, 25e9, 0.0, 12),
    "a100-40gb": (312e12, 40, 25e9, 600e9, 16),
    "a100": (312e12, 80, 25e9, 600e9, 16),
    "b200": (2250e12, 180, 55e9, 1800e9, 14),
    "gh200": (989e12, 96, 300e9, 900e9, 72),
    "h100": (989e12, 80, 55e9, 900e9, 14),
    "h200": (989e12, 141, 55e9, 900e9, 14),
    "l4": (121e12, 24, 25e9, 0.0, 12),
    "l40s": (362e12, 48, 25e9, 0.0, 12),
    "mi250x": (383e12, 128, 25e9, 800e9, 16),
    "mi300x": (1307e12, 192, 55e9, 896e9, 12),
    "rtx3090": (71e12, 24, 25e9, 0.0, 8),
    "rtx4090": (165e12, 24, 25e9, 0.0, 8),
    "rtx5090": (209e12, 32, 55e9, 0.0, 8),
    "v100": (125e12, 32, 12e9, 300e9, 6),
}
"""Data sheet values by accelerator name:

- peak FLOP/s for dense bf16 (fp16 for the V100) with fp32 accumulation;
- memory in GiB;
- achievable bandwidth of the link to the host in bytes per second (PCIe 3, 4 or 5 with 16 lanes, or NVLink-C2C);
- bandwidth of NVLink or Infinity Fabric to the other accelerators of a node, as the sum of both directions, in bytes
  per second (SXM modules; 0: none);
- physical CPU cores per accelerator in a common node: DGX A100, H100, H200 and B200; AWS g5, g6, g6e and p3dn with
  eight GPUs; Azure ND MI300X v5; Frontier (MI250X); Grace (GH200); a desktop with eight cores (GeForce).
"""

ACCELERATORS: Mapping[str, Accelerator] = {
    name: Accelerator(
        name=name,
        flops=REACHED * peak,
        memory_bytes=int(memory * GIB),
        link=link,
        fabric=REACHED_IN_COLLECTIVES * fabric / 2,
        cores=cores,
    )
    for name, (peak, memory, link, fabric, cores) in _DATA_SHEETS.items()
}
"""Accelerators that can be passed to `infinity plan --gpu`."""

UPDATE_SECONDS: Mapping[str, float] = {"fp32": 2.9e-9, "split": 8.9e-9, "bf16-moments": 24e-9, "8bit": 34e-9}
"""Seconds that one core takes to update one parameter with AdamW, by `state.format`. Measured on the benchmark machine;
see benchmarks/results/plan.json (`make bench-plan`).
"""

HASH_RATE = 10e9
"""Approximate checksum speed of one thread, in bytes per second. On servers, XXH3 reaches 5e9 to 15e9 for pages in
memory.
"""

CALL_SECONDS = 3.5e-6
"""Time per call of a Python function on a machine with a GPU, in seconds. It includes the functions of torch that these
functions call, the launch of kernels, and waits for the GIL, which all threads of a process share.

The value was fitted to the five steps of `infinity` in benchmarks/results/gpu*.json, which are planned 2 % too short to
4 % too long with the plans and counts of their commit. It is a mean: on a CPU, a call of an FSDP2 function takes
1.5 µs, and a call of an `infinity` function takes 0.7 to 1.2 µs. With the GPU, a step of FSDP2 alone with 2,048 tokens
took 3.9 µs per call. Code that processed pages one by one took less than 2 µs.
"""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Hardware that one rank uses, possibly shared with other ranks of its node."""

    drives: Drives
    """Drives of the node."""
    ranks_per_node: int = 1
    """Number of ranks that share the drives."""
    device: Accelerator
    """Device of the rank."""
    update_seconds: Mapping[str, float]
    """Seconds to update one parameter, by `state.format`. If `update_cores` is 0, the time applies to all compute cores
    together, otherwise to a single core.
    """
    update_cores: int = 0
    """Number of cores that the update thread uses. 0: there is no update thread, and updates use the compute cores."""
    fixed_seconds: float = 0.0
    """Seconds per step in addition to computation, copies and updates, independent of the number of tokens."""
    hash_rate: float = 0.0
    """Checksum speed per thread, in bytes per second. One thread handles pages that are read, and another handles pages
    that are written. 0: checksums take no time.
    """
    call_seconds: float = 0.0
    """Time per call of a Python function, in seconds. 0: Python takes no time, or is part of `fixed_seconds`."""
    network: Network = ALONE
    """Collectives between ranks."""

    @property
    def threaded(self) -> bool:
        """Whether a separate thread runs updates in parallel with computation."""
        return self.update_cores > 0

    def update(self, state_format: str) -> float:
        """Return the seconds to update one parameter."""
        return self.update_seconds[state_format] / max(1, self.update_cores)

    def with_drives(self, count: int) -> Machine:
        """Return a copy of the machine with the given number of drives of the same kind."""
        factor = count / self.drives.count
        scaled = {name: value * factor for name, value in vars(self.drives).items()}
        scaled |= {"count": count, "space_bytes": int(scaled["space_bytes"])}
        return replace(self, drives=Drives(**scaled))

    def bandwidth(self, written_share: float) -> float:
        """Return this rank's drive bandwidth for a mix of reads and writes, in bytes per second.

        Args:
            written_share: Fraction of the bytes that are written.
        """
        return self.drives.bandwidth(written_share) / self.ranks_per_node
