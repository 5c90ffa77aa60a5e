"""Whole parameters out of the slices of all ranks, for updates that need more than a rank has.

[Note: exchange in updates] An update that needs a whole parameter runs on every rank that has a slice of it, on the
same numbers and with the same result; each keeps its own slice. Gradient, master and states are gathered for it, one
parameter at a time. Updates run on a thread of their own, beside FSDP2's collectives, so they have a process group of
their own. All ranks run such updates in the same order, and none waits for something that another rank does later: all
run in backward as soon as the gradients are there, or in `step()` (`UpdateSchedule.of`), never in the next forward,
which a
rank alone could run ahead to by looking at a weight.

[Note: exchanges that are left] An exchange that another rank never comes to cannot be called off, and the destructor of
a gloo group waits for it, up to the time limit of collectives and wherever Python happens to collect garbage. So the
group of such an exchange is never destroyed: its threads and sockets end with the process.
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
"""Seconds between two looks whether an exchange has ended."""


@dataclass(frozen=True)
class Slice:
    """Which slice of a parameter this rank has: chunks of equal length, the last ones shorter or empty."""

    group: Any
    """Process group of the ranks that share it."""
    rank: int
    """Which of them this is."""
    size: int
    """How many they are."""


class FullParameters:
    """Gathers parameters that ranks share.

    The thread of updates calls `meet`, `gather` and `own`; `close` comes when that has ended.
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
        """Gather nothing yet.

        Args:
            slices: by shard, of those that are updated whole and shared with other ranks.
            failure: returns the error of a run that has failed, so that nothing is waited for.
            exchanging: returns a context for each exchange, which takes as long as other ranks do.
            timeout: seconds after which, in the end, a rank that does not come to an exchange is waited for no longer.
        """
        self._layout, self._slices, self._ranks = layout, slices, ranks
        self._failure, self._exchanging = failure, exchanging
        self._timeout, self._patience = timeout, math.inf  # seconds for each exchange; set by `end`
        self._last: dict[Any, Any] = {}  # by process group, its last exchange

    def end(self, *, early: bool = False) -> None:
        """Note that the run ends: updates that were begun are, unless it ends `early`, still exchanged, others too."""
        self._patience = 0.0 if early else min(self._patience, self._timeout)

    def close(self) -> None:
        """Close the process groups. [Note: exchanges that are left]"""
        for group, work in self._last.items():
            if not work.is_completed():
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        self._last = {}
        for group in {slice_.group for slice_ in self._slices.values()}:
            if dist.is_initialized():
                dist.destroy_process_group(group)

    def on_any_rank(self, value: bool) -> bool:
        """Return whether it is true on any rank: what decides the order of updates. Of the training thread."""
        return any(self._ranks.collect(value))

    def meet(self, shard: int, step: int) -> None:
        """Check that all ranks that share a parameter are about to update it, in the same step.

        Raises:
            InfinityError: they are not. LostRankError: as `gather`.
        """
        if shard not in self._slices:
            return
        places = torch.empty(self._slices[shard].size, 2, dtype=torch.int64)
        self._gather(shard, places, torch.tensor([[shard, step]]))
        if len({tuple(place) for place in places.tolist()}) > 1:
            name = self._layout.shards[shard].spec.name
            raise InfinityError(
                f"ranks update different parameters: this one {name} in step {step + 1}, another one something else; "
                "gradients must be dropped, changed or looked at on all ranks alike"
            )

    def gather(self, shard: int, values: torch.Tensor) -> torch.Tensor:
        """Return a section of the whole parameter, flat, given this rank's elements of it.

        Raises:
            LostRankError: another rank has ended. StallError: it does not come, and the run ends.
        """
        if shard not in self._slices:
            return values
        slice_, spec = self._slices[shard], self._layout.shards[shard].spec
        mine = pad(values, (0, spec.padded - spec.numel)) if spec.padded > spec.numel else values.contiguous()
        whole = torch.empty(slice_.size * spec.padded, dtype=values.dtype)
        self._gather(shard, whole, mine)
        return whole[: spec.whole]

    def own(self, shard: int, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's elements of a section."""
        if shard not in self._slices:
            return whole
        spec = self._layout.shards[shard].spec
        first = self._slices[shard].rank * spec.padded
        return whole[first : first + spec.numel]

    def _gather(self, shard: int, into: torch.Tensor, mine: torch.Tensor) -> None:
        """Put what ranks have of a parameter one behind the other."""
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
                raise StallError(f"the run ended while another rank did not come to the update of {name}")
            time.sleep(seconds)
            seconds = min(2 * seconds, _LONGEST)
        work.wait()


def open_slices(shared: Mapping[int, tuple[tuple[int, ...], int]], ranks: Ranks) -> dict[int, Slice]:
    """Make process groups for parameters that are updated whole; all ranks call it together.

    Args:
        shared: by shard, the ranks that share the parameter, and which of them this is.

    Returns:
        The slices by shard; `FullParameters.close` closes the groups.
    """
    mine = {members for members, _ in shared.values()}
    everyone = sorted(set().union(*ranks.collect(mine)))  # each rank has to know of all groups, in the same order
    made = {members: dist.new_group(list(members), backend="gloo") for members in everyone}
    groups = {members: made[members] for members in mine}
    return {shard: Slice(groups[members], at, len(members)) for shard, (members, at) in shared.items()}
