"""The device mesh that models are sharded over."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from infinity import torchrun
from infinity.errors import ConfigError
from infinity.fsdp import forks


def mesh(device_type: str | None = None) -> DeviceMesh:
    """Return a mesh over all ranks for `fully_shard(..., mesh=infinity.mesh())`.

    Under torchrun the process group is made from its environment; under plain `python` one of a single rank is
    made, without any network. A process group that exists already is used.

    Args:
        device_type: ``cuda`` or ``cpu``; by default ``cuda`` where there is a GPU.

    Raises:
        ConfigError: there is no such device, the environment is not that of torchrun, or the ranks do not find each
            other.
    """
    forks.keep_process_groups()
    device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    launched = not dist.is_initialized() and torchrun.launched()
    _take_device(device_type, choose=launched or not dist.is_initialized())
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
        if launched:
            try:
                dist.init_process_group(backend)
            except (RuntimeError, ValueError) as error:
                place = f"MASTER_ADDR={os.environ['MASTER_ADDR']!r}, MASTER_PORT={os.environ['MASTER_PORT']}"
                reason = str(error).partition("\n")[0]
                raise ConfigError(f"the ranks do not find each other at {place}: {reason}") from error
        else:
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(backend, store=store, rank=0, world_size=1)
    if device_type == "cpu":
        # `init_device_mesh` would make a gloo group per call where there is a GPU.
        everyone = dist.group.WORLD
        assert everyone is not None
        return DeviceMesh.from_group(everyone, "cpu")
    return init_device_mesh(device_type, (dist.get_world_size(),))


def _take_device(device_type: str, *, choose: bool) -> None:
    """Check that there is such a device; `choose` this rank's GPU, which whoever made a process group has done."""
    if device_type not in ("cuda", "cpu"):
        raise ConfigError(f"infinity.mesh({device_type!r}): the devices are 'cuda' and 'cpu'")
    if device_type == "cuda" and (choose or "LOCAL_RANK" in os.environ):
        index, there = torchrun.number("LOCAL_RANK", 0), torch.cuda.device_count()
        if index >= there:
            raise ConfigError(f"local rank {index} has no GPU: there are {there} here; start as many ranks as GPUs")
        torch.cuda.set_device(index)
