"""Attach paged shards to a sharded model, and listen to its gathers and gradients."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from infinity import torch_private
from infinity.errors import UnsupportedError
from infinity.fsdp.conversions import check_conversions
from infinity.fsdp.gradient import Gradient, PagedGradient
from infinity.fsdp.shard import PagedShard, ShardHandle, ShardSource
from infinity.fsdp.sharded_model import Member, ShardedModel, check_gradient_dtype
from infinity.telemetry.ledger import Ledger


class ModelListener(Protocol):
    """Receiver of the events of a model's training step."""

    def forward(self, grad_enabled: bool) -> None:
        """Note the beginning of an outermost forward, that is, one that no other FSDP module's forward contains.

        Args:
            grad_enabled: Whether grad mode is enabled.
        """

    def gradient_arrived(self, shard: int, local: torch.Tensor | None) -> Gradient | None:
        """Take over the gradient in `p.grad` after its reduction and after the user's hooks.

        Args:
            shard: Index of the shard.
            local: Gradient of the local shape. ``None`` if a hook has dropped it.

        Returns:
            The gradient that `p.grad` holds from now on, or ``None`` to leave `p.grad` unchanged.
        """


class Attachment:
    """Paged shards that replace the local tensors of a model, and hooks on FSDP2 that remain until `detach`."""

    def __init__(self, sharded: ShardedModel, source: ShardSource, listener: ModelListener, ledger: Ledger) -> None:
        """Attach to a model. The previous values of its parameters are lost.

        Args:
            sharded: Model to attach to.
            source: Content of the shards.
            listener: Receiver of the model's events.
            ledger: Ledger that records the time of collectives.

        Raises:
            UnsupportedError: If the local tensor of a parameter cannot be replaced. Hooks set so far are removed.
        """
        self._members = sharded.shards
        with ExitStack() as undo:
            groups = [
                group for group, fsdp_module in zip(sharded.groups, sharded.members, strict=True) for _ in fsdp_module
            ]
            for shard, (group, member) in enumerate(zip(groups, self._members, strict=True)):
                self._attach(shard, group, member, source, listener, undo)
            # Must come before watch_collectives, which wraps these collectives, and is therefore undone after it.
            undo.callback(torch_private.reuse_reduce_buffers(sharded.groups))
            undo.callback(torch_private.watch_collectives(sharded.groups, partial(ledger.part, "collective")))
            undo.callback(check_conversions(sharded.model))

            running: list[nn.Module] = []  # FSDP modules of the running forward, outermost first

            # Only the outermost FSDP module notifies the listener, because checkpointing runs inner ones under no_grad
            # and recomputes them.
            def begin(module: nn.Module, args: Any) -> None:
                again = module is sharded.model or any(other is module for other in running)
                if again and not torch_private.in_backward():
                    running.clear()  # left by an interrupted forward: torch calls `end` after an `Exception` only
                if not running:
                    listener.forward(torch.is_grad_enabled())
                running.append(module)

            def end(module: nn.Module, args: Any, output: Any) -> None:
                if running and running[-1] is module:  # another hook may have failed before `begin`
                    running.pop()

            for module in sharded.model.modules():
                if torch_private.is_sharded_module(module):
                    undo.callback(module.register_forward_pre_hook(begin, prepend=True).remove)
                    undo.callback(module.register_forward_hook(end, always_call=True).remove)
            unchanged = torch.compiler.disable(lambda module, args: self.check())  # type: ignore[no-untyped-call]
            undo.callback(sharded.model.register_forward_pre_hook(unchanged, prepend=True).remove)
            self._undo = undo.pop_all()

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
                f"{member.names[0]} is on the meta device and cannot be replaced because a weak reference to it exists "
                f"({error}); call infinity.offload before creating that reference"
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
            UnsupportedError: If a parameter was replaced by another tensor, which would be neither trained nor
                checkpointed.
        """
        for member in self._members:
            _check(member)

    def detach(self) -> None:
        """Remove the hooks. Shards stay paged, and FSDP2 still checks that they are. Idempotent."""
        self._undo.close()


def _check(member: Member, exchanged: bool = False) -> None:
    """Reject a tensor that replaces the pages of a parameter, and a gradient dtype that pages do not support.

    FSDP2 would silently compute with the other tensor.

    Args:
        member: Parameter to check.
        exchanged: Whether the module held a different parameter.
    """
    if exchanged or not isinstance(torch_private.local_tensor(member.param), PagedShard):
        raise UnsupportedError(
            f"{member.names[0]} is on NVMe, but was replaced by another tensor (load_state_dict(assign=True), "
            "swap_tensors, a new nn.Parameter); use p.copy_(value) or load_state_dict(assign=False)"
        )
    check_gradient_dtype(member.names[0], member.param.sharded_param)
