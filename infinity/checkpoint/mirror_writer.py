"""Copying of checkpoints to a mirror, on threads of its own. `infinity.checkpoint.mirror` describes the files, and
`infinity.checkpoint.copier` when checkpoints are copied.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Collection, Iterator
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import BinaryIO

from infinity import interrupts
from infinity.checkpoint import manifest as files
from infinity.checkpoint.checkpoint_files import MODEL_FOLDER
from infinity.checkpoint.copier import CHECK_SECONDS, Copier
from infinity.checkpoint.manifest import CheckpointName, Manifest
from infinity.checkpoint.mirror import Mirror, page_folder, page_name
from infinity.io.pace import Pace
from infinity.ranks import Ranks
from infinity.store.folder import RunFolder
from infinity.store.page_store import PageStore, Version, read_version
from infinity.units import MIB

_log = logging.getLogger("infinity")
_TOGETHER = 4
"""Maximum number of pages that are copied concurrently, because an object store answers slowly."""
_MEMORY = 128 * MIB
"""Maximum size of the pages that are copied concurrently, unless a single page is larger, in bytes. fsspec may copy a
page once more.
"""
_END_SECONDS = 5.0
"""Maximum time to wait for a thread that is to stop, in seconds."""


class _StoppedError(Exception):
    """The run ends before a copy is complete."""


class MirrorWriter(Copier):
    """Copies the checkpoints of one rank to a mirror. Their page versions stay on the drives until they are copied.

    Args:
        store: page store of this rank.
        rate: maximum number of bytes per second; 0 for no limit.
        before: newest checkpoint of this run that is complete in the mirror, or ``None``.
        previous: id of the run in this mirror from which this run has resumed, or an empty string. It is removed once a
            checkpoint of this run is complete.
    """

    def __init__(
        self,
        mirror: Mirror,
        folder: RunFolder,
        ranks: Ranks,
        store: PageStore,
        rate: float,
        *,
        before: CheckpointName | None = None,
        previous: str = "",
    ) -> None:
        super().__init__(1, before)
        self._mirror, self._folder, self._rank, self._store = mirror, folder, ranks.rank, store
        self._alone = ranks.world_size == 1
        self._pace = Pace(rate)
        self._previous = previous
        self._thread: threading.Thread | None = None  # copies one checkpoint

    def close(self) -> None:
        """Stop copying."""
        self._pace.stopped.set()
        if self._thread is not None:
            self._thread.join(_END_SECONDS)
            if self._thread.is_alive():
                _log.warning("the mirror %s does not respond; its newest checkpoint is incomplete", self._mirror)

    def _busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _has_copied(self, checkpoint: CheckpointName) -> bool:
        return self._copied == checkpoint

    def _wait(self) -> bool:
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(CHECK_SECONDS)
            interrupts.check()
        return True

    def _start(self, manifest: Manifest, retained: Collection[CheckpointName]) -> None:
        opened: list[BinaryIO] = []  # the files stay readable after a later checkpoint has removed them
        try:
            for name in (manifest.file_name, manifest.state_file):
                opened.append((self._folder.checkpoints / name).open("rb"))
        except OSError as error:
            for file in opened:
                file.close()
            _log.warning("%s is not copied to the mirror: %s", manifest.name.checkpoint, error)
            return
        self._store.keep(manifest.pages)
        self._thread = threading.Thread(
            target=self._run, args=(manifest, retained, *opened), name="infinity-mirror", daemon=True
        )
        self._thread.start()

    def _run(
        self, manifest: Manifest, retained: Collection[CheckpointName], content: BinaryIO, state: BinaryIO
    ) -> None:
        what, doing = f"the checkpoint of step {manifest.step}", "copied to"
        try:
            with content, state:
                self._copy(manifest, content, state)
            self._copied = manifest.name.checkpoint
            if self._alone:
                self._complete = self._copied
            _log.info("copied %s to %s", what, self._mirror)
            what, doing = "older checkpoints", "removed from"
            self._remove_others(manifest, retained)
        except _StoppedError:
            pass
        except Exception as error:  # of any type, because every protocol has its own package
            if not self._pace.stopped.is_set():
                _log.warning(
                    "rank %d: %s could not be %s %s: %s: %s",
                    self._rank, what, doing, self._mirror, type(error).__name__, error,
                )  # fmt: skip
        finally:
            self._store.release(manifest.pages)

    def _copy(self, manifest: Manifest, content: BinaryIO, state: BinaryIO) -> None:
        mirror, run_id = self._mirror, self._folder.run_id
        checkpoints, pages = f"{run_id}/checkpoints", page_folder(run_id, self._rank)
        mirror.make_folder(checkpoints)
        mirror.make_folder(pages)
        there = mirror.sizes(pages)
        missing = (
            (page, version)
            for page, version in manifest.pages.items()
            if there.get(page_name(page, version)) != version.extent.length
        )
        self._copy_pages(manifest, missing)
        for name in self._companions() if self._rank == 0 else ():
            mirror.make_folder(f"{checkpoints}/{name}".rpartition("/")[0])
            mirror.write(f"{checkpoints}/{name}", (self._folder.checkpoints / name).read_bytes())
        self._pace.wait(os.fstat(state.fileno()).st_size)
        mirror.write_from(f"{checkpoints}/{manifest.state_file}", state)
        mirror.publish(f"{checkpoints}/{manifest.file_name}", content.read())

    def _copy_pages(self, manifest: Manifest, missing: Iterator[tuple[int, Version]]) -> None:
        """Copy pages on several threads, until one of them fails or the run ends."""
        lock, errors = threading.Lock(), list[Exception]()

        def copy() -> None:
            try:
                while not errors:
                    with lock:
                        item = next(missing, None)
                    if item is None:
                        return
                    self._copy_page(manifest, *item)
            except Exception as error:
                errors.append(error)

        number = max(1, min(_TOGETHER, _MEMORY // manifest.layout.page_bytes))
        threads = [threading.Thread(target=copy, name="infinity-mirror", daemon=True) for _ in range(number)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def _copy_page(self, manifest: Manifest, page: int, version: Version) -> None:
        self._pace.wait(version.extent.length)
        if self._pace.stopped.is_set():
            raise _StoppedError
        file = self._folder.data_file(version.extent.path, self._rank)
        data = read_version(file, page, version, manifest.layout.page_name(page))
        self._mirror.write(f"{page_folder(self._folder.run_id, self._rank)}/{page_name(page, version)}", data)

    def _companions(self) -> list[str]:
        folder = self._folder.checkpoints / MODEL_FOLDER
        return [str(file.relative_to(self._folder.checkpoints)) for file in folder.rglob("*") if file.is_file()]

    def _remove_others(self, manifest: Manifest, retained: Collection[CheckpointName]) -> None:
        """Remove this rank's files of checkpoints that are neither retained nor needed, manifests first."""
        mirror, run_id, complete = self._mirror, self._folder.run_id, self._complete
        folder, pages = f"{run_id}/checkpoints", page_folder(run_id, self._rank)
        keep = {manifest.name.checkpoint, *retained, *([complete] if complete is not None else [])}
        names = [checkpoint.of(self._rank) for checkpoint in keep]
        kept = {name for each in names for name in (each.file_name, each.state_file)}
        there = [name for name in mirror.names(folder) if fnmatch(name, f"step*.rank{self._rank:05d}[.-]*")]
        gone = sorted(set(there) - kept, key=lambda name: (not name.endswith(".json"), name))
        mirror.remove([f"{folder}/{name}" for name in gone])
        needed = {page_name(page, version) for page, version in manifest.pages.items()}
        for other in names:
            if other.file_name in there and other != manifest.name:
                file = f"{folder}/{other.file_name}"
                found = files.decode_manifest(Path(file), mirror.read(file), decode=False)
                needed |= {page_name(page, version) for page, version in found.pages.items()}
        mirror.remove([f"{pages}/{name}" for name in sorted(mirror.sizes(pages).keys() - needed)])
        if self._previous and self._rank == 0 and complete is not None:
            with suppress(FileNotFoundError):
                mirror.remove([self._previous], recursive=True)
            self._previous = ""
