"""A training session that can be interrupted and resumed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

import infinity
from support import models
from support.train import MIB, Paging, Recipe, host_bytes, make_optimizer, settings

RECIPE = Recipe(model="toy", groups=True)
STEPS, EVERY = 9, 3


def seed() -> None:
    """Seed all generators from which the data is drawn."""
    torch.manual_seed(11)
    random.seed(12)
    np.random.seed(13)


def draw() -> torch.Tensor:
    """Return tokens drawn from torch's, Python's and NumPy's global generators."""
    length = 8 + random.randrange(16)
    start = int(np.random.randint(0, 7))
    return torch.randint(start, models.Toy.vocabulary, (2, length))


class Session:
    """Model, optimizer and scheduler of one launch."""

    def __init__(self, folder: Path, host_cache: str = "least", **sections: dict[str, Any]) -> None:
        paging = Paging(host_cache=host_cache)
        self.model = models.build(RECIPE.model)
        base = make_optimizer(RECIPE, self.model)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(base, lambda step: 1 / (1 + 0.2 * step))
        host = host_bytes(paging, self.model, base, folder) if paging.host_cache != "all" else 64 * MIB
        seed()  # a resumed run restores the states of the checkpoint instead
        self.optimizer = infinity.offload(self.model, base, settings(folder, paging, host, **sections))
        if self.optimizer.resumed_extra:
            self.scheduler.load_state_dict(self.optimizer.resumed_extra["scheduler"])

    def step(self) -> float:
        """Run one step; return its loss."""
        loss = models.loss_of(self.model, draw())
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return loss.item()

    def save_checkpoint(self) -> None:
        """Save a checkpoint with the state of the scheduler in `extra`."""
        self.optimizer.save_checkpoint({"scheduler": self.scheduler.state_dict()})

    def run(self, until: int = STEPS, every: int = EVERY) -> list[float]:
        """Train until a step, with a checkpoint after `every` steps; return the losses."""
        losses = []
        while self.optimizer.steps < until:
            losses.append(self.step())
            if every and self.optimizer.steps % every == 0:
                self.save_checkpoint()
        return losses

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.optimizer.__exit__(*exception)


def reference(folder: Path) -> list[float]:
    """Return the losses of an uninterrupted run."""
    with Session(folder) as session:
        return session.run()
