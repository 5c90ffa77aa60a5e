"""Copies of checkpoints in a shared folder or an object store.

[Note: mirror] A mirror is a folder at an address of fsspec. It contains the manifests and state files of a run as they
are on the drives, and one file for each version of a page:

    RUN_ID/checkpoints/stepN.rankR-of-W.IDENTITY.json, .safetensors, and model/...
    RUN_ID/pages/rankR/PAGE-CHECKSUM

The name of a page's file follows from the manifest. Therefore a version that several checkpoints contain, such as a
frozen weight, is stored once, and an interrupted copy continues with the files that are missing. A rank copies its
manifest last, and a checkpoint is complete if the manifests of all ranks are present.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO

from fsspec.core import url_to_fs  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

from infinity.checkpoint import manifest as files
from infinity.checkpoint.checkpoint_files import MODEL_FOLDER, CheckpointFiles
from infinity.checkpoint.held import HeldCheckpoint, Seen, held, usable
from infinity.checkpoint.manifest import Manifest, Published
from infinity.checkpoint.reader import CheckpointReader
from infinity.config import check_address
from infinity.errors import CheckpointError, ConfigError, CorruptPageError, InfinityError, StorageError
from infinity.store.folder import RunFolder
from infinity.store.marker import is_run_id
from infinity.store.page_store import Version, checksum


class Mirror:
    """Folder that contains copies of checkpoints. [Note: mirror]

    Args:
        address: address of fsspec, such as ``s3://bucket/run``. Credentials are taken from fsspec's configuration or
            from the environment.

    Raises:
        ConfigError: if the address contains a password, or cannot be opened, for example because the package for its
            protocol is missing.
    """

    def __init__(self, address: str) -> None:
        check_address("the address of the mirror", address)
        self.address = address
        """Address of the folder."""
        try:
            self._files, self._root = url_to_fs(address)
        except Exception as error:  # of any type, because every protocol has its own package
            raise ConfigError(f"the mirror {address} cannot be opened: {error}") from error

    def check(self, paths: Sequence[str]) -> None:
        """Check that files can be written to the mirror.

        Args:
            paths: the NVMe paths of the run.

        Raises:
            ConfigError: if they cannot, or if the mirror is on one of these paths.
        """
        if isinstance(self._files, LocalFileSystem):
            root = Path(self._root).resolve()
            for path in map(Path, paths):
                if root.is_relative_to(path.resolve()):
                    raise ConfigError(
                        f"run.mirror = {self.address!r} is in {str(path)!r}, a folder of storage.paths. Set it to a "
                        "folder on other drives."
                    )
        name = f"check-{secrets.token_hex(8)}"
        try:
            if isinstance(self._files, LocalFileSystem):  # elsewhere, a wrong address could create a new bucket
                Path(self._root).mkdir(0o700, parents=True, exist_ok=True)
            self.write(name, b"")
            self.remove([name])
        except Exception as error:
            raise ConfigError(
                f"run.mirror = {self.address!r} cannot be written: {type(error).__name__}: {error}. Check the address, "
                "the credentials and the network."
            ) from error

    def __str__(self) -> str:
        return self.address

    def names(self, folder: str) -> list[str]:
        """Return the names of the files and folders in a folder, sorted."""
        self._files.invalidate_cache()
        try:
            found = self._files.ls(self._at(folder), detail=False)
        except FileNotFoundError:
            return []
        return sorted(name.rstrip("/").rpartition("/")[2] for name in found)

    def _at(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    @contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        try:
            yield
        except InfinityError:
            raise
        except Exception as error:  # of any type, because every protocol has its own package
            why = f"{type(error).__name__}: {error}"
            raise CheckpointError(f"{name} cannot be read from the mirror {self}: {why}") from error

    # Reading #

    def published(self, run_id: str) -> list[Published]:
        """Return the manifests of a run, sorted."""
        return files.published_among(self.names(f"{run_id}/checkpoints"))

    def newest(self, step: int = -1, wanted: str = "", replica: int = -1) -> tuple[str, HeldCheckpoint] | None:
        """Return the newest run with a usable checkpoint, and its newest checkpoint; ``None`` if there is none.

        Args:
            step: step of the checkpoint, or -1 for any step.
            wanted: id of the run, or an empty string for any run.
            replica: replica to read, or -1 for any.

        Raises:
            CheckpointError: if the mirror cannot be read.
        """
        with self._reading("the list of checkpoints"):
            for run_id in [wanted] if wanted else reversed([name for name in self.names("") if is_run_id(name)]):
                found = held([Seen(self.published(run_id))])
                if complete := [each for each in usable(found, replica) if step in (-1, each.name.step)]:
                    # Not the highest step: the run may have resumed from an earlier step in the meantime.
                    return run_id, max(complete, key=lambda each: each.name.identity)
        return None

    def reader(self, run_id: str, checkpoint: HeldCheckpoint, replica: int = -1) -> CheckpointReader:
        """Return a reader of a checkpoint. Raises `CheckpointError` if a file cannot be read or is malformed."""
        access = MirrorFiles(self, run_id)
        return CheckpointReader(access.folder, checkpoint, replica=replica, access=access)

    def read(self, name: str) -> bytes:
        """Return the content of a file. Raises `CheckpointError`."""
        with self._reading(name):
            return bytes(self._files.cat_file(self._at(name)))

    def read_page(self, file: str, page: int, version: Version, name: str) -> memoryview:
        """Return the bytes of a version of a page.

        Args:
            name: readable name of the page, for messages.

        Raises:
            StorageError: if the file cannot be read.
            CorruptPageError: if it does not match the checksum.
        """
        at, length = f"{self}/{file}", version.extent.length
        try:
            data = memoryview(bytearray(self._files.cat_file(self._at(file))))
        except Exception as error:
            raise StorageError("read", at, 0, length, getattr(error, "errno", None), str(error)) from error
        if (found := checksum(page, data)) != version.checksum:
            raise CorruptPageError(name, at, 0, length, version.checksum, found)
        return data

    def download(self, folder: str, target: Path) -> None:
        """Copy the files of a folder, and of its subfolders, to a local folder. Raises `CheckpointError`."""
        with self._reading(folder):
            root = self._at(folder).rstrip("/") + "/"
            for name in self._files.find(root):
                inner = Path(name.rpartition(f"/{folder}/")[2])
                if ".." not in inner.parts and not inner.is_absolute():
                    (target / inner).parent.mkdir(parents=True, exist_ok=True)
                    self._files.get_file(name, str(target / inner))

    # Writing #

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the sizes of the files in a folder, by name."""
        self._files.invalidate_cache()
        try:
            found = self._files.ls(self._at(folder), detail=True)
        except FileNotFoundError:
            return {}
        return {each["name"].rpartition("/")[2]: each["size"] or 0 for each in found}

    def write(self, name: str, data: bytes | memoryview) -> None:
        """Write a file."""
        self._files.pipe_file(self._at(name), bytes(data))

    def write_from(self, name: str, source: BinaryIO) -> None:
        """Write the content of an open file. Raises `OSError`."""
        with self._files.open(self._at(name), "wb") as target:
            shutil.copyfileobj(source, target)

    def publish(self, name: str, data: bytes) -> None:
        """Write a file so that it is never visible in part. Raises `OSError`."""
        self.write(f"{name}.tmp", data)
        self._files.mv(self._at(f"{name}.tmp"), self._at(name))

    def make_folder(self, name: str) -> None:
        """Create a folder, if the file system has folders. Raises `OSError`."""
        self._files.makedirs(self._at(name), exist_ok=True)

    def remove(self, names: Collection[str], *, recursive: bool = False) -> None:
        """Remove files or, if `recursive`, folders with their content."""
        if names:
            self._files.rm([self._at(name) for name in names], recursive=recursive)


def page_folder(run_id: str, rank: int) -> str:
    """Return the folder with the pages of a rank."""
    return f"{run_id}/pages/rank{rank:05d}"


def page_name(page: int, version: Version) -> str:
    """Return the name of the file with a version of a page."""
    return f"{page}-{version.checksum:016x}"


class MirrorFiles(CheckpointFiles):
    """Files of a checkpoint in a mirror. Files are read when they are used."""

    def __init__(self, mirror: Mirror, run_id: str) -> None:
        super().__init__(RunFolder.of([mirror.address], run_id))
        self.address = mirror.address
        """Address of the mirror."""
        self._mirror, self._run_id = mirror, run_id
        self._companions: TemporaryDirectory[str] | None = None

    def manifest(self, name: Published) -> Manifest:
        """Return a manifest. Raises `CheckpointError`."""
        file = f"{self._run_id}/checkpoints/{name.file_name}"
        return files.decode_manifest(Path(file), self._mirror.read(file))

    def state_path(self, manifest: Manifest) -> Path:
        """Return the path of a state file, for messages."""
        return Path(self._run_id, "checkpoints", manifest.state_file)

    def state_file(self, manifest: Manifest) -> bytes:
        """Return the verified contents of a state file. Raises `CheckpointError`."""
        content = self._mirror.read(str(self.state_path(manifest)))
        if files.checksum_of(content) != manifest.state_checksum:
            raise CheckpointError(f"{manifest.state_file} in the mirror {self._mirror} does not match its checksum")
        return content

    def page(self, manifest: Manifest, page: int) -> memoryview:
        """Return the verified contents of a page. Raises `StorageError` or `CorruptPageError`."""
        version = manifest.pages[page]
        file = f"{page_folder(self._run_id, manifest.rank)}/{page_name(page, version)}"
        return self._mirror.read_page(file, page, version, manifest.layout.page_name(page))

    @property
    def checkpoints(self) -> Path:
        """Temporary folder with a copy of the files for exports. Raises `CheckpointError`."""
        if self._companions is None:
            self._companions = TemporaryDirectory(prefix="infinity-mirror-")
            target = Path(self._companions.name, MODEL_FOLDER)
            self._mirror.download(f"{self._run_id}/checkpoints/{MODEL_FOLDER}", target)
        return Path(self._companions.name)

    def close(self) -> None:
        """Remove the temporary folder."""
        if self._companions is not None:
            self._companions.cleanup()
