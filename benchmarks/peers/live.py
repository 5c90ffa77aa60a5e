"""A running system: the processes of its ranks, the commands that they receive, and their answers."""

from __future__ import annotations

import json
import os
import select
import shutil
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peers.environment import variables

from infinity import torchrun

WORKER = Path(__file__).with_name("worker.py")
PATIENCE_SECONDS = 900.0
SAVES = "checkpoint"
"""Name of the folder for saves inside the folder of a system, if the system saves separately; see `systems`."""


class SystemFailedError(RuntimeError):
    """A rank has exited or reported an error. The message contains its last output."""


class Live:
    """The ranks of one system in one folder, as a context that stops them.

    Args:
        system: Name in `systems.SYSTEMS`.
        python: Python interpreter of the environment in which the system is installed.
        model: Folder of the pretrained model.
        work: Folder of the system on the drive.
        settings: Settings of the system.
        ranks: Number of processes.
        threads: Number of torch threads per process.
        resume: Whether to resume from the save in `work`.
        within: Prefix of the command, e.g. to start it in a control group.
    """

    def __init__(
        self,
        system: str,
        python: Path,
        model: Path,
        work: Path,
        settings: dict[str, Any],
        *,
        ranks: int = 1,
        threads: int = 1,
        resume: bool = False,
        within: Sequence[str] = (),
    ) -> None:
        work.mkdir(parents=True, exist_ok=True)
        self.work = work
        self._processes: list[subprocess.Popen[bytes]] = []
        self._answers: list[Any] = []
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        for rank in range(ranks):
            ours, theirs = os.pipe()
            command = [
                *within, str(python), str(WORKER), "--system", system, "--model", str(model), "--work", str(work),
                "--settings", json.dumps(settings), "--answers", str(theirs), *(["--resume"] if resume else []),
            ]  # fmt: skip
            environment = variables(python, threads) | torchrun.variables(rank, ranks, port)
            with (work.parent / f"{work.name}-rank{rank}.log").open("wb") as log:
                process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=log, stderr=log, pass_fds=[theirs], env=environment
                )
            os.close(theirs)
            self._processes.append(process)
            self._answers.append(os.fdopen(ours))
        self.facts = self._collect()

    def __enter__(self) -> Live:
        return self

    def __exit__(self, *_: Any) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
            if process.stdin is not None:
                process.stdin.close()
        for answers in self._answers:
            answers.close()

    @property
    def pids(self) -> list[int]:
        """Process IDs by rank."""
        return [process.pid for process in self._processes]

    def steps(self, first: int, count: int, tokens: int, seq: int) -> dict[str, Any]:
        """Take steps; return the steps of rank 0, and the bytes and memory of all ranks."""
        return self._ask({"do": "steps", "first": first, "count": count, "tokens": tokens, "seq": seq})

    def save(self) -> dict[str, Any]:
        """Save the state and return the cost of the save."""
        return self._ask({"do": "save"})

    def end(self) -> None:
        """Shut down regularly. The shutdown is not measured."""
        self._tell({"do": "end"})
        for process in self._processes:
            process.wait(PATIENCE_SECONDS)

    def _tell(self, command: dict[str, Any]) -> None:
        for process in self._processes:
            assert process.stdin is not None
            try:
                process.stdin.write(json.dumps(command).encode() + b"\n")
                process.stdin.flush()
            except BrokenPipeError:
                raise SystemFailedError(f"a rank exited: {self.log(0)[-400:]}") from None

    def _ask(self, command: dict[str, Any]) -> dict[str, Any]:
        self._tell(command)
        return self._collect()

    def _collect(self) -> dict[str, Any]:
        found = []
        for rank, answers in enumerate(self._answers):
            if not select.select([answers], [], [], PATIENCE_SECONDS)[0]:
                raise SystemFailedError(f"rank {rank} has not answered for {PATIENCE_SECONDS:.0f} s")
            line = answers.readline()
            if not line:
                status = self._processes[rank].wait(60)
                raise SystemFailedError(f"rank {rank} exited with status {status}: {self.log(rank)[-400:]}")
            answer = json.loads(line)
            if "error" in answer:
                raise SystemFailedError(f"rank {rank}: {answer['error']}")
            found.append(answer)
        sums = {name: sum(answer.get(name, 0) for answer in found) for name in ("read", "written", "peak_rss_bytes")}
        return {**found[0], **sums}

    def log(self, rank: int) -> str:
        """Return the output of a rank."""
        return (self.work.parent / f"{self.work.name}-rank{rank}.log").read_text(errors="replace")


def occupied(folder: Path) -> int:
    """Return the bytes that files below a folder occupy on the drive."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(place, name)).st_blocks * 512
            except FileNotFoundError:
                continue
    return total


def clear(folder: Path) -> None:
    """Remove a folder of a system."""
    shutil.rmtree(folder, ignore_errors=True)
