"""Disk space for a rank's files, reserved with the node daemon and then allocated."""

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
    """One file per NVMe path that grows on demand.

    While a file grows, the node daemon keeps other runs from using the space.
    """

    def __init__(self, daemon: NodeDaemon, run_id: str, files: Sequence[Path]) -> None:
        """Initialize the object without allocating space.

        Args:
            files: one file per NVMe path.
        """
        self._daemon, self._run_id = daemon, run_id
        self.files = files
        """One file per NVMe path; fixed."""
        self._roots = [file.parent for file in files]
        """Folders of the run."""
        self.changed: Callable[[], object] = lambda: None
        """Function that is called after files have grown or shrunk."""
        self._sizes = [0] * len(files)
        """Allocated bytes of each file."""

    @property
    def nbytes(self) -> int:
        """Total allocated bytes of all files."""
        return sum(self._sizes)

    def _reserved(self, number: int, nbytes: int) -> AbstractContextManager[None]:
        """Return a context manager that reserves `nbytes` on the drive of a file.

        Entering it may raise `BudgetError`.
        """
        return self._daemon.space_reserved(str(self.files[number].parent.resolve()), nbytes, self._run_id)


class FileSpace(Space):
    """Space for the data files, from which a run can resume."""

    def allocate(self, slots: Iterable[SlotClass]) -> None:
        """Allocate blocks for all slots. Existing blocks are kept.

        Raises:
            BudgetError: if there is not enough space. Earlier files may already have grown.
            StorageError: if the allocation fails on a drive.
        """
        for number, size in enumerate(file_sizes(slots, len(self.files))):
            file = self.files[number]
            if size > self._sizes[number] or not file.exists():
                with self._reserved(number, size - allocated_bytes(file)):
                    reserve(file, size, self._roots)
                self._sizes[number] = size
        self.changed()

    def cut(self, slots: Iterable[SlotClass]) -> None:
        """Truncate the files to the size that the slots need.

        Raises:
            StorageError: if truncating fails.
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
    """Space in files that no run resumes from.

    The files are unlinked once they are open, so the operating system frees them when the process exits.
    """

    def __init__(self, daemon: NodeDaemon, folder: RunFolder, rank: int) -> None:
        """Create empty files.

        Raises:
            StorageError: if a file cannot be created.
        """
        super().__init__(daemon, folder.run_id, [root / f"rank{rank:05d}.activations" for root in folder.roots])
        self._descriptors: list[int] = []
        """One descriptor per NVMe path. After `unname`, they are the only references to the files. Empty after `close`.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        for file in self.files:
            try:
                self._descriptors.append(os.open(file, flags, 0o600))
            except OSError as error:
                self.close()
                raise StorageError("open", str(file), 0, 0, error.errno) from error

    def unname(self) -> None:
        """Unlink the files. Call it once every component that needs the files has opened them."""
        for file in self.files:
            file.unlink(missing_ok=True)

    def allocate(self, slots: Sequence[SlotClass]) -> None:
        """Allocate blocks for all slots.

        Raises:
            BudgetError: if there is not enough space. Earlier files may already have grown.
            StorageError: if the allocation fails on a drive.
        """
        for number, size in enumerate(file_sizes(slots, len(self.files))):
            before = self._sizes[number]
            if size > before:
                with self._reserved(number, size - before):
                    extend(self._descriptors[number], self.files[number], before, size, self._roots)
                self._sizes[number] = size
                self.changed()

    def cut(self, slots: Sequence[SlotClass]) -> None:
        """Do nothing, because the operating system frees the files when the process exits."""

    def close(self) -> None:
        """Unlink and close the files."""
        self.unname()
        while self._descriptors:
            os.close(self._descriptors.pop())
