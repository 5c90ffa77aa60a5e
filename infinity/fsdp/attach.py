"""Attachment: replaces the shards of a sharded model by paged ones and listens to gathers and gradients."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from infinity.errors import UnsupportedError
from infinity.fsdp import private
from infinity.fsdp.content import dtype_name
from infinity.fsdp.conversions import refuse_conversions
from infinity.fsdp.first_values import Member
from infinity.fsdp.gradient import Gradient, PagedGradient
from infinity.fsdp.shard import PagedShard, ShardHome, ShardSource
from infinity.layout import HALVES, ShardSpec, StateFormat, UnitSpec

_OTHER_WRAPPERS = {"FullyShardedDataParallel", "DistributedDataParallel"}


@dataclass(frozen=True)
class ShardedModel:
    """What `fully_shard` left behind: units, their parameters, and what each looks like on this rank."""

    model: nn.Module
    names: tuple[str, ...]
    groups: tuple[Any, ...]
    members: tuple[tuple[Member, ...], ...]
    device: torch.device
    on_meta: bool

    @classmethod
    def inspect(cls, model: nn.Module) -> ShardedModel:
        """Find the units of a model.

        Raises:
            UnsupportedError: the model is not sharded, or a parameter is outside of all units; or this release of
                torch lacks what is needed of FSDP2.
        """
        if not isinstance(model, nn.Module):
            raise UnsupportedError(f"the model is of type {type(model).__name__}, which is no torch.nn.Module")
        if wrappers := _OTHER_WRAPPERS & {type(module).__name__ for module in model.modules()}:
            raise UnsupportedError(
                f"the model is wrapped in {min(wrappers)}, which keeps its weights in memory; leave that out and call "
                "fully_shard(…, mesh=infinity.mesh()) of torch.distributed.fsdp on its layers and on itself"
            )
        private.require_names(model)
        found = list(private.parameter_groups(model))
        if not found:
            raise UnsupportedError("the model is not sharded: call fully_shard on its layers and on itself first")
        names_of: dict[int, list[str]] = {}
        for name, param in model.named_parameters(remove_duplicate=False):
            names_of.setdefault(id(param), []).append(name)
            _check_gradient_dtype(name, param)
        members = []
        for name, group in found:
            if private.uses_cpu_offload(group):
                raise UnsupportedError(
                    f"unit {name} was sharded with CPUOffloadPolicy; leave offload_policy out, infinity pages instead"
                )
            if private.reshards_to_fewer_ranks(group):
                raise UnsupportedError(
                    f"unit {name} was sharded with a number for reshard_after_forward, which keeps a part of all "
                    "gathered weights in memory until backward; infinity reads them again from NVMe: pass True (or "
                    "False for units whose weights are to stay)"
                )
            members.append(
                tuple(Member(p, tuple(names_of.pop(id(p.sharded_param)))) for p in private.fsdp_params(group))
            )
        if names_of:
            left = sorted(name for names in names_of.values() for name in names)
            raise UnsupportedError(f"parameters outside of all units: {', '.join(left)}; call fully_shard(model) too")
        if any(isinstance(private.local_tensor(member.param), PagedShard) for unit in members for member in unit):
            raise UnsupportedError("the model is offloaded already; build it anew to offload it again")
        devices = {member.param.sharded_param.device.type for unit in members for member in unit}
        return cls(
            model=model,
            names=tuple(name for name, _ in found),
            groups=tuple(group for _, group in found),
            members=tuple(members),
            device=found[0][1].device,
            on_meta="meta" in devices,
        )

    def parameters(self) -> list[list[nn.Parameter]]:
        """Return the sharded parameters, unit by unit."""
        return [[member.param.sharded_param for member in unit] for unit in self.members]

    def describe(
        self,
        format_of: Callable[[nn.Parameter, str], StateFormat],
        row_of: Callable[[Member], int] = lambda _: 1,
    ) -> tuple[list[UnitSpec], dict[str, StateFormat]]:
        """Return the units and state formats from which pages are laid out.

        Args:
            format_of: state format of a trainable parameter, given the dtype it is gathered in.
            row_of: elements of a row of a trainable parameter that no page may cut; 1 where there is none.
        """
        units: list[UnitSpec] = []
        formats: dict[str, StateFormat] = {}
        for name, members in zip(self.names, self.members, strict=True):
            shards = []
            for member in members:
                param = member.param.sharded_param
                gather = dtype_name(private.compute_dtype(member.param))
                own = dtype_name(param.dtype)
                fmt = format_of(param, gather) if param.requires_grad else StateFormat(param=gather)
                # Alone, a rank gets each gradient in the dtype in which it was computed: its lower half may be zero.
                halves = (gather, own) == (HALVES[0], "float32") and not private.reduces(member.param)
                grads = (HALVES if halves else (own,)) if param.requires_grad else ()
                fmt = replace(fmt, master="" if own == gather else own, grads=grads)
                key = f"{'trained' if param.requires_grad else 'frozen'} {own} {fmt}"
                row = row_of(member) if param.requires_grad else 1
                key += " rows" if row > 1 else ""
                formats[key] = fmt
                shards.append(
                    ShardSpec(
                        name=member.names[0],
                        numel=private.local_tensor(member.param).numel(),
                        padded=private.padded_shape(member.param).numel(),
                        segment_key=key,
                        trainable=param.requires_grad,
                        row=row,
                    )
                )
            units.append(UnitSpec(name=name, shards=tuple(shards)))
        return units, formats


class Attachment:
    """Paged shards in place of real ones, and hooks on what FSDP2 does with them."""

    def __init__(
        self,
        sharded: ShardedModel,
        source: ShardSource,
        *,
        gradient_arrived: Callable[[int, torch.Tensor | None], Gradient | None],
        part: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self._handles: list[Any] = []
        self.parameters: list[nn.Parameter] = []
        self._grad_enabled = True
        self._frozen: list[list[tuple[str, nn.Parameter]]] = []  # by unit, by name
        index = 0
        for group, members in zip(sharded.groups, sharded.members, strict=True):
            self._frozen.append([])
            for member in members:
                param = self._attach(index, group, member, source, gradient_arrived)
                self.parameters.append(param)
                if not param.requires_grad:
                    self._frozen[-1].append((member.names[0], param))
                index += 1
        private.reuse_reduce_buffers(sharded.groups)
        private.watch_collectives(sharded.groups, lambda: part("collective"))
        self._allow_conversions = refuse_conversions(sharded.model)
        self._members = [member for unit in sharded.members for member in unit]
        for module in sharded.model.modules():
            if private.is_sharded_module(module):
                self._handles.append(module.register_forward_pre_hook(self._note_grad_mode, prepend=True))
        unchanged = torch.compiler.disable(lambda module, args: self.check())  # type: ignore[no-untyped-call]
        self._handles.append(sharded.model.register_forward_pre_hook(unchanged, prepend=True))

    def _attach(
        self,
        index: int,
        group: Any,
        member: Member,
        source: ShardSource,
        gradient_arrived: Callable[[int, torch.Tensor | None], Gradient | None],
    ) -> nn.Parameter:
        param = member.param
        current: nn.Parameter = param.sharded_param
        local = private.local_tensor(param)
        home = ShardHome(
            source=source,
            shard=index,
            name=member.names[0],
            padded=private.padded_shape(param),
            gather_dtype=private.compute_dtype(param),
            device=group.device,
        )
        shard = PagedShard.stored(home, local.shape, current.dtype, group.device)
        try:
            private.replace_local_tensor(param, shard)
        except RuntimeError as error:
            raise UnsupportedError(
                f"{member.names[0]} is on the meta device and cannot be given a value, since something refers to it "
                f"weakly ({error}); call infinity.offload before what does"
            ) from error
        private.watch_local_tensor(param, partial(_check, member))
        if current.requires_grad:

            def arrived(parameter: nn.Parameter) -> None:
                local = private.local_gradient(parameter) if parameter.grad is not None else None
                gradient = gradient_arrived(index, local)
                if gradient is not None and local is not None:
                    paged = PagedGradient(gradient, local, local.device)
                    parameter.grad = private.sharded_gradient(param, paged)

            self._handles.append(private.on_gradient(current, arrived))
        return current

    def _note_grad_mode(self, module: nn.Module, args: Any) -> None:
        self._grad_enabled = torch.is_grad_enabled()

    def check(self) -> None:
        """Check that all parameters are still paged.

        Raises:
            UnsupportedError: one was exchanged for another tensor, which would be trained and committed nowhere.
        """
        for member in self._members:
            _check(member)

    @property
    def training_pass(self) -> bool:
        """Whether the pass that is running belongs to a training step (not to an evaluation under no_grad)."""
        return self._grad_enabled or private.in_backward()

    def check_frozen(self, unit: int) -> None:
        """Check that a unit is not to train what it was offloaded without.

        Raises:
            UnsupportedError: it is.
        """
        for name, param in self._frozen[unit]:
            if param.requires_grad:
                raise UnsupportedError(
                    f"{name} was frozen when the model was offloaded, so it has no optimizer state, and requires a "
                    "gradient now: call requires_grad_(True) before infinity.offload (it may be frozen again later)"
                )

    def detach(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._allow_conversions()


def _check_gradient_dtype(name: str, param: nn.Parameter) -> None:
    if private.has_gradient_dtype(param):
        raise UnsupportedError(
            f"{name} has grad_dtype = {param.grad_dtype}, but the gradients of offloaded parameters are kept in the "
            f"dtype of the parameter: set {name}.grad_dtype = {param.dtype}, or leave it"
        )


def _check(member: Member, exchanged: bool = False) -> None:
    """Refuse what FSDP2 would silently compute with in place of the pages, and gradients that have no page.

    Args:
        exchanged: whether another parameter was found on the module.
    """
    if exchanged or not isinstance(private.local_tensor(member.param), PagedShard):
        raise UnsupportedError(
            f"{member.names[0]} is on NVMe, but another tensor was put in its place (load_state_dict(assign=True), "
            "swap_tensors, a new nn.Parameter); use p.copy_(value) or load_state_dict(assign=False)"
        )
    _check_gradient_dtype(member.names[0], member.param.sharded_param)
