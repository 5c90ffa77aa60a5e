"""Offload policy that declares which FSDP modules are stored on NVMe."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.fsdp import OffloadPolicy


@dataclass
class NVMeOffloadPolicy(OffloadPolicy):
    """Offload policy of the FSDP modules that `infinity.offload` moves to NVMe.

    Pass it to `fully_shard` to offload only a part of a model. The parameters, gradients and optimizer state of FSDP
    modules without this policy stay in memory, as in plain FSDP2. If no FSDP module has the policy, `infinity.offload`
    moves the whole model to NVMe. As with FSDP2's other offload policies, the policy of a module applies to the
    parameters that FSDP2 gathers for it, and not to modules inside of it on which `fully_shard` was called.

    The policy has no effect before `infinity.offload` is called.

    Example::

        >>> for layer in model.layers:
        ...     fully_shard(layer, mesh=mesh, offload_policy=infinity.NVMeOffloadPolicy())
        >>> fully_shard(model, mesh=mesh)  # embeddings and head stay in memory
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        >>> optimizer = infinity.offload(model, optimizer, {"storage": {"paths": ["/nvme0/run"]}})
    """
