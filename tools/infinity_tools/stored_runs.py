"""What lies on NVMe folders: runs, their checkpoints and bytes, whether these are what was written, and what is waste.

[Note: reading a live run] The bytes that a manifest names are not written over while the manifest is there: a
checkpoint
is removed before its slots are used again. So a page that does not match is bad if, after it was read, its manifest
still names it; if not, the run has gone on in between and the page is passed over.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from infinity.checkpoint.manifest import (
    CheckpointName,
    Manifest,
    Published,
    complete_checkpoints,
    left_over,
    published_in,
    read_manifest,
)
from infinity.checkpoint.manifest import read_state_file as check_state_file
from infinity.errors import CheckpointError, ConfigError, StorageError
from infinity.store.folder import Holder, RunFolder, believed, holder_of, holders, remove_stale_lock, stale_locks
from infinity.store.marker import MARKER_NAME, FoundRun, empty_folders, is_run_id, look_for_runs
from infinity.store.page_store import Version, read_version

_READERS = 4
_BATCH = 1024


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The manifests of one checkpoint, one per rank; `problem` says why it cannot be used.

    `nbytes` are those of its pages and state files, `own_bytes` those of them that no other checkpoint of the run
    names:
    what its end gives back to the run.
    """

    name: CheckpointName
    created: float
    """Seconds since 1970."""
    manifests: dict[int, Path]
    nbytes: int
    own_bytes: int
    problem: str = ""

    @property
    def step(self) -> int:
        """Its step."""
        return self.name.step

    @property
    def world_size(self) -> int:
        """Number of ranks that made it."""
        return self.name.world_size


@dataclass(frozen=True, kw_only=True)
class StoredRun:
    """One run on the given paths; `owner` is the process that has it open, if there is one.

    `ranks` is the number of those that have data files here, `parameters` the number of elements of the model, 0 where
    no checkpoint says it; `nbytes` is what the run takes on the drives. `paths` is how many folders the run has in all,
    and
    `first` says whether that of its checkpoints is among those that are here.
    """

    folder: RunFolder
    paths: int
    first: bool
    ranks: int
    parameters: int
    nbytes: int
    checkpoints: tuple[Checkpoint, ...]
    owner: Holder | None

    @property
    def run_id(self) -> str:
        """The run's id."""
        return self.folder.run_id

    @property
    def identity(self) -> tuple[RunFolder, tuple[tuple[int, float], ...]]:
        """Which run it is, with which checkpoints."""
        return self.folder, tuple((checkpoint.step, checkpoint.created) for checkpoint in self.checkpoints)

    @property
    def usable(self) -> tuple[Checkpoint, ...]:
        """Checkpoints that have no problem, the newest last."""
        return tuple(checkpoint for checkpoint in self.checkpoints if not checkpoint.problem)


@dataclass(frozen=True, kw_only=True)
class BadPage:
    """A page, or a whole file (`page` is None), that is not what was checkpointed."""

    step: int
    """Of the checkpoint that names it."""
    rank: int
    """Whose page it is."""
    page: int | None
    path: str
    """The file."""
    offset: int
    """Of its first byte in the file."""
    length: int
    """Bytes."""
    reason: str
    """What is wrong with it."""


def _meant(paths: Sequence[Path]) -> Path | None:
    """Return the folder that was meant where a run itself was named, or the folder that the runs' folder lies in."""
    for path in paths:
        for folder in (path.absolute().parent, *sorted(path.iterdir())):
            with suppress(OSError):  # not what was named: whether it can be read is nobody's question
                if folder.is_dir() and look_for_runs([folder])[0]:
                    return folder
    return None


def stored_runs(paths: Sequence[Path], passed: dict[Path, str] | None = None) -> list[StoredRun]:
    """Return the runs on `paths`, oldest first, whatever the order of `paths`; other folders are passed over.

    Args:
        paths: the folders of storage.paths.
        passed: is given those that are named as a run but are passed over, each with the reason.

    Raises:
        ConfigError: a path is not a folder that can be read, or has no runs while one beside it does.
    """
    for path in paths:
        if not path.is_dir():
            raise ConfigError(f"{str(path)!r} is not a folder")
    try:
        found, odd = look_for_runs(paths)
        if not found and not odd and (meant := _meant(paths)):
            raise ConfigError(f"{', '.join(map(str, paths))} has no runs, {meant} has: name that folder")
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be read: {error.strerror}") from error
    runs = []
    for run in found:
        try:
            runs.append(_stored_run(run))
        except OSError as error:  # of another user, or on a drive that fails: the others are not hidden by it
            if run.in_order[0].exists():  # else it was removed just now
                odd[Path(error.filename or run.in_order[0])] = str(error.strerror)
    if passed is not None:
        passed.update(odd)
    return runs


def _stored_run(run: FoundRun) -> StoredRun:
    folder = RunFolder(run.run_id, run.in_order)
    if 0 in run.roots and folder.checkpoints.is_dir():
        os.listdir(folder.checkpoints)  # a folder that cannot be read is not one without checkpoints
    read = _read_checkpoints(folder)
    return StoredRun(
        folder=folder,
        paths=run.paths,
        first=0 in run.roots,
        ranks=len(_local_ranks(folder)),
        parameters=max((_parameters(manifest) for found in read.values() for manifest in found.manifests), default=0),
        nbytes=sum(map(_bytes_in, folder.roots)),
        checkpoints=tuple(_checkpoints(folder, read)),
        owner=holder_of(folder),
    )


def other_holders(paths: Sequence[Path], runs: Sequence[StoredRun]) -> list[str]:
    """Return words on who holds a path without being the owner of one of the runs that are listed.

    Who says to be a run's without being believed (`holder_of`) is named by the user that it is of, not by what it says.

    Raises:
        ConfigError: a lock file cannot be asked.
    """
    shown = {run.owner for run in runs}
    roots = {root for run in runs for root in run.folder.roots}
    ids = {run.run_id for run in runs}
    found = []
    for path in paths:
        for owner in holders(path):
            root = path / owner.run_id
            if owner not in shown and not (root in roots and believed(owner, root)):
                found.append(f"{path} is held by {Holder.unknown(owner.uid) if owner.run_id in ids else owner}")
    return list(dict.fromkeys(found))


def _local_ranks(folder: RunFolder) -> set[str]:
    """Return the names of the data files here, one per rank."""
    return {file.name for root in folder.roots for file in root.glob("rank*.pages")}


def _parameters(manifest: Manifest) -> int:
    return sum(tensor.parameters for tensor in manifest.description.tensors)


def _bytes_in(root: Path) -> int:
    """Return what a folder takes, at any depth; links are not followed, what cannot be looked at counts as nothing."""
    total, places = 0, [os.fspath(root)]
    while places:
        with suppress(OSError), os.scandir(places.pop()) as entries:
            for entry in entries:
                total += _disk_bytes(Path(entry.path))
                if entry.is_dir(follow_symlinks=False):
                    places.append(entry.path)
    return total


def _disk_bytes(file: Path) -> int:
    try:
        return file.lstat().st_blocks * 512
    except OSError:  # a live run removes what it has replaced
        return 0


def _length(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


def _read_checkpoints(folder: RunFolder) -> dict[CheckpointName, _Read]:
    groups: dict[CheckpointName, list[Published]] = {}
    for name in published_in(folder.checkpoints):
        groups.setdefault(name.checkpoint, []).append(name)
    return {checkpoint: _Read(names, *_manifests(folder, names)) for checkpoint, names in groups.items()}


def _checkpoints(folder: RunFolder, read: Mapping[CheckpointName, _Read]) -> Iterator[Checkpoint]:
    named: Counter[tuple[int, Version]] = Counter()
    for found in read.values():
        named.update((manifest.rank, version) for manifest in found.manifests for version in manifest.pages.values())
    for checkpoint, (names, manifests, problem) in read.items():
        if not manifests and not problem:  # a live run has removed it just now
            continue
        if len(names) < checkpoint.world_size:
            problem = f"{len(names)} of {checkpoint.world_size} ranks"
        pages = [(manifest.rank, version) for manifest in manifests for version in manifest.pages.values()]
        states = sum(_length(folder.checkpoints / manifest.state_file) for manifest in manifests)
        yield Checkpoint(
            name=checkpoint,
            created=max((manifest.created for manifest in manifests), default=0.0),
            manifests={name.rank: folder.checkpoints / name.file_name for name in names},
            nbytes=states + sum(version.extent.length for _, version in pages),
            own_bytes=states + sum(version.extent.length for rank, version in pages if named[rank, version] == 1),
            problem=problem,
        )


def _manifests(folder: RunFolder, names: Sequence[Published]) -> tuple[list[Manifest], str]:
    """Return the manifests that can be read, and why another one cannot."""
    found, problem = [], ""
    for name in names:
        file = folder.checkpoints / name.file_name
        try:
            found.append(read_manifest(file))
        except CheckpointError as error:
            if file.exists():
                problem = str(error)
    return found, problem


class _Read(NamedTuple):
    """What can be read of a checkpoint: names and manifests that are here, and why another cannot be read."""

    names: list[Published]
    manifests: list[Manifest]
    problem: str
    """Empty: none."""


class Check:
    """Reads what the checkpoints of a run name, every page once, and collects what is not what was checkpointed in
    `bad`.

    `nbytes` is what there is to read, in bytes of pages; `pages` their number.
    """

    def __init__(self, run: StoredRun) -> None:
        """Read the manifests.

        Raises:
            ConfigError: the run lies on other folders too.
        """
        self.bad: list[BadPage] = []
        self._folder = run.folder
        # Versions to be read, with the manifests that name them, by rank, page and version.
        self._work: dict[tuple[int, int, Version], list[Path]] = {}
        self._require(run, run.paths)
        for step, rank, file in ((c.step, rank, file) for c in run.checkpoints for rank, file in c.manifests.items()):
            manifest = self._manifest(step, rank, file)
            if manifest is None:
                continue
            self._require(run, len(manifest.weights))
            for page, version in sorted(manifest.pages.items()):
                self._work.setdefault((manifest.rank, page, version), []).append(file)
        self.pages = len(self._work)
        self.nbytes = sum(version.extent.length for _, _, version in self._work)

    def _require(self, run: StoredRun, paths: int) -> None:
        if len(run.folder.roots) != paths:
            raise ConfigError(
                f"run {run.run_id} lies on {paths} folders, {len(run.folder.roots)} of them were named; name them all"
            )

    def _manifest(self, step: int, rank: int, file: Path) -> Manifest | None:
        """Return a manifest whose state file is good; a run that is live may have removed it."""
        bad = file
        try:
            manifest = read_manifest(file)
            bad = file.parent / manifest.state_file
            check_state_file(file.parent, manifest)
            return manifest
        except CheckpointError as error:
            if file.exists():
                self._found(step, rank, None, str(bad), 0, _length(bad), str(error))
            return None

    def _found(self, step: int, rank: int, page: int | None, path: str, offset: int, length: int, reason: str) -> None:
        self.bad.append(
            BadPage(step=step, rank=rank, page=page, path=path, offset=offset, length=length, reason=reason)
        )

    def run(self, advance: Callable[[int], None], rate: float = 0) -> list[BadPage]:
        """Read all pages; return what is bad.

        Args:
            advance: told the bytes of every page that has been read.
            rate: most bytes per second; 0 is no limit.
        """
        pace = Pace(rate)

        def read(item: tuple[int, int, Version]) -> tuple[tuple[int, int, Version], str]:
            rank, page, version = item
            pace.wait(version.extent.length)
            try:
                read_version(self._folder.data_file(version.extent.path, rank), page, version, f"number {page}")
            except StorageError as error:
                return item, error.reason
            return item, ""

        left = iter(self._work)
        with ThreadPoolExecutor(_READERS) as readers:
            while batch := list(islice(left, _BATCH)):
                for (rank, page, version), reason in readers.map(read, batch):
                    advance(version.extent.length)
                    if reason:
                        self._confirm(rank, page, version, reason)
        return self.bad

    def _confirm(self, rank: int, page: int, version: Version, reason: str) -> None:
        """Note a bad page for every checkpoint that names it still. [Note: reading a live run]"""
        path, offset, length = version.extent
        for file in self._work[rank, page, version]:
            try:
                manifest = read_manifest(file)
            except CheckpointError:
                continue
            if manifest.pages.get(page) == version:
                data = str(self._folder.data_file(path, rank))
                self._found(manifest.step, rank, page, data, offset, length, reason)


class Pace:
    """Holds threads back to `rate` bytes per second together; 0 is no limit."""

    def __init__(self, rate: float) -> None:
        self._rate, self._lock = rate, threading.Lock()
        self._next = 0.0  # when the next bytes may be read, of `time.monotonic`; under the lock

    def wait(self, nbytes: int) -> None:
        """Return when these bytes may be read."""
        if not self._rate:
            return
        with self._lock:
            now = time.monotonic()
            start = max(self._next, now)
            self._next = start + nbytes / self._rate
        time.sleep(start - now)


def good_step(run: StoredRun, bad: Sequence[BadPage]) -> int | None:
    """Return the newest step that the run can be resumed from, None if there is none."""
    spoilt = {page.step for page in bad}
    return max((checkpoint.step for checkpoint in run.usable if checkpoint.step not in spoilt), default=None)


def incomplete(run: StoredRun) -> list[Checkpoint]:
    """Return what not all ranks have published, where all ranks are here; else other nodes may have the rest."""
    return [c for c in run.checkpoints if len(c.manifests) < c.world_size and _all_local(run, c.world_size)]


def without_manifest(run: StoredRun) -> list[Path]:
    """Return the state files of checkpoints that are none, of a run that has ended."""
    return [] if run.owner else left_over(run.folder.checkpoints, published_in(run.folder.checkpoints))


def remove(run: StoredRun) -> None:
    """Remove a run from its folders, checkpoints first; to be called where nothing starts (`no_starts`).

    Raises:
        ConfigError: the run is live, or a file cannot be removed.
    """
    try:
        if owner := holder_of(run.folder):
            raise ConfigError(f"{owner} is running; it is not removed")
        run.folder.remove()
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be removed: {error.strerror}") from error


@dataclass(frozen=True, kw_only=True)
class Waste:
    """Something that nobody can use and nobody owns.

    A whole run; `files` of a run; or, without a run, a lock that nobody holds, or an empty folder with the name of one.
    """

    what: str
    """What it is, in words."""
    run: StoredRun | None
    files: tuple[Path, ...]
    nbytes: int
    """Space that its removal gives back."""

    @property
    def name(self) -> str:
        """Run, or file."""
        return self.run.run_id if self.run is not None and not self.files else str(self.files[0])

    @property
    def identity(self) -> tuple[str, str, tuple[Path, ...]]:
        """What it is, to tell it from other waste at another time."""
        return self.what, self.run.run_id if self.run else "", self.files

    def remove(self) -> None:
        """Remove it, in order; to be called where nothing starts (`no_starts`).

        Raises:
            ConfigError: the run is live by now, or a file cannot be removed.
        """
        if self.run is not None and not self.files:
            remove(self.run)
            return
        try:
            if self.run is None:
                for file in self.files:
                    if is_run_id(file.name):
                        _remove_empty(file)
                    else:
                        remove_stale_lock(file)
                return
            if owner := holder_of(self.run.folder):
                raise ConfigError(f"{owner} is running; nothing of it is removed")
            for file in self.files:
                self.run.folder.remove_file(file)
        except OSError as error:
            raise ConfigError(f"{error.filename} cannot be removed: {error.strerror}") from error


def _remove_empty(folder: Path) -> None:
    """Remove the folder of a run that has nothing in it, not even a marker. Raises `ConfigError` or `OSError`."""
    with suppress(FileNotFoundError):
        if owner := holder_of(RunFolder(folder.name, (folder,))):
            raise ConfigError(f"{owner} is running; {folder} is not removed")
        folder.rmdir()


def waste(
    paths: Sequence[Path], passed: dict[Path, str] | None = None, live: list[StoredRun] | None = None
) -> list[Waste]:
    """Return what can be removed without loss, as far as these folders show.

    Only runs that have ended are looked at, and only where the first of their folders, that of their checkpoints, is
    among
    `paths`. Whether a checkpoint is of all ranks is judged only where all its ranks have their data files here: on
    private
    drives the manifests of other ranks are on other nodes. A run of which this node has no manifest at all has no
    checkpoint anywhere.

    Args:
        paths: the folders of storage.paths.
        passed: as of `stored_runs`.
        live: is given the runs that are live, and so not looked at.

    Raises:
        ConfigError: a path is not a folder.
    """
    found: list[Waste] = []
    for run in stored_runs(paths, passed):
        if run.owner is not None and live is not None:
            live.append(run)
        if run.owner is None and run.first:
            found += _waste_of(run)
    for path in paths:
        for folder in empty_folders(path):
            with suppress(FileNotFoundError):
                if holder_of(RunFolder(folder.name, (folder,))) is None:
                    size = _disk_bytes(folder)
                    found.append(Waste(what="empty folder of a run", run=None, files=(folder,), nbytes=size))
        locks = stale_locks(path)
        found += [Waste(what="lock of nobody", run=None, files=(file,), nbytes=_disk_bytes(file)) for file in locks]
    return found


def _waste_of(run: StoredRun) -> Iterator[Waste]:
    folder = run.folder.checkpoints
    published = published_in(folder)
    complete = set(complete_checkpoints(published))
    partial = [checkpoint for checkpoint in run.checkpoints if checkpoint.name not in complete]
    if not complete and all(_all_local(run, checkpoint.world_size) for checkpoint in partial):
        yield Waste(what="run without a checkpoint", run=run, files=(), nbytes=run.nbytes)
        return

    def files(what: str, *found: Path) -> Waste:
        return Waste(what=what, run=run, files=found, nbytes=sum(map(_disk_bytes, found)))

    gone: set[Path] = set()
    for checkpoint in partial:
        if _all_local(run, checkpoint.world_size):
            gone.update(checkpoint.manifests.values())
            yield files(f"checkpoint of step {checkpoint.step} of {checkpoint.problem}", *checkpoint.manifests.values())
    drafts = [file for root in run.folder.roots for file in root.glob(f".{MARKER_NAME}.*")]
    drafts += [file for file in folder.rglob("*.tmp") if not file.is_dir()]  # also of companions
    for file in sorted(drafts):
        yield files("temporary file", file)
    for file in left_over(folder, [name for name in published if folder / name.file_name not in gone]):
        yield files("state file of no checkpoint", file)


def _all_local(run: StoredRun, world_size: int) -> bool:
    """Whether all ranks have their data files here."""
    return run.ranks >= world_size
