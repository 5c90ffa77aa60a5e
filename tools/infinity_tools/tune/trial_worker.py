"""Worker process for trials, so that a crash or an out-of-memory kill ends one trial and not the search.

The worker exits cleanly on SIGTERM, and when its parent process has exited: it closes an open run, which removes the
run's data from the drives, and removes the folders of the trials. Ctrl-C in a terminal reaches both processes; the
worker ignores it and leaves it to the parent.
"""

from __future__ import annotations

import logging
import multiprocessing as mp
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from infinity.config import Config
from infinity.errors import ConfigError, InfinityError
from infinity_tools.trial_folders import empty, remove
from infinity_tools.tune.outcome import Bounds, Outcome
from infinity_tools.tune.search_space import Candidate
from infinity_tools.tune.trial import Trials, Workload, is_usage

_NOT_FOR_WORKERS = (signal.SIGINT, signal.SIGHUP)
_LOOK_SECONDS = 0.2
_PATIENCE = 30.0
"""Seconds that a worker has to exit cleanly before it is killed."""


class Worker:
    """Process that runs trials, as a context manager. It is started on first use, and restarted if it has died."""

    def __init__(
        self, workload: Workload, settings: Config, folders: Sequence[str], stopped: Callable[[], int] = lambda: 0
    ) -> None:
        """Prepare without starting a process. `stopped` returns the number of a received signal, or 0."""
        self._stopped = stopped
        self._arguments = workload, settings, tuple(folders)
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None
        self.facts: dict[str, Any] = {}
        """Result of `Trials.facts`; empty before `start`."""

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the process and wait until it has imported its modules and checked the workload.

        Raises:
            ConfigError: if the workload is invalid.
            InfinityError: if the process failed for another reason.
        """
        context = mp.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, *self._arguments), name="infinity-tune")
        resource_tracker.ensure_running()  # started first, because its start unblocks the signals
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _NOT_FOR_WORKERS)  # inherited by the process
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        try:
            kind, answer = self._receive()
        except EOFError:
            raise InfinityError(f"the trial process {self._ending()} before the first trial") from None
        if kind != "ready":
            self.close()
            raise (ConfigError if kind == "usage" else InfinityError)(answer)
        self.facts = answer

    def measure(self, candidate: Candidate, bounds: Bounds) -> Outcome:
        """Run a trial. If the worker dies, the outcome is a failure."""
        if self._process is None:
            self.start()
        assert self._pipe is not None
        began = time.perf_counter()
        try:
            self._pipe.send((dict(candidate), bounds))
            outcome: Outcome = self._receive()
        except (EOFError, OSError):
            reason = f"the trial process {self._ending()}"
            _, settings, folders = self._arguments
            for folder in folders:
                empty(Path(folder), settings.telemetry)
            return Outcome(kind="failed", reason=reason, wall=time.perf_counter() - began)
        return outcome

    def _receive(self) -> Any:
        """Return the next message of the process. Raises `SystemExit` on a signal, `EOFError` if the process died."""
        assert self._pipe is not None
        while not self._pipe.poll(_LOOK_SECONDS):
            if number := self._stopped():
                raise SystemExit(128 + number)
        return self._pipe.recv()

    def _ending(self) -> str:
        """Return a description of how the process ended, and release it."""
        assert self._process is not None
        self._process.join(_PATIENCE)
        status = self._process.exitcode
        self.close()
        if status == -signal.SIGKILL:
            return "was killed (out of memory?)"
        return f"ended with status {status}"

    def close(self) -> None:
        """Stop the process, cleanly if possible."""
        process, self._process = self._process, None
        if process is not None and process.pid is not None:  # started
            process.terminate()
            process.join(_PATIENCE)
            if process.exitcode is None:
                process.kill()
            process.join()
            process.close()
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None


def serve(pipe: Connection, workload: Workload, settings: Config, folders: Sequence[str]) -> None:
    """Run the requested trials until the pipe is closed or this process must exit. Runs in the worker."""
    ending, orphaned = threading.Event(), threading.Event()
    threading.Thread(target=_end_with_parent, args=(ending, orphaned, settings, folders), daemon=True).start()
    warnings.simplefilter("ignore")
    logging.getLogger("infinity").setLevel(logging.CRITICAL)
    try:
        trials = Trials(workload, ending.is_set)
        pipe.send(("ready", trials.facts()))
    except Exception as error:  # transformers may raise any exception for an invalid model folder
        pipe.send(("usage" if is_usage(error) else "failed", str(error) or type(error).__name__))
        return
    # The handler sets a flag and does not raise: an exception in a callback of the interpreter would get lost.
    signal.signal(signal.SIGTERM, lambda number, frame: ending.set())
    try:
        with suppress(EOFError, ConnectionError):
            while not ending.is_set():
                if pipe.poll(_LOOK_SECONDS):
                    candidate, bounds = pipe.recv()
                    pipe.send(trials.run(settings, candidate, folders, bounds))
    finally:
        if orphaned.is_set():
            _remove_all(settings, folders)


def _end_with_parent(
    ending: threading.Event, orphaned: threading.Event, settings: Config, folders: Sequence[str]
) -> None:
    """Wait until the parent process exits, then end this process and remove all data."""
    parent = mp.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    orphaned.set()
    ending.set()
    time.sleep(_PATIENCE)  # the main thread ends the process, unless it hangs
    _remove_all(settings, folders)
    os._exit(1)


def _remove_all(settings: Config, folders: Sequence[str]) -> None:
    for folder in folders:
        remove(Path(folder).parent, settings.telemetry)
