"""What orders the threads of the package, and what reaches its cache slots without torch: the store.

Threads are ordered by the pager's lock, by the queue of the worker of updates, and by nothing else. A transfer of the
store uses its cache slot from when it is started until its end is told, on whatever thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch

from infinity.fsdp import gradient, staging
from infinity.optim import update_thread
from infinity.schedule import pager, transfers
from infinity.store.page_store import PageStore
from support.device.clocks import Actor, Clock, merge

if TYPE_CHECKING:
    from support.device.simulation import Simulation

Done = Callable[[Exception | None], None]
_HOST = torch.device("meta")
"""Stands for the host in `gradient._Number`, which looks copies up by where they are: here both are "cpu"."""


@contextmanager
def followed(simulation: Simulation) -> Iterator[None]:
    """Follow the threads of runs that begin inside."""
    with ExitStack() as stack:
        for owner, name, value in (
            (transfers, "_Lock", lambda: _as_in_runs(_Lock(simulation))),
            (update_thread, "ThreadPoolExecutor", partial(_Executor, simulation)),
            (update_thread, "wait", partial(_wait, simulation)),
            (staging, "ThreadPoolExecutor", partial(_Executor, simulation)),
            (pager, "wait_for_futures", partial(_wait, simulation)),
            (PageStore, "read", _transfer(simulation, PageStore.read, "an NVMe read into it", writes=True)),
            (PageStore, "write", _transfer(simulation, PageStore.write, "an NVMe write from it", writes=False)),
            (gradient._Number, "on", _number(simulation, gradient._Number.on)),
        ):
            stack.enter_context(patch.object(owner, name, value))
        yield


_as_in_runs: Any = transfers._Lock
"""Makes the one lock of `Transfers` of a lock that can be taken again."""


class _Lock:
    """A lock that can be taken again; who takes it is behind who gave it back before."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._lock = threading.RLock()
        self._clock: Clock = {}

    def acquire(self, *args: Any) -> bool:
        taken = self._lock.acquire(*args)
        if taken:
            self._follow()
        return taken

    def release(self) -> None:
        self._leave()
        self._lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *exception: object) -> None:
        self.release()

    def _follow(self) -> None:
        self._simulation.streams.thread.follow(self._clock)

    def _leave(self) -> None:
        merge(self._clock, self._simulation.streams.thread.clock)

    # What `threading.Condition` asks of a lock that can be taken again.

    def _is_owned(self) -> bool:
        return self._lock._is_owned()  # type: ignore[attr-defined]

    def _release_save(self) -> Any:
        self._leave()
        return self._lock._release_save()  # type: ignore[attr-defined]

    def _acquire_restore(self, state: Any) -> None:
        self._lock._acquire_restore(state)  # type: ignore[attr-defined]
        self._follow()


class _Executor(ThreadPoolExecutor):
    """A job is behind who submits it; who waits for it, or for the end of all, is behind the job."""

    def __init__(self, simulation: Simulation, *args: Any) -> None:
        super().__init__(*args)
        self._simulation = simulation
        self._ended: Clock = {}  # behind all jobs; they run one after the other

    def submit(self, job: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        before = dict(self._simulation.streams.thread.clock)
        ended: Clock = {}

        def run() -> Any:
            thread = self._simulation.streams.thread
            thread.follow(before)
            try:
                return job(*args, **kwargs)
            finally:
                ended.update(thread.clock)
                self._ended = ended

        future = super().submit(run)
        result = future.result

        def followed(timeout: float | None = None) -> Any:
            try:
                return result(timeout)
            finally:
                self._simulation.streams.thread.follow(ended)

        future.clock, future.result = ended, followed  # type: ignore[attr-defined, method-assign]
        return future

    def shutdown(self, *args: Any, **kwargs: Any) -> None:
        super().shutdown(*args, **kwargs)
        self._simulation.streams.thread.follow(self._ended)


def _wait(simulation: Simulation, futures: Iterable[Future[Any]], timeout: float | None = None) -> Any:
    """Wait for jobs, as `concurrent.futures.wait`."""
    found = wait(list(futures), timeout)
    for future in found.done:
        simulation.streams.thread.follow(future.clock)  # type: ignore[attr-defined]
    return found


def _transfer(simulation: Simulation, original: Any, what: str, *, writes: bool) -> Any:
    def transfer(store: Any, page: int, memory: memoryview, done: Done) -> None:
        streams = simulation.streams
        with simulation.lock:
            request = Actor(f"request of {streams.thread.name}")
            request.follow(streams.thread.clock)
            for part in simulation.memory.at(memory):
                simulation.races.access(request, part, what, writes=writes)

        def ended(error: Exception | None) -> None:
            streams.thread.follow(request.clock)
            done(error)

        original(store, page, memory, ended)

    return transfer


def _number(simulation: Simulation, original: Any) -> Any:
    def on(number: Any, device: torch.device) -> torch.Tensor:
        if simulation.updating:
            return original(number, device)
        if _HOST not in number._copies:
            value = number._copies[device]
            number._copies = {device: _OnDevice(simulation, value)}
            original(number, _HOST)
            number._copies[device] = value
        return number._copies[_HOST]

    return on


class _OnDevice:
    """A number of the device: the host has to have it copied. On the CPU the two have the same name."""

    def __init__(self, simulation: Simulation, value: torch.Tensor) -> None:
        self._simulation, self._value = simulation, value

    def to(self, device: torch.device) -> torch.Tensor:
        """Copy it on the current stream, wait for that, and return it as the host has it."""
        streams = self._simulation.streams
        with self._simulation.lock:
            stream = streams.current()
            stream.launch()
            stream.run()
            for part in self._simulation.memory.of(self._value):
                self._simulation.races.access(stream, part, "a number's copy to the host", writes=False)
            stream.synchronize()
            with self._simulation.silence():
                return self._value.clone()
