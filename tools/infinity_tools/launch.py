"""Start several ranks on this machine, each in its own process (`--nproc`)."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any

from infinity import torchrun
from infinity.errors import ConfigError
from infinity_tools.signals import give_back, heard_by

_LOOK_SECONDS = 0.05
_GRACE, _PATIENCE = 5.0, 60.0
"""Seconds from the failure of a rank until the others receive SIGTERM, and until they receive SIGKILL."""
_PR_SET_PDEATHSIG = 1
_PROGRAM = ("-m", "infinity_tools")


def launch(count: int, words: Sequence[str]) -> int:
    """Run `infinity` with these arguments on `count` ranks, and return the exit status of the first rank that failed.

    Standard streams and signals are passed on to the ranks. When a rank fails, the others are terminated because they
    would wait for it. They are also terminated if this process is killed.

    Args:
        count: Number of ranks.
        words: Arguments of `infinity`.

    Raises:
        ConfigError: If this process is already a rank.
    """
    if "RANK" in os.environ or int(os.environ.get("WORLD_SIZE", "1") or 1) > 1:
        raise ConfigError(
            f"--nproc {count} starts its own ranks, but this process is already one of several ranks (RANK and "
            "WORLD_SIZE are set, for example by torchrun); use either --nproc or torchrun"
        )
    import torch.distributed as dist

    # The ranks use this store for rendezvous. This process keeps the port open, so no other process can take it.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    common = {"TORCHELASTIC_USE_AGENT_STORE": "True", "GROUP_RANK": "0"}
    if "OMP_NUM_THREADS" not in os.environ:  # torchrun would set 1
        common["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // count))
    command = [sys.executable, *_PROGRAM, *words]
    ranks = _Processes()
    with ranks:
        for rank in range(count):
            ranks.start(command, {**os.environ, **common, **torchrun.variables(rank, count, store.port)})
        return ranks.wait()


class _Processes:
    """Processes of all ranks, and the signals that are forwarded to them."""

    def __init__(self) -> None:
        self._running: list[subprocess.Popen[bytes]] = []
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> _Processes:
        self._before = heard_by(self._pass_on)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._running:
            if process.poll() is None:
                process.kill()
                process.wait()
        give_back(self._before)

    def start(self, command: Sequence[str], environment: dict[str, str]) -> None:
        # Each rank gets its own process group. Otherwise it would receive terminal signals twice: from the terminal and
        # from this process.
        parent = os.getpid()
        libc = ctypes.CDLL(None)

        def tie() -> None:  # runs in the new process before exec
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != parent:
                os._exit(1)

        self._running.append(subprocess.Popen(command, env=environment, preexec_fn=tie, process_group=0))

    def wait(self) -> int:
        """Wait for all processes, and return the status of the first that failed, or 0."""
        status, failed, told = 0, 0.0, False
        while running := [process for process in self._running if process.poll() is None]:
            if not status:
                status, failed = self._first_status(), time.monotonic()
            waited = time.monotonic() - failed if status else 0.0
            if waited > _PATIENCE or (waited > _GRACE and not told):
                told = True
                for process in running:
                    process.send_signal(signal.SIGKILL if waited > _PATIENCE else signal.SIGTERM)
            time.sleep(_LOOK_SECONDS)
        return status or self._first_status()

    def _first_status(self) -> int:
        """Return the status of a failed rank, or 0. Ranks that were killed take precedence, because others fail as a
        consequence.
        """
        failed = sorted(process.returncode for process in self._running if process.poll())
        if not failed:
            return 0
        return failed[0] if failed[0] >= 0 else 128 - failed[0]  # as a shell reports a signal

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        for process in self._running:
            if process.poll() is None:
                process.send_signal(number)
