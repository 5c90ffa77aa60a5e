"""Streams and events with the semantics of an accelerator and the API of `torch.cpu`."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from support.device.clocks import Actor, Clock

LOOKS = 4
"""Maximum number of queries until an event has completed."""
_PAUSE = 5e-4
"""Pause between queries of a thread that waits for an event, in seconds."""


class Streams:
    """Streams of a simulated device. `lock` protects data that threads share."""

    def __init__(self, seed: int, looks: int) -> None:
        self.looks = looks  # maximum number of queries until an event has completed
        self.queries = 0  # number of queries of all events
        self.lock = threading.RLock()
        self.chance = random.Random(seed)  # determines how many queries of an event return False
        self.default = Stream(self, "the stream of the computation")
        self._local = threading.local()  # actor and current stream of each thread

    @property
    def thread(self) -> Actor:
        """Actor of this thread."""
        actor = getattr(self._local, "actor", None)
        if actor is None:
            actor = self._local.actor = Actor(f"thread {threading.current_thread().name}")
        return actor

    def current(self, device: Any = None) -> Stream:
        """Return the current stream of this thread."""
        return getattr(self._local, "stream", self.default)

    @contextmanager
    def on(self, stream: Stream | None) -> Iterator[None]:
        """Make a stream the current one."""
        before = self.current()
        self._local.stream = stream or before
        try:
            yield
        finally:
            self._local.stream = before

    def make_stream(self, *_: Any, **__: Any) -> Stream:
        """Replacement for `torch.cpu.Stream`."""
        return Stream(self, "a stream")

    def make_event(self, *_: Any, **__: Any) -> Event:
        """Replacement for `torch.cpu.Event`."""
        return Event(self)

    def synchronize(self, device: Any = None) -> None:
        """Make this thread wait for its current stream."""
        self.current().synchronize()


class Stream(Actor):
    """A stream, with a queue of delayed operations that run when a later operation depends on them."""

    def __init__(self, streams: Streams, name: str) -> None:
        super().__init__(name)
        self._streams = streams
        self._queue: deque[Callable[[], object]] = deque()  # operations that have not run
        self._given = 0  # number of operations ever queued
        self._ran = 0  # number of operations that have run

    def launch(self) -> None:
        """Order later operations of the stream after all accesses of this thread, which launches them."""
        self.follow(self._streams.thread.clock)

    def push(self, action: Callable[[], object]) -> None:
        """Queue a delayed operation."""
        self._queue.append(action)
        self._given += 1

    def run(self, until: int | None = None) -> None:
        """Run what is queued, or as much as was queued up to a moment."""
        with self._streams.lock:
            while self._queue and (until is None or self._ran < until):
                self._ran += 1
                self._queue.popleft()()

    def has_run(self, number: int) -> bool:
        """Return whether the first `number` operations have run."""
        return self._ran >= number

    @property
    def given(self) -> int:
        """Number of operations ever queued."""
        return self._given

    def wait_event(self, event: Event | None) -> None:
        """Make operations that are launched later wait for an event."""
        with self._streams.lock:
            if event is not None and event.stream is not None:
                self.launch()
                self.follow(event.clock)
                stream, number = event.stream, event.number
                if stream is not self and not stream.has_run(number):
                    self.push(lambda: stream.run(number))

    def wait_stream(self, stream: Stream) -> None:
        """Make operations that are launched later wait for all operations of a stream."""
        self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        """Record an event after all launched operations."""
        return (event or Event(self._streams)).record(self)

    def synchronize(self) -> None:
        """Make this thread wait for all launched operations."""
        self.record_event().complete()

    def query(self) -> bool:
        """Return whether all launched operations have run."""
        return self.record_event().query()


class Event:
    """A point on a stream. Several queries may return ``False`` before it has completed."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self.stream: Stream | None = None  # None before `record`
        self.number = 0  # number of operations that must have run
        self.clock: Clock = {}  # accesses that precede the event
        self._looks = 0  # remaining queries that return False

    def record(self, stream: Stream | None = None) -> Event:
        """Record the event after all operations of a stream."""
        with self._streams.lock:
            self.stream = stream or self._streams.current()
            self.stream.launch()
            self.number, self.clock = self.stream.given, dict(self.stream.clock)
            self._looks = self._streams.chance.randrange(self._streams.looks)
        return self

    def delay(self, looks: int) -> None:
        """Make the next `looks` queries return ``False``."""
        self._looks = looks

    def wait(self, stream: Stream | None = None) -> None:
        """Make a stream wait for the event."""
        (stream or self._streams.current()).wait_event(self)

    def query(self) -> bool:
        """Return whether the event has completed. If so, this thread is ordered after it."""
        with self._streams.lock:
            self._streams.queries += 1
            return self._look()

    def _look(self) -> bool:
        if self._looks:
            self._looks -= 1
            return False
        self.complete()
        return True

    def synchronize(self) -> None:
        """Make this thread wait for the event, which completes as late as if this thread had queried it."""
        while True:
            with self._streams.lock:
                if self._look():
                    return
            time.sleep(_PAUSE)

    def complete(self) -> None:
        """Complete the event, and order this thread after it."""
        with self._streams.lock:
            if self.stream is not None:
                self.stream.run(self.number)
                self._looks = 0
                self._streams.thread.follow(self.clock)
