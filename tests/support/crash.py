"""Kill a training run at random points, or simulate a loss of power, and resume it repeatedly.

    PYTHONPATH=tests python -m support.crash --trials 1000 --power 200

A *life* consists of one process per rank. It resumes, compares its state bitwise with an uninterrupted run, trains, and
saves a checkpoint after every step (after some steps, two checkpoints), until one rank is killed or loses power. The
other ranks are killed shortly afterwards, as torchrun does. Some lives use a different page size than the previous life
and continue as a new run. Lives are forked from a process that has imported torch, so that each takes a fraction of a
second.

With `--nodes 2`, the ranks run on nodes of their own (`support.nodes`), each with its own drive. An interrupted rank
may take the other processes of its node with it, and the nodes of some lives have changed places.

Between lives, commands are interrupted in the same way: exports, `store gc` and `store rm` (crash_commands.py).
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from support.crash_commands import COMMANDS, Commands
from support.ends import End
from support.lives import HUNG, STEPS, Life
from support.nodes import Node, Nodes


@dataclass
class Report:
    """Results of the trials."""

    trials: int = 0
    ends: int = 0
    power_losses: int = 0
    resumes: int = 0
    runs: int = 0
    reshards: int = 0
    moves: int = 0
    commands: int = 0
    failures: list[str] | None = None


class Harness:
    """Run and kill consecutive runs in one folder, or on nodes."""

    def __init__(self, folder: Path, seed: int, ranks: int, nodes: Sequence[Node] = ()) -> None:
        self.folder, self.rng, self.ranks, self.nodes = folder, random.Random(seed), ranks, list(nodes)
        self.life = Life(folder, ranks, self.nodes)
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
        if not self.nodes:
            self.commands = Commands(self.folder / "nvme0", self.folder.parent / f"{self.folder.name}-commands")
        self._reset()

    def trial(self, *, power: bool) -> None:
        """Interrupt a life or a command, and check the results."""
        if not self.nodes and self.rng.random() < 0.25:
            self._command(power)
            return
        end, victim = self._end(power), self.rng.randrange(self.ranks)
        seed = self.rng.randrange(1 << 30)
        before = self._other_pages
        self._other_pages ^= self.rng.random() < 0.15
        moves = len(self.nodes) > 1 and self.rng.random() < 0.15
        if moves:
            self.nodes.reverse()
        together = len(self.nodes) > 0 and self.rng.random() < 0.5
        words, status = self.life.run({victim: end}, seed, whole_node=together, other_pages=self._other_pages)
        resumed = any(said and said[0][0] == "resumed" for said in words)
        self.report.reshards += resumed and before != self._other_pages
        self.report.moves += resumed and moves
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
        if status == HUNG:
            yield "the ranks did not end"
        elif status not in (0, -signal.SIGKILL):
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
        for folder in [self.folder, *(node.folder / "drive0" for node in self.nodes)]:
            for entry in folder.iterdir():
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def run(trials: int, power: int, seed: int, ranks: int, folder: Path, nodes: Sequence[Node] = ()) -> Report:
    """Run trials in an empty folder, or with this folder for logs on nodes with empty drives."""
    harness = Harness(folder, seed, ranks, nodes)
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
        "--ranks",
        type=int,
        nargs="+",
        default=None,
        help="world sizes, between which the trials are divided [default: 1 2, or one rank per node]",
    )
    parser.add_argument("--nodes", type=int, default=0, help="number of nodes; requires root [default: this machine]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--dir", type=Path, default=None, help="folder on the drive to test [default: a temporary folder]"
    )
    options = parser.parse_args()
    power = options.trials // 5 if options.power is None else options.power
    sizes = options.ranks or ([options.nodes] if options.nodes else [1, 2])
    trials, failures = 0, []
    for number, ranks in enumerate(sizes):
        mine = [total * (number + 1) // len(sizes) - total * number // len(sizes) for total in (options.trials, power)]
        with tempfile.TemporaryDirectory(dir=options.dir) as folder:
            (lives := Path(folder) / "lives").mkdir()
            with Nodes(Path(folder), options.nodes) if options.nodes else nullcontext(()) as nodes:
                report = run(*mine, options.seed, ranks, lives, nodes)
        trials += report.trials
        failures += report.failures or []
        print(
            f"{ranks} rank{'s' * (ranks > 1)}: {report.resumes} resumes, {report.ends} kills, of which "
            f"{report.power_losses} with a loss of power, {report.runs} completed runs, {report.reshards} resumes "
            f"with a different page size, {report.moves} on exchanged nodes, {report.commands} interrupted commands"
        )
    print(*failures, f"{trials} trials, {len(failures)} failures", sep="\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
