"""What lies on NVMe folders: runs, their commits, their bytes, and whether the bytes are what was written."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from infinity.checkpoint.manifest import Manifest, Published, checksum_of, published_in, read_manifest
from infinity.errors import CommitError, ConfigError, StorageError
from infinity.store.folder import Owner, RunFolder, live_run
from infinity.store.pages import Version, read_version

_READERS = 4


@dataclass(frozen=True, kw_only=True)
class Commit:
    """The manifests of one step, one per rank; `problem` says why it cannot be used."""

    step: int
    created: float
    world_size: int
    manifests: tuple[Path, ...]
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class StoredRun:
    """One run on the given paths; `owner` is the process that has it open, if there is one."""

    folder: RunFolder
    ranks: int
    nbytes: int
    commits: tuple[Commit, ...]
    owner: Owner | None

    @property
    def run_id(self) -> str:
        """The run's id."""
        return self.folder.run_id


@dataclass(frozen=True, kw_only=True)
class BadPage:
    """A page, or a whole file (`page` is None), that is not what was committed."""

    step: int
    rank: int
    page: int | None
    path: str
    offset: int
    length: int
    reason: str


def stored_runs(paths: Sequence[Path]) -> list[StoredRun]:
    """Return the runs on `paths`, oldest first; folders that are not runs are passed over.

    Raises:
        ConfigError: a path is not a folder.
    """
    for path in paths:
        if not path.is_dir():
            raise ConfigError(f"{str(path)!r} is not a folder")
    owners = [owner for path in paths if (owner := live_run(path))]
    roots: dict[str, list[Path]] = {}
    for path in paths:
        for root in sorted(path.iterdir()):
            if root.is_dir() and not root.is_symlink() and _is_run(root):
                roots.setdefault(root.name, []).append(root)
    return [_stored_run(run_id, tuple(roots[run_id]), owners) for run_id in sorted(roots)]


def _is_run(root: Path) -> bool:
    return (root / "commits").is_dir() or any(root.glob("rank*.pages"))


def _stored_run(run_id: str, roots: tuple[Path, ...], owners: Sequence[Owner]) -> StoredRun:
    # The manifests are on the first path of the run, whatever the order in which paths are given here.
    roots = tuple(sorted(roots, key=lambda root: not (root / "commits").is_dir()))
    folder = RunFolder(run_id, roots)
    files = {file for root in roots for file in root.glob("rank*.pages")}
    return StoredRun(
        folder=folder,
        ranks=len({file.name for file in files}),
        nbytes=sum(_disk_bytes(file) for root in roots for file in root.rglob("*")),
        commits=tuple(_commits(folder)),
        owner=next((owner for owner in owners if owner.run_id in (run_id, "unknown")), None),
    )


def _disk_bytes(file: Path) -> int:
    try:
        return file.lstat().st_blocks * 512
    except OSError:  # a live run removes what it has replaced
        return 0


def _commits(folder: RunFolder) -> Iterator[Commit]:
    by_step = groupby(published_in(folder.commits), key=lambda name: name.step)
    for step, names in by_step:
        yield _commit(folder, step, list(names))


def _commit(folder: RunFolder, step: int, names: list[Published]) -> Commit:
    manifests = tuple(folder.commits / name.file_name for name in names)
    world_size, created, problem = names[0].world_size, 0.0, ""
    try:
        created = read_manifest(manifests[0]).created
    except CommitError as error:
        problem = str(error)
    if lacking := sorted(set(range(world_size)) - {name.rank for name in names}):
        problem = f"not of all ranks: {', '.join(map(str, lacking))} lacking"
    return Commit(step=step, created=created, world_size=world_size, manifests=manifests, problem=problem)


def pages_to_verify(run: StoredRun) -> list[tuple[Manifest, int, Version]]:
    """Return every page that a commit of the run names.

    Raises:
        ConfigError: the run is live, or lies on other folders too.
        CommitError: a manifest is malformed.
    """
    if run.owner is not None:
        raise ConfigError(f"{run.owner} is running and replaces its pages; verify it when it has ended")
    work: list[tuple[Manifest, int, Version]] = []
    for commit in run.commits:
        for file in commit.manifests:
            manifest = read_manifest(file)
            if len(manifest.weights) != len(run.folder.roots):
                raise ConfigError(
                    f"run {run.run_id} lies on {len(manifest.weights)} folders, {len(run.folder.roots)} of them "
                    "were named; name them all, in the order of storage.paths"
                )
            work += [(manifest, page, version) for page, version in sorted(manifest.pages.items())]
    return work


def verify(
    run: StoredRun, pages: Sequence[tuple[Manifest, int, Version]], advance: Callable[[int], None]
) -> list[BadPage]:
    """Read `pages` and the files beside the manifests; return what does not match its checksum.

    `advance` is told the bytes of every page that has been read.
    """
    bad = [found for commit in run.commits for file in commit.manifests if (found := _check_state(file))]

    def check(item: tuple[Manifest, int, Version]) -> tuple[int, BadPage | None]:
        return item[2].extent.length, _check_page(run.folder, *item)

    with ThreadPoolExecutor(_READERS) as readers:
        for nbytes, found in readers.map(check, pages):
            advance(nbytes)
            if found is not None:
                bad.append(found)
    return bad


def _check_page(folder: RunFolder, manifest: Manifest, page: int, version: Version) -> BadPage | None:
    extent = version.extent
    reason = ""
    file = Path("unknown")
    if extent.path >= len(folder.roots):
        reason = f"the manifest names path {extent.path}, which does not exist"
    else:
        file = folder.data_file(extent.path, manifest.rank)
        try:
            read_version(file, page, version, f"number {page}")
        except StorageError as error:
            reason = error.reason
    if not reason:
        return None
    return BadPage(
        step=manifest.step,
        rank=manifest.rank,
        page=page,
        path=str(file),
        offset=extent.offset,
        length=extent.length,
        reason=reason,
    )


def _check_state(file: Path) -> BadPage | None:
    manifest = read_manifest(file)
    state = file.parent / manifest.state_file
    try:
        data = state.read_bytes()
        matches = checksum_of(data) == manifest.state_checksum
        reason = "" if matches else "the file does not match its checksum"
        length = len(data)
    except OSError as error:
        reason, length = error.strerror or str(error), 0
    if not reason:
        return None
    return BadPage(
        step=manifest.step, rank=manifest.rank, page=None, path=str(state), offset=0, length=length, reason=reason
    )


def remove(run: StoredRun) -> None:
    """Remove a run from its folders, commits first.

    Raises:
        ConfigError: the run is live, or a file cannot be removed.
    """
    if run.owner is not None:
        raise ConfigError(f"{run.owner} is running; it is not removed")
    try:
        if run.folder.commits.is_dir():
            shutil.rmtree(run.folder.commits)
        for root in run.folder.roots:
            shutil.rmtree(root)
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be removed: {error.strerror}") from error
