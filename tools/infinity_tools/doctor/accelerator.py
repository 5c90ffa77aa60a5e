"""Checks of the accelerator. They import torch, which takes one or two seconds."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

from infinity.optional_dependencies import NEWEST_TORCH, OLDEST
from infinity.units import MIB, format_size
from infinity_tools.doctor.finding import Finding, Group, check, note, ok, problem, warning
from infinity_tools.doctor.software import installed
from infinity_tools.doctor.world import World

_SECONDS: Final = 120.0
"""Time limit; importing torch from a slow drive and creating a CUDA context can take long."""
_AGAIN: Final = "reinstall it: pip install --force-reinstall torch"
_NONE: Final = "skipped: torch is not installed"
_INSTALL: Final = "see the check `torch`"


@check("fsdp2", _SECONDS)
def fsdp2(world: World) -> Finding:
    """Imports torch, and checks that the FSDP2 internals used by infinity exist."""
    if installed("torch") is None:
        return note(_NONE, _INSTALL)
    try:
        import torch.distributed
    except (ImportError, OSError) as error:  # a shared library is missing or has a different version
        return problem(f"torch cannot be imported: {' '.join(str(error).split())}", _AGAIN)
    if not torch.distributed.is_available():
        return problem("this build of torch does not include torch.distributed", _AGAIN)
    from infinity.errors import UnsupportedError

    try:
        import_module("infinity.torch_private")
    except (UnsupportedError, ImportError, AttributeError) as error:
        return problem(" ".join(str(error).split()), f"pip install 'torch>={OLDEST['torch']},<={NEWEST_TORCH}.99'")
    return ok("compatible with infinity")


@check("accelerator", _SECONDS)
def accelerator(world: World) -> Finding:
    """GPUs that torch can use. Without a GPU, the model runs on the CPU, which is fast enough only for small models. If
    torch does not detect an existing GPU, install a matching build of torch or give the container access to the GPU."""
    torch = _torch()
    if torch is None:
        return note(_NONE, _INSTALL)
    if torch.cuda.is_available():
        found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        each = dict.fromkeys(f"{one.name} with {format_size(one.total_memory)}" for one in found)
        return ok(f"{len(found)} x {', '.join(each)}")
    nvidia, amd = (world.root / "dev/nvidiactl").exists(), (world.root / "dev/kfd").exists()
    if (nvidia and torch.version.cuda is None) or (amd and torch.version.hip is None and not nvidia):
        kind = "CUDA" if nvidia else "ROCm"
        return warning(
            f"a GPU is present, but torch {torch.__version__} was built without {kind}; the model runs on the CPU",
            f"install a build of torch with {kind} support: https://pytorch.org/get-started/locally",
        )
    if nvidia or amd:
        return warning(
            "a GPU is present, but torch does not detect it; the model runs on the CPU",
            "check that nvidia-smi lists it and CUDA_VISIBLE_DEVICES is not empty; docker run --gpus all",
        )
    other = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if other is not None:
        return note(f"{other.type} is not supported; the model runs on the CPU", "use a CUDA GPU for higher speed")
    return ok("no GPU; the model runs on the CPU")


@check("host registration", _SECONDS)
def host_registration(world: World) -> Finding:
    """Registers a 2 MiB host cache with CUDA on the first GPU. Copies between unregistered memory and the GPU are
    slower and not asynchronous."""
    torch = _torch()
    if torch is None or not torch.cuda.is_available():
        return ok("not needed: no GPU")
    from infinity.memory.device import open_device
    from infinity.memory.host_cache import HostCache

    host_cache = HostCache(1, 2 * MIB, device=open_device(torch.device("cuda")))
    try:
        if not host_cache.registered:
            return warning("CUDA cannot register host memory", "ulimit -l unlimited; docker run --ulimit memlock=-1")
        return ok("CUDA can register host memory")
    finally:
        host_cache.close()


@check("collectives", _SECONDS)
def collectives(world: World) -> Finding:
    """Communication backends of torch: gloo and, if there are GPUs, NCCL."""
    torch = _torch()
    if torch is None or not torch.distributed.is_available():
        return note("skipped: torch.distributed is not available", _INSTALL)
    has = {"gloo": torch.distributed.is_gloo_available(), "NCCL": torch.distributed.is_nccl_available()}
    wanted = ["gloo", "NCCL"] if torch.cuda.is_available() else ["gloo"]
    if missing := [name for name in wanted if not has[name]]:
        return problem(f"this build of torch does not include {' and '.join(missing)}", _AGAIN)
    return ok(" and ".join(wanted))


def _torch() -> Any:
    """Return torch, or None if it cannot be imported, which the check `fsdp2` reports."""
    try:
        import torch
        import torch.distributed
    except (ImportError, OSError):
        return None
    return torch


ACCELERATOR: Final = Group("Accelerator", (fsdp2, accelerator, host_registration, collectives))
