"""Kills a training run at random instants and resumes it, over and over; or cuts its power.

    python tests/core/core_crash.py --trials 1000 --power 200

A *life* is one process: it resumes, checks every bit of the state it finds against a run that nobody disturbs,
trains and commits every step until it is killed. Lives are forked from a process that has loaded torch, so one takes
a fraction of a second.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # what every life needs is loaded before they are forked
import torch.distributed as dist
from core_session import Session
from core_train import local, state_on_nvme
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from infinity.config import StorageConfig
from infinity.io import VolatileEngine

STEPS = 8
RETAINED = 2
_CALLS = ("fsync", "rename", "unlink", "mkdir", "posix_fallocate", "truncate")
"""System calls before or after which a life may end: the named points of the publish protocol, and of start and end."""
_PATIENCE = 60.0


@dataclass(frozen=True, kw_only=True)
class End:
    """How a life ends: after so many seconds, or at the so-manieth of `_CALLS`, or not at all."""

    seconds: float | None = None
    call: int | None = None
    after: bool = False
    power: bool = False
    """At that call the power goes as well."""

    def __str__(self) -> str:
        if self.seconds is not None:
            return f"SIGKILL after {self.seconds:.3f} s"
        if self.call is None:
            return "no end"
        what = "loss of power" if self.power else "SIGKILL"
        return f"{what} {'after' if self.after else 'before'} call {self.call}"


class Folder:
    """Renames and removals in a folder, which a loss of power undoes as long as the folder is not synced."""

    def __init__(self, keep: Path) -> None:
        self._keep = keep
        self._undo: list[tuple[Path, Callable[[], None]]] = []

    def renaming(self, source: Path, target: Path) -> None:
        replaced = self._copy(target) if target.exists() else None

        def undo() -> None:
            os.replace(target, source)
            if replaced is not None:
                os.replace(replaced, target)

        self._undo.append((target.parent, undo))

    def removing(self, file: Path) -> None:
        copy = self._copy(file)
        self._undo.append((file.parent, lambda: os.replace(copy, file)))

    def _copy(self, file: Path) -> Path:
        copy = self._keep / f"{len(self._undo)}-{os.getpid()}-{file.name}"
        shutil.copy2(file, copy)
        return copy

    def synced(self, folder: Path) -> None:
        self._undo = [entry for entry in self._undo if entry[0] != folder]

    def lose_power(self, rng: random.Random) -> None:
        """Undo the latest changes, as many as chance wants: file systems keep the order of changes to a folder."""
        for _ in range(rng.randrange(len(self._undo) + 1)):
            self._undo.pop()[1]()


def digest(session: Session) -> str:
    """Return a digest of every bit that must survive: weights, moments, step counts, random states, rates."""
    found = hashlib.sha256()
    for name, states in sorted(state_on_nvme(session.model, session.optimizer).items()):
        for kind, value in sorted(states.items()):
            found.update(f"{name}/{kind}/{value.dtype}".encode())
            found.update(local(value.float()).numpy().tobytes())
    found.update(torch.get_rng_state().numpy().tobytes())
    found.update(repr(random.getstate()).encode())
    found.update(repr([group["lr"] for group in session.optimizer.param_groups]).encode())
    found.update(repr(session.scheduler.state_dict()["last_epoch"]).encode())
    return found.hexdigest()[:16]


def live(folder: Path, log: int, end: End, seed: int, *, reference: bool = False) -> None:
    """Run one life; what it saw goes line by line into the file `log`, which outlives it.

    Digests are of the state that it begins and ends with; of every step in the `reference`.
    """

    def say(*words: object) -> None:
        os.write(log, (" ".join(map(str, words)) + "\n").encode())

    volatile: list[VolatileEngine] = []
    with _ended(end, seed, folder, volatile) as calls:
        exists = any((folder / "nvme0").glob("*/commits/step*.json")) if (folder / "nvme0").is_dir() else False
        run = {"resume": "latest" if exists else "", "retained_commits": RETAINED}
        with Session(folder, arena="small", run=run) as session:
            say("resumed" if exists else "started", session.optimizer.steps, digest(session))
            if not exists:
                session.commit()
                say("committed", 0)
            while session.optimizer.steps < STEPS:
                session.step()
                if reference or session.optimizer.steps == STEPS:
                    say("trained", session.optimizer.steps, digest(session))
                session.commit()
                say("committed", session.optimizer.steps)
        say("calls", calls())


@contextlib.contextmanager
def _ended(end: End, seed: int, folder: Path, engines: list[VolatileEngine]) -> Iterator[Callable[[], int]]:
    """Let the life end at a system call; yields what tells how many there were."""
    if end.call is None:
        yield lambda: 0
        return
    rng = random.Random(seed)
    keep = folder / "undo"
    keep.mkdir(exist_ok=True)
    changes = Folder(keep)
    count = 0

    def die() -> None:
        if end.power:
            for engine in engines:
                engine.lose_power(rng)
            changes.lose_power(rng)
        os.kill(os.getpid(), signal.SIGKILL)

    def wrapped(name: str) -> Callable[..., Any]:
        original = getattr(os, name)

        def call(*arguments: Any, **keywords: Any) -> Any:
            nonlocal count
            mine, count = count, count + 1
            if mine == end.call and not end.after:
                die()
            if end.power and name == "rename":
                changes.renaming(*map(Path, arguments[:2]))
            elif end.power and name == "unlink" and Path(arguments[0]).parent.name == "commits":
                with contextlib.suppress(FileNotFoundError):
                    changes.removing(Path(arguments[0]))
            try:
                result = original(*arguments, **keywords)
                if end.power and name == "fsync":
                    changes.synced(Path(os.readlink(f"/proc/self/fd/{arguments[0]}")))
            finally:
                if mine == end.call:
                    die()
            return result

        return call

    module = importlib.import_module("infinity.run")
    original_open = module.open_engine

    def open_engine(config: StorageConfig) -> tuple[Any, str]:
        inner, reason = original_open(config)
        engines.append(VolatileEngine(inner))
        return engines[-1], reason

    for name in _CALLS:
        setattr(os, name, wrapped(name))
    if end.power:
        module.open_engine = open_engine
    yield lambda: count  # nothing is put back: the process ends


def _forked(folder: Path, end: End, seed: int, *, reference: bool = False) -> tuple[list[list[str]], int]:
    """Run a life in a process of its own; return its words and its exit status (minus a signal)."""
    log = folder / "log"
    log.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            torch.set_num_threads(1)
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            live(folder, descriptor, end, seed, reference=reference)
            if dist.is_initialized():
                dist.destroy_process_group()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    deadline = time.monotonic() + (end.seconds if end.seconds is not None else _PATIENCE)
    pid = 0
    while not pid and time.monotonic() < deadline:
        time.sleep(0.001)
        pid, status = os.waitpid(child, os.WNOHANG)
    if not pid:
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    words = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
    return words, os.waitstatus_to_exitcode(status)


@dataclass
class Report:
    """What came of the trials."""

    trials: int = 0
    power_losses: int = 0
    resumes: int = 0
    runs: int = 0
    failures: list[str] | None = None


class Harness:
    """One run after the other in one folder, each killed many times."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.rng = folder, random.Random(seed)
        self.report = Report(failures=[])
        self.expected: dict[int, str] = {}
        self.calls = 0
        self.seconds = 1.0
        self._committed = -1

    def reference(self) -> None:
        """Run a life that nobody disturbs: what every other one must equal, how long it takes, how many calls it makes.

        Raises:
            RuntimeError: it failed by itself.
        """
        began = time.monotonic()
        words, status = _forked(self.folder, End(call=1 << 30), 0, reference=True)
        self.seconds = time.monotonic() - began
        self.expected = {int(word[1]): word[2] for word in words if len(word) == 3}
        if status or len(set(self.expected.values())) != STEPS + 1:
            raise RuntimeError(f"the undisturbed run ended with {status}: {words}")
        self.calls = int(words[-1][1])
        self._reset()

    def trial(self, *, power: bool) -> None:
        """End one life, and check what it found."""
        end = self._end(power)
        seed = self.rng.randrange(1 << 30)
        words, status = _forked(self.folder, end, seed)
        self.report.trials += 1
        self.report.power_losses += power and status == -signal.SIGKILL
        problems = list(self._problems(words, status))
        if problems:
            assert self.report.failures is not None
            self.report.failures += [f"trial {self.report.trials} ({end}, seed {seed}): {text}" for text in problems]
            self._reset()
        elif status == 0:
            self.report.runs += 1
            self._reset()

    def _end(self, power: bool) -> End:
        left = 1 - max(0, self._committed) / STEPS  # a life that resumes is shorter
        if power or self.rng.random() < 0.5:
            call = int(self.calls * left * self.rng.random())
            return End(call=call, after=self.rng.random() < 0.5, power=power)
        return End(seconds=self.seconds * (0.3 + 0.7 * left * self.rng.random()))

    def _problems(self, words: list[list[str]], status: int) -> Iterator[str]:
        if status not in (0, -signal.SIGKILL):
            yield f"ended with {status}"
        for word in words:
            if word[0] == "started" and self._committed >= 0:
                yield f"step {self._committed} was committed, but the next life found nothing"
            if word[0] == "resumed":
                self.report.resumes += 1
                if int(word[1]) < self._committed:
                    yield f"step {self._committed} was committed, but the next life resumed at {word[1]}"
            if (
                word[0] in ("started", "resumed", "trained")
                and len(word) == 3
                and self.expected[int(word[1])] != word[2]
            ):
                yield f"{word[0]} step {word[1]} with other bits than the undisturbed run"
            if word[0] == "committed":
                self._committed = int(word[1])

    def _reset(self) -> None:
        self._committed = -1
        for entry in self.folder.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def run(trials: int, power: int, seed: int, folder: Path, progress: Callable[[], None]) -> Report:
    """Run trials in an empty folder."""
    harness = Harness(folder, seed)
    harness.reference()
    kinds = [False] * trials + [True] * power
    harness.rng.shuffle(kinds)
    for kind in kinds:
        harness.trial(power=kind)
        progress()
    return harness.report


def main() -> int:
    """Parse the command line, run, and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=100, help="lives that are killed")
    parser.add_argument("--power", type=int, default=None, help="lives that lose power; default: a fifth of --trials")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", type=Path, default=None, help="folder on a drive; default: a temporary one")
    options = parser.parse_args()
    power = options.trials // 5 if options.power is None else options.power
    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with (
        tempfile.TemporaryDirectory(dir=options.dir) as folder,
        # No thread of its own: the process forks.
        Progress(*columns, console=console, auto_refresh=False) as bar,
    ):
        task = bar.add_task("killing and resuming", total=options.trials + power)

        def advance() -> None:
            bar.advance(task)
            bar.refresh()

        report = run(options.trials, power, options.seed, Path(folder), advance)
    failures = report.failures or []
    for failure in failures:
        console.print(failure, markup=False, soft_wrap=True)
    console.print(
        f"{report.resumes} resumes, {report.power_losses} losses of power, {report.runs} runs that reached their end"
    )
    console.print(f"{report.trials} trials, {len(failures)} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
