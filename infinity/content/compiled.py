"""The kernels of `infinity.content.kernels`, where numba is installed and makes of them what the reference computes.

A run whose state format has encodings calls `prepare` before its first step. That imports numba, compiles, and compares
the kernels with the reference; in about two seconds, and nothing is kept in a file: so there is none that two ranks
write at once, that was made for another processor or that somebody else may have changed. Whatever goes wrong is no
error: torch encodes then, with the same bits, in more passes over memory.
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
_STEPS = (1, 1000)  # for which kernels are compared
_lock = threading.Lock()
_prepared: Prepared | None = None


class Kernels:
    """The compiled kernels, for tensors in memory, of one dimension and contiguous; `module` has them."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def encode(self, values: torch.Tensor, encoding: str, step: int | None, made: Sequence[torch.Tensor]) -> bool:
        """Write the components of fp32 values, shape (n,); `step` is that of an update, but for ``split``.

        Returns:
            Whether it has; else the reference is to encode them, and what `made` holds is nothing.
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
        """Write fp32 values, shape (n,), from their components: of ``split`` or ``8bit``."""
        items = [_numbers(component.contiguous()) for component in components]
        if encoding == "split":
            self._module.decode_split(*items, values.view(torch.int32).numpy())
        else:
            self._module.decode_8bit(*items, values.numpy())


def _numbers(component: torch.Tensor) -> Any:
    """Return the items of a component as numpy has them, which knows no bf16: a view."""
    return (component.view(torch.int16) if component.dtype == torch.bfloat16 else component).numpy()


class Prepared(NamedTuple):
    """What `prepare` found: kernels, or why there are none; and what that took."""

    kernels: Kernels | None
    reason: str
    seconds: float


def prepare() -> Prepared:
    """Compile the kernels, unless that has been tried in this process."""
    global _prepared
    with _lock:
        if _prepared is None:
            begun = time.perf_counter()
            found, reason = _prepare()
            _prepared = Prepared(found, reason, time.perf_counter() - begun)
        return _prepared


def kernels(device: torch.device) -> Kernels | None:
    """Return the kernels for tensors on a device; None where there are none, or nobody has prepared them."""
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
    except Exception as error:  # numba has many of its own, and LLVM's
        first = next(iter(str(error).splitlines()), "")
        return None, f"numba does not compile them ({type(error).__name__}: {first})"
    if wrong:
        return None, f"numba computes other bits of {', '.join(wrong)} on this machine; please report that"
    return found, ""


def _differs(found: Kernels, encoding: str) -> bool:
    """Whether kernels make other bits of an encoding than the reference, of values that cover all of its cases."""
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
    """Return finite numbers in blocks of all exponents, with negative ones and without, zeros and denormals."""
    mantissas = torch.arange(SHARD_ALIGNMENT, dtype=torch.int32) * 0x1F123B % (1 << 23)
    exponents = torch.arange(250, dtype=torch.int32)[:, None] + torch.arange(SHARD_ALIGNMENT) % 7 // 3 * -3
    positive = ((exponents.clamp(min=0).int() << 23) + mantissas).view(torch.float32)
    alternating = positive * torch.tensor([1.0, -1.0]).repeat(SHARD_ALIGNMENT // 2)
    zeros = torch.zeros(2, SHARD_ALIGNMENT) * torch.tensor([[1.0], [-1.0]])
    return torch.cat([positive, alternating, zeros]).view(-1)


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
