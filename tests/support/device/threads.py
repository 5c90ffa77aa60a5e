"""Synchronization between threads of the package, and accesses of the page store to cache slots.

Threads are ordered only by the pager's lock and by the queue of the update thread. A transfer of the page store
accesses its cache slot from its start until its completion callback, which may run in any thread.
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
"""Represents the host in `gradient._Number`, which finds copies by device. In the simulation, both are on ``cpu``."""


@contextmanager
def tracked(simulation: Simulation) -> Iterator[None]:
    """Track the threads of runs that start inside of the block."""
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
"""Class that creates the lock of `Transfers` from a reentrant lock."""


class _Lock:
    """A reentrant lock that orders each thread that acquires it after the thread that released it."""

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

    # Methods that `threading.Condition` requires of a reentrant lock.

    def _is_owned(self) -> bool:
        return self._lock._is_owned()  # type: ignore[attr-defined]

    def _release_save(self) -> Any:
        self._leave()
        return self._lock._release_save()  # type: ignore[attr-defined]

    def _acquire_restore(self, state: Any) -> None:
        self._lock._acquire_restore(state)  # type: ignore[attr-defined]
        self._follow()


class _Executor(ThreadPoolExecutor):
    """An executor that orders jobs after their submission, and threads that wait for jobs after them."""

    def __init__(self, simulation: Simulation, *args: Any) -> None:
        super().__init__(*args)
        self._simulation = simulation
        self._ended: Clock = {}  # clock after all jobs, which run sequentially

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

        def tracked_result(timeout: float | None = None) -> Any:
            try:
                return result(timeout)
            finally:
                self._simulation.streams.thread.follow(ended)

        future.clock, future.result = ended, tracked_result  # type: ignore[attr-defined, method-assign]
        return future

    def shutdown(self, *args: Any, **kwargs: Any) -> None:
        super().shutdown(*args, **kwargs)
        self._simulation.streams.thread.follow(self._ended)


def _wait(simulation: Simulation, futures: Iterable[Future[Any]], timeout: float | None = None) -> Any:
    """Replacement for `concurrent.futures.wait`."""
    found = wait(list(futures), timeout)
    for future in found.done:
        simulation.streams.thread.follow(future.clock)  # type: ignore[attr-defined]
    return found


def _transfer(simulation: Simulation, original: Any, what: str, *, writes: bool) -> Any:
    def transfer(store: Any, page: int, memory: memoryview, done: Done) -> None:
        streams = simulation.streams
        with simulation.lock:
            request = _request(simulation)
            for part in simulation.memory.at(memory):
                simulation.races.access(request, part, what, writes=writes)

        def ended(error: Exception | None) -> None:
            streams.thread.follow(request.clock)
            with simulation.lock:
                simulation.ended_requests.append(request)
            done(error)

        original(store, page, memory, ended)

    return transfer


def _request(simulation: Simulation) -> Actor:
    """Return an actor for a request of this thread, ordered after the thread.

    An actor whose earlier request precedes the thread is reused, because the size of all clocks, and thus the time of
    all accesses, grows with the number of actors.
    """
    thread = simulation.streams.thread
    name = f"request of {thread.name}"
    for request in simulation.ended_requests:
        if request.name == name and request.is_before(thread.clock):
            simulation.ended_requests.remove(request)
            break
    else:
        request = Actor(name)
    request.follow(thread.clock)
    return request


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
    """A number on the device, which must be copied to the host, although both are on ``cpu`` in the simulation."""

    def __init__(self, simulation: Simulation, value: torch.Tensor) -> None:
        self._simulation, self._value = simulation, value

    def to(self, device: torch.device) -> torch.Tensor:
        """Copy the number on the current stream, wait for the copy, and return it."""
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
