"""Evaluation of the loss on held-out data."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from infinity.ranks import Ranks
from infinity_tools.samples.batches import Readable
from infinity_tools.samples.pack import IGNORED


class Evaluation:
    """Evaluation sequences, divided among the ranks."""

    def __init__(self, source: Readable, *, every: int, at_once: int, ranks: Ranks, device: torch.device) -> None:
        """Prepare the evaluation.

        Args:
            source: Evaluation sequences.
            every: Steps between evaluations. 0: only after the last step.
            at_once: Sequences per forward pass of a rank.
            ranks: Ranks that share the sequences.
            device: Device of the model's inputs.
        """
        self._source, self._every, self._at_once = source, every, at_once
        self._ranks, self._device = ranks, device

    def is_due(self, step: int, last: int) -> bool:
        """Return whether to evaluate after `step`. `last` is the last step of the run."""
        return step == last or (self._every > 0 and step % self._every == 0)

    def loss(self, model: nn.Module) -> float:
        """Return the mean loss over all tokens that count, which is the same on every rank. The training state is
        unchanged.
        """
        model.eval()
        try:
            with torch.no_grad():
                total = self._total(model)
        finally:
            model.train()
        # The root stays gathered after a forward pass, so the next step would otherwise start in a different state than
        # the first.
        model.reshard()  # type: ignore[operator]
        if self._ranks.world_size > 1:
            dist.all_reduce(total)
        return float(total[0] / total[1])

    def _total(self, model: Any) -> torch.Tensor:
        """Return the sum of this rank's losses and its number of tokens, as float64 on the CPU."""
        total = torch.zeros(2, dtype=torch.float64)
        per_pass = self._at_once * self._ranks.world_size
        for first in range(0, len(self._source), per_pass):
            mine = range(first + self._ranks.rank * self._at_once, len(self._source))[: self._at_once]
            # Every rank must take part in every pass. A rank with too few sequences repeats sequence 0 without counting
            # it.
            rows = [*mine, *[0] * (self._at_once - len(mine))]
            inputs = {name: value.to(self._device) for name, value in self._source.rows(rows).items()}
            inputs["labels"][len(mine) :] = IGNORED
            count = int((inputs["labels"][:, 1:] != IGNORED).sum())
            loss = float(model(**inputs, use_cache=False).loss)
            if count:
                total += torch.tensor([loss * count, count], dtype=torch.float64)
        return total
