"""FSDP modules that stay in memory, because only other FSDP modules were sharded with `NVMeOffloadPolicy`.

FSDP2 and a copy of the base optimizer train such a module in memory. It has pages too, but no training step uses them:
its values are copied to them before a checkpoint, and from them when a run starts or resumes. Every source
of initial values and every reader of checkpoints therefore supports these modules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from infinity import torch_private
from infinity.content.format import MASTER
from infinity.content.layout import Layout
from infinity.errors import UnsupportedError
from infinity.fsdp.shard_io import ShardIO
from infinity.fsdp.sharded_model import ShardedModel
from infinity.optim.optimizer_clone import bits
from infinity.optim.parameters_in_memory import ParametersInMemory
from infinity.optim.states import StateReader


class ModulesInMemory:
    """Copies the FSDP modules that stay in memory from and to their pages."""

    def __init__(
        self,
        sharded: ShardedModel,
        layout: Layout,
        shards: ShardIO,
        parameters: ParametersInMemory,
        states: StateReader,
    ) -> None:
        self._sharded, self._layout, self._shards = sharded, layout, shards
        self._parameters, self._states = parameters, states

    def load(self, scalars: Mapping[int, Mapping[str, Any]]) -> None:
        """Read the modules from their pages, one tensor at a time.

        Args:
            scalars: scalar optimizer states by shard. Shards that were never updated are missing.

        Raises:
            StorageError, CorruptPageError: if a page cannot be read.
        """
        for shard, member in self._sharded.shards_in_memory.items():
            torch_private.materialize(member.param, self._sharded.device)
            local = torch_private.local_tensor(member.param)
            with torch.no_grad():
                local.copy_(self._shards.read(shard, MASTER).view(local.shape))
        self._states.restore_in_memory(scalars)

    def check(self) -> None:
        """Check that the optimizer trains the parameters of the modules.

        Raises:
            UnsupportedError: if a parameter was replaced by one that the optimizer does not train.
        """
        for shard, member in self._sharded.shards_in_memory.items():
            if member.param.sharded_param is not self._parameters.sharded[shard]:
                raise UnsupportedError(
                    f"{member.names[0]} was replaced by another parameter (for example, by "
                    "load_state_dict(assign=True)), which the optimizer does not train; use assign=False"
                )

    def read(self, shard: int) -> torch.Tensor:
        """Return a copy of a shard's weights on the CPU, shape (numel,): from memory, or from its pages.

        Raises:
            UnsupportedError: if the weights in memory have a different size or dtype than at the start.
            StorageError, CorruptPageError: if a page cannot be read.
        """
        if shard not in self._sharded.shards_in_memory:
            return self._shards.read(shard, MASTER)
        return self._shards.checked(shard, MASTER, self._weights(shard)).to("cpu", copy=True)

    def store(self) -> dict[int, dict[str, Any]]:
        """Write the modules to their pages. Frozen parameters are only written if they have changed.

        Returns:
            Scalar optimizer states by shard.

        Raises:
            UnsupportedError: See `check`.
            StorageError: if a write fails.
        """
        self.check()
        for number in sorted(self._sharded.in_memory):
            self._shards.write_module(
                number, partial(self._value, self._layout.fsdp_module_shards[number]), frozen=False
            )
        for shard in self._sharded.shards_in_memory:
            local = self._weights(shard)
            frozen = not self._layout.shards[shard].spec.trainable
            if frozen and not torch.equal(bits(local), bits(self._shards.read(shard, MASTER))):
                self._shards.save(shard, local)
        return self._states.scalars_in_memory()

    def _weights(self, shard: int) -> torch.Tensor:
        return torch_private.local_tensor(self._sharded.shards[shard].param).detach().reshape(-1)

    def _value(self, shards: Sequence[int], position: int, section: str) -> torch.Tensor | None:
        shard = shards[position]
        if section == MASTER:
            return self._weights(shard)
        value = self._parameters.state_of_shard(shard).get(section)
        return None if value is None else torch_private.local_part(value).reshape(-1)
