"""The batches of one rank, drawn from prepared sequences: epoch after epoch, each in an order of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from infinity_tools.samples.order import Order


class Readable(Protocol):
    """Sequences that can be read by number."""

    def __len__(self) -> int: ...

    @property
    def uneven(self) -> bool:
        """Whether in some more tokens count than in others."""

    def rows(self, numbers: Sequence[int]) -> dict[str, torch.Tensor]:
        """Return some as arguments of the model, one row for each."""


class Drawn:
    """A pure function of the seed and of how many sequences were drawn before: a run that goes on draws the next one,
    on any number of ranks.
    """

    def __init__(self, source: Readable, *, sequences: int, seed: int, rank: int, world_size: int) -> None:
        """Draw `sequences` per step for all ranks; of them this rank reads its own."""
        self._source, self._seed, self._sequences = source, seed, sequences
        self._local = sequences // world_size
        self._first = rank * self._local
        self._start = (0, 0)  # a step, and the sequences that were drawn before it
        self._orders: dict[int, Order] = {}  # of the epoch that is drawn from, and of the next one

    @property
    def uneven(self) -> bool:
        """Whether in some sequences more tokens count than in others."""
        return self._source.uneven

    def start(self, step: int, drawn: int) -> None:
        """Let `drawn` sequences be those that the first `step` steps have had."""
        self._start = step, drawn

    def drawn(self, step: int) -> int:
        """Return how many sequences the first `step` steps take."""
        return self._start[1] + (step - self._start[0]) * self._sequences

    def at(self, step: int) -> dict[str, torch.Tensor]:
        """Return the batch of a step, counted from 0, as arguments of the model: int64 of shape (sequences, length)."""
        first = self.drawn(step) + self._first
        return self._source.rows([self._number(place) for place in range(first, first + self._local)])

    def _number(self, place: int) -> int:
        epoch, place = divmod(place, len(self._source))
        if epoch not in self._orders:
            self._orders = {known: order for known, order in self._orders.items() if abs(known - epoch) <= 1}
            self._orders[epoch] = Order(len(self._source), self._seed, epoch)
        return self._orders[epoch].at(place)


def steps_of(epochs: float, sequences: int, per_step: int, drawn: int = 0) -> int:
    """Return the steps in which every one of so many sequences is trained on `epochs` times, `drawn` of them before."""
    return max(0 if drawn else 1, -int(-(epochs * sequences - drawn) // per_step))
