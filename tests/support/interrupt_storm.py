"""Interrupt a training loop with Ctrl-C at random points, and repeat each interrupted step as in a notebook.

    PYTHONPATH=tests python -m support.interrupt_storm --storms 300

A *storm* is one process with 1 to 10 SIGINTs, each after a random time or a random number of Python function calls. The
loop catches `KeyboardInterrupt`, calls `zero_grad()` and repeats the step. The final state must be bitwise equal to
that of an uninterrupted run, either immediately or, if `infinity` raises an error, after resuming from the last
checkpoint.
"""

from __future__ import annotations

import argparse
import faulthandler
import functools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # imported before storms are forked
from torch import nn

import infinity
import infinity.run.offload  # imported before storms are forked
from infinity.errors import InfinityError
from support import models
from support.train import MIB, Paging, Recipe, batch, build, digest, make_optimizer, settings

STEPS = 4
_ATTEMPTS = 60
"""Maximum number of attempts of the loop, which needs one more for each signal."""
_PATIENCE = 300.0
"""Seconds after which a storm counts as hanging."""
_SECONDS = 0.06
_CALLS = 4000
"""Mean time, and mean number of calls and returns, between two signals. A step takes several times as long."""


class Signals:
    """SIGINTs that this process sends to itself while a loop is running."""

    def __init__(self, rng: random.Random, number: int) -> None:
        self._timed = rng.random() < 0.5
        mean = _SECONDS if self._timed else _CALLS
        self._gaps = [rng.expovariate(1 / mean) for _ in range(number)]
        self._left = 0.0  # calls and returns until the next signal
        self.listening = False
        """Whether the loop is running. Signals that arrive while it handles `KeyboardInterrupt` are ignored."""
        self.raised = 0
        """Number of times that `KeyboardInterrupt` was raised."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._send)

    def __enter__(self) -> Signals:
        signal.signal(signal.SIGINT, self._interrupt)
        if self._timed:
            self._thread.start()
        else:
            self._left = self._gaps.pop()
        return self

    def __exit__(self, *_: Any) -> None:
        self.listening = False
        self._ended.set()
        sys.setprofile(None)
        if self._timed:
            self._thread.join()

    def listen(self) -> None:
        """Raise `KeyboardInterrupt` from here. Python removes a profile function that raises an exception."""
        self.listening = True
        if self._left > 0:
            sys.setprofile(self._count)

    def _interrupt(self, *_: Any) -> None:
        if self.listening:
            self.raised += 1
            raise KeyboardInterrupt

    def _send(self) -> None:
        for gap in self._gaps:
            if self._ended.wait(gap):
                return
            os.kill(os.getpid(), signal.SIGINT)

    def _count(self, *_: Any) -> None:
        self._left -= 1
        if -1 < self._left <= 0 and not self._ended.is_set():
            self._left = self._gaps.pop() if self._gaps else -1
            signal.raise_signal(signal.SIGINT)


def train(model: nn.Module, optimizer: Any, micro: int, signals: Signals) -> None:
    """Train until the last step, repeating interrupted steps, and save a checkpoint after each step."""
    for _ in range(_ATTEMPTS):
        try:
            try:
                signals.listen()
                while optimizer.steps < STEPS:
                    before = optimizer.steps
                    optimizer.zero_grad()
                    for part in range(micro):
                        (models.loss_of(model, batch(model, 10 * before + part)) / micro).backward()
                    optimizer.step()
                    if optimizer.steps != before + 1:
                        raise AssertionError(f"step() returned, but optimizer.steps is {optimizer.steps}")
                    optimizer.zero_grad()
                    optimizer.save_checkpoint()
                return
            except KeyboardInterrupt:
                signals.listening = False
        except KeyboardInterrupt:  # a second signal, before the assignment
            signals.listening = False
    raise AssertionError(f"{optimizer.steps} of {STEPS} steps after {_ATTEMPTS} attempts")


@dataclass(frozen=True)
class Case:
    """Settings of a storm."""

    recipe: Recipe
    paging: Paging
    micro: int

    def __str__(self) -> str:
        parts = [self.paging.update_schedule, f"{self.paging.cores} cores", f"{self.micro} micro-batches"]
        parts += ["activation checkpointing"] * self.recipe.checkpointing + ["resharded"] * self.recipe.reshard
        return ", ".join(parts)

    @classmethod
    def draw(cls, rng: random.Random) -> Case:
        """Draw the settings."""
        schedule = rng.choice(("after_backward", "in_forward", "in_backward", "auto"))
        micro = rng.randint(1, 2) if schedule in ("after_backward", "in_forward") else 1
        recipe = Recipe(model="toy", checkpointing=rng.random() < 0.3, reshard=rng.random() < 0.7)
        return cls(recipe, Paging(host_cache="all", update_schedule=schedule, cores=rng.randrange(2)), micro)

    @contextmanager
    def session(self, folder: Path) -> Iterator[tuple[nn.Module, Any]]:
        """Yield the model and the optimizer of a run that starts or resumes in a folder."""
        model = build(self.recipe)
        config = settings(folder, self.paging, 64 * MIB, run={"resume": "auto"})
        with infinity.offload(model, make_optimizer(self.recipe, model), config) as optimizer:
            yield model, optimizer


def storm(folder: Path, seed: int) -> tuple[str, str, str]:
    """Run a storm in this process.

    Returns:
        "completed", or the error that `infinity` raised; the digest of the final state; the number of interrupts.
    """
    rng = random.Random(seed)
    case = Case.draw(rng)
    end = "completed"
    signals = Signals(rng, rng.randint(1, 10))
    try:
        with case.session(folder) as (model, optimizer):
            with signals:
                train(model, optimizer, case.micro, signals)
            return end, digest(model, optimizer), str(signals.raised)
    except InfinityError as error:
        end = str(error)
    with case.session(folder) as (model, optimizer):
        train(model, optimizer, case.micro, Signals(rng, 0))
        return end, digest(model, optimizer), str(signals.raised)


def reference(folder: Path, micro: int) -> str:
    """Return the digest of the final state without signals."""
    with Case(Recipe(model="toy"), Paging(host_cache="all"), micro).session(folder) as (model, optimizer):
        train(model, optimizer, micro, Signals(random.Random(0), 0))
        return digest(model, optimizer)


def run(storms: int, seed: int, folder: Path) -> tuple[Counter[str], list[str]]:
    """Run storms in an empty folder.

    Returns:
        How often each end occurred, with the number of interrupts as "interrupts", and the failures.
    """

    @functools.cache
    def expected(micro: int) -> str:
        status, words = _in_child(folder / f"calm{micro}", partial(_calm, micro))
        if status:
            raise RuntimeError(f"the uninterrupted run exited with status {status}: {words}")
        return words[0]

    ends, failures = Counter[str](), list[str]()
    for number in range(seed, seed + storms):
        case = Case.draw(random.Random(number))
        status, words = _in_child(folder / f"storm{number}", partial(storm, seed=number))
        problem = f"status {status}: {' '.join(words)}" if status else ""
        if not status:
            ends[words[0]] += 1
            ends["interrupts"] += int(words[2])
            problem = "" if words[1] == expected(case.micro) else f"the final state differs ({words[0]})"
        if problem:
            failures.append(f"storm {number} ({case}): {problem}")
        print(f"\r{number - seed + 1} of {storms} storms", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return ends, failures


def _calm(micro: int, folder: Path) -> tuple[str]:
    return (reference(folder, micro),)


def _in_child(folder: Path, work: Callable[[Path], tuple[str, ...]]) -> tuple[int, list[str]]:
    """Run `work` in a child process and remove its folder; return the exit status, and its result or its error."""
    folder.mkdir()
    child = os.fork()
    if not child:
        status = 1
        try:
            os.setpgid(0, 0)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            torch.set_num_threads(1)
            with (folder / "stderr").open("w") as file:
                os.dup2(file.fileno(), 2)
            faulthandler.enable(2)
            faulthandler.dump_traceback_later(_PATIENCE, exit=True)
            (folder / "result").write_text(json.dumps(work(folder)))
            status = 0
        except BaseException:
            (folder / "result").write_text(json.dumps([traceback.format_exc()]))
        finally:
            os._exit(status)
    _, waited = os.waitpid(child, 0)
    result = folder / "result"
    words = json.loads(result.read_text()) if result.exists() else [(folder / "stderr").read_text()[-4000:]]
    shutil.rmtree(folder)
    return os.waitstatus_to_exitcode(waited), words


def main() -> int:
    """Parse the command line, run, and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storms", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--dir", type=Path, default=None, help="folder on the drive to test [default: a temporary folder]"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        ends, failures = run(options.storms, options.seed, Path(folder))
    interrupts = ends.pop("interrupts", 0)
    lines = [f"{number} storms: {end}" for end, number in ends.most_common()]
    print(*lines, *failures, f"{interrupts} interrupts", sep="\n")
    print(f"{options.storms} storms, {len(failures)} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
