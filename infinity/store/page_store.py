"""Page store: writes each new version of a page to a free extent, and verifies every read."""

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
"""Callback that is called once when a transfer has ended, with its error or ``None``."""
Moved = Callable[[Page, Ticket, int, int, Exception | None], None]
"""Callback that is called once when a transfer has succeeded or will not be retried again. Arguments: page, last
ticket, index of the NVMe path, number of resubmissions, error.
"""


@dataclass(frozen=True, slots=True)
class Version:
    """One version of a page: its location and its expected checksum."""

    extent: Extent
    checksum: int
    """64-bit XXH3 of the content. See the function `checksum`."""


def checksum(page: int, content: memoryview) -> int:
    """Return the 64-bit XXH3 of a page's bytes, seeded with the page index so that no other page's content matches."""
    return xxhash.xxh3_64_intdigest(content, seed=page)


def state_pages(pages: Sequence[Page]) -> list[Page]:
    """Return the pages that checkpoints contain: all pages except gradients."""
    return [page for page in pages if page.role is not Role.GRAD]


def lay_out(
    pages: Sequence[Page],
    stripe_weights: Sequence[float],
    checkpointed: Mapping[int, Mapping[int, Version]],
    spare: int,
    retained: int,
) -> tuple[tuple[int, ...], tuple[SlotClass, ...]]:
    """Return the path for new versions of each page, and the slots of the state.

    Every extent of a checkpoint is a slot as well. The pages of a checkpoint stay on the path on which the checkpoint
    stores them, even if `stripe_weights` would place them elsewhere because the bandwidth may have been measured again
    since.

    Args:
        pages: pages of the rank, by index.
        stripe_weights: relative amount of data for each path.
        checkpointed: versions of the checkpoints to resume from: in order, then by page.
        spare: maximum number of writes in flight.
        retained: number of checkpoints to keep.
    """
    spread_out = spread(pages, stripe_weights)
    paths = list(spread_out)
    for _, versions in sorted(checkpointed.items()):
        for page, version in versions.items():
            paths[page] = version.extent.path
    # If there are more checkpoints than `retained`, the excess ones keep their extents until the next checkpoint is
    # published.
    retained = max(retained, len(checkpointed))
    state = state_pages(pages)
    slots = plan_slots(state, [spread_out[page.index] for page in state], spare, retained)
    used = {version.extent for versions in checkpointed.values() for version in versions.values()}
    needed = needed_slots(state, [paths[page.index] for page in state], spare, retained)
    more = missing_slots(slots, needed, used)
    strays = (SlotClass(path=p, offset=at, length=n, count=1) for p, at, n in sorted(used.difference(*slots)))
    return tuple(paths), (*slots, *more, *strays)


def read_version(file: Path, page: int, version: Version, name: str) -> memoryview:
    """Return the bytes of a stored version. Bypasses the I/O engine and leaves no data in the page cache.

    Raises:
        StorageError: if the bytes cannot be read.
        CorruptPageError: if the bytes do not match the checksum.
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
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # opening a pipe must not block
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(0, "not a regular file")
        # Drop cached data first, because the purpose is to verify the drive and not the page cache. The second call
        # prevents this read from evicting unrelated data.
        os.posix_fadvise(descriptor, offset, length, os.POSIX_FADV_DONTNEED)
        data, done = memoryview(bytearray(length)), 0
        while done < length:
            count = os.preadv(descriptor, [data[done:]], offset + done)
            if not count:
                raise OSError(0, f"unexpected end of file, {length - done} bytes missing")
            done += count
        os.posix_fadvise(descriptor, offset, length, os.POSIX_FADV_DONTNEED)
        return data
    finally:
        os.close(descriptor)


def _may_pass(error: Exception | None) -> bool:
    """Return whether resubmitting a failed transfer may help.

    EIO can be caused by a cable or a controller reset, and a checksum mismatch by a bit flipped in transit. A full
    drive stays full. If a transfer stopped early without an errno, the engine has already tried to continue it.
    """
    return isinstance(error, CorruptPageError) or (isinstance(error, StorageError) and error.errno == errno.EIO)


def _in_place(file: DataFile) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fd), os.stat(file.path))
    except FileNotFoundError:
        return False


_LEAST_HASHERS, _MOST_HASHERS = 2, 4
"""Limits for the number of checksum threads per direction. A single additional thread would only add hand-overs
between threads. Four threads hash more data than the drives of one node can read.
"""


def hash_threads(idle: int) -> int:
    """Return the number of threads that hash pages in each direction. 0 means no additional threads.

    Args:
        idle: number of cores that neither compute nor update.
    """
    return min(idle // 2, _MOST_HASHERS) if idle >= 2 * _LEAST_HASHERS else 0


class PageStore:
    """Reads and writes whole pages, and never overwrites the extent of a version that may still be needed.

    Life cycle of a version: `write` takes a free extent, which no reader uses. When the transfer has succeeded, the
    version becomes *current* and replaces the previous one. `keep` and `adopt` mark versions as *named* by a
    checkpoint, first while the checkpoint is being published and then while it is retained. An extent becomes free
    when its version is neither current nor named.

    Threads: the pager calls `read`, `write`, `has` and `discard` from any thread, under its own lock
    (`Transfers.lock`). The training thread calls the methods that concern checkpoints, except that the thread of a
    mirror also calls `release`. `allow_edits` is called by the
    thread that edits frozen parameters. Writes complete on the engine's thread; reads complete on a verifier thread if
    there is one. `_write` runs on a writer thread. `_lock` guards the shared state, and no thread blocks while holding
    it.
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
        kept: Iterable[Mapping[int, Version]] = (),
        retained: int = 1,
        hashers: int = 0,
    ) -> None:
        """Open the data files.

        Args:
            pages: pages of this rank, by index.
            paths: index of the path for new versions, by page.
            files: data file on each path.
            slots: slots from which extents are allocated, see `lay_out`.
            engine: I/O engine that transfers the pages. It also closes the files.
            lengths: functions that extend and truncate the data files.
            name_of: function that returns the readable name of a page, for error messages.
            moved: callback for every completed transfer, see `Moved`.
            timeout: number of seconds that a write waits for a free slot.
            spare: maximum number of writes in flight.
            retries: maximum number of resubmissions of a transfer, see `_may_pass`.
            checkpointed: versions of the checkpoints to resume from: by step, then by page.
            kept: versions of further checkpoints, by page. They are protected until `release`.
            retained: number of checkpoints to keep.
            hashers: number of threads that hash pages before a write, and number of threads that verify pages after a
                read. With 0, one thread hashes pages before a write, and each read is verified on the thread that
                completes it.

        Raises:
            StorageError: if a file cannot be opened.
            CheckpointError: if checkpointed pages overlap or have the wrong length.
        """
        self._paths = list(paths)
        """Path for new versions of each page. `add` extends the list."""
        self._pages = list(pages)
        """Pages by index. `add` extends the list."""
        # Constant after construction.
        self._engine, self._spare = engine, spare
        self._name_of, self._moved, self._timeout, self._retries = name_of, moved, timeout, retries
        self.retained = retained
        self.pinned: Collection[int] = ()
        """Steps of checkpoints that are retained in addition to `retained` ones. Changed by the training thread."""
        self._files = [engine.open(os.fspath(file)) for file in files]
        self._warned = False
        """``True`` if a retry has been logged. Set by the engine's thread."""
        self._checkpoints = {step: dict(versions) for step, versions in sorted((checkpointed or {}).items())}
        """Versions of the retained checkpoints: by step (newest last), then by page. Changed only by `adopt`, under
        `_lock`.
        """
        self._named = Counter(
            version for versions in (*self._checkpoints.values(), *kept) for version in versions.values()
        )
        """Number of checkpoints, published or being published, that contain each version. Changed by the training
        thread, under `_lock`.
        """
        self._check_checkpointed()
        self._current = dict(self._checkpoints[max(self._checkpoints)]) if self._checkpoints else {}
        """Current version of each page. Changed under `_lock`, by `discard` and by the thread that completes a write.
        Read without the lock, because the pager never reads a page that is being written.
        """
        self._writing: dict[int, bool] = {}
        """Pages that are being written. The value is ``True`` if the content is no longer needed, so that the version
        must not become current. Changed under `_lock`.
        """
        self._extents = ExtentAllocator(slots, (version.extent for version in self._named))
        """Free slots of the state. It has its own lock."""
        self._slots = list(slots)
        """All slots of the state. `add` and `allow_edits` extend the list."""
        self._ends = list(file_sizes(slots, len(files)))
        """End of the slots on each path, in bytes."""
        self._added: Counter[tuple[int, int]] = Counter()
        """Number of pages added by `add`, by (path, length)."""
        self._edited: set[int] = set()
        """Fixed pages that may be rewritten. `allow_edits` extends the set."""
        self._not_removed = 0
        """Maximum number of further checkpoints whose versions are kept. Changed by `reserve_checkpoints`."""
        self._lengths = lengths
        self._gradients = GradientSpace(pages, paths, spare, lengths, lambda: self._slots)
        """Slots for gradients."""
        self._lock = Lock()
        self._writers = ThreadPoolExecutor(max(1, hashers), thread_name_prefix="infinity-writer")
        """Threads that hash and submit one page at a time each. One core hashes 5 to 15 GB/s, which is less than
        several drives can write.
        """
        self._verifiers = ThreadPoolExecutor(hashers, "infinity-verifier") if hashers else None
        """Threads that verify pages after a read, so that the engine's thread can submit the next requests in the
        meantime.
        """
        self._pending: dict[int, Ticket] = {}
        """Tickets in flight by `id`, for stall reports. Changed under `_lock` by the threads that submit and complete
        transfers.
        """

    def _check_checkpointed(self) -> None:
        """Check that no future write can overwrite a checkpointed page.

        Raises:
            CheckpointError: if a checkpointed page has the wrong length or overlaps another one.
        """
        run = Path(self._files[0].path).parent
        for step, versions in self._checkpoints.items():
            for page, version in versions.items():
                if version.extent.length != self._pages[page].nbytes:
                    raise CheckpointError(
                        f"{run}, step {step}: {self._name_of(page)} has the wrong length at {version.extent}"
                    )
        if len({version.extent for version in self._named}) < len(self._named):
            raise CheckpointError(f"{run}: two checkpoints store different versions of pages in the same extent")
        if stray := overlapping(version.extent for version in self._named):
            raise CheckpointError(
                f"{self._files[stray.path].path}: two checkpointed pages overlap at offset {stray.offset}"
            )

    def add(self, pages: Sequence[Page], path_of: Callable[[Page], int]) -> None:
        """Add pages whose indices follow the existing ones. Supported only for stores that keep no checkpoints.

        Args:
            pages: pages to add.
            path_of: function that returns the path for versions of a page.

        Raises:
            BudgetError: if a path has too little space. The pages are not added.
            StorageError: if a drive fails.
        """
        with self._gradients.growing:
            paths = [path_of(page) for page in pages]
            members = self._added + Counter((path, page.nbytes) for path, page in zip(paths, pages, strict=True))
            self._have(further_slots(self._ends, self._added, members, self._spare))
            self._added = members
            self._paths += paths
            self._pages += pages

    def allow_edits(self, pages: Iterable[int]) -> None:
        """Allow fixed pages to be rewritten. Pages that are not fixed are ignored.

        Raises:
            BudgetError: if a path has too little space for the additional slots.
            StorageError: if a drive fails.
        """
        fixed = {page for page in pages if self._pages[page].fixed} - self._edited
        if fixed:
            with self._gradients.growing:
                self._reserve_space(self._edited | fixed)
                self._edited |= fixed

    def reserve_checkpoints(self, further: int) -> None:
        """Allocate slots for further checkpoints that are kept because their files could not be removed.

        Args:
            further: number of these checkpoints.

        Raises:
            BudgetError: if a path has too little space for the additional slots.
            StorageError: if a drive fails.
        """
        with self._gradients.growing:
            self._not_removed = max(self._not_removed, further)
            self._reserve_space(self._edited)

    def _reserve_space(self, edited: Collection[int]) -> None:
        """Allocate missing slots. The caller must hold `growing`."""
        state = state_pages(self._pages)
        checkpoints = max(self.retained, len(self._checkpoints)) + self._not_removed
        paths = [self._paths[page.index] for page in state]
        needed = needed_slots(state, paths, self._spare, checkpoints, edited)
        self._have(missing_slots(self._slots, needed, behind=self._gradients.area))

    def _have(self, slots: Sequence[SlotClass]) -> None:
        """Add slots. The caller must hold `growing`."""
        # Blocks are allocated before a slot can be handed out, so that a write never runs out of space.
        self._lengths.allocate(slots)
        self._extents.add(slots)
        self._slots += slots
        self._ends = list(map(max, self._ends, file_sizes(slots, len(self._ends))))

    def expect_gradients(self, stored: bool) -> None:
        """Reserve space for the gradients of all pages if a step may store them. Otherwise release the space.

        Raises:
            BudgetError: if a path has too little space.
            StorageError: if a drive fails.
        """
        self._gradients.expect(stored)

    def read(self, page: int, memory: memoryview, done: Done) -> None:
        """Read the current version of a page into `memory`, verify it, then call `done`."""
        version = self._current[page]

        def verify() -> None:
            if (found := checksum(page, memory)) != version.checksum:
                path, offset, length = version.extent
                name, file = self._name_of(page), self._files[path].path
                raise CorruptPageError(name, file, offset, length, version.checksum, found)

        self._transfer(Op.READ, page, version.extent, memory, verify, done)

    def write(self, page: int, memory: memoryview, done: Done) -> None:
        """Store a new version from `memory`, then call `done`. The caller must not change `memory` until then."""
        with self._lock:
            self._writing[page] = False
        self._writers.submit(self._write, page, memory, done)

    def _write(self, page: int, memory: memoryview, done: Done) -> None:
        try:
            # Always take a free extent, never the extent of the current version: if the process crashes during the
            # write, the version that a checkpoint contains must remain intact.
            extent = self._take(page)
            version = Version(extent, checksum(page, memory))
        except Exception as error:  # on a writer thread: without `done`, the waiting thread would block forever
            done(error)
            return

        def ended(error: Exception | None) -> None:
            # A version becomes current only in `_arrived`, i.e. after the engine has transferred all of its bytes.
            if error is not None:
                self._give(page, extent)
            done(error)

        self._transfer(Op.WRITE, page, extent, memory, lambda: self._arrived(page, version), ended)

    def _arrived(self, page: int, version: Version) -> None:
        """Make a written version current, unless its content was discarded during the write."""
        with self._lock:
            dead = self._writing.pop(page, False)
            if dead:
                self._give(page, version.extent)
            else:
                self._replace(page, version)

    def _take(self, page: int) -> Extent:
        # Checkpoints contain no gradients, so gradients use a separate area that can be truncated.
        if self._pages[page].role is Role.GRAD:
            return self._gradients.take(self._paths[page], self._pages[page].nbytes, self._timeout)
        return self._extents.take(self._paths[page], self._pages[page].nbytes, self._timeout)

    def _give(self, page: int, extent: Extent) -> None:
        # The caller guarantees that no current version and no checkpoint uses the extent.
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
        """Transfer a page, with retries if they may help. `arrived` processes a successful transfer and may raise."""

        def ended(ticket: Ticket) -> None:
            self._forget(ticket)
            error: Exception | None = ticket.error
            try:
                if error is None:
                    arrived()
            except Exception as failure:  # without `done`, the waiting thread would block forever
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
        self._remember(ticket)  # before `on_done`, because `ended` may run immediately and call `_forget`
        ticket.on_done(ended if op is Op.WRITE else partial(self._hand_over, ended))

    def _hand_over(self, ended: Callable[[Ticket], None], ticket: Ticket) -> None:

        def end() -> None:
            try:
                ended(ticket)
            except Exception:
                _log.exception("a callback of %s failed", ticket)

        try:
            if self._verifiers is not None:
                self._verifiers.submit(end)
                return
        except RuntimeError:  # the executor is shut down: complete the remaining transfers on this thread
            pass
        ended(ticket)

    def _warn(self, error: Exception | None) -> None:
        if not self._warned:
            self._warned = True
            _log.warning("%s; retrying. Check this drive. Further retries are counted but not logged.", error)

    def discard(self, page: int) -> None:
        """Forget the current version of a page, and any version being written, because the content is not needed."""
        with self._lock:
            if page in self._writing:
                self._writing[page] = True
            self._replace(page, None)

    def has(self, page: int) -> bool:
        """Return whether a version of the page is stored."""
        return page in self._current

    def _replace(self, page: int, version: Version | None) -> None:
        """Replace or remove the current version. The caller must hold `_lock`."""
        old = self._current.pop(page, None)
        if version is not None:
            self._current[page] = version
        # The extent of a version that a checkpoint contains stays in use: `_release` frees it.
        if old is not None and not self._named[old]:
            self._give(page, old.extent)

    def sync(self) -> None:
        """Make all completed writes durable.

        Raises:
            StorageError: if a device fails to sync, or if a data file was removed or replaced. The contents of such a
                file, including checkpoints, are lost when the file is closed.
        """
        # The path is checked because fdatasync succeeds on an unlinked file, whose pages could never be read again.
        for file in self._files:
            self._engine.sync(file)
            if not _in_place(file):
                raise StorageError(
                    "sync", file.path, 0, 0, errno.ENOENT, "the data file was removed or replaced during the run"
                )

    def versions(self, pages: Sequence[int]) -> dict[int, Version]:
        """Return the current versions of `pages`, for a manifest."""
        with self._lock:
            return {page: self._current[page] for page in pages}

    @property
    def checkpoints(self) -> tuple[int, ...]:
        """Steps of the retained checkpoints, newest last."""
        return tuple(self._checkpoints)

    def retained_with(self, step: int, prefer: Collection[int] = ()) -> tuple[int, ...]:
        """Return the steps of the checkpoints that are retained once the one at `step` is adopted, newest last.

        Args:
            step: step of the new checkpoint.
            prefer: steps whose checkpoints are retained in preference to newer ones.
        """
        others = sorted(set(self._checkpoints) - {step}, key=lambda other: (other in prefer, other))
        kept = {
            *others[max(0, len(others) - self.retained + 1) :],
            *(other for other in others if other in self.pinned),
        }
        return (*sorted(kept), step)

    def replaced_by(self, step: int, prefer: Collection[int] = ()) -> dict[int, Mapping[int, Version]]:
        """Return the versions of the checkpoints that `adopt` releases: by step, then by page.

        Takes the same arguments as `adopt`.
        """
        retained = set(self.retained_with(step, prefer)) - {step}
        return {other: versions for other, versions in self._checkpoints.items() if other not in retained}

    def adopt(self, step: int, versions: Mapping[int, Version], prefer: Collection[int] = ()) -> None:
        """Retain the versions of a published checkpoint, and release the checkpoints that are no longer retained.

        Args:
            step: step of the checkpoint, not older than the newest one. It replaces an earlier checkpoint of the same
                step.
            versions: versions that the checkpoint contains, by page.
            prefer: the value passed to `retained_with`.
        """
        with self._lock:
            # The new versions are added before old ones are released, because both checkpoints may contain the same
            # versions.
            self._named.update(versions.values())
            self._forget_checkpoint(step)
            self._checkpoints[step] = dict(versions)
            for gone in set(self._checkpoints).difference(self.retained_with(step, prefer)):
                self._forget_checkpoint(gone)

    def keep(self, versions: Mapping[int, Version]) -> None:
        """Protect versions from being overwritten until `release`, because a file on the drive may refer to them."""
        with self._lock:
            self._named.update(versions.values())

    def release(self, versions: Mapping[int, Version]) -> None:
        """Undo one `keep` of these versions. Their extents become free unless a retained checkpoint contains them."""
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
                    # A current version keeps its extent: `_replace` frees it when the next version has been written.
                    self._extents.give(old.extent)

    def oldest_request(self) -> tuple[float, str] | None:
        """Return the submission time (`time.perf_counter`) and description of the oldest request, or ``None``."""
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
        """Wait until pending writes are submitted, and release the gradient area. The engine closes the files."""
        self._writers.shutdown(wait=True)
        if self._verifiers is not None:
            self._verifiers.shutdown(wait=True)
        with suppress(StorageError):  # a failed drive has already been reported
            self._lengths.cut(self._slots)
