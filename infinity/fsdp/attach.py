"""Attach paged shards to a sharded model, and notify a listener of its forwards and gradients."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

import torch
from torch import nn

from infinity import torch_private
from infinity.errors import UnsupportedError
from infinity.fsdp.conversions import check_conversions
from infinity.fsdp.passes import ModelListener, Passes
from infinity.fsdp.shard import PagedShard, ShardHandle
from infinity.fsdp.shard_io import ShardIO
from infinity.fsdp.sharded_model import Member, ShardedModel, check_gradient_dtype
from infinity.telemetry.ledger import Ledger


class Attachment:
    """Paged shards that replace a model's local tensors, and the FSDP2 hooks that `detach` removes."""

    def __init__(
        self, sharded: ShardedModel, source: ShardIO, listener: ModelListener, ledger: Ledger, *, alone: bool
    ) -> None:
        """Attach to a model. The current values of its parameters are discarded.

        Args:
            alone: Whether there is only one rank.

        Raises:
            UnsupportedError: If a parameter's local tensor cannot be replaced. Hooks that were already set are removed.
        """
        self._members = sharded.paged_shards
        self._params = [member.param for member in self._members.values()]
        with ExitStack() as undo:
            for shard, member in self._members.items():
                self._attach(shard, sharded.device, member, source, listener, undo)
            offloaded = [group for number, group in enumerate(sharded.groups) if number not in sharded.in_memory]
            # Must come before watch_collectives, which wraps these collectives. It is undone after watch_collectives.
            undo.callback(torch_private.reuse_reduce_buffers(offloaded))
            undo.callback(torch_private.watch_collectives(sharded.groups, partial(ledger.part, "collective")))
            undo.callback(check_conversions(sharded.model))

            self.passes = Passes(sharded.model, listener, alone=alone)
            """The model's passes."""
            self.passes.observe(undo)
            unchanged = torch.compiler.disable(lambda module, args: self.check())  # type: ignore[no-untyped-call]
            undo.callback(sharded.model.register_forward_pre_hook(unchanged, prepend=True).remove)
            self._undo = undo.pop_all()

    @staticmethod
    def _attach(
        index: int, device: torch.device, member: Member, source: ShardIO, listener: ModelListener, undo: ExitStack
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
            device=device,
        )
        shard = PagedShard.stored(handle, local.shape, current.dtype, device)
        try:
            torch_private.replace_local_tensor(param, shard)
        except RuntimeError as error:
            raise UnsupportedError(
                f"{member.names[0]} is on the meta device and cannot be replaced because a weak reference to it exists "
                f"({error}); call infinity.offload before creating that reference"
            ) from error
        torch_private.watch_local_tensor(param, partial(_check, member))
        torch_private.supply_gather_input(param, handle.gather_input)
        if current.requires_grad:
            undo.callback(torch_private.on_gradient(current, partial(listener.gradient_arrived, index)))

    def check(self) -> None:
        """Check that all parameters are still paged.

        Raises:
            UnsupportedError: If a parameter was replaced with a tensor that would be neither trained nor checkpointed.
        """
        if not torch_private.all_have_local_tensors(self._params, PagedShard):
            for member in self._members.values():
                _check(member)

    def detach(self) -> None:
        """Remove the hooks. Idempotent. The shards stay paged, and replacing one still raises `UnsupportedError`."""
        self._undo.close()


def _check(member: Member, exchanged: bool = False) -> None:
    """Check that a parameter is still paged, and that pages support its gradient dtype.

    Without this check, FSDP2 would silently compute with a tensor that replaced the parameter, or with a different
    parameter that was registered on the module (`exchanged`).
    """
    if exchanged or not isinstance(torch_private.local_tensor(member.param), PagedShard):
        raise UnsupportedError(
            f"{member.names[0]} is on NVMe, but was replaced by another tensor (for example, by "
            "load_state_dict(assign=True), swap_tensors or a new nn.Parameter); use p.copy_(value) or "
            "load_state_dict(assign=False)"
        )
    check_gradient_dtype(member.names[0], member.param.sharded_param)
