"""The page store: current version of every page, written to free extents and verified on every read."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

import xxhash

from infinity.errors import CorruptPageError
from infinity.io import Engine, Op, Ticket
from infinity.layout import Page
from infinity.store.extents import Extent, ExtentAllocator, SlotClass

Done = Callable[[Exception | None], None]
Moved = Callable[[Page, Ticket, int], None]


@dataclass(frozen=True, slots=True)
class Version:
    """One version of a page: where it lies and what it must hash to."""

    extent: Extent
    checksum: int


def checksum(page: int, content: memoryview) -> int:
    """Return the 64-bit XXH3 of a page's bytes, seeded with its index so that a misdirected page never matches."""
    return xxhash.xxh3_64_intdigest(content, seed=page)


class PageStore:
    """Reads and writes whole pages; never overwrites the extent of a version that somebody may need.

    Completion callbacks run on another thread. `moved` is told of every finished transfer (page, ticket, path).
    """

    def __init__(
        self,
        pages: Sequence[Page],
        paths: Sequence[int],
        files: Sequence[Path],
        slots: Sequence[SlotClass],
        engine: Engine,
        *,
        name_of: Callable[[int], str],
        moved: Moved,
        timeout: float,
        committed: dict[int, Version] | None = None,
    ) -> None:
        self._pages, self._paths, self._engine = pages, paths, engine
        self._name_of, self._moved, self._timeout = name_of, moved, timeout
        self._files = [engine.open(os.fspath(file)) for file in files]
        self._committed: dict[int, Version] = dict(committed or {})
        self._current: dict[int, Version] = dict(self._committed)
        self._extents = ExtentAllocator(slots, (version.extent for version in self._committed.values()))
        self._lock = Lock()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="infinity-writer")
        self._pending: dict[int, Ticket] = {}

    def read(self, page: int, memory: memoryview, done: Done) -> None:
        """Fetch the current version into `memory`, verify it, then call `done`."""
        version = self._current[page]
        extent = version.extent
        file = self._files[extent.path]

        def arrived(ticket: Ticket) -> None:
            self._forget(ticket)
            error: Exception | None = ticket.error
            try:
                self._moved(self._pages[page], ticket, extent.path)
                if error is None and (found := checksum(page, memory)) != version.checksum:
                    error = CorruptPageError(
                        self._name_of(page), file.path, extent.offset, extent.length, version.checksum, found
                    )
            except Exception as failure:  # this runs on the engine's thread: whoever waits must hear of it
                error = failure
            done(error)

        try:
            ticket = self._engine.submit(Op.READ, file, extent.offset, memory)
        except Exception as error:
            done(error)
            return
        self._remember(ticket)
        ticket.on_done(arrived)

    def write(self, page: int, memory: memoryview, done: Done) -> None:
        """Store a new version from `memory`, then call `done`. The caller leaves `memory` alone until then."""
        self._writer.submit(self._write, page, memory, done)

    def _write(self, page: int, memory: memoryview, done: Done) -> None:
        try:
            extent = self._extents.take(self._paths[page], self._pages[page].nbytes, self._timeout)
            version = Version(extent, checksum(page, memory))
            ticket = self._engine.submit(Op.WRITE, self._files[extent.path], extent.offset, memory)
        except Exception as error:  # this runs on a thread of its own: whoever waits must hear of it
            done(error)
            return

        def arrived(ticket: Ticket) -> None:
            self._forget(ticket)
            error: Exception | None = ticket.error
            try:
                self._moved(self._pages[page], ticket, extent.path)
                if error is None:
                    self._replace(page, version)
                else:
                    self._extents.give(extent)
            except Exception as failure:
                error = failure
            done(error)

        self._remember(ticket)
        ticket.on_done(arrived)

    def discard(self, page: int) -> None:
        """Forget the current version of a page whose content is dead."""
        self._replace(page, None)

    def has(self, page: int) -> bool:
        """Whether there is a stored version."""
        return page in self._current

    def _replace(self, page: int, version: Version | None) -> None:
        with self._lock:
            old = self._current.pop(page, None)
            if version is not None:
                self._current[page] = version
            if old is not None and self._committed.get(page) != old:
                self._extents.give(old.extent)

    def sync(self) -> None:
        """Make all completed writes durable.

        Raises:
            StorageError: a device refused.
        """
        for file in self._files:
            self._engine.sync(file)

    def versions(self, pages: Sequence[int]) -> dict[int, Version]:
        """Return the current versions of `pages`, for a manifest."""
        with self._lock:
            return {page: self._current[page] for page in pages}

    def adopt(self, committed: dict[int, Version]) -> None:
        """Keep the versions of a published commit; free those that only the commit before it named."""
        with self._lock:
            for page, old in self._committed.items():
                if committed.get(page) != old and self._current.get(page) != old:
                    self._extents.give(old.extent)
            self._committed = dict(committed)

    def oldest_request(self) -> str:
        """Describe what has been in flight longest, for stall reports."""
        with self._lock:
            tickets = sorted(self._pending.values(), key=lambda ticket: ticket.submitted)
        if not tickets:
            return "no request is in flight"
        first = tickets[0]
        return (
            f"oldest of {len(tickets)} requests in flight: {first.op.value} of {first.length} bytes at offset "
            f"{first.offset} of {first.path}"
        )

    def _remember(self, ticket: Ticket) -> None:
        with self._lock:
            self._pending[id(ticket)] = ticket

    def _forget(self, ticket: Ticket) -> None:
        with self._lock:
            self._pending.pop(id(ticket), None)

    def close(self) -> None:
        """Wait for writes that were handed in, then close the data files."""
        self._writer.shutdown(wait=True)
        for file in self._files:
            self._engine.forget(file)
