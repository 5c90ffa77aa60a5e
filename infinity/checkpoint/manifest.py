"""The manifest of a commit: one JSON file per rank, docs/on-disk-format.md is its description.

A reader assumes nothing: every field is checked against `_BODY`, the fields against each other and the name of the
file, the extents against the layout and the data files. Whatever is wrong is a `CommitError` that names the file.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from infinity.checkpoint import schema
from infinity.checkpoint.schema import index, integer, number, record, row, sequence, setting, table, text
from infinity.errors import CommitError
from infinity.layout import PAGE_ALIGNMENT, Layout, Role
from infinity.store.extents import Extent
from infinity.store.folder import RunFolder
from infinity.store.pages import Version

T = TypeVar("T")

FORMAT = 1
_NAME = re.compile(r"step(\d{12,})\.rank(\d{5,})-of-(\d{5,})\.json", re.ASCII)
_CHECKSUM = text("[0-9a-f]{16}")
_WORD = integer(0, (1 << 32) - 1)
_ENVELOPE = record(checksum=_CHECKSUM, body=text())
_BODY = record(
    run_id=text(),
    step=integer(0),
    rank=integer(0),
    world_size=integer(1),
    created=number(0, 1 << 40),
    layout=_CHECKSUM,
    page_bytes=integer(PAGE_ALIGNMENT, multiple=PAGE_ALIGNMENT),
    optimizer=text(r"\S{1,200}"),
    weights=sequence(number(1e-30, 1e30), least=1),
    pages=table(
        index,
        row(
            integer(0),
            integer(0, multiple=PAGE_ALIGNMENT),
            integer(PAGE_ALIGNMENT, multiple=PAGE_ALIGNMENT),
            _CHECKSUM,
        ),
    ),
    scalars=table(index, table(text(), setting)),
    groups=sequence(record(params=sequence(integer(0)), settings=table(text(r"(?!params$)(?s:.*)"), setting))),
    random=record(
        python=row(integer(3, 3), row(*[_WORD] * 624, integer(0, 624)), schema.optional(number())),
        numpy=row(schema.one_of("MT19937"), integer(0, 624), integer(0, 1), number()),
    ),
    state_file=text(r"step[0-9]{12,}\.rank[0-9]{5,}\.[0-9a-f]{8}\.safetensors"),
    state_checksum=_CHECKSUM,
    extra=table(text(), schema.anything),
    own=table(text(), setting),
)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything that a rank needs to continue, except the bytes of the pages.

    `weights` are the shares of the paths, from which the slots follow; `pages` maps page index to version; `scalars`
    shard index to the optimizer's scalars; `groups` are parameters and settings of the param groups; `random` the
    states of Python's and NumPy's generators; the tensors (buffers, torch's generators) are in `state_file` beside
    the manifest; `extra` is the user's own; `own` is what the optimizer counts on itself, left
    out if there is nothing.
    """

    run_id: str
    step: int
    rank: int
    world_size: int
    created: float
    layout: str
    page_bytes: int
    optimizer: str
    weights: Sequence[float]
    pages: dict[int, Version]
    scalars: dict[int, dict[str, Any]]
    groups: Sequence[dict[str, Any]]
    random: dict[str, Any]
    state_file: str
    state_checksum: str
    extra: dict[str, Any]
    own: dict[str, Any] = field(default_factory=dict)

    @property
    def file_name(self) -> str:
        """Name of the file."""
        return Published(self.step, self.rank, self.world_size).file_name


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
    matches = ((file, _NAME.fullmatch(file.name)) for file in folder.glob("step*.json"))
    names = ((file, Published(*map(int, match.groups()))) for file, match in matches if match)
    return sorted(name for file, name in names if name.rank < name.world_size and name.file_name == file.name)


def complete_steps(published: Iterable[Published]) -> list[int]:
    """Return the steps that all their ranks have published, in order: only they are commits."""
    ranks = Counter((name.step, name.world_size) for name in set(published))
    return sorted({step for (step, world_size), number in ranks.items() if number == world_size})


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
    write_checked(folder / manifest.file_name, _encode(manifest))


def write_checked(target: Path, tree: Mapping[str, Any]) -> None:
    """Write plain data with its format and its checksum, durably."""
    body = json.dumps({"format": FORMAT, **tree}, sort_keys=True, separators=(",", ":"))
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
        CommitError: it cannot be read, is malformed, or does not match its checksum or its name.
    """

    def decode(body: Any) -> Manifest:
        values = _BODY({"own": {}, **body} if isinstance(body, dict) else body)
        pages = {page: Version(Extent(*place), int(digest, 16)) for page, (*place, digest) in values["pages"].items()}
        manifest = Manifest(**{**values, "pages": pages})
        _check_names(manifest, file)
        _check_extents(manifest)
        return manifest

    return read_checked(file, decode)


def _check_names(manifest: Manifest, file: Path) -> None:
    if manifest.rank >= manifest.world_size or manifest.file_name != file.name:
        raise ValueError(f"it is of rank {manifest.rank} of {manifest.world_size} at step {manifest.step}")
    if file.parent.parent.name != manifest.run_id:
        raise ValueError(f"it is of run {schema.brief(manifest.run_id)}")
    if not manifest.state_file.startswith(f"step{manifest.step:012d}.rank{manifest.rank:05d}."):
        raise ValueError(f"state_file: {manifest.state_file} is of another commit")


def _check_extents(manifest: Manifest) -> None:
    for page, (path, offset, length) in ((page, version.extent) for page, version in manifest.pages.items()):
        if path >= len(manifest.weights) or length > manifest.page_bytes or offset + length > schema.MOST:
            raise ValueError(f"page {page} cannot be {length} bytes at offset {offset} of path {path}")
    for (path, offset, length), after in pairwise(sorted(version.extent for version in manifest.pages.values())):
        if after.path == path and after.offset < offset + length:
            raise ValueError(f"two pages share the bytes at offset {after.offset} of path {path}")


def check_pages(manifest: Manifest, layout: Layout, folder: RunFolder) -> None:
    """Check that a commit has the pages of a layout, all of them and each of its size, within the run's data files.

    Raises:
        CommitError: it does not, or it lies on another number of paths; the file is named.
    """
    file = folder.commits / manifest.file_name
    if len(manifest.weights) != len(folder.roots):
        raise CommitError(
            f"run {manifest.run_id} lies on {len(manifest.weights)} paths, {len(folder.roots)} were named; name them "
            "all, in the order of storage.paths"
        )
    expected = {page.index: page.nbytes for page in layout.pages if page.role is not Role.GRAD}
    if {page: version.extent.length for page, version in manifest.pages.items()} != expected:
        raise CommitError(f"{file} is malformed: its pages are not those of the run's layout")
    grouped = (shard for group in manifest.groups for shard in group["params"])
    if max((*manifest.scalars, *grouped), default=-1) >= len(layout.shards):
        raise CommitError(f"{file} is malformed: its scalars or groups are of parameters that the layout lacks")
    ends = [0] * len(folder.roots)
    for path, offset, length in (version.extent for version in manifest.pages.values()):
        ends[path] = max(ends[path], offset + length)
    for path, end in enumerate(ends):
        data = folder.data_file(path, manifest.rank)
        size = data.stat().st_size if data.is_file() else 0
        if size < end:
            raise CommitError(f"{file} names {end} bytes of {data}, which has {size}")


def read_checked(file: Path, decode: Callable[[Any], T]) -> T:
    """Return what `decode` makes of the data that `write_checked` wrote; it raises `ValueError` if it cannot use it.

    Raises:
        CommitError: the file cannot be read, does not match its checksum, has another format or cannot be used.
    """
    with using(file):
        outer = _ENVELOPE(_parse(_content(file)))
        if checksum_of(outer["body"].encode()) != outer["checksum"]:
            raise CommitError(f"{file} does not match its checksum; resume from another commit")
        body = schema.table(schema.anything, schema.anything)(_parse(outer["body"]))
        if (found := body.pop("format", None)) != FORMAT or type(found) is not int:
            raise CommitError(f"{file} has format {schema.brief(found)}, this version reads {FORMAT}")
        return decode(body)


@contextmanager
def using(file: Path) -> Iterator[None]:
    """Turn what is wrong with the content of a file into a `CommitError` that names it."""
    try:
        yield
    except OSError as error:
        raise CommitError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CommitError(f"{file} is malformed: {error}") from error


def _content(file: Path) -> bytes:
    if file.exists() and not file.is_file():  # a pipe would be waited for
        raise ValueError("it is not a file")
    return file.read_bytes()


def _parse(content: str | bytes) -> Any:
    return json.loads(content, object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    tree = dict(pairs)
    if len(tree) != len(pairs):
        raise ValueError("a key is there twice")
    return tree


def read_state_file(folder: Path, manifest: Manifest) -> bytes:
    """Return the content of a commit's state file.

    Raises:
        CommitError: it is missing or does not match its checksum.
    """
    file = folder / manifest.state_file
    with using(file):
        data = _content(file)
    if checksum_of(data) != manifest.state_checksum:
        raise CommitError(f"state file {file} of the commit does not match its checksum")
    return data


def _encode(manifest: Manifest) -> dict[str, Any]:
    pages = {
        str(page): [*version.extent, f"{version.checksum:016x}"] for page, version in sorted(manifest.pages.items())
    }
    tree = {**{field.name: getattr(manifest, field.name) for field in fields(manifest)}, "pages": pages}
    if not manifest.own:
        del tree["own"]
    return tree
