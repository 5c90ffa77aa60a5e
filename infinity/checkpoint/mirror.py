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

import logging
import re
import shutil
from collections.abc import Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import BinaryIO

from fsspec.core import url_to_fs  # type: ignore[import-untyped]

from infinity import interrupts
from infinity.checkpoint import manifest as files
from infinity.checkpoint.checkpoint_files import MODEL_FOLDER, CheckpointFiles
from infinity.checkpoint.held import HeldCheckpoint, choose, held, usable
from infinity.checkpoint.manifest import CheckpointName, Manifest, Published
from infinity.checkpoint.reader import CheckpointReader
from infinity.errors import CheckpointError, ConfigError, CorruptPageError, StorageError
from infinity.io.pace import Pace
from infinity.store.folder import RunFolder
from infinity.store.marker import is_run_id
from infinity.store.page_store import PageStore, Version, checksum, read_version
from infinity.units import MIB

_log = logging.getLogger("infinity")
_TOGETHER = 4
"""Maximum number of pages that are copied concurrently, because an object store answers slowly."""
_MEMORY = 256 * MIB
"""Maximum size, in bytes, of the pages that are copied concurrently, unless a single page is larger."""
_CHECK_SECONDS = 0.5
"""Interval at which the training thread checks for interrupts while it waits."""


def is_address(text: str) -> bool:
    """Return whether a text is an address of fsspec with a protocol, such as ``s3://bucket/run``."""
    return re.match(r"[a-z0-9+.-]+://", text) is not None


class Mirror:
    """Folder that contains copies of checkpoints. [Note: mirror]

    Args:
        address: folder, or address of fsspec such as ``s3://bucket/run``. Credentials are taken from fsspec's
            configuration or from the environment.

    Raises:
        ConfigError: if the address cannot be opened, for example because the package for its protocol is missing.
    """

    def __init__(self, address: str) -> None:
        self.address = re.sub(r"(?<=://)[^/@]*@", "", address)
        """The address without credentials, for messages."""
        try:
            self._files, self._root = url_to_fs(address)
        except Exception as error:  # of any type, because every protocol has its own package
            raise ConfigError(f"the mirror {self.address} cannot be opened: {error}") from error

    def __str__(self) -> str:
        return self.address

    def _names(self, folder: str) -> list[str]:
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
        except OSError as error:
            raise CheckpointError(f"{name} cannot be read from the mirror {self}: {error}") from error

    # Reading #

    def published(self, run_id: str) -> list[Published]:
        """Return the manifests of a run, sorted. Raises `OSError`."""
        return files.published_among(self._names(f"{run_id}/checkpoints"))

    def newest(self, step: int = -1, wanted: str = "", replica: int = -1) -> tuple[str, HeldCheckpoint] | None:
        """Return the newest run with a usable checkpoint, and its newest checkpoint; ``None`` if there is none.

        Args:
            step: step of the checkpoint, or -1 for any step.
            wanted: id of the run, or an empty string for any run.
            replica: replica to read, or -1 for any.

        Raises:
            CheckpointError: if the run has no checkpoint of this step, or if the mirror cannot be read.
        """
        with self._reading("the list of checkpoints"):
            for run_id in [wanted] if wanted else reversed([name for name in self._names("") if is_run_id(name)]):
                found = held([(self.published(run_id), {})])
                if usable(found, replica):
                    return run_id, choose(run_id, found, step, replica)
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
        except OSError as error:
            raise StorageError("read", at, 0, length, error.errno, error.strerror or str(error)) from error
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

    def page_sizes(self, run_id: str, rank: int) -> dict[str, int]:
        """Return the sizes of the page files of a rank, by name. Raises `OSError`."""
        self._files.invalidate_cache()
        try:
            found = self._files.ls(self._at(_page_folder(run_id, rank)), detail=True)
        except FileNotFoundError:
            return {}
        return {each["name"].rpartition("/")[2]: each["size"] or 0 for each in found}

    def write(self, name: str, data: bytes | memoryview) -> None:
        """Write a file. Raises `OSError`."""
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

    def remove(self, names: Collection[str]) -> None:
        """Remove files. Raises `OSError`."""
        if names:
            self._files.rm([self._at(name) for name in names])


def _page_folder(run_id: str, rank: int) -> str:
    return f"{run_id}/pages/rank{rank:05d}"


def _page_name(page: int, version: Version) -> str:
    return f"{page}-{version.checksum:016x}"


class MirrorFiles(CheckpointFiles):
    """Files of a checkpoint in a mirror. Files are read when they are used."""

    def __init__(self, mirror: Mirror, run_id: str) -> None:
        super().__init__(RunFolder.of([mirror.address], run_id))
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
        file = f"{_page_folder(self._run_id, manifest.rank)}/{_page_name(page, version)}"
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


class _StoppedError(Exception):
    """The run ends before a copy is complete."""


@dataclass
class _Copy:
    """A checkpoint to copy. Its page versions are kept until then."""

    manifest: Manifest
    content: bytes
    """Bytes of the manifest."""
    state: BinaryIO
    """The state file. It stays readable after a later checkpoint has removed it."""
    retained: Collection[CheckpointName]
    """Checkpoints that the run retains."""


class MirrorWriter:
    """Copies the checkpoints of one rank to a mirror, on threads of its own.

    One checkpoint is copied at a time, and then the newest one, so checkpoints in between may be skipped. The page
    versions of the checkpoint that is copied stay on the drives. If a copy fails, a warning is logged, and the next
    checkpoint is copied instead. `copy`, `finish` and `close` are called on the training thread.

    Args:
        rate: maximum number of bytes per second; 0 for no limit.
    """

    def __init__(self, mirror: Mirror, folder: RunFolder, rank: int, store: PageStore, rate: float) -> None:
        self._mirror, self._folder, self._rank, self._store = mirror, folder, rank, store
        self._pace = Pace(rate)
        self._thread = ThreadPoolExecutor(1, "infinity-mirror")
        self._lock = Lock()
        self._waiting: _Copy | None = None  # guarded by the lock
        self._running: Future[None] | None = None  # last job of the thread, which takes `_waiting`; as above

    def copy(self, name: Published, retained: Collection[CheckpointName]) -> None:
        """Copy a published checkpoint that the run retains, and remove the copies of others.

        Args:
            retained: checkpoints whose copies are kept.

        Raises:
            OSError, CheckpointError: if the files of the checkpoint cannot be read.
        """
        file = self._folder.checkpoints / name.file_name
        state = (self._folder.checkpoints / name.state_file).open("rb")
        item = _Copy(files.read_manifest(file, decode=False), file.read_bytes(), state, tuple(retained))
        self._store.keep(item.manifest.pages)
        with self._lock:
            replaced, self._waiting = self._waiting, item
            if self._running is None or self._running.done():
                self._running = self._thread.submit(self._run)
        if replaced is not None:
            self._end(replaced)

    def finish(self) -> None:
        """Wait until the newest checkpoint has been copied, or has failed to be copied."""
        while self._running is not None and not wait([self._running], _CHECK_SECONDS).done:
            interrupts.check()

    def close(self) -> None:
        """Stop copying. The next start of the run copies the rest."""
        self._pace.stopped.set()
        self._thread.shutdown(wait=True, cancel_futures=True)
        if self._waiting is not None:
            self._end(self._waiting)

    def _end(self, item: _Copy) -> None:
        item.state.close()
        self._store.release(item.manifest.pages)

    def _run(self) -> None:
        while True:
            with self._lock:
                item, self._waiting = self._waiting, None
                if item is None:
                    self._running = None
                    return
            what = f"the checkpoint of step {item.manifest.step}"
            try:
                self._copy(item)
                self._remove_others(item)
                _log.info("copied %s to %s", what, self._mirror)
            except _StoppedError:
                return
            except Exception as error:  # of any type, because every protocol has its own package
                _log.warning(
                    "%s of rank %d was not copied to %s: %s: %s; the next checkpoint will be",
                    what, self._rank, self._mirror, type(error).__name__, error,
                )  # fmt: skip
            finally:
                self._end(item)

    def _copy(self, item: _Copy) -> None:
        manifest, mirror, run_id = item.manifest, self._mirror, self._folder.run_id
        for folder in (f"{run_id}/checkpoints", _page_folder(run_id, self._rank)):
            mirror.make_folder(folder)
        there = mirror.page_sizes(run_id, self._rank)
        missing = [
            (page, version)
            for page, version in manifest.pages.items()
            if there.get(_page_name(page, version)) != version.extent.length
        ]
        together = max(1, min(_TOGETHER, _MEMORY // manifest.layout.page_bytes))
        with ThreadPoolExecutor(together, "infinity-mirror") as pool:
            left = iter(missing)
            while batch := list(islice(left, together)):  # `map` alone would go through all pages after a failure
                list(pool.map(lambda each: self._copy_page(manifest, *each), batch))
        for name in self._companions() if self._rank == 0 else ():
            target = f"{run_id}/checkpoints/{name}"
            mirror.make_folder(target.rpartition("/")[0])
            mirror.write(target, (self._folder.checkpoints / name).read_bytes())
        mirror.write_from(f"{run_id}/checkpoints/{manifest.state_file}", item.state)
        mirror.publish(f"{run_id}/checkpoints/{manifest.file_name}", item.content)

    def _copy_page(self, manifest: Manifest, page: int, version: Version) -> None:
        self._pace.wait(version.extent.length)
        if self._pace.stopped.is_set():
            raise _StoppedError
        file = self._folder.data_file(version.extent.path, self._rank)
        data = read_version(file, page, version, manifest.layout.page_name(page))
        self._mirror.write(f"{_page_folder(self._folder.run_id, self._rank)}/{_page_name(page, version)}", data)

    def _companions(self) -> list[str]:
        folder = self._folder.checkpoints / MODEL_FOLDER
        return [str(file.relative_to(self._folder.checkpoints)) for file in folder.rglob("*") if file.is_file()]

    def _remove_others(self, item: _Copy) -> None:
        """Remove this rank's copies of checkpoints that are not retained, manifests first.

        The newest complete checkpoint stays, because other ranks may not have copied this one yet.
        """
        mirror, run_id = self._mirror, self._folder.run_id
        published = mirror.published(run_id)
        keep = {
            item.manifest.name.checkpoint,
            *item.retained,
            *(each.name for each in usable(held([(published, {})]))[-1:]),
        }
        own = [name for name in published if name.rank == self._rank]
        gone = [name for name in own if name.checkpoint not in keep]
        mirror.remove([f"{run_id}/checkpoints/{name.file_name}" for name in gone])
        mirror.remove([f"{run_id}/checkpoints/{name.state_file}" for name in gone])
        needed = {_page_name(page, version) for page, version in item.manifest.pages.items()}
        for name in own:
            if name.checkpoint in keep and name != item.manifest.name:
                file = Path(run_id, "checkpoints", name.file_name)
                manifest = files.decode_manifest(file, mirror.read(str(file)), decode=False)
                needed |= {_page_name(page, version) for page, version in manifest.pages.items()}
        stray = mirror.page_sizes(run_id, self._rank).keys() - needed
        mirror.remove([f"{_page_folder(run_id, self._rank)}/{name}" for name in sorted(stray)])
