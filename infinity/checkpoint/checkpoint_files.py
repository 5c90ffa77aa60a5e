"""Access to the files of a checkpoint: manifests, state files and pages."""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path

from infinity.checkpoint import manifest as files
from infinity.checkpoint.held import HeldParity
from infinity.checkpoint.manifest import Manifest
from infinity.checkpoint.parity import Parity, folder_of, parities_in
from infinity.errors import CheckpointError
from infinity.store.folder import RunFolder
from infinity.store.page_store import read_version
from infinity.untrusted_files import read_regular

MODEL_FOLDER = "model"
"""Subfolder of the checkpoint folder with the files for exports."""


class CheckpointFiles:
    """Files of a checkpoint in folders of this node. Files are opened for each read and closed afterwards."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        """Folders of the run."""

    def manifest(self, name: files.Published) -> Manifest:
        """Return a manifest, after checking that its pages are within the data files. Raises `CheckpointError`."""
        found = files.read_manifest(self.folder.checkpoints / name.file_name)
        files.check_pages(found, self.folder)
        return found

    def state_path(self, manifest: Manifest) -> Path:
        """Return the path of a state file, for messages."""
        return self.folder.checkpoints / manifest.state_file

    def state_file(self, manifest: Manifest) -> bytes:
        """Return the verified contents of a state file. Raises `CheckpointError`."""
        return files.read_state_file(self.folder.checkpoints, manifest)

    def page(self, manifest: Manifest, page: int) -> memoryview:
        """Return the verified contents of a page. Raises `StorageError` or `CorruptPageError`."""
        version = manifest.pages[page]
        file = self.folder.data_file(version.extent.path, manifest.rank)
        return read_version(file, page, version, manifest.layout.page_name(page))

    def parity(self, held: HeldParity, start: int, stop: int) -> bytes | bytearray:
        """Return bytes [start, stop) of a parity, without verifying them.

        Bytes after the end of the parity are omitted. [Note: copies on other nodes]

        Args:
            held: Parity.
            start: First byte.
            stop: Byte after the last one.

        Raises:
            CheckpointError: if the parity is missing or cannot be read.
        """
        file = self._parity_file(held)
        with files.using(file), file.open("rb") as opened:
            return os.pread(opened.fileno(), stop - start, start)

    def copied(self, held: HeldParity, name: files.Published, *, state: bool) -> bytes | bytearray:
        """Return the contents of a manifest, or of its state file, that is stored next to a parity. See `parity`."""
        file = folder_of(self._parity_file(held)) / (name.state_file if state else name.file_name)
        with files.using(file):
            return read_regular(file, files.MOST_STATE)

    @cached_property
    def _parities(self) -> list[Parity]:
        return parities_in(self.folder.roots)

    def _parity_file(self, held: HeldParity) -> Path:
        for parity in self._parities:
            if (parity.rank, parity.contents) == (held.rank, held.contents):
                return parity.target
        identity = held.contents.identity
        raise CheckpointError(f"the copy of checkpoint {identity} that rank {held.rank} stores was removed")

    @property
    def checkpoints(self) -> Path:
        """Checkpoint folder with the files for exports (see `infinity.formats.companions`)."""
        return self.folder.checkpoints

    def close(self) -> None:
        """Release connections to other ranks, if any."""
