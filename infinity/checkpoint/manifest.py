"""The manifest of a commit: one JSON file per rank, docs/on-disk-format.md is its description.

A reader assumes nothing: every field is checked, and whatever is wrong is a `CommitError` that names the file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from infinity.errors import CommitError
from infinity.store.extents import Extent
from infinity.store.pages import Version

T = TypeVar("T")

FORMAT = 1
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


def manifest_name(step: int, rank: int) -> str:
    """Return the file name of a manifest."""
    return f"step{step:012d}.rank{rank:05d}.json"


def checksum_of(data: bytes) -> str:
    """Return the checksum that protects manifests and state files."""
    return f"{xxhash.xxh3_64_intdigest(data):016x}"


def write_manifest(folder: Path, manifest: Manifest) -> Path:
    """Publish a manifest: it is there completely, or it is not there.

    Raises:
        OSError: the file system refused.
    """
    target = folder / manifest_name(manifest.step, manifest.rank)
    write_checked(target, _encode(manifest))
    return target


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
    found: dict[int, Path] = {}
    for file in folder.glob(f"step*.rank{rank:05d}.json"):
        digits = file.name[4 : file.name.index(".")]
        if digits.isdigit():
            found[int(digits)] = file
    return found
