"""A training session that can be killed at a given point and resumed, in this process or in a new one."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import infinity
from infinity.checkpoint import manifest as manifests
from infinity.checkpoint import publish as checkpoints
from support import models
from support.processes import fork_server
from support.train import MIB, Paging, Recipe, host_bytes, make_optimizer, settings

RECIPE = Recipe(model="toy", groups=True)
STEPS, EVERY = 9, 3
KILLS = (
    "forward",
    "backward",
    "before step",
    "checkpoint: pages flushed",
    "checkpoint: state written",
    "checkpoint: published",
)


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


def run_killed_session(folder: Path, where: str, step: int) -> list[float]:
    """Run a session in a process that kills itself in a step; return the losses before it."""
    process = fork_server().Process(target=_run_and_die, args=(str(folder), where, step))
    process.start()
    process.join(900)
    assert process.exitcode == -signal.SIGKILL, f"ended with {process.exitcode} instead of being killed"
    return json.loads((folder / "losses.json").read_text())


def _run_and_die(folder: str, where: str, step: int) -> None:
    torch.set_num_threads(1)
    losses: list[float] = []
    with Session(Path(folder)) as session:
        while session.optimizer.steps < STEPS:
            if session.optimizer.steps == step - 1:
                (Path(folder) / "losses.json").write_text(json.dumps(losses))
                _arm(where, session)
            losses.append(session.step())
            if session.optimizer.steps % EVERY == 0:
                session.save_checkpoint()


def _die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _arm(where: str, session: Session) -> None:
    """Make the process kill itself at a point of the next step."""
    middle: nn.Module = session.model.blocks[1]
    if where == "forward":
        middle.register_forward_hook(_die)
    elif where == "backward":
        middle.register_full_backward_hook(_die)
    elif where == "before step":
        session.optimizer.step = _die
    elif where == "checkpoint: pages flushed":
        _before(checkpoints.model_state, "save_tensors", _die)
    elif where == "checkpoint: state written":
        _before(manifests, "write_manifest", _die)
    else:
        _before(checkpoints, "remove_checkpoints", _die)


def _before(module: Any, name: str, action: Callable[..., None]) -> None:
    original = getattr(module, name)

    def wrapped(*arguments: Any, **keywords: Any) -> Any:
        action()
        return original(*arguments, **keywords)

    setattr(module, name, wrapped)
