"""Gathering of full parameters from the slices on all ranks, for updates that cannot run on a slice.

[Note: exchange in updates] If an update requires a full parameter, every rank that has a slice of the parameter runs
the update with the same inputs and the same result, and keeps its own slice of the result. The gradient, master weights
and states are gathered for one parameter at a time. Updates run on their own thread in parallel with FSDP2's
collectives, so they use separate process groups. To avoid deadlocks, all ranks must run these updates in the same
order. Therefore, they run in backward as soon as the gradients have arrived, or in `step()` (`UpdateSchedule.of`), but
never in the next forward, where a single rank could trigger an update early by reading a weight.

[Note: abandoned exchanges] An exchange that another rank never joins cannot be canceled. The destructor of a gloo group
waits for such an exchange until the collective timeout, wherever Python happens to collect garbage. Therefore, the
group is never destroyed. Its threads and sockets are released when the process exits.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from infinity.content.layout import Layout
from infinity.errors import InfinityError, LostRankError, StallError
from infinity.ranks import Ranks, naming_loss
from infinity.schedule.transfers import Transfers

_SHORTEST, _LONGEST = 50e-6, 5e-3
"""Minimum and maximum interval between two polls of an unfinished exchange, in seconds."""


@dataclass(frozen=True)
class Slice:
    """This rank's slice of a parameter. All slices have the same length, except that the last ones may be shorter."""

    group: Any
    """Process group of the ranks that share the parameter."""
    rank: int
    """Index of this rank in the group."""
    size: int
    """Number of ranks in the group."""


class FullParameters:
    """Gather parameters whose slices are on several ranks.

    All ranks must create an instance together, because it creates process groups. The update thread calls `meet`,
    `gather` and `own`. Call `close` after this thread has stopped.

    Args:
        shared: parameters that are updated as full parameters and shared with other ranks, by shard: the ranks that
            share the parameter, and this rank's index among them.
        transfers: state of the pager. Its failure ends all waits. Its time limit applies to an exchange after the run
            has ended; before, an exchange lasts until the slowest rank has joined.
    """

    def __init__(
        self, layout: Layout, shared: Mapping[int, tuple[tuple[int, ...], int]], ranks: Ranks, transfers: Transfers
    ) -> None:
        self._layout, self.ranks, self._transfers = layout, ranks, transfers
        mine = {members for members, _ in shared.values()}
        everyone = sorted(set().union(*ranks.collect(mine)))  # each rank must create all groups in the same order
        groups = {members: dist.new_group(list(members), backend="gloo") for members in everyone}
        self._slices = {shard: Slice(groups[members], at, len(members)) for shard, (members, at) in shared.items()}
        self._patience = math.inf  # current time limit for an exchange in seconds, lowered by `end`
        self._last: dict[Any, Any] = {}  # last exchange, by process group

    def end(self, *, early: bool = False) -> None:
        """Limit the time that exchanges may take, because the run is ending.

        Updates may still exchange data, unless the run ends `early`.
        """
        self._patience = 0.0 if early else min(self._patience, self._transfers.timeout)

    def close(self) -> None:
        """Close the process groups; see [Note: abandoned exchanges]."""
        for group, work in self._last.items():
            if not work.is_completed():
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        self._last = {}
        for group in {slice_.group for slice_ in self._slices.values()}:
            if dist.is_initialized():
                dist.destroy_process_group(group)

    def meet(self, shard: int, step: int) -> None:
        """Check that all ranks that share a parameter are about to update it in the same step.

        Raises:
            InfinityError: if another rank is about to update a different parameter, or is in a different step.
            LostRankError: if another rank has exited.
        """
        if shard not in self._slices:
            return
        places = torch.empty(self._slices[shard].size, 2, dtype=torch.int64)
        self._gather(shard, places, torch.tensor([[shard, step]]))
        if len({tuple(place) for place in places.tolist()}) > 1:
            name = self._layout.shards[shard].spec.name
            raise InfinityError(
                f"ranks update different parameters: this rank updates {name} in step {step + 1}, but another rank "
                "does not; drop, change and read gradients in the same way on all ranks"
            )

    def gather(self, shard: int, values: torch.Tensor) -> torch.Tensor:
        """Return the gradient, the master weights or a state of the full parameter as a flat tensor.

        Args:
            values: this rank's elements of the gradient, master weights or state.

        Raises:
            LostRankError: if another rank has exited.
            StallError: if another rank does not join in time while the run ends.
        """
        if shard not in self._slices:
            return values
        slice_, spec = self._slices[shard], self._layout.shards[shard].spec
        mine = pad(values, (0, spec.padded - spec.numel)) if spec.padded > spec.numel else values.contiguous()
        whole = torch.empty(slice_.size * spec.padded, dtype=values.dtype)
        self._gather(shard, whole, mine)
        return whole[: spec.whole]

    def own(self, shard: int, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's elements of `whole`, a flat tensor with all elements of the full parameter."""
        if shard not in self._slices:
            return whole
        spec = self._layout.shards[shard].spec
        first = self._slices[shard].rank * spec.padded
        return whole[first : first + spec.numel]

    def _gather(self, shard: int, into: torch.Tensor, mine: torch.Tensor) -> None:
        name, group = self._layout.shards[shard].spec.name, self._slices[shard].group
        try:
            with self._transfers.exchanging(), naming_loss():
                work = dist.all_gather([*torch.split(into, len(mine))], mine, group, async_op=True)
                self._last[group] = work
                self._wait(work, name)
        except LostRankError as lost:
            failure = self._transfers.failure or lost
            if not isinstance(failure, LostRankError):
                raise failure from lost.__cause__
            raise LostRankError(f"{failure}; the update of {name} needs this rank") from lost.__cause__

    def _wait(self, work: Any, name: str) -> None:
        seconds, began = _SHORTEST, time.monotonic()
        while not work.is_completed():
            if (failure := self._transfers.failure) is not None:
                raise failure
            if time.monotonic() - began > self._patience:
                raise StallError(f"the run ended before another rank joined the update of {name}")
            time.sleep(seconds)
            seconds = min(2 * seconds, _LONGEST)
        work.wait()
