"""Access to the files of a checkpoint: manifests, state files and pages."""

from __future__ import annotations

from pathlib import Path

from infinity.checkpoint import manifest as files
from infinity.checkpoint.manifest import Manifest
from infinity.store.folder import RunFolder
from infinity.store.page_store import read_version

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

    @property
    def checkpoints(self) -> Path:
        """Checkpoint folder with the files for exports (see `infinity.formats.companions`)."""
        return self.folder.checkpoints

    def close(self) -> None:
        """Release connections to other ranks, if any."""
