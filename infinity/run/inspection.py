"""Checks and decisions that precede the opening of a run: the optimizer, the page layout and the memory budget."""

from __future__ import annotations

import inspect
import logging
import math
from contextlib import suppress
from functools import partial
from operator import attrgetter

import torch
from torch import nn

from infinity import torch_private
from infinity.budget import Budget, choose_budget
from infinity.config import Config
from infinity.content.compiled import prepare
from infinity.content.layout import Layout
from infinity.errors import BudgetError, ConfigError, UnsupportedError
from infinity.fsdp.sharded_model import Member, ShardedModel, UpdateExtent
from infinity.memory.device import open_device
from infinity.memory.limits import default_host_cache
from infinity.optim.kernel import UpdateKernel
from infinity.optim.multi_optimizer import owner
from infinity.optim.slicing_check import view_shape
from infinity.processor import crawls_in_bf16
from infinity.ranks import Ranks

_log = logging.getLogger("infinity")
_OF_ALL_RANKS = (
    "state.format",
    "update.schedule",
    "run.seed",
    "run.resume",
    "run.resume_step",
    "run.resume_replica",
    "run.retained_checkpoints",
    "run.keep",
)
"""Settings that must be equal on all ranks. Other settings, such as paths and memory limits, may differ between ranks.
"""


def check_agreement(settings: Config, ranks: Ranks, **arguments: bool) -> None:
    """Check that all ranks request the same run.

    All ranks must call it together, before a rank that resumes could start to wait for the others.

    Args:
        arguments: boolean arguments of `infinity.offload`, and whether its optional arguments were passed.

    Raises:
        ConfigError: on all ranks, if the settings or arguments differ.
    """
    asked: dict[str, object] = {name: attrgetter(name)(settings) for name in _OF_ALL_RANKS}
    first, *others = ranks.collect({**asked, **arguments})
    for rank, other in enumerate(others, 1):
        for name, value in other.items():
            if value != first[name]:
                kind = "argument" if name in arguments else "setting"
                raise ConfigError(
                    f"the {kind} {name} differs between ranks: {first[name]!r} on rank 0, {value!r} on rank {rank}. "
                    "Start all ranks with the same value."
                )


def warn_of_bf16(sharded: ShardedModel) -> None:
    """Warn if the model computes in bf16 on a processor for which torch has no optimized bf16 kernels."""
    computed = any(torch_private.compute_dtype(member.param) is torch.bfloat16 for member in sharded.shards)
    if computed and sharded.device.type == "cpu" and crawls_in_bf16():
        _log.warning(
            "the model computes in bf16, for which torch has no optimized kernels on this processor (no AVX-512): "
            "steps take up to 100 times as long as in fp32; shard the model with mp_policy=MixedPrecisionPolicy() and "
            "omit --bf16 true"
        )


def check_optimizer(sharded: ShardedModel, optimizer: torch.optim.Optimizer) -> None:
    """Check that an optimizer covers exactly the trainable parameters of a model.

    Call it before `make_kernel` tests the optimizer on small copies of its parameters.

    Raises:
        ConfigError: if a setting of a param group is not finite.
        UnsupportedError: if the object is not a `torch.optim.Optimizer`, contains parameters of a different model, or
            lacks trainable parameters of this one.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UnsupportedError(f"the optimizer is a {type(optimizer).__name__}, not a torch.optim.Optimizer")
    # Some optimizers use an infinite default to mean "no limit", for example on the growth of an estimate.
    for group in optimizer.param_groups:
        defaults = inspect.signature(type(owner(optimizer, group)).__init__).parameters
        for name, value in group.items():
            standard = name in defaults and defaults[name].default == value
            if isinstance(value, float) and not math.isfinite(value) and not standard:
                raise ConfigError(f"{name} = {value} in the optimizer is not finite. Set it to a finite number.")
    known = {id(param) for params in (*sharded.parameters(), sharded.ignored.values()) for param in params}
    optimized = {id(param) for group in optimizer.param_groups for param in group["params"]}
    if foreign := len(optimized - known):
        raise UnsupportedError(
            f"the optimizer contains parameters that do not belong to the model ({foreign}). Create the optimizer "
            "after fully_shard."
        )
    for members in sharded.members:
        for member in members:
            param = member.param.sharded_param
            if param.requires_grad and id(param) not in optimized:
                raise UnsupportedError(
                    f"{member.names[0]} requires a gradient but is not in the optimizer. Add it, or freeze it with "
                    "requires_grad_(False)."
                )


def no_updates(sharded: ShardedModel) -> torch.optim.Optimizer:
    """Return an optimizer for a model that is not trained.

    Raises:
        UnsupportedError: if a parameter requires a gradient. The message names it.
    """
    named = [(member.names[0], member.param.sharded_param) for member in sharded.shards]
    for name, param in (*named, *sharded.ignored.items()):
        if param.requires_grad:
            raise UnsupportedError(
                f"the optimizer is None, but {name} requires a gradient. Pass an optimizer, or freeze the "
                "model with requires_grad_(False) before infinity.offload."
            )
    return torch.optim.SGD(sharded.model.parameters(), lr=0.0)


def plan_memory(
    settings: Config,
    sharded: ShardedModel,
    kernel: UpdateKernel,
    ranks: Ranks,
    checkpointed: int = 0,
) -> Budget:
    """Compute this rank's page layout, and divide its part of host memory into cache slots.

    Args:
        checkpointed: page size in bytes of the checkpoint to resume from, or 0. It is used if `memory.page_bytes` is
            not set and there is enough memory.

    Raises:
        BudgetError: if the host cache is too small.
        ConfigError: if `state.format` would have no effect, or `activations.tier` requires a GPU.
        UnsupportedError: if pages cannot be divided as the optimizer requires.
    """

    def kinds_of(param: nn.Parameter) -> tuple[tuple[str, str], ...]:
        return kernel.discover(param).kinds

    def extent_of(member: Member) -> UpdateExtent:
        param = member.param.sharded_param
        slices = kernel.discover(param).slices
        if slices not in ("rows", "whole"):
            return UpdateExtent()
        why, whole = "", slices == "whole"
        _, size = torch_private.shard_rank_and_size(member.param)
        if torch_private.is_tensor_parallel(member.param) or (
            torch_private.shard_dim(member.param) and (size > 1 or not whole)
        ):
            why = f"{member.names[0]} is not sharded along its first dimension"
        elif settings.state.format != "fp32" and not whole:
            why = 'this requires state.format = "fp32"'
        if why:
            kind = "parameters, which are assembled from the rows on all ranks" if whole else "rows"
            raise UnsupportedError(
                f"{kernel.name} is not supported here: it updates whole {kind}, but {why}. Use an element-wise "
                "optimizer such as AdamW."
            )
        if whole:
            return UpdateExtent(whole=math.prod(torch_private.full_shape(member.param)))
        return UpdateExtent(row=math.prod(torch_private.local_tensor(member.param).shape[1:]))

    fsdp_modules, formats = sharded.describe(kinds_of, extent_of, settings.state.format)
    if settings.state.format != "fp32" and not any(fmt.encodings for fmt in formats.values()):
        raise ConfigError(
            f'state.format = "{settings.state.format}" has no effect on this model: "split" requires bf16 weights '
            "with fp32 master weights (MixedPrecisionPolicy(param_dtype=torch.bfloat16) on an fp32 model); the other "
            'formats require that, or fp32 optimizer state. Set state.format to "fp32".'
        )
    host = settings.memory.host_bytes or default_host_cache(ranks.local_world_size)
    device = open_device(sharded.device).asynchronous
    if settings.activations.tier == "host" and not device:
        raise ConfigError(
            'activations.tier = "host" requires a model on a GPU, but this model is on the CPU. Set "nvme" or "device".'
        )
    choose = partial(choose_budget, fsdp_modules, formats, host, device=device, activations=settings.activations)
    if checkpointed and not settings.memory.page_bytes:
        with suppress(BudgetError):
            return choose(checkpointed)
    return choose(settings.memory.page_bytes)


def prepare_encodings(settings: Config, layout: Layout, ranks: Ranks) -> None:
    """Before the first step, compile the kernels that encode the state of a layout. Warn if they are unavailable."""
    if not any(segment.format.encoded for segment in layout.segments):
        return
    found = prepare()
    if found.kernels is None and ranks.local_rank == 0:
        _log.warning(
            'state.format = "%s" is encoded without compiled kernels, which gives identical bits but is several times '
            "slower: %s",
            settings.state.format,
            found.reason,
        )


def shared_slices(kernel: UpdateKernel, sharded: ShardedModel) -> dict[int, tuple[tuple[int, ...], int]]:
    """Return the shards that are updated as full parameters and are distributed across several ranks.

    Returns:
        For each of these shards, the ranks that hold its slices, and the index of this rank among them.
    """
    found = {}
    for shard, member in sharded.paged_shards.items():
        param = member.param.sharded_param
        at, size = torch_private.shard_rank_and_size(member.param)
        if size > 1 and param.requires_grad and kernel.discover(param).slices == "whole":
            found[shard] = torch_private.shard_ranks(member.param), at
    return found


def check_exchange(settings: Config, kernel: UpdateKernel) -> None:
    """Check that the settings allow updates in which ranks exchange data.

    Raises:
        ConfigError: if a setting rules them out.
    """
    why = f"{kernel.name} updates whole parameters, so the ranks exchange slices during updates"
    if settings.update.schedule == "in_forward":
        raise ConfigError(
            f'update.schedule = "in_forward" is not supported here: {why}, but a rank may reach an update in the next '
            'forward before the others do. Set "auto", "in_backward" or "after_backward".'
        )
    if settings.update.device == "cuda":
        raise ConfigError(
            f'update.device = "cuda" requires a single rank here: {why}. Set update.device to "auto" or "cpu".'
        )


def give_shapes(kernel: UpdateKernel, sharded: ShardedModel) -> None:
    """Set the slice shapes in `kernel.shapes` for the shards that are not updated as flat vectors."""
    for shard, member in sharded.paged_shards.items():
        param = member.param.sharded_param
        if param.requires_grad:
            slices = kernel.discover(param).slices
            whole = slices == "whole"
            of = torch_private.full_shape(member.param) if whole else torch_private.local_tensor(member.param).shape
            shape = view_shape(slices, of)
            if shape is not None:
                kernel.shapes[shard] = shape
