"""Kills a training run at random instants and resumes it, over and over; or cuts its power.

    python tests/core/core_crash.py --trials 1000 --power 200

A *life* is one process per rank: it resumes, checks every bit of the state it finds against a run that nobody
disturbs, trains and commits every step until one of its ranks is killed, or loses power as a node of its own does; the
others are killed a moment later, as torchrun does. Lives are forked from a process that has loaded torch, so one
takes a fraction of a second.
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
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from infinity.checkpoint.manifest import complete_commits, published_in
from infinity.config import StorageConfig
from infinity.io import VolatileEngine

STEPS = 8
RETAINED = 2
_CALLS = ("fsync", "rename", "unlink", "mkdir", "posix_fallocate", "truncate")
"""System calls before or after which a life may end: the named points of the publish protocol, and of start and end."""
_PATIENCE = 60.0
_GRACE = 0.05
"""Seconds at most for which the other ranks outlive the one that is killed."""


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
    """Run one rank of a life; what it saw goes line by line into the file `log`, which outlives it.

    Digests are of the state that it begins and ends with; of every step in the `reference`.
    """

    def say(*words: object) -> None:
        os.write(log, (" ".join(map(str, words)) + "\n").encode())

    volatile: list[VolatileEngine] = []
    with _ended(end, seed, folder, volatile) as calls:
        exists = _has_commit(folder / "nvme0")
        if dist.is_initialized():
            dist.barrier()  # all have looked before one begins
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


def _has_commit(path: Path) -> bool:
    return any(complete_commits(published_in(run / "commits")) for run in path.glob("*") if run.is_dir())


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


class Life:
    """The processes of one life, one per rank."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self._folder, self._ranks = folder, ranks

    def run(self, ends: dict[int, End], seed: int, *, reference: bool = False) -> tuple[list[list[list[str]]], int]:
        """Let the life run to its end.

        Returns:
            The words of every rank, and the exit status (minus a signal) of the rank that ended first or failed first.
        """
        logs = [self._folder / f"log{rank}" for rank in range(self._ranks)]
        for file in (*logs, self._folder / "store", *self._folder.glob("trace*")):
            file.unlink(missing_ok=True)
        began = time.monotonic()
        children = {self._fork(rank, ends.get(rank, End()), seed, reference): rank for rank in range(self._ranks)}
        timed = [(began + end.seconds, rank) for rank, end in ends.items() if end.seconds is not None]
        deadline, victim = min(timed, default=(began + _PATIENCE, 0))
        first: int | None = None
        grace = random.Random(seed).uniform(0, _GRACE)
        while children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid:
                del children[pid]
                code = os.waitstatus_to_exitcode(status)
                if code and first is None:
                    first, deadline, victim = code, time.monotonic() + grace, -1
            elif time.monotonic() >= deadline:
                for child in [child for child, rank in children.items() if victim in (-1, rank)]:
                    os.kill(child, signal.SIGKILL)
                deadline = time.monotonic() + _PATIENCE
            else:
                time.sleep(0.001)
        words = [[line.split() for line in log.read_text().splitlines()] if log.exists() else [] for log in logs]
        return words, first or 0

    def _fork(self, rank: int, end: End, seed: int, reference: bool) -> int:
        child = os.fork()
        if child:
            return child
        status = 1
        try:
            torch.set_num_threads(1)
            if self._ranks > 1:
                store = dist.FileStore(str(self._folder / "store"), self._ranks)
                dist.init_process_group("gloo", store=store, rank=rank, world_size=self._ranks)
            log = os.open(self._folder / f"log{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            live(self._folder, log, end, seed, reference=reference)
            if dist.is_initialized():
                dist.destroy_process_group()
            status = 0
        except BaseException:
            (self._folder / f"trace{rank}").write_text(traceback.format_exc())
        finally:
            os._exit(status)


@dataclass
class Report:
    """What came of the trials."""

    trials: int = 0
    ends: int = 0
    power_losses: int = 0
    resumes: int = 0
    runs: int = 0
    failures: list[str] | None = None


class Harness:
    """One run after the other in one folder, each killed many times."""

    def __init__(self, folder: Path, seed: int, ranks: int) -> None:
        self.folder, self.rng, self.ranks = folder, random.Random(seed), ranks
        self.life = Life(folder, ranks)
        self.report = Report(failures=[])
        self.expected: list[dict[int, str]] = []
        self.calls = 0
        self.seconds = 1.0
        self._committed = -1

    def reference(self) -> None:
        """Run a life that nobody disturbs: what every other one must equal, how long it takes, how many calls it makes.

        Raises:
            RuntimeError: it failed by itself.
        """
        began = time.monotonic()
        ends = dict.fromkeys(range(self.ranks), End(call=1 << 30))
        words, status = self.life.run(ends, 0, reference=True)
        self.seconds = time.monotonic() - began
        self.expected = [{int(word[1]): word[2] for word in said if len(word) == 3} for said in words]
        if status or any(len(set(digests.values())) != STEPS + 1 for digests in self.expected):
            raise RuntimeError(f"the undisturbed run ended with {status}: {words}{self._traces()}")
        self.calls = min(int(said[-1][1]) for said in words)
        self._reset()

    def trial(self, *, power: bool) -> None:
        """End one life, and check what it found."""
        end, victim = self._end(power), self.rng.randrange(self.ranks)
        seed = self.rng.randrange(1 << 30)
        words, status = self.life.run({victim: end}, seed)
        self.report.trials += 1
        self.report.ends += status == -signal.SIGKILL
        self.report.power_losses += power and status == -signal.SIGKILL
        problems = list(self._problems(words, status))
        if problems:
            assert self.report.failures is not None
            place = f"trial {self.report.trials} (rank {victim} of {self.ranks}: {end}, seed {seed})"
            self.report.failures += [f"{place}: {text}" for text in problems]
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

    def _problems(self, words: list[list[list[str]]], status: int) -> Iterator[str]:
        if status not in (0, -signal.SIGKILL):
            yield f"ended with {status}{self._traces()}"
        begun = {int(said[0][1]) for said in words if said}
        if len(begun) > 1:
            yield f"the ranks went on from different steps: {sorted(begun)}"
        for rank, said in enumerate(words):
            for word in said:
                if word[0] in ("started", "resumed") and int(word[1]) < self._committed:
                    yield f"step {self._committed} was committed, but rank {rank} {word[0]} at {word[1]}"
                if word[0] != "committed" and len(word) == 3 and self.expected[rank][int(word[1])] != word[2]:
                    yield f"rank {rank} {word[0]} step {word[1]} with other bits than the undisturbed run"
        self.report.resumes += any(said and said[0][0] == "resumed" for said in words)
        self._committed = max(
            (int(word[1]) for said in words for word in said if word[0] == "committed"), default=self._committed
        )

    def _traces(self) -> str:
        return "".join(f"\n{file.name}: {file.read_text()}" for file in sorted(self.folder.glob("trace*")))

    def _reset(self) -> None:
        self._committed = -1
        for entry in self.folder.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def run(trials: int, power: int, seed: int, ranks: int, folder: Path, progress: Callable[[], None]) -> Report:
    """Run trials in an empty folder."""
    harness = Harness(folder, seed, ranks)
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
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="world sizes that share the trials")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", type=Path, default=None, help="folder on a drive; default: a temporary one")
    options = parser.parse_args()
    power = options.trials // 5 if options.power is None else options.power
    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    trials, failures = 0, []
    # No thread of its own: the process forks.
    with Progress(*columns, console=console, auto_refresh=False) as bar:
        for number, ranks in enumerate(options.ranks):
            mine = [
                whole * (number + 1) // len(options.ranks) - whole * number // len(options.ranks)
                for whole in (options.trials, power)
            ]
            task = bar.add_task(f"killing and resuming, {ranks} rank{'s' * (ranks > 1)}", total=sum(mine))

            def advance(task: TaskID = task) -> None:
                bar.advance(task)
                bar.refresh()

            with tempfile.TemporaryDirectory(dir=options.dir) as folder:
                report = run(*mine, options.seed, ranks, Path(folder), advance)
            trials += report.trials
            failures += report.failures or []
            bar.console.print(
                f"{ranks} rank{'s' * (ranks > 1)}: {report.resumes} resumes, {report.ends} lives killed, of which "
                f"{report.power_losses} lost power, {report.runs} that reached their end"
            )
    for failure in failures:
        console.print(failure, markup=False, soft_wrap=True)
    console.print(f"{trials} trials, {len(failures)} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
