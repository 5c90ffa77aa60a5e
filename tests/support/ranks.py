"""Process pools of ranks, which are reused by many tests."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for_any
from pathlib import Path
from typing import Any

from support.processes import fork_server

PATIENCE = 900.0
"""Seconds after which a call on the ranks counts as lost."""
TIMEOUT = timedelta(seconds=2 * PATIENCE)
"""Timeout of collectives. It is longer, so that a lost call is reported with the stacks of all ranks."""


class RankFailedError(AssertionError):
    """A call failed on a rank. The message contains the traceback of this rank."""


class RankPool:
    """Processes of one process group. After a failed call, they are killed, and the next call starts new ones."""

    def __init__(self, world_size: int, backend: str = "gloo") -> None:
        self.world_size, self._backend = world_size, backend
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call an importable function on every rank; return the results in rank order.

        Raises:
            RankFailedError: if the call fails on a rank, with the traceback of the rank that failed first.
        """
        if not self._processes:
            self._start()
        try:
            for pipe in self._pipes:
                pipe.send((function, arguments))
            return self._collect()
        except RankFailedError as error:
            stacks = self._stacks()
            self.close(kill=True)
            raise RankFailedError(f"{error}\n{stacks}") from None
        except BaseException:
            self.close(kill=True)
            raise

    def _stacks(self) -> str:
        """Return the current stack of each rank, because only one of two ranks in a deadlock reports an error."""
        for process in self._processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(1.0)
        files = sorted(Path(self._folder.name).glob("stacks*")) if self._folder else []
        return "\n".join(f"{file.name}:\n{file.read_text()}" for file in files)

    def _start(self) -> None:
        # With CUDA, processes are spawned, as in user code.
        context = fork_server() if self._backend == "gloo" else multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, rank, self.world_size, self._backend, self._folder.name), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _collect(self) -> list[Any]:
        results: dict[int, Any] = {}
        deadline = time.monotonic() + PATIENCE
        while len(results) < self.world_size:
            left = [pipe for rank, pipe in enumerate(self._pipes) if rank not in results]
            ready = wait_for_any(left, max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RankFailedError(f"no answer within {PATIENCE:.0f} s from ranks {self._missing(results)}")
            for pipe in ready:
                rank = self._pipes.index(pipe)
                try:
                    good, value = pipe.recv()
                except EOFError:
                    raise RankFailedError(f"rank {rank} exited unexpectedly") from None
                if not good:
                    raise RankFailedError(f"on rank {rank}:\n{value}")
                results[rank] = value
        return [results[rank] for rank in range(self.world_size)]

    def _missing(self, results: dict[int, Any]) -> list[int]:
        return [rank for rank in range(self.world_size) if rank not in results]

    def close(self, *, kill: bool = False) -> None:
        """Stop the processes."""
        for pipe in self._pipes:
            pipe.close()  # an idle rank reads EOF and exits
        for process in self._processes:
            if kill:
                process.kill()
            process.join(60)
            if process.is_alive():
                process.kill()
                process.join()
        self._processes, self._pipes = [], []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def _serve(pipe: Connection, rank: int, world_size: int, backend: str, folder: str) -> None:
    import torch
    import torch.distributed as dist

    from support import gpu

    if "cuda" in backend:
        gpu.track_blocks()
    stacks = Path(folder, f"stacks{rank}").open("w")  # noqa: SIM115, open until the process ends
    faulthandler.register(signal.SIGUSR1, stacks)
    store = dist.FileStore(str(Path(folder) / "store"), world_size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=TIMEOUT)
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            break
        torch.set_num_threads(1)  # results depend on it, and the last function may have changed it, as accelerate does
        try:
            pipe.send((True, function(*arguments)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
    dist.destroy_process_group()
