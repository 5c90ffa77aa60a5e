"""Streams and events with the meaning that they have on an accelerator, under the names that `torch.cpu` has."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from support.device.clocks import Actor, Clock

LOOKS = 4
"""An event has been passed at the latest when it is looked at so often."""


class Streams:
    """The streams of one simulated device; what is asked under `lock` belongs to all threads."""

    def __init__(self, seed: int, looks: int) -> None:
        self.looks = looks  # an event has been passed at the latest when it is looked at so often
        self.lock = threading.RLock()
        self.chance = random.Random(seed)  # says how often an event is looked at in vain
        self.default = Stream(self, "the stream of the computation")
        self._local = threading.local()  # by thread, its actor and its current stream

    @property
    def thread(self) -> Actor:
        """This thread."""
        actor = getattr(self._local, "actor", None)
        if actor is None:
            actor = self._local.actor = Actor(f"thread {threading.current_thread().name}")
        return actor

    def current(self, device: Any = None) -> Stream:
        """Return the current stream of this thread."""
        return getattr(self._local, "stream", self.default)

    @contextmanager
    def on(self, stream: Stream | None) -> Iterator[None]:
        """Make a stream current."""
        before = self.current()
        self._local.stream = stream or before
        try:
            yield
        finally:
            self._local.stream = before

    def make_stream(self, *_: Any, **__: Any) -> Stream:
        """Return a new stream, as `torch.cpu.Stream` does."""
        return Stream(self, "a stream")

    def make_event(self, *_: Any, **__: Any) -> Event:
        """Return a new event, as `torch.cpu.Event` does."""
        return Event(self)

    def synchronize(self, device: Any = None) -> None:
        """Let this thread wait for its current stream."""
        self.current().synchronize()


class Stream(Actor):
    """A queue of the device. What may be late waits in it until something that is ordered behind it runs."""

    def __init__(self, streams: Streams, name: str) -> None:
        super().__init__(name)
        self._streams = streams
        self._queue: deque[Callable[[], object]] = deque()  # what has not run
        self._given = 0  # what was ever queued
        self._ran = 0  # how much of that has run

    def launch(self) -> None:
        """Be behind what this thread has done so far: it gives the stream something to do."""
        self.follow(self._streams.thread.clock)

    def push(self, action: Callable[[], object]) -> None:
        """Queue what may be late."""
        self._queue.append(action)
        self._given += 1

    def run(self, until: int | None = None) -> None:
        """Run what is queued, or as much as was queued up to a moment."""
        with self._streams.lock:
            while self._queue and (until is None or self._ran < until):
                self._ran += 1
                self._queue.popleft()()

    def has_run(self, number: int) -> bool:
        """Whether as much has run."""
        return self._ran >= number

    @property
    def given(self) -> int:
        """How much was ever queued."""
        return self._given

    def wait_event(self, event: Event | None) -> None:
        """Let what is launched from now on wait for an event."""
        with self._streams.lock:
            if event is not None and event.stream is not None:
                self.launch()
                self.follow(event.clock)
                stream, number = event.stream, event.number
                if stream is not self and not stream.has_run(number):
                    self.push(lambda: stream.run(number))

    def wait_stream(self, stream: Stream) -> None:
        """Let what is launched from now on wait for all that a stream was given."""
        self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        """Return an event behind all that was launched."""
        return (event or Event(self._streams)).record(self)

    def synchronize(self) -> None:
        """Let this thread wait for all that was launched."""
        self.record_event().synchronize()

    def query(self) -> bool:
        """Whether all has run."""
        return self.record_event().query()


class Event:
    """A point on a stream; it takes some looks until it has been passed."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self.stream: Stream | None = None  # none before `record`
        self.number = 0  # how much the stream has to have run
        self.clock: Clock = {}  # what it is behind
        self._looks = 0  # that are left in vain

    def record(self, stream: Stream | None = None) -> Event:
        """Put it behind all that a stream was given."""
        with self._streams.lock:
            self.stream = stream or self._streams.current()
            self.stream.launch()
            self.number, self.clock = self.stream.given, dict(self.stream.clock)
            self._looks = self._streams.chance.randrange(self._streams.looks)
        return self

    def delay(self, looks: int) -> None:
        """Let it be looked at so often in vain."""
        self._looks = looks

    def wait(self, stream: Stream | None = None) -> None:
        """Let a stream wait for it."""
        (stream or self._streams.current()).wait_event(self)

    def query(self) -> bool:
        """Whether the device has come there; this thread is behind it then."""
        with self._streams.lock:
            if self.stream is None:
                return True
            if self._looks:
                self._looks -= 1
                return False
            self.synchronize()
            return True

    def synchronize(self) -> None:
        """Let this thread wait for it."""
        with self._streams.lock:
            if self.stream is not None:
                self.stream.run(self.number)
                self._looks = 0
                self._streams.thread.follow(self.clock)
