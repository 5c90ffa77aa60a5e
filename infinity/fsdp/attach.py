"""Attachment: replaces the shards of a sharded model by paged ones and listens to gathers and gradients."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn

from infinity.errors import UnsupportedError
from infinity.fsdp import private
from infinity.fsdp.conversions import refuse_conversions
from infinity.fsdp.gradient import Gradient, PagedGradient
from infinity.fsdp.shard import PagedShard, ShardHome, ShardSource
from infinity.fsdp.sharded_model import Member, ShardedModel, check_gradient_dtype


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
    check_gradient_dtype(member.names[0], member.param.sharded_param)
