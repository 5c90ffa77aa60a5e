"""Capabilities of the processor and the number of cores per rank, as reported by the kernel."""

from __future__ import annotations

import math
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path

_NATIVE = {"amx_bf16", "avx512_bf16", "bf16"}
_WIDE = {"avx512bw", "avx512dq", "avx512vl"}


def multiplies_bf16(root: Path = Path("/")) -> bool:
    """Return whether the processor multiplies bf16 matrices natively. Emulation is several times slower than fp32.

    Args:
        root: folder that contains `proc`.
    """
    return not _NATIVE.isdisjoint(flags(root))


def crawls_in_bf16(root: Path = Path("/")) -> bool:
    """Return whether torch has only unoptimized bf16 loops on this processor, about 100 times slower than fp32.

    The kernels with which torch emulates bf16 need AVX-512, which many processors lack.

    Args:
        root: folder that contains `proc`.
    """
    found = flags(root)
    return bool(found) and _NATIVE.isdisjoint(found) and not found >= _WIDE


def flags(root: Path = Path("/")) -> set[str]:
    """Return all words in the kernel's description of the processors, or an empty set if it is not readable."""
    try:
        return set((root / "proc/cpuinfo").read_text().split())
    except OSError:
        return set()


def share_of_cores(mine: AbstractSet[int], of_node: Sequence[AbstractSet[int]], limit: float) -> int:
    """Return the number of cores of a rank, considering that launchers may bind ranks to overlapping sets of cores.

    Args:
        mine: cores that this rank may run on.
        of_node: cores that each rank of the node may run on, including this rank.
        limit: CPU time limit for all ranks of the node together, in cores, as returned by
            `memory.cgroups.cores_of_groups`.
    """
    share = sum(1 / sum(core in cores for cores in of_node) for core in mine)
    return math.floor(min(share, limit / len(of_node)) + 1e-9)
