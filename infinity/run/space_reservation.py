"""Space for the files of a rank: reserved with the node's daemon, then allocated."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from infinity.daemon_client import NodeDaemon
from infinity.errors import StorageError
from infinity.store.extents import SlotClass, file_sizes
from infinity.store.folder import RunFolder, allocated_bytes, extend, reserve


class Space:
    """A file on every NVMe path, as long as it needs to be, while nobody else on the node takes that space."""

    def __init__(self, daemon: NodeDaemon, run_id: str, files: Sequence[Path]) -> None:
        """Allocate nothing yet.

        Args:
            files: by NVMe path.
        """
        self._daemon, self._run_id = daemon, run_id
        self.files = files
        """By NVMe path; fixed."""
        self.changed: Callable[[], object] = lambda: None
        """Is called when files have become longer or shorter."""
        self._sizes = [0] * len(files)
        """Bytes by file that have been allocated."""

    @property
    def nbytes(self) -> int:
        """What has been allocated in all files."""
        return sum(self._sizes)

    def _reserved(self, number: int, nbytes: int) -> AbstractContextManager[None]:
        """Return a context in which so much of the drive of a file is for it. Raises `BudgetError` on entry."""
        return self._daemon.space_reserved(str(self.files[number].parent.resolve()), nbytes, self._run_id)


class FileSpace(Space):
    """The data files, which a run may go on from."""

    def allocate(self, slots: Iterable[SlotClass]) -> None:
        """Let there be blocks for all of these slots; what is there already stays.

        Raises:
            BudgetError: there is no room; files that came first may have grown. StorageError: a drive failed.
        """
        for number, size in enumerate(file_sizes(slots, len(self.files))):
            file = self.files[number]
            if size > self._sizes[number] or not file.exists():
                with self._reserved(number, size - allocated_bytes(file)):
                    reserve(file, size)
                self._sizes[number] = size
        self.changed()

    def cut(self, slots: Iterable[SlotClass]) -> None:
        """Let no file be longer than these slots need.

        Raises:
            StorageError: a drive failed.
        """
        for number, size in enumerate(file_sizes(slots, len(self.files))):
            file = self.files[number]
            try:
                if file.exists() and os.path.getsize(file) > size:
                    os.truncate(file, size)
            except OSError as error:
                raise StorageError("shorten", str(file), size, 0, error.errno) from error
            self._sizes[number] = min(self._sizes[number], size)
        self.changed()


class UnnamedSpace(Space):
    """Files that nobody goes on from: they lose their names once they are open, and go with the process."""

    def __init__(self, daemon: NodeDaemon, folder: RunFolder, rank: int) -> None:
        """Make the files, empty.

        Raises:
            StorageError: that cannot be done.
        """
        super().__init__(daemon, folder.run_id, [root / f"rank{rank:05d}.activations" for root in folder.roots])
        self._descriptors: list[int] = []
        """By NVMe path; they are all that leads to the files after `unname`. Empty after `close`."""
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        for file in self.files:
            try:
                self._descriptors.append(os.open(file, flags, 0o600))
            except OSError as error:
                self.close()
                raise StorageError("open", str(file), 0, 0, error.errno) from error

    def unname(self) -> None:
        """Take the names away: who else needs the files has them open."""
        for file in self.files:
            file.unlink(missing_ok=True)

    def allocate(self, slots: Sequence[SlotClass]) -> None:
        """Let there be blocks for all of these slots.

        Raises:
            BudgetError: there is no room; files that came first may have grown. StorageError: a drive failed.
        """
        for number, size in enumerate(file_sizes(slots, len(self.files))):
            before = self._sizes[number]
            if size > before:
                with self._reserved(number, size - before):
                    extend(self._descriptors[number], self.files[number], before, size)
                self._sizes[number] = size
                self.changed()

    def cut(self, slots: Sequence[SlotClass]) -> None:
        """Do nothing: all of it goes soon."""

    def close(self) -> None:
        """Close the files."""
        self.unname()
        while self._descriptors:
            os.close(self._descriptors.pop())
