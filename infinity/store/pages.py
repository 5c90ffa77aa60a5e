"""The page store: current version of every page, written to free extents and verified on every read."""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock
from time import perf_counter

import xxhash

from infinity.content.layout import Page
from infinity.errors import CommitError, CorruptPageError, StorageError
from infinity.io import DataFile, Engine, Op, Ticket
from infinity.store.extents import (
    Extent,
    ExtentAllocator,
    SlotClass,
    missing_slots,
    needed_slots,
    overlapping,
    plan_slots,
    spread,
)

_log = logging.getLogger(__name__)

Done = Callable[[Exception | None], None]
"""Told once how a transfer has ended: with what went wrong, or None."""
Moved = Callable[[Page, Ticket, int, int, Exception | None], None]
"""Told of a transfer: page, last ticket, number of the NVMe path, how often it was submitted again, error."""


@dataclass(frozen=True, slots=True)
class Version:
    """One version of a page: where it lies and what it must hash to."""

    extent: Extent
    checksum: int
    """64-bit XXH3, see the function `checksum`."""


def checksum(page: int, content: memoryview) -> int:
    """Return the 64-bit XXH3 of a page's bytes, seeded with its index so that a misdirected page never matches."""
    return xxhash.xxh3_64_intdigest(content, seed=page)


def lay_out(
    pages: Sequence[Page],
    shares: Sequence[float],
    committed: Mapping[int, Mapping[int, Version]],
    spare: int,
    retained: int,
) -> tuple[tuple[int, ...], tuple[SlotClass, ...]]:
    """Return the path that new versions of every page go to, and all slots; extents of commits are slots, too.

    Pages of a commit stay where it has them, which need not be where `shares` say: they may have been spread anew.

    Args:
        pages: of the rank, by index.
        shares: how much of the pages each path is to hold, relative to the others.
        committed: versions by page of the commits to go on from, by step.
        spare: writes that may be in flight at once.
        retained: commits that are kept.
    """
    spread_out = spread(pages, shares)
    paths = list(spread_out)
    on = [{path} for path in paths]
    for _, versions in sorted(committed.items()):
        for page, version in versions.items():
            paths[page] = version.extent.path
            on[page].add(version.extent.path)
    # Commits beyond the retained ones stay until the next one is published, where they are.
    retained = max(retained, len(committed))
    slots = plan_slots(pages, spread_out, spare, retained)
    used = {version.extent for versions in committed.values() for version in versions.values()}
    more = missing_slots(slots, needed_slots(pages, on, spare, retained), used)
    strays = (SlotClass(path=p, offset=at, length=n, count=1) for p, at, n in sorted(used.difference(*slots)))
    return tuple(paths), (*slots, *more, *strays)


def read_version(file: Path, page: int, version: Version, name: str) -> memoryview:
    """Return the bytes of a stored version, past any engine and without leaving them in the page cache.

    Raises:
        StorageError: they cannot be read. CorruptPageError: they do not match the checksum.
    """
    _, offset, length = version.extent
    try:
        data = _read(file, offset, length)
    except OSError as error:
        raise StorageError(
            "read", str(file), offset, length, error.errno or None, error.strerror or str(error)
        ) from error
    if (found := checksum(page, data)) != version.checksum:
        raise CorruptPageError(name, str(file), offset, length, version.checksum, found)
    return data


def _read(file: Path, offset: int, length: int) -> memoryview:
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe in its place is not waited for
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(0, "it is not a regular file")
        # What is cached is not what is stored, and it is not to push other things out of memory.
        os.posix_fadvise(descriptor, offset, length, os.POSIX_FADV_DONTNEED)
        data, done = memoryview(bytearray(length)), 0
        while done < length:
            count = os.preadv(descriptor, [data[done:]], offset + done)
            if not count:
                raise OSError(0, f"the file ends {length - done} bytes too early")
            done += count
        os.posix_fadvise(descriptor, offset, length, os.POSIX_FADV_DONTNEED)
        return data
    finally:
        os.close(descriptor)


def _may_pass(error: Exception | None) -> bool:
    """Whether a transfer that failed so is worth another try.

    EIO may be a cable or a reset, and a wrong checksum a bit that was flipped on the way. A full drive stays full,
    and a transfer that stops short without an errno has been continued by the engine already.
    """
    return isinstance(error, CorruptPageError) or (isinstance(error, StorageError) and error.errno == errno.EIO)


def _in_place(file: DataFile) -> bool:
    """Whether the path of an open file still leads to it."""
    try:
        return os.path.samestat(os.fstat(file.fd), os.stat(file.path))
    except FileNotFoundError:
        return False


class PageStore:
    """Reads and writes whole pages; never overwrites the extent of a version that somebody may need.

    The life of a version: `write` takes a free extent, which nobody reads; when the transfer has ended well, the
    version is *current* and the one before it is *replaced*. `keep` and `adopt` *name* current versions: those of a
    commit that is being published, then of one that is. An extent is free again when its version is neither current
    nor named, whichever ends last.

    Threads: the pager calls `read`, `write`, `has` and `discard`, from any thread but under its own lock
    (`Transfers.lock`); the training thread those about commits; whoever makes the data files longer, one thread at a
    time, `slots_to_spread` and `spread_anew`, `slots_to_edit` and `allow_edits`. Transfers end on the engine's thread,
    but reads on one of the verifiers', where there are any. `_write` runs on the writer's. `_lock` guards what they
    share; nothing is waited for under it.
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
        spare: int,
        retries: int = 0,
        committed: Mapping[int, Mapping[int, Version]] | None = None,
        retained: int = 1,
        verifiers: int = 0,
    ) -> None:
        """Open the data files.

        Args:
            pages: of this rank, by index.
            paths: by page, the index of the path that new versions of it go to.
            files: data file of every path.
            slots: that the extents are taken from, see `lay_out`.
            engine: that moves bytes; it closes the files.
            name_of: readable name of a page, for errors.
            moved: told of every transfer that has ended for good: page, last ticket, path, how often it was submitted
                again, error.
            timeout: seconds that a write waits for a free slot.
            spare: writes that may be in flight at once.
            retries: how often a transfer is submitted again where that may help (`_may_pass`).
            committed: versions by page of the commits to go on from, by step.
            retained: how many commits are kept.
            verifiers: threads that verify what has been read; 0: the thread on which a transfer ends does.

        Raises:
            StorageError: a file cannot be opened. CommitError: committed pages overlap, or are not of their length.
        """
        self._paths = tuple(paths)
        """By page, the path of its next version. Replaced as a whole by `spread_anew`."""
        # None of these changes.
        self._pages, self._engine, self._spare = pages, engine, spare
        self._name_of, self._moved, self._timeout, self._retries = name_of, moved, timeout, retries
        self.retained = retained
        self._files = [engine.open(os.fspath(file)) for file in files]
        self._warned = False
        """Whether a retry was logged. Set by the engine's thread."""
        self._commits = {step: dict(versions) for step, versions in sorted((committed or {}).items())}
        """Versions by page of the commits that are kept, by step, newest last. Changed by `adopt`, under `_lock`."""
        self._named = Counter(version for versions in self._commits.values() for version in versions.values())
        """How many commits, published or about to be, name a version. Changed by the training thread under `_lock`."""
        self._check_committed()
        self._current = dict(self._commits[max(self._commits)]) if self._commits else {}
        """Current version by page. Changed under `_lock` by the thread on which a write ends, and by `discard`; read
        without it, as the pager reads no page that is being written. A page whose content is dead may be discarded
        while it is being written: its dead version then becomes current, is read by nobody, and is replaced by the next
        write."""
        self._extents = ExtentAllocator(slots, (version.extent for version in self._named))
        """Which slots are free; has a lock of its own."""
        self._slots = tuple(slots)
        """All slots. Grows with `spread_anew` and `allow_edits`."""
        self._edited: set[int] = set()
        """Fixed pages that may be written again. Grows with `allow_edits`."""
        self._lock = Lock()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="infinity-writer")
        """Hashes and submits writes, one after the other."""
        self._verifiers = ThreadPoolExecutor(verifiers, "infinity-verifier") if verifiers else None
        """Verify what has been read, one page each, so that the engine's thread has the next requests on their way
        meanwhile: hashing takes 5 to 15 GB/s of one core."""
        self._pending: dict[int, Ticket] = {}
        """Tickets in flight by `id`, for stall reports. Changed by whoever submits and by the engine's thread, under
        `_lock`."""

    def _check_committed(self) -> None:
        """Check that nothing that will be written can touch what is committed.

        Raises:
            CommitError: a committed page is not of its length, or overlaps another one.
        """
        run = Path(self._files[0].path).parent
        for step, versions in self._commits.items():
            for page, version in versions.items():
                if version.extent.length != self._pages[page].nbytes:
                    raise CommitError(f"{run}, step {step}: {self._name_of(page)} cannot be at {version.extent}")
        if len({version.extent for version in self._named}) < len(self._named):
            raise CommitError(f"{run}: two commits have different versions of pages in the same place")
        if stray := overlapping(version.extent for version in self._named):
            raise CommitError(f"{self._files[stray.path].path}: two committed pages overlap at {stray.offset}")

    def slots_to_spread(self, paths: Sequence[int]) -> tuple[SlotClass, ...]:
        """Return the slots that are missing, behind those that there are, so that new versions can go to `paths`."""
        return self._missing(paths, self._edited)

    def slots_to_edit(self, pages: Collection[int]) -> tuple[SlotClass, ...]:
        """Return the slots that are missing, behind those that there are, so that fixed pages can be written again."""
        return self._missing(self._paths, self._edited.union(pages))

    def allow_edits(self, pages: Collection[int], slots: Sequence[SlotClass]) -> None:
        """From now on, `pages` may be written again.

        Args:
            pages: that are fixed.
            slots: what `slots_to_edit` returned for them; the data files are long enough for them.
        """
        self._extents.add(slots)
        self._slots = (*self._slots, *slots)
        self._edited.update(pages)

    def is_written_once(self, page: int) -> bool:
        """Whether there is no slot for a second version of a page."""
        return self._pages[page].fixed and page not in self._edited

    def _missing(self, paths: Sequence[int], edited: Collection[int]) -> tuple[SlotClass, ...]:
        on = [{old, new} for old, new in zip(self._paths, paths, strict=True)]
        with self._lock:
            for versions in (self._current, *self._commits.values()):
                for page, version in versions.items():
                    on[page].add(version.extent.path)
        retained = max(self.retained, len(self._commits))
        return missing_slots(self._slots, needed_slots(self._pages, on, self._spare, retained, edited))

    def spread_anew(self, paths: Sequence[int], slots: Sequence[SlotClass]) -> None:
        """From now on, write new versions of pages to `paths`; they move as they are written.

        Args:
            paths: by page.
            slots: what `slots_to_spread` returned for `paths`; the data files are long enough for them.
        """
        self._extents.add(slots)
        self._slots = (*self._slots, *slots)
        self._paths = tuple(paths)

    def not_moved(self, pages: Sequence[int]) -> list[int]:
        """Return those of `pages` whose current version is on another path than the next one will be."""
        with self._lock:
            current = [self._current.get(page) for page in pages]
        return [
            page
            for page, version in zip(pages, current, strict=True)
            if version is not None and version.extent.path != self._paths[page]
        ]

    @property
    def paths(self) -> tuple[int, ...]:
        """By page, the path that new versions of it go to."""
        return self._paths

    def read(self, page: int, memory: memoryview, done: Done) -> None:
        """Fetch the current version into `memory`, verify it, then call `done`."""
        version = self._current[page]

        def verify() -> None:
            if (found := checksum(page, memory)) != version.checksum:
                path, offset, length = version.extent
                name, file = self._name_of(page), self._files[path].path
                raise CorruptPageError(name, file, offset, length, version.checksum, found)

        self._transfer(Op.READ, page, version.extent, memory, verify, done)

    def write(self, page: int, memory: memoryview, done: Done) -> None:
        """Store a new version from `memory`, then call `done`. The caller leaves `memory` alone until then."""
        self._writer.submit(self._write, page, memory, done)

    def _write(self, page: int, memory: memoryview, done: Done) -> None:
        try:
            extent = self._extents.take(self._paths[page], self._pages[page].nbytes, self._timeout)
            version = Version(extent, checksum(page, memory))
        except Exception as error:  # this runs on a thread of its own: whoever waits must hear of it
            done(error)
            return

        def ended(error: Exception | None) -> None:
            if error is not None:
                self._extents.give(extent)
            done(error)

        self._transfer(Op.WRITE, page, extent, memory, lambda: self._replace(page, version), ended)

    def _transfer(
        self,
        op: Op,
        page: int,
        extent: Extent,
        memory: memoryview,
        arrived: Callable[[], None],
        done: Done,
        attempt: int = 0,
    ) -> None:
        """Move a page, again where that may help; `arrived` looks at what a good transfer has brought, and raises."""

        def ended(ticket: Ticket) -> None:
            self._forget(ticket)
            error: Exception | None = ticket.error
            try:
                if error is None:
                    arrived()
            except Exception as failure:  # this runs on the engine's thread: whoever waits must hear of it
                error = failure
            if attempt < self._retries and _may_pass(error):
                self._warn(error)
                self._transfer(op, page, extent, memory, arrived, done, attempt + 1)
                return
            try:
                self._moved(self._pages[page], ticket, extent.path, attempt + ticket.retries, error)
            except Exception as failure:
                error = error or failure
            done(error)

        try:
            ticket = self._engine.submit(op, self._files[extent.path], extent.offset, memory)
        except Exception as error:
            done(error)
            return
        self._remember(ticket)  # before `on_done`: `ended`, which may run at once, forgets it
        ticket.on_done(ended if op is Op.WRITE else partial(self._hand_over, ended))

    def _hand_over(self, ended: Callable[[Ticket], None], ticket: Ticket) -> None:
        """Have a read end on a thread that verifies it, if there is one."""

        def end() -> None:
            try:
                ended(ticket)
            except Exception:
                _log.exception("a callback of %s failed", ticket)

        try:
            if self._verifiers is not None:
                self._verifiers.submit(end)
                return
        except RuntimeError:  # closed: what is still in flight ends here
            pass
        ended(ticket)

    def _warn(self, error: Exception | None) -> None:
        if not self._warned:
            self._warned = True
            _log.warning("%s; it is tried again, look after this drive (said once, then only counted)", error)

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
            if old is not None and not self._named[old]:
                self._extents.give(old.extent)

    def sync(self) -> None:
        """Make all completed writes durable.

        Raises:
            StorageError: a device refused, or a data file is not in its place any more: what it holds, commits
                included, goes when it is closed.
        """
        for file in self._files:
            self._engine.sync(file)
            if not _in_place(file):
                raise StorageError(
                    "sync", file.path, 0, 0, errno.ENOENT, "the data file was removed or replaced while the run used it"
                )

    def versions(self, pages: Sequence[int]) -> dict[int, Version]:
        """Return the current versions of `pages`, for a manifest."""
        with self._lock:
            return {page: self._current[page] for page in pages}

    @property
    def commits(self) -> tuple[int, ...]:
        """Steps of the commits whose versions are kept, the newest last."""
        return tuple(self._commits)

    def retained_with(self, step: int) -> tuple[int, ...]:
        """Return the steps of the commits that are kept once `step` is adopted, the newest last."""
        return tuple(sorted({*self._commits, step}))[-self.retained :]

    def adopt(self, step: int, versions: Mapping[int, Version]) -> None:
        """Keep the versions of a published commit; free what only commits beyond the retained ones named.

        Args:
            step: of the commit, no older than the newest; the commit that had this step before is forgotten.
        """
        with self._lock:
            self._named.update(versions.values())
            self._forget_commit(step)
            self._commits[step] = dict(versions)
            while len(self._commits) > self.retained:
                self._forget_commit(min(self._commits))

    def keep(self, versions: Mapping[int, Version]) -> None:
        """Do not write over these until they are released: something on the drive may name them."""
        with self._lock:
            self._named.update(versions.values())

    def release(self, versions: Mapping[int, Version]) -> None:
        """Undo one `keep` of these versions: nothing names them any more, unless a kept commit does."""
        with self._lock:
            self._release(versions)

    def _forget_commit(self, step: int) -> None:
        self._release(self._commits.pop(step, {}))

    def _release(self, versions: Mapping[int, Version]) -> None:
        for page, old in versions.items():
            self._named[old] -= 1
            if not self._named[old]:
                del self._named[old]
                if self._current.get(page) != old:
                    self._extents.give(old.extent)

    def oldest_request(self) -> str:
        """Describe what has been in flight longest, for stall reports."""
        with self._lock:
            tickets = sorted(self._pending.values(), key=lambda ticket: ticket.submitted)
        if not tickets:
            return "no request is in flight"
        first = tickets[0]
        return (
            f"oldest of {len(tickets)} requests in flight: {first.op.value} of {first.length} bytes at offset "
            f"{first.offset} of {first.path}, for {perf_counter() - first.submitted:.1f} s"
        )

    def _remember(self, ticket: Ticket) -> None:
        with self._lock:
            self._pending[id(ticket)] = ticket

    def _forget(self, ticket: Ticket) -> None:
        with self._lock:
            self._pending.pop(id(ticket), None)

    def close(self) -> None:
        """Wait until writes that were handed in are submitted; the data files are closed with the engine."""
        self._writer.shutdown(wait=True)
        if self._verifiers is not None:
            self._verifiers.shutdown(wait=True)
