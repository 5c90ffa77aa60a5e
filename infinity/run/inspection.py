"""What is looked at and decided before anything is opened: the optimizer, the layout of pages, the memory budget."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable
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
from infinity.optim.kernel import StateSpec, UpdateKernel
from infinity.optim.multi_optimizer import owner
from infinity.optim.probe import view_shape
from infinity.processor import crawls_in_bf16
from infinity.ranks import Ranks

_log = logging.getLogger("infinity")
_OF_ALL_RANKS = (
    "state.format",
    "update.schedule",
    "run.seed",
    "run.resume",
    "run.resume_step",
    "run.retained_checkpoints",
    "run.keep",
)
"""Settings that are those of the run. Others are of a rank or its node: folders, memory, engine, telemetry."""


def check_agreement(settings: Config, ranks: Ranks, **arguments: bool) -> None:
    """Check that all ranks were asked for the same run; all together, as one that resumes would wait for one that not.

    Args:
        arguments: of `infinity.offload`: whether they were given, or are set.

    Raises:
        ConfigError: they were not; on all ranks.
    """
    asked: dict[str, object] = {name: attrgetter(name)(settings) for name in _OF_ALL_RANKS}
    first, *others = ranks.collect({**asked, **arguments})
    for rank, other in enumerate(others, 1):
        for name, value in other.items():
            if value != first[name]:
                what = "whether it is given" if name in arguments else "its value"
                raise ConfigError(
                    f"{name} must be the same on all ranks: {what} is {first[name]!r} on rank 0, {value!r} on rank "
                    f"{rank}; start all ranks with the same"
                )


def warn_of_bf16(sharded: ShardedModel) -> None:
    """Say so where the model would compute in bf16 on a processor for which torch has no kernels of it."""
    computed = any(torch_private.compute_dtype(member.param) is torch.bfloat16 for member in sharded.shards)
    if computed and sharded.device.type == "cpu" and crawls_in_bf16():
        _log.warning(
            "the model computes in bf16, for which torch has plain loops only on this processor (no AVX-512): steps "
            "take up to a hundred times as long as in fp32; shard it with mp_policy=MixedPrecisionPolicy(), and leave "
            "--dtype bf16 out"
        )


def check_optimizer(sharded: ShardedModel, optimizer: torch.optim.Optimizer) -> None:
    """Check, before it is tried out, that an optimizer is over the parameters of a model that are to be trained.

    Raises:
        ConfigError: a setting of a group is no finite number.
        UnsupportedError: it is none of torch's, has parameters of another model, or lacks some of this one.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UnsupportedError(f"the optimizer is of type {type(optimizer).__name__}, no torch.optim.Optimizer")
    # Some have infinity as a default, such as for the growth of an estimate, which is no limit then.
    for group in optimizer.param_groups:
        defaults = inspect.signature(type(owner(optimizer, group)).__init__).parameters
        for name, value in group.items():
            standard = name in defaults and defaults[name].default == value
            if isinstance(value, float) and not math.isfinite(value) and not standard:
                raise ConfigError(f"{name} of the optimizer is {value}; give it a finite number")
    known = {id(param) for fsdp_module in sharded.parameters() for param in fsdp_module}
    base_optimizer = {id(param) for group in optimizer.param_groups for param in group["params"]}
    if foreign := len(base_optimizer - known):
        raise UnsupportedError(
            f"{foreign} parameters of the optimizer do not belong to the model; make the optimizer after fully_shard"
        )
    for members in sharded.members:
        for member in members:
            param = member.param.sharded_param
            if param.requires_grad and id(param) not in base_optimizer:
                raise UnsupportedError(
                    f"{member.names[0]} requires a gradient but is not in the optimizer; add it, or freeze it with "
                    "requires_grad_(False)"
                )


def _discovering(kernel: UpdateKernel, optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor], StateSpec]:
    """Return what says what is known of a parameter of the optimizer."""
    group_of = {id(param): group for group in optimizer.param_groups for param in group["params"]}
    return lambda param: kernel.discover(param, group_of[id(param)])


def plan_memory(
    settings: Config,
    sharded: ShardedModel,
    optimizer: torch.optim.Optimizer,
    kernel: UpdateKernel,
    ranks: Ranks,
    checkpointed: int = 0,
) -> Budget:
    """Lay out the pages of this rank, and divide its share of host memory into cache slots.

    Args:
        checkpointed: page size of the checkpoint to go on from, which is taken where memory has room for it and the
            settings
            name none; 0: there is none.

    Raises:
        BudgetError: the host cache is too small.
        ConfigError: `state.format` would change nothing. UnsupportedError: pages cannot be cut as the optimizer needs.
    """
    discover = _discovering(kernel, optimizer)

    def kinds_of(param: nn.Parameter) -> tuple[tuple[str, str], ...]:
        return discover(param).kinds

    def reach_of(member: Member) -> UpdateExtent:
        param = member.param.sharded_param
        slices = discover(param).slices
        if slices not in ("rows", "whole"):
            return UpdateExtent()
        why, whole = "", slices == "whole"
        _, size = torch_private.shard_rank_and_size(member.param)
        if torch_private.is_tensor_parallel(member.param) or (
            torch_private.shard_dim(member.param) and (size > 1 or not whole)
        ):
            why = f"{member.names[0]} is not cut along its first dimension only"
        elif settings.state.format != "fp32" and not whole:
            why = 'it needs state.format = "fp32"'
        if why and whole:
            raise UnsupportedError(
                f"{kernel.name} updates whole parameters (it orthogonalises them, or divides by norms), which are put "
                f"together from the rows of all ranks, and {why}; use an element-wise optimizer such as AdamW"
            )
        if why:
            raise UnsupportedError(
                f"{kernel.name} updates whole rows (it centralises gradients, or divides by norms of rows), which is "
                f"not possible here: {why}; use an element-wise optimizer such as AdamW"
            )
        if whole:
            return UpdateExtent(whole=math.prod(torch_private.full_shape(member.param)))
        return UpdateExtent(row=math.prod(torch_private.local_tensor(member.param).shape[1:]))

    fsdp_modules, found = sharded.describe(kinds_of, reach_of)
    formats = {key: fmt.stored_as(settings.state.format) for key, fmt in found.items()}
    if settings.state.format != "fp32" and not any(fmt.encodings for fmt in formats.values()):
        raise ConfigError(
            f'state.format = "{settings.state.format}" would change nothing: "split" is for bf16 weights with an fp32 '
            "master (MixedPrecisionPolicy(param_dtype=torch.bfloat16) on an fp32 model), the others also for fp32 "
            'states of the optimizer; set "fp32"'
        )
    host = settings.memory.host_bytes or default_host_cache(ranks.local_world_size)
    device = open_device(sharded.device).asynchronous
    if settings.activations.tier == "host" and not device:
        raise ConfigError(
            'activations.tier = "host" is for models that compute on a GPU: this one computes in host memory; set '
            '"nvme" or "device"'
        )
    choose = partial(choose_budget, fsdp_modules, formats, host, device=device, activations=settings.activations)
    if checkpointed and not settings.memory.page_bytes:
        with suppress(BudgetError):
            return choose(checkpointed)
    return choose(settings.memory.page_bytes)


def prepare_encodings(settings: Config, layout: Layout, ranks: Ranks) -> None:
    """Compile what encodes the state of a layout, before the first step needs it; say so where that cannot be."""
    if not any(segment.format.encoded for segment in layout.segments):
        return
    found = prepare()
    if found.kernels is None and ranks.local_rank == 0:
        _log.warning(
            'state.format = "%s" is encoded without compiled kernels, in the same bits and several times the time: %s',
            settings.state.format,
            found.reason,
        )


def shared_slices(
    kernel: UpdateKernel, sharded: ShardedModel, optimizer: torch.optim.Optimizer
) -> dict[int, tuple[tuple[int, ...], int]]:
    """Return, of shards that are updated whole and that other ranks have slices of, those ranks, and which this is."""
    discover = _discovering(kernel, optimizer)
    found = {}
    for shard, member in enumerate(sharded.shards):
        param = member.param.sharded_param
        at, size = torch_private.shard_rank_and_size(member.param)
        if size > 1 and param.requires_grad and discover(param).slices == "whole":
            found[shard] = torch_private.shard_ranks(member.param), at
    return found


def check_exchange(settings: Config, kernel: UpdateKernel) -> None:
    """Check that updates in which ranks exchange what they have can run as the settings say.

    Raises:
        ConfigError: they cannot.
    """
    why = f"{kernel.name} updates whole parameters, of which several ranks have slices, and exchanges them in updates"
    if settings.update.schedule == "in_forward":
        raise ConfigError(
            f'update.schedule = "in_forward" is not possible here: {why}, which a rank may run ahead to in the next '
            'forward while others do not; set "auto", "in_backward" or "after_backward"'
        )
    if settings.update.device == "cuda":
        raise ConfigError(f'update.device = "cuda" is for one rank here: {why}; set "auto" or "cpu"')


def give_shapes(kernel: UpdateKernel, sharded: ShardedModel, optimizer: torch.optim.Optimizer) -> None:
    """Tell the kernel the shape of slices, by shard, where the optimizer needs another than (n,)."""
    discover = _discovering(kernel, optimizer)
    for shard, member in enumerate(sharded.shards):
        param = member.param.sharded_param
        if param.requires_grad:
            slices = discover(param).slices
            whole = slices == "whole"
            of = torch_private.full_shape(member.param) if whole else torch_private.local_tensor(member.param).shape
            shape = view_shape(slices, of)
            if shape is not None:
                kernel.shapes[shard] = shape
