"""Ranks of a run, and small collectives by which they agree on values and errors."""

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
    """Position of this process among the ranks."""

    rank: int
    """Global rank."""
    local_rank: int
    """Rank on this node."""
    world_size: int
    """Total number of ranks."""

    @classmethod
    def current(cls) -> Ranks:
        """Return the position of this process, from the process group and torchrun's environment variables."""
        rank, world_size = dist.get_rank(), dist.get_world_size()
        return cls(rank, torchrun.number("LOCAL_RANK", rank), world_size)

    @property
    def local_world_size(self) -> int:
        """Number of ranks on this node."""
        return torchrun.number("LOCAL_WORLD_SIZE", self.world_size)

    def agree(self, value: T) -> T:
        """Return rank 0's value on every rank. Raises `LostRankError` if another rank exits."""
        if self.world_size == 1:
            return value
        box = [value]
        with naming_loss():
            dist.broadcast_object_list(box, src=0)
        return box[0]

    def collect(self, value: T) -> list[T]:
        """Return the values of all ranks on every rank. Raises `LostRankError` if another rank exits."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        with naming_loss():
            dist.all_gather_object(values, value)
        return values

    @property
    def exchange_on_cpu(self) -> bool:
        """``True`` if the process group can exchange tensors in host memory; otherwise they must be on the device."""
        return "cpu" in dist.get_backend_config()

    def send(self, tensor: torch.Tensor, rank: int) -> None:
        """Send a contiguous tensor to a rank that calls `receive`. Raises `LostRankError` if that rank exits."""
        with naming_loss():
            dist.send(tensor, rank)

    def receive(self, tensor: torch.Tensor, rank: int) -> None:
        """Receive a contiguous tensor from a rank that calls `send`. Raises `LostRankError` if that rank exits."""
        with naming_loss():
            dist.recv(tensor, rank)

    def together(self, what: str, action: Callable[[], T], undo: Callable[[], None] | None = None) -> T:
        """Run `action` on every rank. If it fails on any rank, raise an error on all ranks.

        Args:
            what: name of the action, for messages.
            action: function to run on this rank.
            undo: function to call if the action is known to have failed on any rank, or was interrupted on this rank.
                It is not called if the exchange of results is interrupted or loses its connection, because other
                ranks may have seen a success.

        Returns:
            Result of `action` on this rank.

        Raises:
            InfinityError: if `action` failed on another rank. A rank on which it failed raises its own error.
        """
        failure: Exception | None = None
        result: T | None = None
        try:
            result = action()
        except Exception as error:
            failure = error
        except BaseException:  # the other ranks still wait for this rank's report, so none of them continues
            if undo is not None:
                undo()
            raise
        here = socket.gethostname()
        reports = self.collect(None if failure is None else (here, f"{type(failure).__name__}: {failure}"))
        if undo is not None and any(report is not None for report in reports):
            undo()
        if failure is not None:
            raise failure
        for rank, report in enumerate(reports):
            if report is not None:
                host, text = report
                place = f"rank {rank} on host {host}" if host != here else f"rank {rank}"
                elsewhere = InfinityError(f"{what} failed on {place}: {text}")
                elsewhere.told_elsewhere = True
                raise elsewhere
        return result  # type: ignore[return-value]

    def once_per_node(self, action: Callable[[], T], otherwise: T) -> T:
        """Run `action` on the first rank of each node and return its result on all ranks of the node.

        Args:
            action: function with a picklable result, which must not fail.
            otherwise: result on a node without a first rank.

        Raises:
            LostRankError: if another rank exits.
        """
        host = socket.gethostname()
        mine = [action()] if self.local_rank == 0 else []
        by_host = {name: values[0] for name, values in self.collect((host, mine)) if values}
        return by_host.get(host, otherwise)

    def on_first(self, what: str, action: Callable[[], T]) -> T:
        """Run `action` on rank 0 and return its result on every rank. If it fails, raise an error on all ranks.

        Args:
            what: name of the action, for messages.
            action: function with a picklable result.

        Raises:
            InfinityError: if `action` failed. Rank 0 raises its own error.
        """
        result: T = self.agree(self.together(what, action if self.rank == 0 else _nothing))
        return result


def _nothing() -> Any:
    """Replace the action on ranks other than 0."""


@contextmanager
def naming_loss() -> Iterator[None]:
    """Raise `LostRankError` if a collective in the block fails because another rank exited."""
    try:
        yield
    except RuntimeError as error:
        if not is_lost_connection(error):
            raise
        raise LostRankError(
            f"the connection to another rank was lost; see that rank's message for the reason ({error})"
        ) from error
