"""The page store: current version of every page, written to free extents and verified on every read."""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock
from time import perf_counter

import xxhash

from infinity.content.format import Role
from infinity.content.layout import Page
from infinity.errors import CheckpointError, CorruptPageError, StorageError
from infinity.io import DataFile, Engine, Op, Ticket
from infinity.store.extents import (
    Extent,
    ExtentAllocator,
    SlotClass,
    file_sizes,
    further_slots,
    missing_slots,
    needed_slots,
    overlapping,
    plan_slots,
    spread,
)
from infinity.store.gradient_area import FileLengths, GradientSpace

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


def state_pages(pages: Sequence[Page]) -> list[Page]:
    """Return those of some pages that are in checkpoints: no gradients."""
    return [page for page in pages if page.role is not Role.GRAD]


def lay_out(
    pages: Sequence[Page],
    stripe_weights: Sequence[float],
    checkpointed: Mapping[int, Mapping[int, Version]],
    spare: int,
    retained: int,
) -> tuple[tuple[int, ...], tuple[SlotClass, ...]]:
    """Return the path that new versions of every page go to, and the slots of the state.

    Extents of checkpoints are slots, too. Pages of a checkpoint stay where it has them, which need not be where
    `shares` say:
    they may have been spread anew.

    Args:
        pages: of the rank, by index.
        shares: how much of the pages each path is to hold, relative to the others.
        checkpointed: versions by page of the checkpoints to go on from, by step.
        spare: writes that may be in flight at once.
        retained: checkpoints that are kept.
    """
    spread_out = spread(pages, stripe_weights)
    paths = list(spread_out)
    on = [{path} for path in paths]
    for _, versions in sorted(checkpointed.items()):
        for page, version in versions.items():
            paths[page] = version.extent.path
            on[page].add(version.extent.path)
    # Checkpoints beyond the retained ones stay until the next one is published, where they are.
    retained = max(retained, len(checkpointed))
    state = state_pages(pages)
    slots = plan_slots(state, [spread_out[page.index] for page in state], spare, retained)
    used = {version.extent for versions in checkpointed.values() for version in versions.values()}
    needed = needed_slots(state, [on[page.index] for page in state], spare, retained)
    more = missing_slots(slots, needed, used)
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


_LEAST_HASHERS, _MOST_HASHERS = 2, 4
"""Threads for checksums each way: with one, pages would only change hands; four hash more than a node's drives read."""


def hash_threads(idle: int) -> int:
    """Return how many threads hash pages each way, given how many cores neither compute nor update; 0: no further."""
    return min(idle // 2, _MOST_HASHERS) if idle >= 2 * _LEAST_HASHERS else 0


class PageStore:
    """Reads and writes whole pages; never overwrites the extent of a version that somebody may need.

    The life of a version: `write` takes a free extent, which nobody reads; when the transfer has ended well, the
    version is *current* and the one before it is *replaced*. `keep` and `adopt` *name* current versions: those of a
    checkpoint that is being published, then of one that is. An extent is free again when its version is neither current
    nor named, whichever ends last.

    Threads: the pager calls `read`, `write`, `has` and `discard`, from any thread but under its own lock
    (`Transfers.lock`); the training thread those about checkpoints; whoever edits what is not trained `allow_edits`; a
    thread that balances the paths `spread_anew`. Transfers end on the engine's thread, but reads on one of the
    verifiers', where there are any. `_write` runs on one of the writers'. `_lock` guards what they share; nothing is
    waited for under it.
    """

    def __init__(
        self,
        pages: Sequence[Page],
        paths: Sequence[int],
        files: Sequence[Path],
        slots: Sequence[SlotClass],
        engine: Engine,
        lengths: FileLengths,
        *,
        name_of: Callable[[int], str],
        moved: Moved,
        timeout: float,
        spare: int,
        retries: int = 0,
        checkpointed: Mapping[int, Mapping[int, Version]] | None = None,
        retained: int = 1,
        hashers: int = 0,
    ) -> None:
        """Open the data files.

        Args:
            pages: of this rank, by index.
            paths: by page, the index of the path that new versions of it go to.
            files: data file of every path.
            slots: that the extents are taken from, see `lay_out`.
            engine: that moves bytes; it closes the files.
            lengths: makes the data files longer and shorter.
            name_of: readable name of a page, for errors.
            moved: told of every transfer that has ended for good: page, last ticket, path, how often it was submitted
                again, error.
            timeout: seconds that a write waits for a free slot.
            spare: writes that may be in flight at once.
            retries: how often a transfer is submitted again where that may help (`_may_pass`).
            checkpointed: versions by page of the checkpoints to go on from, by step.
            retained: how many checkpoints are kept.
            hashers: threads for checksums of what is written, and as many of what has been read; 0: one for the former,
                and the thread on which a transfer ends for the latter.

        Raises:
            StorageError: a file cannot be opened. CheckpointError: checkpointed pages overlap, or are not of their
                length.
        """
        self._paths = list(paths)
        """By page, the path of its next version. Replaced as a whole by `spread_anew`; grows with `add`."""
        self._pages = list(pages)
        """By number. Grows with `add`."""
        # None of these changes.
        self._engine, self._spare = engine, spare
        self._name_of, self._moved, self._timeout, self._retries = name_of, moved, timeout, retries
        self.retained = retained
        self._files = [engine.open(os.fspath(file)) for file in files]
        self._warned = False
        """Whether a retry was logged. Set by the engine's thread."""
        self._checkpoints = {step: dict(versions) for step, versions in sorted((checkpointed or {}).items())}
        """Versions by page of the checkpoints that are kept, by step, newest last. Changed by `adopt`, under `_lock`.
        """
        self._named = Counter(version for versions in self._checkpoints.values() for version in versions.values())
        """How many checkpoints, published or about to be, name a version. Changed by the training thread under `_lock`.
        """
        self._check_checkpointed()
        self._current = dict(self._checkpoints[max(self._checkpoints)]) if self._checkpoints else {}
        """Current version by page. Changed under `_lock` by the thread on which a write ends, and by `discard`; read
        without it, as the pager reads no page that is being written."""
        self._writing: dict[int, bool] = {}
        """By page that is being written, whether its content is dead meanwhile, so that the version is not to become
        current. Changed under `_lock`."""
        self._extents = ExtentAllocator(slots, (version.extent for version in self._named))
        """Which slots are free; has a lock of its own."""
        self._slots = list(slots)
        """All slots of the state. Grows with `spread_anew`, `add` and `allow_edits`."""
        self._ends = list(file_sizes(slots, len(files)))
        """By path, where they end."""
        self._added: Counter[tuple[int, int]] = Counter()
        """Pages that `add` has brought, by (path, length)."""
        self._edited: set[int] = set()
        """Fixed pages that may be written again. Grows with `allow_edits`."""
        self._lengths = lengths
        self._gradients = GradientSpace(pages, spare, lengths, lambda: self._slots)
        """Where gradients lie."""
        self._lock = Lock()
        self._writers = ThreadPoolExecutor(max(1, hashers), thread_name_prefix="infinity-writer")
        """Hash and submit writes, one page each. Hashing takes 5 to 15 GB/s of one core, less than several drives."""
        self._verifiers = ThreadPoolExecutor(hashers, "infinity-verifier") if hashers else None
        """Verify what has been read, so that the engine's thread has the next requests on their way meanwhile."""
        self._pending: dict[int, Ticket] = {}
        """Tickets in flight by `id`, for stall reports. Changed by whoever submits and by the engine's thread, under
        `_lock`."""

    def _check_checkpointed(self) -> None:
        """Check that nothing that will be written can touch what is checkpointed.

        Raises:
            CheckpointError: a checkpointed page is not of its length, or overlaps another one.
        """
        run = Path(self._files[0].path).parent
        for step, versions in self._checkpoints.items():
            for page, version in versions.items():
                if version.extent.length != self._pages[page].nbytes:
                    raise CheckpointError(f"{run}, step {step}: {self._name_of(page)} cannot be at {version.extent}")
        if len({version.extent for version in self._named}) < len(self._named):
            raise CheckpointError(f"{run}: two checkpoints have different versions of pages in the same place")
        if stray := overlapping(version.extent for version in self._named):
            raise CheckpointError(f"{self._files[stray.path].path}: two checkpointed pages overlap at {stray.offset}")

    def spread_anew(self, paths: Sequence[int]) -> None:
        """From now on, write new versions of pages to `paths`; they move as they are written.

        Args:
            paths: by page.

        Raises:
            BudgetError: there is no room for the slots that are missing there. StorageError: a drive failed.
        """
        with self._gradients.growing:
            self._make_room(paths, self._edited)
            self._gradients.make_room(paths)
            self._paths = list(paths)

    def add(self, pages: Sequence[Page], path_of: Callable[[Page], int]) -> None:
        """Have further pages, whose numbers come behind those so far; of a store that keeps no checkpoints.

        Args:
            path_of: returns the path that versions of a page go to.

        Raises:
            BudgetError: there is no room for them; they are not there then. StorageError: a drive failed.
        """
        with self._gradients.growing:
            paths = [path_of(page) for page in pages]
            members = self._added + Counter((path, page.nbytes) for path, page in zip(paths, pages, strict=True))
            self._have(further_slots(self._ends, self._added, members, self._spare))
            self._added = members
            self._paths += paths
            self._pages += pages

    def allow_edits(self, pages: Iterable[int]) -> None:
        """From now on, let fixed pages be written again; others may be already.

        Raises:
            BudgetError: there is no room for the slots that they need. StorageError: a drive failed.
        """
        fixed = {page for page in pages if self._pages[page].fixed} - self._edited
        if fixed:
            with self._gradients.growing:
                self._make_room(self._paths, self._edited | fixed)
                self._edited |= fixed

    def _make_room(self, paths: Sequence[int], edited: Collection[int]) -> None:
        """Have the slots that are missing; `growing` is held."""
        on = [{old, new} for old, new in zip(self._paths, paths, strict=True)]
        with self._lock:
            for versions in (self._current, *self._checkpoints.values()):
                for page, version in versions.items():
                    on[page].add(version.extent.path)
        state = state_pages(self._pages)
        needed = needed_slots(
            state, [on[page.index] for page in state], self._spare, max(self.retained, len(self._checkpoints)), edited
        )
        self._have(missing_slots(self._slots, needed, behind=self._gradients.area))

    def _have(self, slots: Sequence[SlotClass]) -> None:
        """Have further slots; `growing` is held."""
        self._lengths.allocate(slots)
        self._extents.add(slots)
        self._slots += slots
        self._ends = list(map(max, self._ends, file_sizes(slots, len(self._ends))))

    def expect_gradients(self, stored: bool) -> None:
        """Have room for the gradients of all pages if they may be stored in a step; if not, give it back.

        Raises:
            BudgetError: there is no room. StorageError: a drive failed.
        """
        self._gradients.expect(stored, self._paths)

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
        return tuple(self._paths)

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
        with self._lock:
            self._writing[page] = False
        self._writers.submit(self._write, page, memory, done)

    def _write(self, page: int, memory: memoryview, done: Done) -> None:
        try:
            extent = self._take(page)
            version = Version(extent, checksum(page, memory))
        except Exception as error:  # this runs on a thread of its own: whoever waits must hear of it
            done(error)
            return

        def ended(error: Exception | None) -> None:
            if error is not None:
                self._give(page, extent)
            done(error)

        self._transfer(Op.WRITE, page, extent, memory, lambda: self._arrived(page, version), ended)

    def _arrived(self, page: int, version: Version) -> None:
        """Have a version that was written become current, unless its content has become dead meanwhile."""
        with self._lock:
            dead = self._writing.pop(page, False)
            if dead:
                self._give(page, version.extent)
            else:
                self._replace(page, version)

    def _take(self, page: int) -> Extent:
        """Return a slot for a new version of a page."""
        if self._pages[page].role is Role.GRAD:
            return self._gradients.take(self._pages[page], self._paths, self._timeout)
        return self._extents.take(self._paths[page], self._pages[page].nbytes, self._timeout)

    def _give(self, page: int, extent: Extent) -> None:
        """Take back the slot of a version that nobody needs."""
        slots = self._gradients if self._pages[page].role is Role.GRAD else self._extents
        slots.give(extent)

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
        """Forget the current version of a page whose content is dead, and the one that is being written."""
        with self._lock:
            if page in self._writing:
                self._writing[page] = True
            self._replace(page, None)

    def has(self, page: int) -> bool:
        """Whether there is a stored version."""
        return page in self._current

    def _replace(self, page: int, version: Version | None) -> None:
        """Have another current version, or none. Under `_lock`."""
        old = self._current.pop(page, None)
        if version is not None:
            self._current[page] = version
        if old is not None and not self._named[old]:
            self._give(page, old.extent)

    def sync(self) -> None:
        """Make all completed writes durable.

        Raises:
            StorageError: a device refused, or a data file is not in its place any more: what it holds, checkpoints
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
    def checkpoints(self) -> tuple[int, ...]:
        """Steps of the checkpoints whose versions are kept, the newest last."""
        return tuple(self._checkpoints)

    def retained_with(self, step: int, prefer: Collection[int] = ()) -> tuple[int, ...]:
        """Return the steps of the checkpoints that are kept once `step` is adopted, the newest last.

        Args:
            step: of the checkpoint.
            prefer: steps of those that are kept before newer ones.
        """
        others = sorted(set(self._checkpoints) - {step}, key=lambda other: (other in prefer, other))
        return (*sorted(others[max(0, len(others) - self.retained + 1) :]), step)

    def adopt(self, step: int, versions: Mapping[int, Version], prefer: Collection[int] = ()) -> None:
        """Keep the versions of a published checkpoint; free what only checkpoints beyond the retained ones named.

        Args:
            step: of the checkpoint, no older than the newest; the checkpoint that had this step before is forgotten.
            prefer: as `retained_with` was given it.
        """
        with self._lock:
            self._named.update(versions.values())
            self._forget_checkpoint(step)
            self._checkpoints[step] = dict(versions)
            for gone in set(self._checkpoints).difference(self.retained_with(step, prefer)):
                self._forget_checkpoint(gone)

    def keep(self, versions: Mapping[int, Version]) -> None:
        """Do not write over these until they are released: something on the drive may name them."""
        with self._lock:
            self._named.update(versions.values())

    def release(self, versions: Mapping[int, Version]) -> None:
        """Undo one `keep` of these versions: nothing names them any more, unless a kept checkpoint does."""
        with self._lock:
            self._release(versions)

    def _forget_checkpoint(self, step: int) -> None:
        self._release(self._checkpoints.pop(step, {}))

    def _release(self, versions: Mapping[int, Version]) -> None:
        for page, old in versions.items():
            self._named[old] -= 1
            if not self._named[old]:
                del self._named[old]
                if self._current.get(page) != old:
                    self._extents.give(old.extent)

    def oldest_request(self) -> tuple[float, str] | None:
        """Return since when the oldest request is in flight (`time.perf_counter`) and what it is, if there is one."""
        with self._lock:
            tickets = sorted(self._pending.values(), key=lambda ticket: ticket.submitted)
        if not tickets:
            return None
        first = tickets[0]
        return (
            first.submitted,
            f"oldest of {len(tickets)} requests in flight: {first.op.value} of {first.length} bytes at offset "
            f"{first.offset} of {first.path}, for {perf_counter() - first.submitted:.1f} s",
        )

    def _remember(self, ticket: Ticket) -> None:
        with self._lock:
            self._pending[id(ticket)] = ticket

    def _forget(self, ticket: Ticket) -> None:
        with self._lock:
            self._pending.pop(id(ticket), None)

    def close(self) -> None:
        """Wait until writes that were handed in are submitted; the data files are closed with the engine.

        What gradients took is given back: nobody needs them any more.
        """
        self._writers.shutdown(wait=True)
        if self._verifiers is not None:
            self._verifiers.shutdown(wait=True)
        with suppress(StorageError):  # the drive has failed: whatever is to be said of that has been
            self._lengths.cut(self._slots)
