"""Full parameters, gathered from the slices of all ranks for updates that cannot run on a slice.

[Note: exchange in updates] An update that requires a full parameter runs on every rank that has a slice of it, with the
same inputs and the same result. Each rank keeps its own slice. Gradient, master and states are gathered for one
parameter at a time. Updates run on their own thread in parallel with FSDP2's collectives, so they use separate process
groups. All ranks run these updates in the same order, and no rank waits for something that another rank does later.
Therefore, all of them run in backward as soon as the gradients have arrived, or in `step()` (`UpdateSchedule.of`). They
never run in the next forward, because a single rank could run them ahead of time by reading a weight.

[Note: abandoned exchanges] An exchange that another rank never joins cannot be cancelled. The destructor of a gloo
group waits for it up to the timeout of collectives, wherever Python happens to collect garbage. Therefore, the group of
such an exchange is never destroyed. Its threads and sockets end with the process.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from infinity.content.layout import Layout
from infinity.errors import InfinityError, LostRankError, StallError
from infinity.ranks import Ranks, naming_loss

_SHORTEST, _LONGEST = 50e-6, 5e-3
"""Minimum and maximum interval between two checks for the end of an exchange, in seconds."""


@dataclass(frozen=True)
class Slice:
    """Slice of a parameter on this rank. All slices have the same length, but the last may be shorter or empty."""

    group: Any
    """Process group of the ranks that share the parameter."""
    rank: int
    """Index of this rank in the group."""
    size: int
    """Number of ranks in the group."""


class FullParameters:
    """Gather parameters that ranks share.

    The update thread calls `meet`, `gather` and `own`. Call `close` after it has stopped.

    Args:
        layout: pages of this rank.
        slices: slices of parameters that are updated as full parameters and shared with other ranks, by shard.
        ranks: communication between ranks.
        failure: returns the error of a run that has failed, which ends all waits, or ``None``.
        exchanging: returns a context for each exchange, which lasts until the slowest rank has joined.
        timeout: time limit in seconds for an exchange after the run has ended.
    """

    def __init__(
        self,
        layout: Layout,
        slices: Mapping[int, Slice],
        ranks: Ranks,
        failure: Callable[[], Exception | None],
        exchanging: Callable[[], AbstractContextManager[None]],
        timeout: float,
    ) -> None:
        self._layout, self._slices, self._ranks = layout, slices, ranks
        self._failure, self._exchanging = failure, exchanging
        # Time limits per exchange in seconds; the second is set by `end`
        self._timeout, self._patience = timeout, math.inf
        self._last: dict[Any, Any] = {}  # by process group, its last exchange

    def end(self, *, early: bool = False) -> None:
        """Note that the run ends.

        Updates that have begun still exchange data, and others too, unless the run ends `early`.
        """
        self._patience = 0.0 if early else min(self._patience, self._timeout)

    def close(self) -> None:
        """Close the process groups; see [Note: abandoned exchanges]."""
        for group, work in self._last.items():
            if not work.is_completed():
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        self._last = {}
        for group in {slice_.group for slice_ in self._slices.values()}:
            if dist.is_initialized():
                dist.destroy_process_group(group)

    def on_any_rank(self, value: bool) -> bool:
        """Return whether `value` is true on any rank, because it determines the order of updates.

        Only the training thread calls it.
        """
        return any(self._ranks.collect(value))

    def meet(self, shard: int, step: int) -> None:
        """Check that all ranks that share a parameter are about to update it in the same step.

        Raises:
            InfinityError: if they are not.
            LostRankError: if another rank has exited.
        """
        if shard not in self._slices:
            return
        places = torch.empty(self._slices[shard].size, 2, dtype=torch.int64)
        self._gather(shard, places, torch.tensor([[shard, step]]))
        if len({tuple(place) for place in places.tolist()}) > 1:
            name = self._layout.shards[shard].spec.name
            raise InfinityError(
                f"ranks update different parameters: this rank updates {name} in step {step + 1}, and another rank "
                "does not; drop, change and read gradients in the same way on all ranks"
            )

    def gather(self, shard: int, values: torch.Tensor) -> torch.Tensor:
        """Return a section of the full parameter as a flat tensor.

        Args:
            shard: index of the shard.
            values: this rank's elements of the section.

        Raises:
            LostRankError: if another rank has exited.
            StallError: if another rank does not join while the run ends.
        """
        if shard not in self._slices:
            return values
        slice_, spec = self._slices[shard], self._layout.shards[shard].spec
        mine = pad(values, (0, spec.padded - spec.numel)) if spec.padded > spec.numel else values.contiguous()
        whole = torch.empty(slice_.size * spec.padded, dtype=values.dtype)
        self._gather(shard, whole, mine)
        return whole[: spec.whole]

    def own(self, shard: int, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's elements of a section of the full parameter."""
        if shard not in self._slices:
            return whole
        spec = self._layout.shards[shard].spec
        first = self._slices[shard].rank * spec.padded
        return whole[first : first + spec.numel]

    def _gather(self, shard: int, into: torch.Tensor, mine: torch.Tensor) -> None:
        """Concatenate the slices of all ranks in `into`."""
        name, group = self._layout.shards[shard].spec.name, self._slices[shard].group
        try:
            with self._exchanging(), naming_loss():
                work = dist.all_gather([*torch.split(into, len(mine))], mine, group, async_op=True)
                self._last[group] = work
                self._wait(work, name)
        except LostRankError as lost:
            failure = self._failure() or lost
            if not isinstance(failure, LostRankError):
                raise failure from lost.__cause__
            raise LostRankError(f"{failure}; the update of {name} waits for it") from lost.__cause__

    def _wait(self, work: Any, name: str) -> None:
        seconds, began = _SHORTEST, time.monotonic()
        while not work.is_completed():
            if (failure := self._failure()) is not None:
                raise failure
            if time.monotonic() - began > self._patience:
                raise StallError(f"the run ended before another rank joined the update of {name}")
            time.sleep(seconds)
            seconds = min(2 * seconds, _LONGEST)
        work.wait()


def open_slices(shared: Mapping[int, tuple[tuple[int, ...], int]], ranks: Ranks) -> dict[int, Slice]:
    """Create process groups for parameters that are updated as full parameters. All ranks call it together.

    Args:
        shared: by shard, the ranks that share the parameter, and the index of this rank among them.
        ranks: communication between ranks.

    Returns:
        The slices by shard. `FullParameters.close` closes the groups.
    """
    mine = {members for members, _ in shared.values()}
    everyone = sorted(set().union(*ranks.collect(mine)))  # each rank must create all groups in the same order
    made = {members: dist.new_group(list(members), backend="gloo") for members in everyone}
    groups = {members: made[members] for members in mine}
    return {shard: Slice(groups[members], at, len(members)) for shard, (members, at) in shared.items()}
