"""The manifest of a commit: one JSON file per rank, docs/on-disk-format.md is its description.

A reader assumes nothing: every field is checked, and whatever is wrong is a `CommitError` that names the file.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from infinity.errors import CommitError
from infinity.store.extents import Extent
from infinity.store.pages import Version

T = TypeVar("T")

FORMAT = 1
_NAME = re.compile(r"step(\d{12,})\.rank(\d{5,})-of-(\d{5,})\.json")
_FIELDS: dict[str, type | tuple[type, ...]] = {
    "format": int,
    "run_id": str,
    "step": int,
    "rank": int,
    "world_size": int,
    "created": (int, float),
    "layout": str,
    "page_bytes": int,
    "optimizer": str,
    "weights": list,
    "pages": dict,
    "scalars": dict,
    "groups": list,
    "random": dict,
    "state_file": str,
    "state_checksum": str,
    "extra": dict,
}


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything that a rank needs to continue, except the bytes of the pages.

    `weights` are the shares of the paths, from which the slots follow; `pages` maps page index to version; `scalars`
    shard index to the optimizer's scalars; `groups` are the settings of the param groups; `random` the states of
    Python's and NumPy's generators; the tensors (buffers, torch's generators) are in `state_file` beside the
    manifest; `extra` is the user's own.
    """

    run_id: str
    step: int
    rank: int
    world_size: int
    created: float
    layout: str
    page_bytes: int
    optimizer: str
    weights: list[float]
    pages: dict[int, Version]
    scalars: dict[int, dict[str, Any]]
    groups: list[dict[str, Any]]
    random: dict[str, Any]
    state_file: str
    state_checksum: str
    extra: dict[str, Any]


@dataclass(frozen=True, order=True)
class Published:
    """What the name of a manifest says: this rank has published this step."""

    step: int
    rank: int
    world_size: int

    @property
    def file_name(self) -> str:
        """Name of the file."""
        return f"step{self.step:012d}.rank{self.rank:05d}-of-{self.world_size:05d}.json"


def published_in(folder: Path) -> list[Published]:
    """Return what was published in a run's folder of commits, in order; other files are passed over."""
    names = (_NAME.fullmatch(file.name) for file in folder.glob("step*.json"))
    return sorted(Published(*map(int, name.groups())) for name in names if name)


def complete_steps(published: Iterable[Published]) -> list[int]:
    """Return the steps that all their ranks have published, in order: only they are commits."""
    ranks: dict[tuple[int, int], set[int]] = {}
    for name in published:
        ranks.setdefault((name.step, name.world_size), set()).add(name.rank)
    return sorted({step for (step, world_size), found in ranks.items() if found >= set(range(world_size))})


def choose_step(run_id: str, steps: list[int], wanted: int) -> int:
    """Return the step to use of those that are committed.

    Args:
        steps: in order.
        wanted: -1 is the newest.

    Raises:
        CommitError: it is not there; the steps that are there are listed.
    """
    if steps and (wanted < 0 or wanted in steps):
        return steps[-1] if wanted < 0 else wanted
    what = f"commit of step {wanted}" if wanted >= 0 else "commit"
    listed = ", ".join(map(str, steps)) or "none"
    raise CommitError(f"run {run_id} has no {what} of all its ranks (steps with a commit: {listed})")


def checksum_of(data: bytes) -> str:
    """Return the checksum that protects manifests and state files."""
    return f"{xxhash.xxh3_64_intdigest(data):016x}"


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Publish a manifest: it is there completely, or it is not there.

    Raises:
        OSError: the file system refused.
    """
    name = Published(manifest.step, manifest.rank, manifest.world_size).file_name
    write_checked(folder / name, _encode(manifest))


def write_checked(target: Path, tree: Mapping[str, Any]) -> None:
    """Write plain data with its checksum, durably."""
    body = json.dumps(tree, sort_keys=True, separators=(",", ":"))
    write_durably(target, json.dumps({"checksum": checksum_of(body.encode()), "body": body}).encode())


def write_durably(target: Path, data: bytes) -> None:
    """Write a file under a temporary name, flush it, rename it, flush the folder."""
    temporary = target.with_name(target.name + ".tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(target.parent)


def sync_folder(folder: Path) -> None:
    """Make what was created, renamed and removed in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_manifest(file: Path) -> Manifest:
    """Read and check a manifest.

    Raises:
        CommitError: it cannot be read, is malformed, or does not match its checksum.
    """
    return read_checked(file, lambda body: _decode(body, file))


def read_checked(file: Path, decode: Callable[[Any], T]) -> T:
    """Return what `decode` makes of the data that `write_checked` wrote.

    Raises:
        CommitError: the file cannot be read, does not match its checksum, or `decode` cannot use it.
    """
    try:
        outer = json.loads(file.read_bytes())
        body = outer["body"]
        if checksum_of(body.encode()) != outer["checksum"]:
            raise CommitError(f"{file} does not match its checksum; resume from another commit")
        return decode(json.loads(body))
    except CommitError:
        raise
    except OSError as error:
        raise CommitError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise CommitError(f"{file} is malformed: {type(error).__name__}: {error}") from error


def read_state_file(folder: Path, manifest: Manifest) -> bytes:
    """Return the content of a commit's state file.

    Raises:
        CommitError: it is missing or does not match its checksum.
    """
    file = folder / manifest.state_file
    try:
        data = file.read_bytes()
    except OSError as error:
        raise CommitError(f"state file {file} of the commit cannot be read: {error.strerror}") from error
    if checksum_of(data) != manifest.state_checksum:
        raise CommitError(f"state file {file} of the commit does not match its checksum")
    return data


def _encode(manifest: Manifest) -> dict[str, Any]:
    pages = {
        str(page): [*version.extent, f"{version.checksum:016x}"] for page, version in sorted(manifest.pages.items())
    }
    body: dict[str, Any] = {name: getattr(manifest, name) for name in _FIELDS if name not in ("format", "pages")}
    return {**body, "format": FORMAT, "pages": pages}


def _decode(body: Any, file: Path) -> Manifest:
    if not isinstance(body, Mapping):
        raise CommitError(f"manifest {file} is malformed: not an object")
    for name, kind in _FIELDS.items():
        if not isinstance(body.get(name), kind) or isinstance(body.get(name), bool):
            raise CommitError(f"manifest {file} is malformed: {name} is {body.get(name)!r}")
    if body["format"] != FORMAT:
        raise CommitError(f"manifest {file} has format {body['format']}, this version reads {FORMAT}")
    pages: dict[int, Version] = {}
    for page, entry in body["pages"].items():
        path, offset, length, digest = entry
        if not all(isinstance(n, int) and n >= 0 for n in (path, offset, length)) or len(digest) != 16:
            raise CommitError(f"manifest {file} is malformed: page {page} is {entry!r}")
        pages[int(page)] = Version(Extent(path, offset, length), int(digest, 16))
    fields = {name: body[name] for name in _FIELDS if name not in ("format", "pages", "scalars")}
    scalars = {int(shard): dict(values) for shard, values in body["scalars"].items()}
    return Manifest(**fields, pages=pages, scalars=scalars)


def commits_in(folder: Path, rank: int) -> dict[int, Path]:
    """Return the manifests of a rank by step."""
    return {name.step: folder / name.file_name for name in published_in(folder) if name.rank == rank}
