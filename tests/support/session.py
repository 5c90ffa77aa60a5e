"""A training session that can be killed at a chosen instant and resumed: run in the test or in a process of its own."""

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
from support.processes import ready_made
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
    """Set every generator that the data comes from."""
    torch.manual_seed(11)
    random.seed(12)
    np.random.seed(13)


def draw() -> torch.Tensor:
    """Return tokens drawn from torch's, Python's and NumPy's global generators."""
    length = 8 + random.randrange(16)
    start = int(np.random.randint(0, 7))
    return torch.randint(start, models.Toy.vocabulary, (2, length))


class Session:
    """Model, optimizer and scheduler of one start of the program."""

    def __init__(self, folder: Path, host_cache: str = "least", **sections: dict[str, Any]) -> None:
        paging = Paging(host_cache=host_cache)
        self.model = models.build(RECIPE.model)
        passed_in = make_optimizer(RECIPE, self.model)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(passed_in, lambda step: 1 / (1 + 0.2 * step))
        host = host_bytes(paging, self.model, passed_in, folder) if paging.host_cache != "all" else 64 * MIB
        seed()  # a resumed run overwrites this with what the checkpoint has
        self.optimizer = infinity.offload(self.model, passed_in, settings(folder, paging, host, **sections))
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
        """Checkpoint with the scheduler in `extra`."""
        self.optimizer.save_checkpoint({"scheduler": self.scheduler.state_dict()})

    def run(self, until: int = STEPS, every: int = EVERY) -> list[float]:
        """Train to a step, checkpointing now and then; return the losses."""
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
    """Return the losses of a run that nobody disturbs."""
    with Session(folder) as session:
        return session.run()


def killed(folder: Path, where: str, step: int) -> list[float]:
    """Run a session in a process that kills itself in a step; return the losses it saw."""
    process = ready_made().Process(target=_run_and_die, args=(str(folder), where, step))
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
    """Put the end of the process at a place in the step that comes."""
    middle: nn.Module = session.model.blocks[1]
    if where == "forward":
        middle.register_forward_hook(_die)
    elif where == "backward":
        middle.register_full_backward_hook(_die)
    elif where == "before step":
        session.optimizer.step = _die
    elif where == "checkpoint: pages flushed":
        _before(checkpoints.state, "save_tensors", _die)
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
