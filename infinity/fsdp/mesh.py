"""Create the device mesh for `fully_shard`."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from infinity import torchrun
from infinity.errors import ConfigError
from infinity.fsdp import forks


def mesh(device_type: str | None = None) -> DeviceMesh:
    """Return a one-dimensional device mesh over all ranks.

    If a process group exists, the mesh uses it. Otherwise, this function initializes one: from the environment under
    torchrun, or with a single rank and without network access under plain ``python``.

    Args:
        device_type: ``"cuda"`` or ``"cpu"``. Default: ``"cuda"`` if a GPU is available.

    Returns:
        The mesh, for ``fully_shard(..., mesh=infinity.mesh())``.

    Raises:
        ConfigError: If the device does not exist, torchrun's environment variables are invalid, or the ranks cannot
            connect to each other.

    Example::

        >>> mesh = infinity.mesh()
        >>> for layer in model.layers:
        ...     fully_shard(layer, mesh=mesh)
        >>> fully_shard(model, mesh=mesh)
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
                raise ConfigError(f"the ranks cannot connect to each other at {place}: {reason}") from error
        else:
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(backend, store=store, rank=0, world_size=1)
    if device_type == "cpu":
        # On a machine with GPUs, each call of `init_device_mesh` would create a new gloo group.
        everyone = dist.group.WORLD
        assert everyone is not None
        return DeviceMesh.from_group(everyone, "cpu")
    return init_device_mesh(device_type, (dist.get_world_size(),))


def _take_device(device_type: str, *, choose: bool) -> None:
    """Check that the device exists, and select this rank's GPU if `choose` is ``True``.

    A caller that created the process group has already selected its GPU.
    """
    if device_type not in ("cuda", "cpu"):
        raise ConfigError(f"infinity.mesh({device_type!r}) is not supported: use 'cuda' or 'cpu'")
    if device_type == "cuda" and (choose or "LOCAL_RANK" in os.environ):
        index, there = torchrun.number("LOCAL_RANK", 0), torch.cuda.device_count()
        if index >= there:
            raise ConfigError(
                f"no GPU is left for local rank {index}: this node has {there}; start at most one rank per GPU"
            )
        torch.cuda.set_device(index)
