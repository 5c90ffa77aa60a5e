"""The ranks of a run, and the few things they agree on."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from infinity import torchrun
from infinity.errors import InfinityError, LostRankError, is_lost_connection

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """Who this process is among the ranks."""

    rank: int
    """Its number among all ranks."""
    local_rank: int
    """Its number among those of this node."""
    world_size: int
    """How many ranks there are."""

    @classmethod
    def current(cls) -> Ranks:
        """Return this process's place, from the process group and torchrun's environment."""
        rank, world_size = dist.get_rank(), dist.get_world_size()
        return cls(rank, torchrun.number("LOCAL_RANK", rank), world_size)

    @property
    def local_world_size(self) -> int:
        """Ranks on this node."""
        return torchrun.number("LOCAL_WORLD_SIZE", self.world_size)

    def agree(self, value: T) -> T:
        """Return rank 0's value on every rank. Raises `LostRankError`."""
        if self.world_size == 1:
            return value
        box = [value]
        with naming_loss():
            dist.broadcast_object_list(box, src=0)
        return box[0]

    def collect(self, value: T) -> list[T]:
        """Return the values of all ranks on every rank. Raises `LostRankError`."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        with naming_loss():
            dist.all_gather_object(values, value)
        return values

    @property
    def exchange_on_cpu(self) -> bool:
        """Whether tensors can be exchanged where they lie in host memory; else they must be on the device."""
        return "cpu" in dist.get_backend_config()

    def send(self, tensor: torch.Tensor, rank: int) -> None:
        """Send a contiguous tensor to a rank, which must `receive` it. Raises `LostRankError`."""
        with naming_loss():
            dist.send(tensor, rank)

    def receive(self, tensor: torch.Tensor, rank: int) -> None:
        """Fill a contiguous tensor with what a rank sends. Raises `LostRankError`."""
        with naming_loss():
            dist.recv(tensor, rank)

    def together(self, what: str, action: Callable[[], T], undo: Callable[[], None] | None = None) -> T:
        """Run `action` on every rank; if it fails on one, raise on all, with the reason.

        Args:
            what: names the action in messages.
            action: run here.
            undo: called where it is known to have failed on a rank, or was interrupted here; not where the exchange
                was interrupted or the connection lost: others may have learned then that all went well.

        Raises:
            InfinityError: `action` failed here or elsewhere; the failing rank's own error is the cause here.
        """
        failure: Exception | None = None
        result: T | None = None
        try:
            result = action()
        except Exception as error:
            failure = error
        except BaseException:  # as others wait for this rank's report, none of them goes on
            if undo is not None:
                undo()
            raise
        reports = self.collect(None if failure is None else f"{type(failure).__name__}: {failure}")
        if undo is not None and any(report is not None for report in reports):
            undo()
        if failure is not None:
            raise failure
        for rank, report in enumerate(reports):
            if report is not None:
                elsewhere = InfinityError(f"{what} failed on rank {rank}: {report}")
                elsewhere.told_elsewhere = True
                raise elsewhere
        return result  # type: ignore[return-value]

    def once_per_node(self, action: Callable[[], T], otherwise: T) -> T:
        """Run `action`, which does not fail, on the first rank of each node; return its result on all ranks there.

        Args:
            action: its result can be pickled.
            otherwise: returned on a node without a first rank.

        Raises:
            LostRankError: another rank has ended.
        """
        host = socket.gethostname()
        mine = [action()] if self.local_rank == 0 else []
        by_host = {name: values[0] for name, values in self.collect((host, mine)) if values}
        return by_host.get(host, otherwise)

    def on_first(self, what: str, action: Callable[[], T]) -> T:
        """Run `action` on rank 0, and return its result on every rank; if it fails, raise on all, with the reason.

        Args:
            what: names the action in messages.
            action: its result can be pickled.

        Raises:
            InfinityError: it failed on rank 0, whose own error is raised there.
        """
        result: T = self.agree(self.together(what, action if self.rank == 0 else _nothing))
        return result


def _nothing() -> Any:
    """Do what the other ranks do while rank 0 works."""


@contextmanager
def naming_loss() -> Iterator[None]:
    """Raise `LostRankError` where a collective fails as another rank has ended."""
    try:
        yield
    except RuntimeError as error:
        if not is_lost_connection(error):
            raise
        raise LostRankError(f"the connection to another rank was lost; its own message says why ({error})") from error
