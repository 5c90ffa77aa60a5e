"""Runs stored on NVMe folders: their checkpoints and sizes, verification of their pages, and data that can be removed.

[Note: reading a live run] The bytes that a manifest refers to are not overwritten while the manifest exists, because a
live run removes a checkpoint before it reuses the slots of its pages. A page whose checksum does not match is therefore
bad only if its manifest still refers to it after the page was read. Otherwise the run has replaced the page in the
meantime, and the page is skipped.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from infinity.checkpoint.held import HeldCheckpoint, HeldParity
from infinity.checkpoint.manifest import CheckpointName, Manifest, Published, left_over, published_in, read_manifest
from infinity.checkpoint.manifest import read_state_file as check_state_file
from infinity.checkpoint.parity import Parity, parities_in, read_index, verify
from infinity.checkpoint.parts import located, named, replicas
from infinity.config import Config
from infinity.errors import CheckpointError, ConfigError, StorageError
from infinity.io.pace import Pace
from infinity.io.probe import targets
from infinity.store.folder import Holder, RunFolder, believed, holder_of, holders, remove_stale_lock, stale_locks
from infinity.store.marker import MARKER_NAME, FoundRun, drafts_in, empty_folders, look_for_runs
from infinity.store.page_store import Version, read_version
from infinity_tools import trial_folders

_READERS = 4
_BATCH = 1024


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Manifests of one checkpoint, one per rank.

    `nbytes` is the size of the pages and state files of the checkpoint. `own_bytes` is the part that no other
    checkpoint of the run shares, which is the space that the run regains when it removes the checkpoint.
    """

    held: HeldCheckpoint
    """Ranks whose manifests are on this node, and the hosts of the others."""
    created: float
    """Seconds since 1970."""
    manifests: dict[int, Path]
    nbytes: int
    own_bytes: int
    problem: str = ""
    """Reason why the checkpoint cannot be used. Empty if it is usable."""

    @property
    def step(self) -> int:
        """Optimizer step of the checkpoint."""
        return self.held.name.step

    @property
    def world_size(self) -> int:
        """Number of ranks that wrote the checkpoint."""
        return self.held.name.world_size


@dataclass(frozen=True, kw_only=True)
class StoredRun:
    """A run found on the given paths.

    `owner` is the process that has the run open, if any. `ranks` is the number of ranks whose data files are on these
    paths. `parameters` is the number of parameters of the model, or 0 if no checkpoint records it. `nbytes` is the disk
    space of the run. `paths` is the total number of folders that the run is spread over. `first` is ``True`` if the
    folder with its checkpoints is among the given ones.
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
        """Id of the run."""
        return self.folder.run_id

    @property
    def usable(self) -> tuple[Checkpoint, ...]:
        """Usable checkpoints, oldest first."""
        return tuple(checkpoint for checkpoint in self.checkpoints if not checkpoint.problem)


@dataclass(frozen=True)
class BadPage:
    """A page, or a whole file if `page` is None, whose contents differ from the checkpointed contents."""

    step: int
    """Step of the checkpoint that contains the page."""
    rank: int
    """Rank that owns the page."""
    page: int | None
    path: str
    """Path of the file."""
    offset: int
    """Offset of the first byte of the page in the file."""
    length: int
    """Size of the page in bytes."""
    reason: str
    """Description of the mismatch."""


@dataclass(frozen=True, kw_only=True)
class StoredCopy:
    """Copy of parts of the files of ranks on other nodes, for one checkpoint. [Note: copies on other nodes]"""

    step: int | None
    """Step of the checkpoint. ``None`` if it is unknown, because the index of the copy is damaged."""
    rank: int
    """Rank that stores the copy."""
    peers: tuple[int, ...]
    """Ranks whose parts are copied, as far as they are known."""
    located: str
    """These ranks, and the hosts that wrote their files."""
    path: str
    """Path of the file."""
    problem: str
    """Description of the damage, or an empty string if the copy is intact."""


def _meant(paths: Sequence[Path]) -> Path | None:
    """Return a folder that contains runs: the parent folder if the user passed a run, or else a subfolder."""
    for path in paths:
        for folder in (path.absolute().parent, *sorted(path.iterdir())):
            with suppress(OSError):  # the user did not pass this folder, so it may be unreadable
                if folder.is_dir() and look_for_runs([folder])[0]:
                    return folder
    return None


def stored_runs(paths: Sequence[Path], passed: dict[Path, str] | None = None) -> list[StoredRun]:
    """Return the runs on `paths`, oldest first, for any order of `paths`. Skip other folders.

    Args:
        paths: Folders of storage.paths.
        passed: Dictionary that receives the folders that are named like a run but are skipped, each with the reason.

    Raises:
        ConfigError: If a path is not a readable folder, or has no runs while a folder next to it does.
    """
    for path in paths:
        if not path.is_dir():
            raise ConfigError(f"{str(path)!r} is not a folder")
    try:
        found, odd = look_for_runs(paths)
        if not found and not odd and (meant := _meant(paths)):
            raise ConfigError(f"{', '.join(map(str, paths))} contains no runs, but {meant} does; pass that folder")
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be read: {error.strerror}") from error
    runs = []
    for run in found:
        try:
            runs.append(_stored_run(run))
        except OSError as error:  # belongs to another user, or the drive fails; the other runs are still listed
            if run.in_order[0].exists():  # otherwise the run was removed in the meantime
                odd[Path(error.filename or run.in_order[0])] = str(error.strerror)
    if passed is not None:
        passed.update(odd)
    return runs


def _stored_run(run: FoundRun) -> StoredRun:
    folder = RunFolder(run.run_id, run.in_order)
    if 0 in run.roots and folder.checkpoints.is_dir():
        os.listdir(folder.checkpoints)  # raises if unreadable, which must not look like "no checkpoints"
    read = _read_checkpoints(folder)
    manifests = [manifest for found in read.values() for manifest in found.manifests]
    parameters = ((tensor.parameters for tensor in manifest.description.tensors) for manifest in manifests)
    return StoredRun(
        folder=folder,
        paths=run.paths,
        first=0 in run.roots,
        ranks=len({file.name for root in folder.roots for file in root.glob("rank*.pages")}),
        parameters=max(map(sum, parameters), default=0),
        nbytes=sum(map(_bytes_in, folder.roots)),
        checkpoints=tuple(_checkpoints(folder, read)),
        owner=holder_of(folder),
    )


def other_holders(paths: Sequence[Path], runs: Sequence[StoredRun]) -> list[str]:
    """Return messages about processes that have locked a path but own none of the listed runs.

    A lock file whose claim to a run cannot be trusted (see `holder_of`) is reported with the user who owns the file.

    Raises:
        ConfigError: If the state of a lock file cannot be determined.
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


def _bytes_in(root: Path) -> int:
    """Return the disk space of a folder and its subfolders, without following links. Unreadable entries count as 0."""
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
    except OSError:  # a live run removes files that it has replaced
        return 0


def _length(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


class _Read(NamedTuple):
    """Readable part of a checkpoint."""

    names: list[Published]
    manifests: list[Manifest]
    problem: str
    """Reason why a manifest cannot be read, or an empty string."""


def _read_checkpoints(folder: RunFolder) -> dict[CheckpointName, _Read]:
    groups: dict[CheckpointName, list[Published]] = {}
    for name in published_in(folder.checkpoints):
        groups.setdefault(name.checkpoint, []).append(name)
    found = {}
    for checkpoint, names in groups.items():
        manifests, problem = [], ""
        for file in (folder.checkpoints / name.file_name for name in names):
            try:
                manifests.append(read_manifest(file, decode=False))
            except CheckpointError as error:
                problem = str(error) if file.exists() else problem
        if manifests or problem:  # otherwise, a live run removed the checkpoint in the meantime
            found[checkpoint] = _Read(names, manifests, problem)
    return found


def _checkpoints(folder: RunFolder, read: Mapping[CheckpointName, _Read]) -> Iterator[Checkpoint]:
    named: Counter[tuple[int, Version]] = Counter()
    for found in read.values():
        named.update((manifest.rank, version) for manifest in found.manifests for version in manifest.pages.values())
    parities = parities_in(folder.roots)
    for checkpoint, (names, manifests, problem) in read.items():
        copies = [HeldParity(rank, index, [0]) for rank, _, index in parities if index.identity == checkpoint.identity]
        held = HeldCheckpoint(
            name=checkpoint,
            holders={name.rank: [0] for name in names},
            parts=manifests[0].parts if manifests else (),
            parities=copies,
        )
        pages = [(manifest.rank, version) for manifest in manifests for version in manifest.pages.values()]
        states = sum(_length(folder.checkpoints / manifest.state_file) for manifest in manifests)
        yield Checkpoint(
            held=held,
            created=max((manifest.created for manifest in manifests), default=0.0),
            manifests={name.rank: folder.checkpoints / name.file_name for name in names},
            nbytes=states + sum(version.extent.length for _, version in pages),
            own_bytes=states + sum(version.extent.length for rank, version in pages if named[rank, version] == 1),
            problem=held.problem() or problem,
        )


class Check:
    """Verification of every page in the checkpoints of a run, each page once.

    Bad pages are collected in `bad`. `pages` is the number of pages to read. `copies` are the copies of ranks on other
    nodes, which are verified too. `nbytes` is the number of bytes to read.
    """

    def __init__(self, run: StoredRun) -> None:
        """Read the manifests.

        Raises:
            ConfigError: If the run also has folders that were not given.
        """
        self.bad: list[BadPage] = []
        self.copies: list[StoredCopy] = []
        self._folder = run.folder
        # Versions to read, by rank, page and version, with the manifests that refer to them.
        self._work: dict[tuple[int, int, Version], list[Path]] = {}
        self._require(run, run.paths)
        for step, rank, file in ((c.step, rank, file) for c in run.checkpoints for rank, file in c.manifests.items()):
            manifest = self._manifest(step, rank, file)
            if manifest is None:
                continue
            self._require(run, len(manifest.stripe_weights))
            for page, version in sorted(manifest.pages.items()):
                self._work.setdefault((manifest.rank, page, version), []).append(file)
        self.pages = len(self._work)
        self._held = {checkpoint.held.name.identity: checkpoint.held for checkpoint in run.checkpoints}
        # Copies of other checkpoints are not used, for example because the run went back to an earlier one.
        damaged: dict[Path, tuple[int, str]] = {}
        parities = parities_in(run.folder.roots, damaged)
        self._parities = [each for each in parities if each.contents.identity in self._held]
        self.copies += [
            StoredCopy(step=None, rank=rank, peers=(), located="other ranks", path=str(target), problem=problem)
            for target, (rank, problem) in damaged.items()
        ]
        self.nbytes = sum(version.extent.length for _, _, version in self._work)
        self.nbytes += sum(parity.contents.length for parity in self._parities)

    def _require(self, run: StoredRun, paths: int) -> None:
        if len(run.folder.roots) != paths:
            raise ConfigError(
                f"run {run.run_id} is spread over {paths} folders, but {len(run.folder.roots)} of them were given; "
                "pass all of them"
            )

    def _manifest(self, step: int, rank: int, file: Path) -> Manifest | None:
        """Return a manifest whose state file is intact, or None. A live run may remove either of them at any time."""
        bad = file
        try:
            manifest = read_manifest(file)
            bad = file.parent / manifest.state_file
            check_state_file(file.parent, manifest)
            return manifest
        except CheckpointError as error:
            if file.exists():
                size = _length(bad)
                self.bad.append(BadPage(step, rank, None, str(bad), 0, size, str(error)))
            return None

    def run(self, advance: Callable[[int], None], rate: float = 0) -> list[BadPage]:
        """Read all pages and copies, and return the bad pages.

        Args:
            advance: Callback that receives numbers of bytes that are read. Several threads call it.
            rate: Maximum number of bytes per second. 0 means no limit.
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
            self.copies += filter(None, readers.map(partial(self._verified, pace, advance), self._parities))
        return self.bad

    def _verified(self, pace: Pace, advance: Callable[[int], None], parity: Parity) -> StoredCopy | None:
        """Verify a copy. Return None if a live run has replaced it in the meantime."""

        def reading(nbytes: int) -> None:
            pace.wait(nbytes)
            advance(nbytes)

        held, peers, problem = self._held[parity.contents.identity], [each.rank for each in parity.contents.peers], ""
        try:
            verify(parity, self._folder.run_id, reading)
        except StorageError as error:
            problem = f"offset {error.offset}, {error.length} bytes: {error.reason}"
        except CheckpointError as error:
            problem = str(error)
        if problem:
            try:
                if read_index(parity.target) != parity.contents:
                    return None
            except CheckpointError as error:
                if isinstance(error.__cause__, FileNotFoundError):
                    return None
        return StoredCopy(
            step=held.name.step,
            rank=parity.rank,
            peers=tuple(peers),
            located=located(held.parts, peers) if held.parts else named(peers),
            path=str(parity.target),
            problem=problem,
        )

    def _confirm(self, rank: int, page: int, version: Version, reason: str) -> None:
        """Record a bad page for every checkpoint that still contains it. [Note: reading a live run]"""
        place, offset, length = version.extent
        path = str(self._folder.data_file(place, rank))
        for file in self._work[rank, page, version]:
            try:
                manifest = read_manifest(file)
            except CheckpointError:
                continue
            if manifest.pages.get(page) == version:
                self.bad.append(BadPage(manifest.step, rank, page, path, offset, length, reason))


def good_checkpoint(run: StoredRun, bad: Sequence[BadPage]) -> Checkpoint | None:
    """Return the newest checkpoint from which the run can be resumed, or None.

    Slices that are bad on one rank may be intact on another one. Files on other hosts are assumed to be intact.
    """
    good = [checkpoint for checkpoint in run.checkpoints if _can_resume(checkpoint.held, spoilt(checkpoint, bad))]
    return max(good, key=lambda checkpoint: checkpoint.held.name, default=None)


def spoilt(checkpoint: Checkpoint, bad: Sequence[BadPage]) -> list[int]:
    """Return the ranks whose files in a checkpoint are bad."""
    return sorted({page.rank for page in bad if page.step == checkpoint.step})


def _can_resume(held: HeldCheckpoint, without: Sequence[int]) -> bool:
    present = {rank: [0] for rank in (*held.holders, *held.on_other_hosts) if rank not in without}
    left = replace(held, holders=present)
    return any(not left.problem(replica) for replica in range(-1, len(replicas(held.parts))))


def incomplete(run: StoredRun) -> list[Checkpoint]:
    """Return checkpoints that not all ranks have published and that cannot be used.

    Checkpoints whose ranks are not all on this node are left out because other nodes may have the missing manifests.
    """
    return [c for c in run.checkpoints if _unpublished(c) and _all_local(run, c)]


def without_manifest(run: StoredRun) -> list[Path]:
    """Return the state files that belong to no checkpoint, if the run has ended."""
    return [] if run.owner else left_over(run.folder.checkpoints, published_in(run.folder.checkpoints))


def remove(run: StoredRun) -> None:
    """Remove a run from its folders, checkpoints first. Call it only while no run can start (see `no_starts`).

    Raises:
        ConfigError: If the run is live, or a file cannot be removed.
    """
    try:
        if owner := holder_of(run.folder):
            raise ConfigError(f"{owner} is running; it was not removed")
        run.folder.remove()
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be removed: {error.strerror}") from error


@dataclass(frozen=True, kw_only=True)
class Waste:
    """Data that no run can use and no process owns.

    Either a whole run, or some `files` of a run, or (without a run) a stale lock, an empty folder named like a run, or
    what a measurement that was killed has left.
    """

    what: str
    """Description, in words."""
    run: StoredRun | None = None
    files: tuple[Path, ...] = ()
    nbytes: int
    """Disk space in bytes that is regained by removing it."""
    remove_file: Callable[[Path], object] = Path.unlink
    """Function that removes one of the files, without a check whether the run is live."""

    @property
    def name(self) -> str:
        """Id of the run, or path of the first file."""
        return str(self.files[0]) if self.files else self.run.run_id if self.run is not None else ""

    def remove(self) -> None:
        """Remove the data. Call it only while no run can start (see `no_starts`).

        Raises:
            ConfigError: If the run is live by now, or a file cannot be removed.
        """
        if self.run is not None and not self.files:
            remove(self.run)
            return
        try:
            if self.run is not None and (owner := holder_of(self.run.folder)):
                raise ConfigError(f"{owner} is running; none of its files were removed")
            for file in self.files:
                self.remove_file(file)
        except OSError as error:
            raise ConfigError(f"{error.filename} cannot be removed: {error.strerror}") from error


def _remove_empty(folder: Path) -> None:
    """Remove the folder of a run, which has at most drafts of a marker. Raises `ConfigError` or `OSError`."""
    with suppress(FileNotFoundError):
        run = RunFolder(folder.name, (folder,))
        if owner := holder_of(run):
            raise ConfigError(f"{owner} is running; {folder} was not removed")
        for name in drafts_in(folder):
            run.remove_file(folder / name)
        folder.rmdir()


def waste(
    paths: Sequence[Path], passed: dict[Path, str] | None = None, live: list[StoredRun] | None = None
) -> list[Waste]:
    """Return all data in these folders that can be removed without loss.

    Only runs that have ended are considered, and only if the first of their folders, which holds the checkpoints, is
    among `paths`. A checkpoint is judged incomplete only if the data files of all its ranks are here. On private drives
    the manifests of other ranks are on other nodes. A run without any manifest on this node has no checkpoint on any
    node.

    Args:
        paths: Folders of storage.paths.
        passed: See `stored_runs`.
        live: List to which the live runs are added. Their data is not returned.

    Raises:
        ConfigError: If a path is not a folder.
    """
    found: list[Waste] = []
    for run in stored_runs(paths, passed):
        if run.owner is not None and live is not None:
            live.append(run)
        if run.owner is None and run.first:
            found += _waste_of(run)
    for path in paths:
        measured = "left by a killed measurement"
        kinds: tuple[tuple[str, Iterable[Path], Callable[[Path], object]], ...] = (
            ("empty run folder", _unused(empty_folders(path)), _remove_empty),
            ("stale lock", stale_locks(path), remove_stale_lock),
            (measured, trial_folders.left_over(path), partial(trial_folders.remove, telemetry=Config().telemetry)),
            (measured, targets.left_over(path), partial(Path.unlink, missing_ok=True)),
        )
        for what, files, remove_file in kinds:
            for file in files:
                size = _disk_bytes(file) + _bytes_in(file)
                found.append(Waste(what=what, files=(file,), nbytes=size, remove_file=remove_file))
    return found


def _unused(folders: Iterable[Path]) -> Iterator[Path]:
    for folder in folders:
        with suppress(FileNotFoundError):
            if holder_of(RunFolder(folder.name, (folder,))) is None:
                yield folder


def _waste_of(run: StoredRun) -> Iterator[Waste]:
    folder = run.folder.checkpoints
    published = published_in(folder)
    unpublished = [checkpoint for checkpoint in run.checkpoints if _unpublished(checkpoint)]
    here = [checkpoint for checkpoint in unpublished if _all_local(run, checkpoint)]
    if len(here) == len(run.checkpoints):
        yield Waste(what="run without a checkpoint", run=run, nbytes=run.nbytes)
        return

    def files(what: str, *found: Path) -> Waste:
        size = sum(map(_disk_bytes, found))
        return Waste(what=what, run=run, files=found, nbytes=size, remove_file=run.folder.remove_file)

    gone: set[Path] = set()
    for checkpoint in here:
        gone.update(checkpoint.manifests.values())
        what = f"incomplete checkpoint of step {checkpoint.step} ({checkpoint.problem})"
        yield files(what, *checkpoint.manifests.values())
    drafts = [file for root in run.folder.roots for file in root.glob(f".{MARKER_NAME}.*")]
    drafts += [file for file in folder.rglob("*.tmp") if not file.is_dir()]  # includes temporary files of companions
    for file in sorted(drafts):
        yield files("temporary file", file)
    for file in left_over(folder, [name for name in published if folder / name.file_name not in gone]):
        yield files("state file without a checkpoint", file)


def _unpublished(checkpoint: Checkpoint) -> bool:
    return bool(checkpoint.problem) and len(checkpoint.manifests) < checkpoint.world_size


def _all_local(run: StoredRun, checkpoint: Checkpoint) -> bool:
    return run.ranks >= checkpoint.world_size
