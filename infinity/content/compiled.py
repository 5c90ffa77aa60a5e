"""Compile the kernels of `infinity.content.kernels` with numba, and verify them against the reference implementation.

A run whose state format uses encodings calls `prepare` before its first step. `prepare` imports numba, compiles the
kernels and compares them with the reference, which takes about two seconds. Compiled code is not cached on disk,
because a cached file could be written by two ranks at once, built for a different processor, or modified by another
user. If compilation fails, no error is raised: torch then produces the same bits, in more passes over memory.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from infinity.content import reference
from infinity.content.format import SHARD_ALIGNMENT

_DENORMAL = 2.0**-149
_STEPS = (1, 1000)  # steps for which kernels are compared
_lock = threading.Lock()
_prepared: Prepared | None = None


class Kernels:
    """Compiled kernels for contiguous one-dimensional tensors in host memory.

    Args:
        module: Module that contains the kernels.
    """

    def __init__(self, module: Any) -> None:
        self._module = module

    def encode(self, values: torch.Tensor, encoding: str, step: int | None, made: Sequence[torch.Tensor]) -> bool:
        """Encode fp32 values into their components.

        Args:
            values: Values, shape (n,).
            encoding: Name of the encoding.
            step: Step of the update, which seeds stochastic rounding. Not used by ``split``.
            made: Components to write.

        Returns:
            ``True`` if the components were written, ``False`` if the reference must encode the values instead. The
            contents of `made` are undefined in that case.
        """
        values = values.detach()
        bits, items = values.view(torch.int32).numpy(), [_numbers(component) for component in made]
        if encoding == "split":
            return bool(self._module.encode_split(bits, *items))
        seed = reference.seed(step or 0)
        if encoding == "8bit":
            return bool(self._module.encode_8bit(values.numpy(), bits, *items, seed, _DENORMAL))
        return bool(self._module.encode_bfloat16(bits, *items, seed))

    def decode(self, components: Sequence[torch.Tensor], encoding: str, values: torch.Tensor) -> None:
        """Decode components into fp32 values.

        Args:
            components: Components of ``split`` or ``8bit``.
            encoding: Name of the encoding.
            values: Tensor to write, shape (n,).
        """
        items = [_numbers(component.contiguous()) for component in components]
        if encoding == "split":
            self._module.decode_split(*items, values.view(torch.int32).numpy())
        else:
            self._module.decode_8bit(*items, values.numpy())


def _numbers(component: torch.Tensor) -> Any:
    """Return a component as a NumPy view. NumPy has no bf16, so bf16 items are viewed as int16."""
    return (component.view(torch.int16) if component.dtype == torch.bfloat16 else component).numpy()


class Prepared(NamedTuple):
    """Result of `prepare`: the kernels, or the reason why they are unavailable, and the elapsed time in seconds."""

    kernels: Kernels | None
    reason: str
    seconds: float


def prepare() -> Prepared:
    """Compile the kernels, at most once per process."""
    global _prepared
    with _lock:
        if _prepared is None:
            begun = time.perf_counter()
            found, reason = _prepare()
            _prepared = Prepared(found, reason, time.perf_counter() - begun)
        return _prepared


def kernels(device: torch.device) -> Kernels | None:
    """Return the kernels for tensors on a device, or ``None`` if they are unavailable or have not been prepared."""
    return _prepared.kernels if _prepared is not None and device.type == "cpu" else None


def _prepare() -> tuple[Kernels | None, str]:
    try:
        from numba.core import config

        if getattr(config, "DISABLE_JIT", 0):
            return None, "NUMBA_DISABLE_JIT is set"
        from infinity.content import kernels as module

        found = Kernels(module)
        wrong = sorted({encoding for encoding in ("split", "bfloat16", "8bit") if _differs(found, encoding)})
    except ModuleNotFoundError as error:
        return None, f"{error.name} is not installed: pip install 'infinity-offload[jit]'"
    except Exception as error:  # numba and LLVM define many exception types
        first = next(iter(str(error).splitlines()), "")
        return None, f"numba cannot compile the kernels ({type(error).__name__}: {first})"
    if wrong:
        return None, f"numba computes different bits for {', '.join(wrong)} on this machine; please report this"
    return found, ""


def _differs(found: Kernels, encoding: str) -> bool:
    """Return whether any bit of an encoding differs between the kernels and the reference, on values that cover all
    cases.
    """
    values = _samples()
    for step in _STEPS:
        expected = reference.encode(values, encoding, step)
        made = [torch.full_like(component, 1) for component in expected]
        if not found.encode(values, encoding, step, made) or not all(map(_equal, made, expected)):
            return True
    if encoding == "bfloat16":
        return False
    decoded = torch.empty_like(values)
    found.decode(expected, encoding, decoded)
    return not _equal(decoded, reference.decode(expected, encoding))


def _samples() -> torch.Tensor:
    """Return blocks of finite numbers with all exponents, with and without negative numbers, zeros and denormals."""
    mantissas = torch.arange(SHARD_ALIGNMENT, dtype=torch.int32) * 0x1F123B % (1 << 23)
    exponents = torch.arange(250, dtype=torch.int32)[:, None] + torch.arange(SHARD_ALIGNMENT) % 7 // 3 * -3
    positive = ((exponents.clamp(min=0).int() << 23) + mantissas).view(torch.float32)
    alternating = positive * torch.tensor([1.0, -1.0]).repeat(SHARD_ALIGNMENT // 2)
    zeros = torch.zeros(2, SHARD_ALIGNMENT) * torch.tensor([[1.0], [-1.0]])
    return torch.cat([positive, alternating, zeros]).view(-1)


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
