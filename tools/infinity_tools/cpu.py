"""What the processor can do."""

from __future__ import annotations

from pathlib import Path

_BF16 = {"amx_bf16", "avx512_bf16", "bf16"}


def multiplies_bf16(root: Path = Path("/")) -> bool:
    """Whether the processor multiplies matrices in bf16 natively; emulation is several times slower than fp32.

    Args:
        root: where `proc` lies.
    """
    try:
        return not _BF16.isdisjoint((root / "proc/cpuinfo").read_text().split())
    except OSError:
        return False
