"""What computes, found by torch, which takes a second or two to load."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

from infinity.optional_dependencies import NEWEST_TORCH, OLDEST
from infinity.units import MIB, format_size
from infinity_tools.doctor.finding import Group, Verdict, check, note, ok, problem, warning
from infinity_tools.doctor.software import installed
from infinity_tools.doctor.world import World

_SECONDS: Final = 120.0
"""torch from a cold drive, and a CUDA context."""
_AGAIN: Final = "install it again: pip install --force-reinstall torch"
_NONE: Final = "not looked at: torch is not installed"
_INSTALL: Final = "see the check `torch`"


@check("fsdp2", _SECONDS)
def fsdp2(world: World) -> Verdict:
    """Whether torch can be imported, and its FSDP2 has what infinity attaches to."""
    if installed("torch") is None:
        return note(_NONE, _INSTALL)
    try:
        import torch.distributed
    except (ImportError, OSError) as error:  # a library that it needs is missing, or is another one
        return problem(f"torch cannot be imported: {' '.join(str(error).split())}", _AGAIN)
    if not torch.distributed.is_available():
        return problem("this build of torch has no distributed package", _AGAIN)
    from infinity.errors import UnsupportedError

    try:
        import_module("infinity.torch_private")
    except (UnsupportedError, ImportError, AttributeError) as error:
        return problem(" ".join(str(error).split()), f"pip install 'torch>={OLDEST['torch']},<={NEWEST_TORCH}.99'")
    return ok("has what infinity needs")


@check("accelerator", _SECONDS)
def accelerator(world: World) -> Verdict:
    """The GPUs that torch sees. Without one, computation is on the CPU, which works, and suits small models. A GPU
    that the machine has and torch does not see is one for another build of torch, or not given to the container."""
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
            f"a GPU is there, but this torch ({torch.__version__}) is built without {kind}: computes on the CPU",
            f"install a build of torch for {kind}: https://pytorch.org/get-started/locally",
        )
    if nvidia or amd:
        return warning(
            "a GPU is there, but torch does not see it: computes on the CPU",
            "nvidia-smi says why; CUDA_VISIBLE_DEVICES must not be empty; docker run --gpus all",
        )
    other = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if other is not None:
        return note(f"{other.type}, which infinity does not use: computes on the CPU", "a CUDA GPU, for speed")
    return ok("none: computes on the CPU")


@check("host registration", _SECONDS)
def host_registration(world: World) -> Verdict:
    """Whether CUDA registers host memory, tried with a host cache of 2 MiB on the first GPU. Where it does not, copies
    to
    the GPU are slower and wait for one another."""
    torch = _torch()
    if torch is None or not torch.cuda.is_available():
        return ok("not needed: no GPU")
    from infinity.memory.device import open_device
    from infinity.memory.host_cache import HostCache

    host_cache = HostCache(1, 2 * MIB, device=open_device(torch.device("cuda")))
    try:
        if not host_cache.registered:
            return warning(
                "CUDA refuses to register host memory", "ulimit -l unlimited; docker run --ulimit memlock=-1"
            )
        return ok("CUDA registers host memory")
    finally:
        host_cache.close()


@check("collectives", _SECONDS)
def collectives(world: World) -> Verdict:
    """Whether torch has what ranks speak with: gloo on the CPU, and NCCL besides where there are GPUs."""
    torch = _torch()
    if torch is None or not torch.distributed.is_available():
        return note("not looked at: no torch.distributed", _INSTALL)
    has = {"gloo": torch.distributed.is_gloo_available(), "NCCL": torch.distributed.is_nccl_available()}
    wanted = ["gloo", "NCCL"] if torch.cuda.is_available() else ["gloo"]
    if missing := [name for name in wanted if not has[name]]:
        return problem(f"this build of torch has no {' and no '.join(missing)}", _AGAIN)
    return ok(" and ".join(wanted))


def _torch() -> Any:
    """Return torch; None where it is not installed, or cannot be imported, which is a finding of another check."""
    try:
        import torch
        import torch.distributed
    except (ImportError, OSError):
        return None
    return torch


ACCELERATOR: Final = Group("Accelerator", (fsdp2, accelerator, host_registration, collectives))
