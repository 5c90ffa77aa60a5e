"""CPU features and number of cores per rank, as reported by the operating system."""

from __future__ import annotations

import math
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path

_NATIVE = {"amx_bf16", "avx512_bf16", "bf16"}
_WIDE = {"avx512bw", "avx512dq", "avx512vl"}


def multiplies_bf16(root: Path = Path("/")) -> bool:
    """Return whether the CPU supports bf16 matrix multiplication, whose emulation is several times slower than fp32.

    Args:
        root: folder that contains `proc`.
    """
    return not _NATIVE.isdisjoint(flags(root))


def crawls_in_bf16(root: Path = Path("/")) -> bool:
    """Return whether PyTorch has only unoptimized bf16 loops for this CPU, about 100 times slower than fp32.

    PyTorch's optimized kernels that emulate bf16 require AVX-512, which many CPUs lack.

    Args:
        root: folder that contains `proc`.
    """
    found = flags(root)
    return bool(found) and _NATIVE.isdisjoint(found) and not found >= _WIDE


def flags(root: Path = Path("/")) -> set[str]:
    """Return all words in ``/proc/cpuinfo``, or an empty set if the file cannot be read."""
    try:
        return set((root / "proc/cpuinfo").read_text().split())
    except OSError:
        return set()


def share_of_cores(mine: AbstractSet[int], of_node: Sequence[AbstractSet[int]], limit: float) -> int:
    """Return the number of cores of a rank. Launchers may bind ranks to overlapping sets of cores.

    Args:
        mine: cores on which this rank may run.
        of_node: cores on which each rank of the node may run, including this rank.
        limit: CPU limit for all ranks of the node together, in cores, as returned by
            `memory.cgroups.cores_of_groups`.
    """
    share = sum(1 / sum(core in cores for cores in of_node) for core in mine)
    return math.floor(min(share, limit / len(of_node)) + 1e-9)
