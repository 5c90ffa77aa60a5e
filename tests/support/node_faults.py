"""Cause every fault of a node in every mode of a run, at every moment, and check what the mode promises.

    PYTHONPATH=tests python -m support.node_faults --trials 200 --json results.json

A trial trains on two nodes (`support.nodes`) with one rank each, and causes a fault on one of them. It checks that:

- every rank that can still report ends with a message that names the cause, the host and the rank, or that the run
  continues, if this is promised,
- the run resumes from the newest checkpoint that the mode guarantees, with the losses of an uninterrupted run,
- after an interrupted export, the next export has the same content as an export without a fault,
- with copies on other nodes, a run whose daemon is killed logs a warning.

The time from the fault until the last rank has ended is recorded. With `--results`, the program prints a table of files
from earlier runs.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import json
import logging
import random
import re
import shutil
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, astuple, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import infinity
from infinity import peer_failures
from infinity.checkpoint.checkpoint_files import CheckpointFiles
from infinity.checkpoint.manifest import published_among
from infinity.checkpoint.mirror import Mirror
from infinity.checkpoint.parity import parities_in
from infinity.ranks import Ranks
from infinity_tools.cli import main as infinity_command
from support.daemon_process import until
from support.nodes import PATIENCE, Node, Nodes, Program
from support.ranks import RankPool
from support.session import EVERY, Session

MODES = ("full shard", "HSDP", "mirror", "copies")
MOMENTS: dict[str, tuple[Any, str]] = {
    "training": (None, ""),
    "checkpoint": ("infinity.checkpoint.manifest", "write_manifest"),
    "copy": (Mirror, "write"),
    "export": (CheckpointFiles, "page"),
    "resume": ("infinity.run.initial_state", "restore"),
}
"""Function of a rank before which the fault occurs, by moment."""
_COPY = ("infinity_daemon.copy_pull", "write_index")
"""Function of a daemon before which the fault occurs, for the moment "copy" of the mode "copies"."""
_SHORT_LIMIT, _LIMIT, _LONG_LIMIT = 5, 30, 60
"""Values of `run.heartbeat_timeout_seconds`. A slow machine must not look like a silent one."""
_PAUSE, _GRACE = 3.0, 1.0
"""Duration of a short pause, and `GRACE_SECONDS`."""
_RUN = "drive0/nvme0"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault of a node."""

    act: Callable[[Trial], None]
    ends: bool | None = True
    """Whether the run must end; None if it may also continue."""
    silent: bool = False
    """Whether the ranks on this node cannot report anything, and are killed at the end of the trial."""
    limit: int = _LIMIT
    """`run.heartbeat_timeout_seconds`."""
    cause: str = ""
    """Regular expression for the cause in messages; by default, of a node without a sign of life."""
    drive: bool = False
    """Whether the drive is a file system of its own, which is mounted again after the fault."""
    wipes: bool = False
    """Whether the drive is replaced by an empty one."""


def _kill_rank(trial: Trial) -> None:
    trial.programs[trial.victim].signal(signal.SIGKILL)


def _kill_node(trial: Trial) -> None:
    trial.node.kill()


def _lose_power(trial: Trial) -> None:
    trial.node.cut()
    trial.node.kill()


def _cut(trial: Trial) -> None:
    trial.node.cut()


def _lose_packets(trial: Trial) -> None:
    trial.node.lose(0.6)


def _pause(trial: Trial) -> None:
    trial.programs[trial.victim].signal(signal.SIGSTOP)


def _pause_briefly(trial: Trial) -> None:
    _pause(trial)
    time.sleep(_PAUSE)
    trial.programs[trial.victim].signal(signal.SIGCONT)


def _fill_drive(trial: Trial) -> None:
    trial.node.command("sh", "-c", "cat /dev/zero > drive0/filler").wait(None)


def _remove_drive(trial: Trial) -> None:
    trial.node.remove_drive()


def _end_daemon(trial: Trial) -> None:
    trial.daemons[trial.victim].signal(signal.SIGKILL)


_FAILED_DRIVE = r"EIO|Input/output error"
FAULTS = {
    "rank killed": Fault(act=_kill_rank, silent=True),
    "node killed": Fault(act=_kill_node, silent=True, limit=_SHORT_LIMIT),
    "power loss": Fault(act=_lose_power, silent=True, limit=_SHORT_LIMIT),
    "power loss, drive wiped": Fault(act=_lose_power, silent=True, limit=_SHORT_LIMIT, wipes=True),
    "link cut": Fault(act=_cut, limit=_SHORT_LIMIT),
    "60 % packet loss": Fault(act=_lose_packets, ends=None, limit=_SHORT_LIMIT),
    "short pause": Fault(act=_pause_briefly, ends=False, limit=_LONG_LIMIT),
    "long pause": Fault(act=_pause, silent=True, limit=_SHORT_LIMIT),
    "full drive": Fault(act=_fill_drive, ends=None, cause="ENOSPC|No space left", drive=True),
    "drive removed": Fault(act=_remove_drive, cause=_FAILED_DRIVE, drive=True),
    "drive removed, wiped": Fault(act=_remove_drive, cause=_FAILED_DRIVE, drive=True, wipes=True),
    "daemon killed": Fault(act=_end_daemon, ends=False, limit=_LONG_LIMIT),
}


@dataclass
class Result:
    """Result of a trial."""

    fault: str
    mode: str
    moment: str
    victim: int
    outcome: str = ""
    seconds: float | None = None
    """Time from the fault until all ranks that can report have ended."""
    problems: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Fault, mode, moment and node."""
        return f"{self.fault}/{self.mode}/{self.moment}/node{self.victim}"


def trials() -> list[Result]:
    """Return all combinations of fault, mode, moment and node."""
    return [
        Result(fault, mode, moment, victim)
        for fault in FAULTS
        for mode in MODES
        for moment in MOMENTS
        for victim in range(2)
        if (moment != "copy" or mode in ("mirror", "copies"))
        and (moment, mode, victim) != ("export", "HSDP", 1)  # rank 0 has all pages
    ]


# On the nodes #


@contextlib.contextmanager
def _mode(mode: str) -> Iterator[None]:
    """Shard over all ranks or, for HSDP, replicate on all ranks."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")) if mode == "HSDP" else None
    with patch.object(infinity, "mesh", lambda *_: mesh) if mesh is not None else contextlib.nullcontext():
        yield


def _pause_before(place: Any, name: str, shared: Path) -> None:
    """Wait for the fault before a function of a class, or of a module with this name, is called."""
    if isinstance(place, str):
        place = importlib.import_module(place)
    original = getattr(place, name) if name else None

    def paused(*arguments: Any, **keywords: Any) -> Any:
        if (shared / "armed").exists():
            (shared / "reached").touch()
            while not (shared / "struck").exists():
                time.sleep(0.01)
        return original(*arguments, **keywords)

    if original is not None:
        setattr(place, name, paused)


def train(local: str, shared: str, moment: str, mode: str, launch: int, run: dict[str, Any]) -> None:
    """Train until the file `stop` exists, and log losses and checkpoints to a file."""
    logging.basicConfig(format="%(message)s")
    peer_failures.GRACE_SECONDS = _GRACE
    dist.init_process_group("gloo")
    ranks = Ranks.current()
    if moment:
        _pause_before(*MOMENTS[moment], Path(shared))
    telemetry = {"runtime_dir": f"{local}/run"}
    with (
        _mode(mode),
        Session(Path(local, "drive0"), run=run, telemetry=telemetry) as session,
        Path(shared, f"log{launch}.{ranks.rank}").open("w", buffering=1) as log,
    ):
        log.write(f"begun {session.optimizer.steps}\n")
        while not ranks.agree(Path(shared, "stop").exists()):
            log.write(f"loss {session.optimizer.steps + 1} {_step(session, mode)}\n")
            if session.optimizer.steps % EVERY == 0:
                session.save_checkpoint()
                log.write(f"saved {session.optimizer.steps}\n")
            time.sleep(0.05)


def _step(session: Session, mode: str) -> str:
    if mode == "HSDP":  # a lost rank continues with other random states
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(2 * session.optimizer.steps + dist.get_rank())
    return session.step().hex()


def export(local: str, shared: str, moment: str, out: str) -> None:
    """Run `infinity export`."""
    peer_failures.GRACE_SECONDS = _GRACE
    if moment:
        _pause_before(*MOMENTS[moment], Path(shared))
    sys.argv = ["infinity", "export", f"{local}/{_RUN}", "--out", f"{shared}/{out}"]
    with patch("infinity_tools.export._SILENCE_SECONDS", _LIMIT):
        infinity_command()


def losses(folder: Path, mode: str, steps: int) -> list[str]:
    """Return the losses of an uninterrupted run. Called on every rank."""
    with _mode(mode), Session(folder) as session:
        return [_step(session, mode) for _ in range(steps)]


# Outside #


class Expected:
    """Losses of uninterrupted runs by mode, which are computed once."""

    def __init__(self) -> None:
        self._pool, self._known = RankPool(2), dict[str, list[list[str]]]()

    def losses(self, mode: str, steps: int) -> list[list[str]]:
        """Return the losses of each rank."""
        kind = "HSDP" if mode == "HSDP" else ""
        if len(self._known.get(kind, [[]])[0]) < steps:
            with tempfile.TemporaryDirectory() as folder:
                self._known[kind] = self._pool.run(losses, Path(folder), kind, -(-steps // 50) * 50)
        return self._known[kind]

    def close(self) -> None:
        """End the processes."""
        self._pool.close()


class Trial:
    """One fault of a run on two nodes."""

    def __init__(self, nodes: Nodes, result: Result, expected: Expected) -> None:
        self.result, self.fault, self.victim = result, FAULTS[result.fault], result.victim
        self.node, self.programs = nodes[result.victim], list[Program]()
        self.daemons: dict[int, Program] = {}
        """Running daemons by node."""
        self._complete = 0  # step of the newest checkpoint of which all ranks have a copy on another node
        self._nodes, self._expected, self._launches = nodes, expected, 0
        self._shared, self._mirror = nodes.folder / "shared", nodes.folder / "mirror"

    def run(self) -> None:
        """Run the trial, and record its outcome and problems in the result."""
        moment = self.result.moment
        self._reset()
        if self.fault.drive:
            self.node.new_drive()
        self._start_daemons(moment)
        after = moment in ("export", "resume")  # the first launch ends without a fault
        limit = self.fault.limit
        self._train(limit, moment="" if after else moment)
        elsewhere = {"mirror": self._mirrored, "copies": self._copied}.get(self.result.mode, self._newest)
        self._wait(lambda: self._newest() >= EVERY and elsewhere() >= EVERY)
        exported = ""
        if after:
            self._stop()
        if moment == "export":
            exported = self._export("first")
            self._start(export, moment, "interrupted")
        elif moment == "resume":
            self._train(limit, moment=moment, resume="latest")
        self._strike()
        self._watch()
        self._repair()
        if moment == "export":
            self._check_export(exported)
        self._check_resume()

    def _reset(self) -> None:
        for node in self._nodes:
            node.restore()
            node.kill()
            node.plain_drive()
        for folder in (self._shared, self._mirror, *(node.folder / "drive0" for node in self._nodes)):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()

    def _start_daemons(self, moment: str = "") -> None:
        copies = self.result.mode == "copies"
        if not copies and self.fault.act is not _end_daemon:
            return
        for index, node in enumerate(self._nodes):
            if copies or node is self.node:
                (node.folder / "infinityd.toml").write_text('[copies]\nhost = "eth0"\n' if copies else "")
                paused = copies and moment == "copy" and node is self.node
                before = partial(_pause_before, *_COPY, self._shared) if paused else None
                config = str(self._nodes.local / "infinityd.toml")
                self.daemons[index] = node.daemon("--config", config, before=before)

    def _start(self, function: Callable[..., None], moment: str, *arguments: Any) -> None:
        self.programs = [
            node.start(
                function, str(self._nodes.local), str(self._shared), moment if rank == self.victim else "", *arguments,
                RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE="2", LOCAL_WORLD_SIZE="1",
                MASTER_ADDR="node0", MASTER_PORT="29500",
            )
            for rank, node in enumerate(self._nodes)
        ]  # fmt: skip

    def _train(self, limit: int, *, moment: str = "", resume: str = "") -> None:
        (self._shared / "stop").unlink(missing_ok=True)
        self._launches += 1
        of_mode = {"mirror": {"mirror": f"file://{self._mirror}"}, "copies": {"copies": 1}}
        run = {"heartbeat_timeout_seconds": limit, "resume": resume, **of_mode.get(self.result.mode, {})}
        self._start(train, moment, self.result.mode, self._launches, run)

    def _stop(self) -> None:
        (self._shared / "stop").touch()
        for program in self.programs:
            program.wait()

    def _export(self, out: str) -> str:
        self._start(export, "", out)
        for program in self.programs:
            program.wait()
        return self._digest(out)

    def _digest(self, out: str) -> str:
        files = sorted(file for file in (self._shared / out).iterdir() if file.suffix == ".safetensors")
        assert files
        return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()

    # Progress #

    def _words(self, kind: str, launch: int | str = "*", rank: int | str = "*") -> list[list[str]]:
        files = sorted(self._shared.glob(f"log{launch}.{rank}"))
        lines = [line.split() for file in files for line in file.read_text().splitlines()]
        return [words[1:] for words in lines if words[0] == kind]

    def _step(self) -> int:
        """Return the last step that both ranks of this launch have completed."""
        return min(
            max((int(step) for step, _ in self._words("loss", self._launches, rank)), default=0) for rank in (0, 1)
        )

    def _newest(self) -> int:
        return max((int(step) for (step,) in self._words("saved")), default=0)

    def _mirrored(self) -> int:
        found = Mirror(f"file://{self._mirror}").newest()
        return found[1].name.step if found else 0

    def _copied(self) -> int:
        """Return the step of the newest checkpoint of which all ranks have had a complete copy."""

        def copies(node: Node) -> set[tuple[int, str]]:
            parities = parities_in(node.inside.glob(f"{_RUN}/2*"))
            names = published_among([peer.manifest for parity in parities for peer in parity.contents.peers])
            return {(name.step, name.identity) for name in names}

        steps = [step for step, _ in set.intersection(*map(copies, self._nodes))]
        self._complete = max(self._complete, *steps, 0)
        return self._complete

    def _wait(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition. No rank may fail in the meantime."""

        def reached() -> bool:
            for program in self.programs:
                assert program.poll() in (None, 0), program.output
            return condition()

        until(reached, PATIENCE)

    # Faults #

    def _strike(self) -> None:
        (self._shared / "armed").touch()
        if self.result.moment == "training":
            at = self._step()
            self._wait(lambda: self._step() > at)
        else:
            self._wait((self._shared / "reached").exists)
        if self.result.mode == "copies":
            self._copied()  # the drive of the node may be lost
        self._began = time.monotonic()
        self.fault.act(self)
        (self._shared / "struck").touch()

    def _watch(self) -> None:
        """Wait until all ranks that can report have ended, or until the run has continued."""
        reporting = [rank for rank in range(2) if not (self.fault.silent and rank == self.victim)]
        at = max(self._step(), self._newest())  # a resumed launch has not logged a step yet

        def codes() -> list[int | None]:
            return [self.programs[rank].poll() for rank in reporting]

        until(lambda: None not in codes() or (not self.fault.ends and self._step() > at + EVERY), PATIENCE)
        if None in codes() and not any(codes()):
            self.node.restore()
            self._stop()
            if self.fault.act is _end_daemon and self.result.mode == "copies" and self.result.moment != "export":
                self._check_warning()
        until(lambda: None not in codes(), PATIENCE)
        self.result.outcome = "ended" if any(codes()) else "continued"
        if any(codes()):
            self.result.seconds = time.monotonic() - self._began
        if bool(any(codes())) is not self.fault.ends and self.fault.ends is not None and self.result.moment != "export":
            self._problem(f"the run {self.result.outcome}: exit statuses {codes()}")
        for rank in reporting:
            if self.programs[rank].poll():
                self._check_message(rank)

    def _check_message(self, rank: int) -> None:
        output, cause = self.programs[rank].output, self.fault.cause
        # Without a connection, each rank sees the other one as lost. The first report that gets through is repeated.
        lost = (0, 1) if rank == self.victim and not cause else (self.victim,)
        named = "|".join(rf"host node{n} \(rank {n}\)|rank {n} (\(process \d+\) )?on host node{n}" for n in lost)
        itself = rank == self.victim and bool(cause)
        cause = cause or "no sign of life|closed its connections|exited unexpectedly"
        if not re.search(cause, output) or not (re.search(named, output) or itself):
            self._problem(f"rank {rank} does not name the cause, the host and the rank:\n{output[-2000:]}")

    def _check_warning(self) -> None:
        output = self.programs[self.victim].output
        if not re.search("could not be copied to this node: infinityd does not respond", output):
            self._problem(f"a warning about the daemon is missing:\n{output[-2000:]}")

    def _repair(self) -> None:
        for node in self._nodes:
            node.restore()
            node.kill()
        (self._shared / "armed").unlink(missing_ok=True)
        if self.fault.wipes and self.fault.drive:
            self.node.new_drive()
        elif self.fault.wipes:
            shutil.rmtree(self.node.folder / _RUN)
        elif self.fault.drive:
            self.node.return_drive()
            self.node.command("rm", "-f", "drive0/filler").wait()
        if self.result.mode == "copies":
            self._start_daemons()

    # Checks #

    def _problem(self, text: str) -> None:
        self.result.problems.append(text)

    def _check_export(self, expected: str) -> None:
        if (self._shared / "interrupted").exists() and self._digest("interrupted") != expected:
            self._problem("an incomplete export looks like a complete one")
        if (not self.fault.wipes or self.result.mode == "copies") and self._export("again") != expected:
            self._problem("the next export differs")

    def _check_resume(self) -> None:
        saved, mode = self._newest(), self.result.mode
        elsewhere = {"mirror": self._mirrored(), "copies": self._complete}
        promised = elsewhere.get(mode, saved) if self.fault.wipes else saved
        self._train(_LONG_LIMIT, resume="latest")
        if self.fault.wipes and mode == "full shard":
            until(lambda: all(program.poll() for program in self.programs), PATIENCE)
            for program in self.programs:
                if f"rank {self.victim} on node{self.victim}" not in program.output:
                    self._problem(f"the lost files are not named:\n{program.output[-2000:]}")
        else:
            self._wait(lambda: self._step() > promised + 1)
            self._stop()
            begun = {int(step) for (step,) in self._words("begun", self._launches)}
            if len(begun) > 1 or max(begun) < promised:
                self._problem(f"resumed from step {sorted(begun)}; promised was {promised}, and saved {saved}")
            text = f"random states of rank {self.victim} are not restored"
            if (text in self.programs[self.victim].output) is not (self.fault.wipes and mode == "HSDP"):
                self._problem(
                    f"a warning about random states is missing or wrong:\n{self.programs[self.victim].output}"
                )
        for rank in range(2):
            found = self._words("loss", rank=rank)
            expected = self._expected.losses(mode, max(int(step) for step, _ in found))[rank]
            if wrong := [step for step, loss in found if expected[int(step) - 1] != loss]:
                self._problem(f"rank {rank} has losses that differ from an uninterrupted run, in steps {wrong}")


def run(result: Result, expected: Expected, nodes: Nodes) -> None:
    """Run a trial on two nodes. Errors of the trial are problems, too."""
    try:
        Trial(nodes, result, expected).run()
    except Exception:
        result.problems.append(traceback.format_exc())


def table(results: list[Result]) -> str:
    """Return a table of the results by fault: outcomes, problems, and the distribution of the seconds."""
    rows = ["| fault | trials | ended | continued | problems | seconds until all ranks ended: median (range) |"]
    rows.append("|---|---|---|---|---|---|")
    for fault in FAULTS:
        mine = [result for result in results if result.fault == fault]
        times = [result.seconds for result in mine if result.seconds is not None]
        spread = f"{statistics.median(times):.1f} ({min(times):.1f} to {max(times):.1f})" if times else ""
        counts = [sum(result.outcome == outcome for result in mine) for outcome in ("ended", "continued")]
        problems = sum(bool(result.problems) for result in mine)
        rows.append(f"| {fault} | {len(mine)} | {counts[0]} | {counts[1]} | {problems} | {spread} |")
    return "\n".join(rows)


def main() -> int:
    """Parse the command line, run, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=0, help="number of trials [default: every combination once]")
    parser.add_argument("--seed", type=int, default=0, help="seed of the order")
    parser.add_argument("--only", default="", help="regular expression for FAULT/MODE/MOMENT/NODE")
    parser.add_argument("--dir", type=Path, default=None, help="folder for the nodes [default: a temporary folder]")
    parser.add_argument("--json", type=Path, default=None, help="file for the results")
    parser.add_argument("--results", type=Path, nargs="+", default=[], help="print these results, without trials")
    options = parser.parse_args()
    results = [Result(**each) for file in options.results for each in json.loads(file.read_text())]
    if not results:
        chosen = [each for each in trials() if re.search(options.only, each.name)]
        random.Random(options.seed).shuffle(chosen)
        count, expected = options.trials or len(chosen), Expected()
        with tempfile.TemporaryDirectory(dir=options.dir) as folder, Nodes(Path(folder), 2) as nodes:
            for number in range(count):
                result = Result(*astuple(chosen[number % len(chosen)])[:4])
                run(result, expected, nodes)
                results.append(result)
                if options.json:
                    options.json.write_text(json.dumps([asdict(each) for each in results], indent=1))
                print(f"{number + 1} of {count}: {result.name}: {result.outcome}", file=sys.stderr, flush=True)
        expected.close()
    failures = [f"{result.name}: {problem}" for result in results for problem in result.problems]
    print(table(results), *failures, f"{len(results)} trials, {len(failures)} problems", sep="\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
