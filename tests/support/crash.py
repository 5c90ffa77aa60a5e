"""Kill a training run at random points, or simulate a loss of power, and resume it repeatedly.

    PYTHONPATH=tests python -m support.crash --trials 1000 --power 200

A *life* consists of one process per rank. It resumes, compares its state bitwise with an uninterrupted run, trains, and
saves a checkpoint after every step (after some steps, two checkpoints), until one rank is killed or loses power. The
other ranks are killed shortly afterwards, as torchrun does. Some lives use a different page size than the previous life
and continue as a new run. Lives are forked from a process that has imported torch, so that each takes a fraction of a
second.

Between lives, commands are interrupted in the same way: exports, `store gc` and `store rm` (crash_commands.py).
"""

from __future__ import annotations

import argparse
import hashlib
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

import torch
import torch._dynamo  # imported before lives are forked
import torch.distributed as dist

from support.crash_commands import COMMANDS, Commands
from support.ends import End, ending
from support.published import complete_checkpoints
from support.session import Session
from support.train import KIB, MIB, local, state_on_nvme

STEPS = 5
RETAINED = 2
_PATIENCE = 300.0
_GRACE = 0.05
"""Maximum seconds between the death of one rank and the kill of the others."""


def digest(session: Session) -> str:
    """Return a digest of the state that must survive: weights, moments, step counts, random states, learning rates."""
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


def live(folder: Path, log: int, end: End, seed: int, *, reference: bool = False, other_pages: bool = False) -> None:
    """Run one rank of a life, which writes its progress as lines to the file descriptor `log`.

    It logs digests of its first and last state or, for the `reference`, of the state after every step.
    """

    def say(*words: object) -> None:
        os.write(log, (" ".join(map(str, words)) + "\n").encode())

    alone = not dist.is_initialized() or dist.get_world_size() == 1
    with ending(end, seed, folder, "" if alone else f"rank{dist.get_rank():05d}") as calls:
        exists = _has_checkpoint(folder / "nvme0")
        if dist.is_initialized():
            dist.barrier()  # all ranks check before one of them creates files
        run = {"resume": "latest" if exists else "", "retained_checkpoints": RETAINED}
        memory = {"memory": {"page_bytes": 128 * KIB, "host_bytes": 64 * MIB}} if other_pages else {}
        with Session(folder, host_cache="small", run=run, **memory) as session:
            note = session.optimizer.resumed_extra.get("note", 0)
            say("resumed" if exists else "started", session.optimizer.steps, digest(session), note)
            say("begun", calls())
            if not exists:
                save_checkpoint(session, say)
            while session.optimizer.steps < STEPS:
                session.step()
                if reference or session.optimizer.steps == STEPS:
                    say("trained", session.optimizer.steps, digest(session), 0)
                save_checkpoint(session, say)
        say("calls", calls())


def save_checkpoint(session: Session, say: Callable[..., None]) -> None:
    """Save one checkpoint or, in every other step, two checkpoints that differ only in `extra`."""
    steps = session.optimizer.steps
    for note in range(1, 2 + steps % 2):
        session.optimizer.save_checkpoint({"scheduler": session.scheduler.state_dict(), "note": note})
        say("checkpointed", steps, note)


def _has_checkpoint(path: Path) -> bool:
    return any(complete_checkpoints(run) for run in path.glob("*") if run.is_dir())


class Life:
    """The processes of one life, one per rank."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self._folder, self._ranks = folder, ranks

    def run(
        self, ends: dict[int, End], seed: int, *, reference: bool = False, other_pages: bool = False
    ) -> tuple[list[list[list[str]]], int]:
        """Run the life until all ranks have ended.

        Returns:
            Logged words of every rank, and the exit status (or negative signal) of the rank that failed first.
        """
        logs = [self._folder / f"log{rank}" for rank in range(self._ranks)]
        for file in (*logs, self._folder / "store", *self._folder.glob("trace*")):
            file.unlink(missing_ok=True)
        began = time.monotonic()
        options = {"reference": reference, "other_pages": other_pages}
        children = {self._fork(rank, ends.get(rank, End()), seed, options): rank for rank in range(self._ranks)}
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

    def _fork(self, rank: int, end: End, seed: int, options: dict[str, bool]) -> int:
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
            live(self._folder, log, end, seed, **options)
            if dist.is_initialized():
                dist.destroy_process_group()
            status = 0
        except BaseException:
            (self._folder / f"trace{rank}").write_text(traceback.format_exc())
        finally:
            os._exit(status)


@dataclass
class Report:
    """Results of the trials."""

    trials: int = 0
    ends: int = 0
    power_losses: int = 0
    resumes: int = 0
    runs: int = 0
    reshards: int = 0
    commands: int = 0
    failures: list[str] | None = None


class Harness:
    """Run and kill consecutive runs in one folder."""

    def __init__(self, folder: Path, seed: int, ranks: int) -> None:
        self.folder, self.rng, self.ranks = folder, random.Random(seed), ranks
        self.life = Life(folder, ranks)
        self.report = Report(failures=[])
        self.expected: list[dict[int, str]] = []
        self.calls = self.start = 0  # system calls of a complete life, and of its startup
        self.seconds = 1.0
        self._checkpointed = (-1, 0)
        self._other_pages = False
        self.commands: Commands

    def reference(self) -> None:
        """Run an uninterrupted life to get the expected digests, its duration and its number of system calls.

        Raises:
            RuntimeError: if it fails.
        """
        began = time.monotonic()
        ends = dict.fromkeys(range(self.ranks), End(call=1 << 30))
        words, status = self.life.run(ends, 0, reference=True)
        self.seconds = time.monotonic() - began
        self.expected = [{int(word[1]): word[2] for word in said if len(word) == 4} for said in words]
        if status or any(len(set(digests.values())) != STEPS + 1 for digests in self.expected):
            raise RuntimeError(f"the uninterrupted run exited with status {status}: {words}{self._traces()}")
        self.calls = min(int(said[-1][1]) for said in words)
        self.start = min(int(word[1]) for said in words for word in said if word[0] == "begun")
        self.commands = Commands(self.folder / "nvme0", self.folder.parent / f"{self.folder.name}-commands")
        self._reset()

    def trial(self, *, power: bool) -> None:
        """Interrupt a life or a command, and check the results."""
        if self.rng.random() < 0.25:
            self._command(power)
            return
        end, victim = self._end(power), self.rng.randrange(self.ranks)
        seed = self.rng.randrange(1 << 30)
        before = self._other_pages
        self._other_pages ^= self.rng.random() < 0.15
        words, status = self.life.run({victim: end}, seed, other_pages=self._other_pages)
        self.report.reshards += before != self._other_pages and any(said and said[0][0] == "resumed" for said in words)
        self._count(power, status)
        problems = list(self._problems(words, status))
        if problems:
            self._failed(f"rank {victim} of {self.ranks}: {end}, seed {seed}", problems)
            self._reset()
        elif status == 0:
            self.report.runs += 1
            self._reset()

    def _command(self, power: bool) -> None:
        name = self.rng.choice(sorted(COMMANDS))
        seed, end = self.rng.randrange(1 << 30), self._end(power, self.commands.calls[name])
        status, problems = self.commands.trial(name, end, seed)
        if status == -signal.SIGKILL and not problems and self.rng.random() < 0.2:  # the run is also resumed
            folder = self.commands.directory.parent
            words, code = Life(folder, self.ranks).run({}, seed)
            found = [said[0][:3] for said in words if said]
            wanted = [["resumed", str(STEPS), digests[STEPS]] for digests in self.expected]
            if code or found != wanted:
                problems.append(f"after the command, the run resumed as {found} with status {code}, not {wanted}")
        self.report.commands += 1
        self._count(power, status)
        if problems:
            self._failed(f"{name} of {self.ranks} ranks: {end}, seed {seed}", problems)

    def _count(self, power: bool, status: int) -> None:
        self.report.trials += 1
        self.report.ends += status == -signal.SIGKILL
        self.report.power_losses += power and status == -signal.SIGKILL

    def _failed(self, place: str, problems: list[str]) -> None:
        assert self.report.failures is not None
        self.report.failures += [f"trial {self.report.trials} ({place}): {text}" for text in problems]

    def _end(self, power: bool, calls: int | None = None) -> End:
        """Draw the end of a life, or of a command with the given number of system calls."""
        after, kind = self.rng.random() < 0.5, self.rng.random()
        if calls is not None:
            return End(call=int(calls * kind), after=after, power=power)
        left = 1 - max(0, self._checkpointed[0]) / STEPS  # a resumed life is shorter
        if kind < 0.15:  # during startup
            return End(call=self.rng.randrange(self.start), after=after, power=power)
        if power or kind < 0.6:
            call = self.start + int((self.calls - self.start) * left * self.rng.random())
            return End(call=call, after=after, power=power)
        return End(seconds=self.seconds * (0.3 + 0.7 * left * self.rng.random()))

    def _problems(self, words: list[list[list[str]]], status: int) -> Iterator[str]:
        if status not in (0, -signal.SIGKILL):
            yield f"exited with status {status}{self._traces()}"
        begun = {(int(said[0][1]), int(said[0][3])) for said in words if said}
        if len(begun) > 1:
            yield f"the ranks resumed from different checkpoints (step, number within the step): {sorted(begun)}"
        for rank, said in enumerate(words):
            for word in said:
                where = (int(word[1]), int(word[3])) if len(word) == 4 else (0, 0)
                if word[0] in ("started", "resumed") and where < self._checkpointed:
                    yield f"checkpoint {self._checkpointed} was saved, but rank {rank} {word[0]} at {where}"
                if word[0] != "checkpointed" and len(word) == 4 and self.expected[rank][int(word[1])] != word[2]:
                    yield f"rank {rank} {word[0]} step {word[1]} with a state that differs from the uninterrupted run"
        self.report.resumes += any(said and said[0][0] == "resumed" for said in words)
        self._checkpointed = max(
            ((int(word[1]), int(word[2])) for said in words for word in said if word[0] == "checkpointed"),
            default=self._checkpointed,
        )

    def _traces(self) -> str:
        return "".join(f"\n{file.name}: {file.read_text()}" for file in sorted(self.folder.glob("trace*")))

    def _reset(self) -> None:
        self._checkpointed = (-1, 0)
        for entry in self.folder.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def run(trials: int, power: int, seed: int, ranks: int, folder: Path) -> Report:
    """Run trials in an empty folder."""
    harness = Harness(folder, seed, ranks)
    harness.reference()
    kinds = [False] * trials + [True] * power
    harness.rng.shuffle(kinds)
    for number, kind in enumerate(kinds, 1):
        harness.trial(power=kind)
        print(f"\r{ranks} rank{'s' * (ranks > 1)}: {number} of {len(kinds)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return harness.report


def main() -> int:
    """Parse the command line, run, and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=100, help="number of lives to kill")
    parser.add_argument(
        "--power", type=int, default=None, help="number of lives that lose power [default: a fifth of --trials]"
    )
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[1, 2], help="world sizes, between which the trials are divided"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--dir", type=Path, default=None, help="folder on the drive to test [default: a temporary folder]"
    )
    options = parser.parse_args()
    power = options.trials // 5 if options.power is None else options.power
    trials, failures = 0, []
    for number, ranks in enumerate(options.ranks):
        mine = [
            total * (number + 1) // len(options.ranks) - total * number // len(options.ranks)
            for total in (options.trials, power)
        ]
        with tempfile.TemporaryDirectory(dir=options.dir) as folder:
            (Path(folder) / "lives").mkdir()
            report = run(*mine, options.seed, ranks, Path(folder) / "lives")
        trials += report.trials
        failures += report.failures or []
        print(
            f"{ranks} rank{'s' * (ranks > 1)}: {report.resumes} resumes, {report.ends} kills, of which "
            f"{report.power_losses} with a loss of power, {report.runs} completed runs, {report.reshards} resumes "
            f"with a different page size, {report.commands} interrupted commands"
        )
    print(*failures, f"{trials} trials, {len(failures)} failures", sep="\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
