"""Describe a model on which `fully_shard` was called: its FSDP modules, their parameters, and this rank's slices."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor

from infinity import torch_private
from infinity.content.format import StateFormat
from infinity.content.layout import FSDPModuleSpec, ShardSpec
from infinity.content.spans import Spans, chunk, full_spans, overlaps, sizes_of
from infinity.content.views import dtype_name
from infinity.errors import UnsupportedError
from infinity.fsdp.offload_policy import NVMeOffloadPolicy
from infinity.fsdp.shard import PagedShard
from infinity.schedule.predicted_trace import expected_events
from infinity.schedule.trace import Event
from infinity.units import MIB, format_size


@dataclass(frozen=True)
class Member:
    """Parameter of an FSDP module: its `FSDPParam` object, and all names under which the model contains it."""

    param: Any
    names: tuple[str, ...]


@dataclass(frozen=True)
class UpdateExtent:
    """Number of elements that an update must process together, if it is not element-wise. See `ShardSpec`."""

    row: int = 1
    """Number of elements per row, or 1 if the update does not need complete rows."""
    whole: int = 0
    """Number of elements of the full parameter, or 0 if the update does not need the full parameter."""

    @property
    def slices(self) -> str:
        """Kind of slices that the update processes, as in `StateFormat.key`."""
        return "whole" if self.whole else "rows" if self.row > 1 else ""


IGNORED_BYTES = 16 * MIB
"""Maximum total size of the parameters that belong to no FSDP module."""
_SHOWN = 3  # maximum number of names in a message
_OTHER_WRAPPERS = {"FullyShardedDataParallel", "DistributedDataParallel"}


@dataclass(frozen=True)
class ShardedModel:
    """A model on which `fully_shard` was called, with its FSDP modules and their parameters."""

    model: nn.Module
    names: tuple[str, ...]
    """Names of the FSDP modules, in FSDP2's order."""
    groups: tuple[Any, ...]
    """FSDP2 parameter group of each FSDP module."""
    members: tuple[tuple[Member, ...], ...]
    """Parameters of each FSDP module, in all-gather order."""
    device: torch.device
    """Compute device."""
    on_meta: bool
    """Whether any parameter is on the meta device."""
    outermost: nn.Module
    """Module that contains the model, such as a LightningModule, or the model itself."""
    ignored: Mapping[str, nn.Parameter]
    """Parameters that belong to no FSDP module, by name: the `ignored_params` of `fully_shard`."""
    in_memory: frozenset[int] = frozenset()
    """FSDP modules that stay in memory, because only others were sharded with `NVMeOffloadPolicy`."""
    of_closed_run: bool = False
    """Whether the model was offloaded before and its run was closed, so that only a checkpoint has its values."""

    @classmethod
    def inspect(cls, model: nn.Module, outermost: nn.Module | None = None) -> ShardedModel:
        """Find the FSDP modules of a model.

        Args:
            outermost: Module that contains the model. Default: the model itself.

        Raises:
            UnsupportedError: If the model is not sharded, if a parameter does not belong to any FSDP module, or if this
                PyTorch release lacks a required part of FSDP2.
        """
        if not isinstance(model, nn.Module):
            raise UnsupportedError(f"the model must be a torch.nn.Module, but is of type {type(model).__name__}")
        if wrappers := _OTHER_WRAPPERS & {type(module).__name__ for module in model.modules()}:
            raise UnsupportedError(
                f"the model is wrapped in {min(wrappers)}, which keeps its weights in memory; remove the wrapper, and "
                "call torch.distributed.fsdp.fully_shard(…, mesh=infinity.mesh()) on its layers and on the model"
            )
        torch_private.require_names(model)
        _reject_quantized_modules(model)
        found = list(torch_private.parameter_groups(model))
        if not found:
            raise UnsupportedError(
                "the model is not sharded; create it with infinity.from_pretrained or infinity.from_config, or call "
                "fully_shard on its layers and on the model first"
            )
        torch_private.take_over_replaced(group for _, group in found)
        names_of: dict[int, list[str]] = {}
        for name, param in model.named_parameters(remove_duplicate=False):
            names_of.setdefault(id(param), []).append(name)
            check_gradient_dtype(name, param)
        members = []
        for name, group in found:
            if isinstance(torch_private.offload_policy(group), CPUOffloadPolicy):
                raise UnsupportedError(
                    f"FSDP module {name} was sharded with CPUOffloadPolicy, which paging replaces; "
                    "remove the offload_policy argument, or pass infinity.NVMeOffloadPolicy()"
                )
            if torch_private.reshards_to_fewer_ranks(group):
                raise UnsupportedError(
                    f"FSDP module {name} was sharded with an integer reshard_after_forward, which keeps part of the "
                    "gathered weights in memory until backward; pass True, or False for FSDP modules whose weights "
                    "should stay gathered"
                )
            for param in torch_private.fsdp_params(group):
                if id(param.sharded_param) not in names_of:
                    module, key = torch_private.owner(param)
                    raise UnsupportedError(
                        f"{key} of a {torch_private.original_class(module).__name__} in FSDP module {name} is not the "
                        "parameter that fully_shard sharded; tie or replace parameters before calling fully_shard"
                    )
            members.append(
                tuple(Member(p, tuple(names_of.pop(id(p.sharded_param)))) for p in torch_private.fsdp_params(group))
            )
        ignored = {names[0]: model.get_parameter(names[0]) for names in names_of.values()}
        _check_ignored(model, ignored)
        paged = [
            local
            for fsdp_module in members
            for member in fsdp_module
            if isinstance(local := torch_private.local_tensor(member.param), PagedShard)
        ]
        if any(not shard.handle.source.closed for shard in paged):
            raise UnsupportedError("the model is already offloaded; build a new model to offload it again")
        for fsdp_module in members:
            for member in fsdp_module:
                _reject_composite(member)
            _reject_mixed_dtypes(fsdp_module)
        devices = {member.param.sharded_param.device.type for fsdp_module in members for member in fsdp_module}
        return cls(
            model=model,
            names=tuple(name for name, _ in found),
            groups=tuple(group for _, group in found),
            members=tuple(members),
            device=found[0][1].device,
            on_meta="meta" in devices,
            outermost=outermost or model,
            ignored=ignored,
            in_memory=_in_memory([group for _, group in found]),
            of_closed_run=bool(paged),
        )

    @cached_property
    def shards(self) -> tuple[Member, ...]:
        """All parameters, in the order of their shards."""
        return tuple(member for fsdp_module in self.members for member in fsdp_module)

    @property
    def paged_shards(self) -> dict[int, Member]:
        """Parameters of the FSDP modules that are offloaded, by shard."""
        return {shard: member for shard, member in enumerate(self.shards) if shard not in self.shards_in_memory}

    @cached_property
    def shards_in_memory(self) -> dict[int, Member]:
        """Parameters of the FSDP modules that stay in memory, by shard."""
        numbers = [number for number, fsdp_module in enumerate(self.members) for _ in fsdp_module]
        return {shard: self.shards[shard] for shard, number in enumerate(numbers) if number in self.in_memory}

    def parameters(self) -> list[list[nn.Parameter]]:
        """Return the sharded parameters of each FSDP module."""
        return [[member.param.sharded_param for member in fsdp_module] for fsdp_module in self.members]

    def expected_step(self, *, alone: bool) -> tuple[Event, ...]:
        """Return the expected events of a training step that uses the FSDP modules in model order.

        Args:
            alone: Whether there is only one rank.
        """
        fsdp_modules = self.parameters()
        root = self.names[0] == torch_private.ROOT
        of_root = {id(param) for param in fsdp_modules[0]} if root else set()
        of_model = {id(param) for fsdp_module in fsdp_modules for param in fsdp_module}
        sharded = (param for param in self.model.parameters() if id(param) in of_model)
        before = itertools.takewhile(lambda param: id(param) in of_root, sharded)
        events = expected_events(
            [any(param.requires_grad for param in fsdp_module) for fsdp_module in fsdp_modules],
            root=root,
            embeds=any(param.requires_grad for param in before),
            alone=alone,
        )
        return tuple(event for event in events if event.fsdp_module not in self.in_memory)

    def describe(
        self,
        kinds_of: Callable[[nn.Parameter], tuple[tuple[str, str], ...]],
        reach_of: Callable[[Member], UpdateExtent] = lambda _: UpdateExtent(),
        stored_as: str = "fp32",
    ) -> tuple[list[FSDPModuleSpec], dict[str, StateFormat]]:
        """Return the FSDP modules and state formats that determine the layout of pages.

        Args:
            kinds_of: Function that returns the (name, dtype) of each element-wise optimizer state of a trainable
                parameter.
            reach_of: Function that returns the extent that the update of a trainable parameter must process together.
            stored_as: Value of `state.format`. It does not apply to FSDP modules that stay in memory, whose pages hold
                a copy of their state as it is in memory.
        """
        fsdp_modules: list[FSDPModuleSpec] = []
        formats: dict[str, StateFormat] = {}
        for number, (name, members) in enumerate(zip(self.names, self.members, strict=True)):
            shards, in_memory = [], number in self.in_memory
            for member in members:
                param = member.param.sharded_param
                own = dtype_name(param.dtype)
                gather = own if in_memory else dtype_name(torch_private.compute_dtype(member.param))
                trainable = param.requires_grad
                kinds = kinds_of(param) if trainable else ()
                alone = not torch_private.reduces(member.param)
                fmt = StateFormat.of(own, gather, kinds, trainable=trainable, alone=alone)
                reach = reach_of(member) if trainable and not in_memory else UpdateExtent()
                key = fmt.key(own, trainable=trainable, slices="in memory" if in_memory else reach.slices)
                formats[key] = fmt if in_memory else fmt.stored_as(stored_as)
                shards.append(
                    ShardSpec(
                        name=member.names[0],
                        numel=torch_private.local_tensor(member.param).numel(),
                        padded=torch_private.padded_shape(member.param).numel(),
                        segment_key=key,
                        trainable=trainable,
                        row=reach.row,
                        whole=reach.whole,
                    )
                )
            fsdp_modules.append(FSDPModuleSpec(name=name, shards=tuple(shards)))
        return fsdp_modules, formats


def _in_memory(groups: Sequence[Any]) -> frozenset[int]:
    """Return the indices of the groups that stay in memory. See `NVMeOffloadPolicy`."""
    offloaded = [isinstance(torch_private.offload_policy(group), NVMeOffloadPolicy) for group in groups]
    return frozenset(number for number, on_nvme in enumerate(offloaded) if not on_nvme and any(offloaded))


_UNQUANTISED = (
    "load the base model in bfloat16 without quantization_config, and quantize its layers with "
    "infinity.formats.quantized.quantize_, or leave it in bfloat16 (4 bytes read per parameter per step)"
)


def _check_ignored(model: nn.Module, ignored: Mapping[str, nn.Parameter]) -> None:
    """Check that parameters that belong to no FSDP module can stay in memory."""

    def of_adapter(name: str) -> bool:
        parts = name.split(".")
        around = (model.get_submodule(".".join(parts[:end])) for end in range(len(parts)))
        return any(hasattr(type(module), "adapter_layer_names") for module in around)

    adapters = sorted(filter(of_adapter, ignored))
    names = adapters or sorted(ignored)
    shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    if adapters:
        raise UnsupportedError(
            "these peft adapter parameters were added after fully_shard and do not belong to any FSDP module: "
            f"{shown}; pass the adapter configuration to infinity.from_pretrained or from_config (adapters=), or call "
            "get_peft_model before fully_shard (docs/how-to/lora.md)"
        )
    if names and not torch_private.is_sharded_module(model):
        raise UnsupportedError(
            f"these parameters do not belong to any FSDP module: {shown}; call fully_shard(model) too"
        )
    nbytes = sum(param.nbytes for param in ignored.values())
    if nbytes > IGNORED_BYTES or any(isinstance(param, DTensor) for param in ignored.values()):
        raise UnsupportedError(
            f"these parameters were passed to fully_shard as ignored_params or added after it: {shown} "
            f"({format_size(nbytes)}); they stay in memory and must be plain tensors of at most "
            f"{format_size(IGNORED_BYTES)} together. Pass larger ones to fully_shard."
        )


def _reject_quantized_modules(model: nn.Module) -> None:
    """Reject bitsandbytes modules, whose quantization state is not part of the parameter.

    `fully_shard` replaces the parameter with a DTensor and loses that state.
    """
    for name, module in model.named_modules():
        cls = torch_private.original_class(module)
        if cls.__module__.partition(".")[0] == "bitsandbytes" and any(True for _ in module.parameters(recurse=False)):
            raise UnsupportedError(
                f"{name} is quantized by bitsandbytes ({cls.__name__}), whose scales are not part of its parameters "
                f"and are lost under fully_shard; {_UNQUANTISED}"
            )


def _reject_composite(member: Member) -> None:
    """Reject a tensor subclass that consists of several tensors, such as a quantized weight."""
    local = torch_private.local_tensor(member.param)
    if hasattr(type(local), "__tensor_flatten__") and not isinstance(local, PagedShard):
        raise UnsupportedError(
            f"{member.names[0]} is of type {type(local).__name__}, which consists of several tensors, but pages hold "
            f"plain elements; {_UNQUANTISED}"
        )


def _reject_mixed_dtypes(members: tuple[Member, ...]) -> None:
    """Reject trainable parameters of different dtypes in an FSDP module. FSDP2 would only fail in the first forward."""
    of_dtype = {
        member.param.sharded_param.dtype: member.names[0]
        for member in members
        if member.param.sharded_param.requires_grad
    }
    if len(of_dtype) > 1:
        shown = ", ".join(f"{name} ({dtype_name(dtype)})" for dtype, name in of_dtype.items())
        raise UnsupportedError(
            f"FSDP2 does not support trainable parameters of different dtypes in one FSDP module: {shown}; convert "
            "them to one dtype, or call fully_shard on the modules of one dtype first"
        )


def check_gradient_dtype(name: str, param: nn.Parameter) -> None:
    """Check that the gradients of a parameter have the dtype of the parameter.

    Raises:
        UnsupportedError: If `grad_dtype` differs from the dtype of the parameter.
    """
    if torch_private.has_gradient_dtype(param):
        raise UnsupportedError(
            f"{name} has grad_dtype = {param.grad_dtype}, but the gradients of offloaded parameters are stored in the "
            f"dtype of the parameter; set {name}.grad_dtype = {param.dtype}, or leave it unset"
        )


def local_spans(param: Any) -> Spans:
    """Return the spans of the slice of a full parameter that this rank holds."""
    spans = full_spans(torch_private.full_shape(param))
    for dim, index, count, parts in torch_private.parallel_chunks(param):
        spans = chunk(spans, dim, index, count, parts)
    rank, size = torch_private.shard_rank_and_size(param)
    return chunk(spans, torch_private.shard_dim(param), rank, size)


def local_slice(param: Any, whole: torch.Tensor) -> torch.Tensor:
    """Return this rank's elements of a full parameter, flat and without padding."""
    spans = local_spans(param)
    parts = [*overlaps(full_spans(whole.shape), spans)]
    if len(parts) == 1:
        return whole[parts[0][0]].reshape(-1)
    held = whole.new_empty(sizes_of(spans))
    for source, target in parts:
        held[target] = whole[source]
    return held.reshape(-1)
