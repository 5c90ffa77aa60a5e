"""What the processor can compute with, and how much of it there is for a rank, as the kernel tells it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path

_NATIVE = {"amx_bf16", "avx512_bf16", "bf16"}
_WIDE = {"avx512bw", "avx512dq", "avx512vl"}


def multiplies_bf16(root: Path = Path("/")) -> bool:
    """Whether the processor multiplies matrices in bf16 natively; emulation is several times slower than fp32.

    Args:
        root: where `proc` lies.
    """
    return not _NATIVE.isdisjoint(flags(root))


def crawls_in_bf16(root: Path = Path("/")) -> bool:
    """Whether torch has nothing but plain loops for bf16 here, which take a hundred times as long as fp32.

    Its kernels that emulate bf16 need AVX-512, which many processors lack.

    Args:
        root: where `proc` lies.
    """
    found = flags(root)
    return bool(found) and _NATIVE.isdisjoint(found) and not found >= _WIDE


def flags(root: Path = Path("/")) -> set[str]:
    """Return all words that the kernel says of the processors; none where it says nothing."""
    try:
        return set((root / "proc/cpuinfo").read_text().split())
    except OSError:
        return set()


def share_of_cores(mine: AbstractSet[int], of_node: Sequence[AbstractSet[int]], limit: float) -> int:
    """Return how many cores a rank has, of those that it may run on: launchers bind ranks to some, or to none.

    Args:
        mine: cores that this rank may run on.
        of_node: the same of all ranks of the node, this one's too.
        limit: cores' time for all ranks of the node together, as of `memory.groups.cores_of_groups`.
    """
    share = sum(1 / sum(core in cores for cores in of_node) for core in mine)
    return math.floor(min(share, limit / len(of_node)) + 1e-9)
