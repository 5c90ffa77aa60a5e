"""Space for the data files of a rank: reserved with the node's daemon, then allocated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from threading import Lock

from infinity.node import NodeDaemon
from infinity.store.extents import SlotClass, file_sizes
from infinity.store.folder import allocated_bytes, reserve
from infinity.store.pages import PageStore


class FileSpace:
    """Makes data files long enough, while nobody else on the node takes that space."""

    def __init__(self, daemon: NodeDaemon, run_id: str, files: Sequence[Path]) -> None:
        """Allocate nothing yet.

        Args:
            files: of every NVMe path.
        """
        self._daemon, self._run_id, self._files = daemon, run_id, files
        self.growing = Lock()
        """Held from asking which slots are missing until the store has them."""
        self._sizes = [0] * len(files)
        """Bytes by file that have been allocated."""

    @property
    def nbytes(self) -> int:
        """What has been allocated in all files."""
        return sum(self._sizes)

    def allocate(self, slots: Iterable[SlotClass]) -> None:
        """Let there be blocks for all of these slots; what is there already stays.

        Raises:
            BudgetError: there is no room; files that came first may have grown. StorageError: a drive failed.
        """
        for number, size in enumerate(file_sizes(slots, len(self._files))):
            file = self._files[number]
            if size > self._sizes[number] or not file.exists():
                missing = size - allocated_bytes(file)
                with self._daemon.space_reserved(str(file.parent.resolve()), missing, self._run_id):
                    reserve(file, size)
                self._sizes[number] = size


class EditRoom:
    """Room for new versions of fixed pages, which have none until somebody edits what is not trained."""

    def __init__(self, store: PageStore, space: FileSpace, grown: Callable[[int], None]) -> None:
        """Make none yet.

        Args:
            store: of the pages.
            space: of the data files.
            grown: is told how many bytes the data files have.
        """
        self._store, self._space, self._grown = store, space, grown

    def make(self, pages: Iterable[int]) -> None:
        """Let there be slots for new versions of pages, as of those that are trained.

        Raises:
            BudgetError: there is no room; nothing has been written. StorageError: a drive failed.
        """
        fixed = [page for page in pages if self._store.is_written_once(page)]
        if not fixed:
            return
        with self._space.growing:
            slots = self._store.slots_to_edit(fixed)
            self._space.allocate(slots)
            self._store.allow_edits(fixed, slots)
        self._grown(self._space.nbytes)
