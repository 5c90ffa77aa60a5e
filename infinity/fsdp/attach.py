"""Attachment: replaces the shards of a sharded model by paged ones and listens to gathers and gradients."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from infinity import torch_private
from infinity.errors import UnsupportedError
from infinity.fsdp.conversions import refuse_conversions
from infinity.fsdp.gradient import Gradient, PagedGradient
from infinity.fsdp.shard import PagedShard, ShardHandle, ShardSource
from infinity.fsdp.sharded_model import Member, ShardedModel, check_gradient_dtype
from infinity.telemetry.ledger import Ledger


class ModelListener(Protocol):
    """Who runs steps: is told what the model does."""

    def forward(self, grad_enabled: bool) -> None:
        """Note that a forward begins that is inside of no other FSDP module's, under `torch.no_grad()` or not."""

    def gradient_arrived(self, shard: int, local: torch.Tensor | None) -> Gradient | None:
        """Take over what is in `p.grad` after a reduction and the user's hooks.

        Args:
            local: of the local shape; None where a hook has dropped it.

        Returns:
            The gradient that is to be in `p.grad` from now on, if that is another.
        """


class Attachment:
    """Paged shards in place of real ones, which are gone. Hooks on what FSDP2 does with them, until `detach`."""

    def __init__(self, sharded: ShardedModel, source: ShardSource, listener: ModelListener, ledger: Ledger) -> None:
        """Attach: the model's own values are gone then.

        Args:
            source: knows the content of shards.

        Raises:
            UnsupportedError: a parameter cannot be given another value. Hooks that were made are removed.
        """
        self._members = sharded.shards
        with ExitStack() as undo:
            groups = [
                group for group, fsdp_module in zip(sharded.groups, sharded.members, strict=True) for _ in fsdp_module
            ]
            for shard, (group, member) in enumerate(zip(groups, self._members, strict=True)):
                self._attach(shard, group, member, source, listener, undo)
            # Before collectives are watched, which puts something else in the place of this; undone behind it.
            undo.callback(torch_private.reuse_reduce_buffers(sharded.groups))
            undo.callback(torch_private.watch_collectives(sharded.groups, partial(ledger.part, "collective")))
            undo.callback(refuse_conversions(sharded.model))

            running: list[nn.Module] = []  # FSDP modules of the forward that runs, the outermost first

            # The outermost tells: checkpointing runs the FSDP modules inside of it under no_grad, and computes them
            # again.
            def begin(module: nn.Module, args: Any) -> None:
                again = module is sharded.model or any(other is module for other in running)
                if again and not torch_private.in_backward():
                    running.clear()  # of a forward that was interrupted: torch calls `end` behind an `Exception` only
                if not running:
                    listener.forward(torch.is_grad_enabled())
                running.append(module)

            def end(module: nn.Module, args: Any, output: Any) -> None:
                if running and running[-1] is module:  # another hook may have failed before `begin` was called
                    running.pop()

            for module in sharded.model.modules():
                if torch_private.is_sharded_module(module):
                    undo.callback(module.register_forward_pre_hook(begin, prepend=True).remove)
                    undo.callback(module.register_forward_hook(end, always_call=True).remove)
            unchanged = torch.compiler.disable(lambda module, args: self.check())  # type: ignore[no-untyped-call]
            undo.callback(sharded.model.register_forward_pre_hook(unchanged, prepend=True).remove)
            self._undo = undo.pop_all()  # removes the hooks

    @staticmethod
    def _attach(
        index: int, group: Any, member: Member, source: ShardSource, listener: ModelListener, undo: ExitStack
    ) -> None:
        param = member.param
        current: nn.Parameter = param.sharded_param
        local = torch_private.local_tensor(param)
        handle = ShardHandle(
            source=source,
            shard=index,
            name=member.names[0],
            padded=torch_private.padded_shape(param),
            gather_dtype=torch_private.compute_dtype(param),
            device=group.device,
        )
        shard = PagedShard.stored(handle, local.shape, current.dtype, group.device)
        try:
            torch_private.replace_local_tensor(param, shard)
        except RuntimeError as error:
            raise UnsupportedError(
                f"{member.names[0]} is on the meta device and cannot be given a value, since something refers to it "
                f"weakly ({error}); call infinity.offload before what does"
            ) from error
        torch_private.watch_local_tensor(param, partial(_check, member))
        if current.requires_grad:

            def arrived(parameter: nn.Parameter) -> None:
                local = torch_private.local_gradient(parameter) if parameter.grad is not None else None
                gradient = listener.gradient_arrived(index, local)
                if gradient is not None and local is not None:
                    paged = PagedGradient(gradient, local, local.device)
                    parameter.grad = torch_private.sharded_gradient(param, paged)

            undo.callback(torch_private.on_gradient(current, arrived).remove)

    def check(self) -> None:
        """Check that all parameters are still paged.

        Raises:
            UnsupportedError: one was exchanged for another tensor, which would be trained and checkpointed nowhere.
        """
        for member in self._members:
            _check(member)

    def detach(self) -> None:
        """Remove the hooks. Shards stay paged, and FSDP2 still looks whether they are. Idempotent."""
        self._undo.close()


def _check(member: Member, exchanged: bool = False) -> None:
    """Refuse what FSDP2 would silently compute with in place of the pages, and gradients that have no page.

    Args:
        exchanged: whether another parameter was found on the module.
    """
    if exchanged or not isinstance(torch_private.local_tensor(member.param), PagedShard):
        raise UnsupportedError(
            f"{member.names[0]} is on NVMe, but another tensor was put in its place (load_state_dict(assign=True), "
            "swap_tensors, a new nn.Parameter); use p.copy_(value) or load_state_dict(assign=False)"
        )
    check_gradient_dtype(member.names[0], member.param.sharded_param)
