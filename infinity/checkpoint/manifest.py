"""The manifest of a checkpoint: one JSON file per rank, all that is needed to read its pages; docs/reference/on-disk-format.md.

[Note: the identity of a checkpoint] Every checkpoint has an identity of its own, which all its ranks have in the names
of their
files and in their manifests. A step that is checkpointed again, or on another branch of the run, is another checkpoint:
ranks
of one are never taken for ranks of the other, and none is replaced before all ranks have published the one after it.

A reader assumes nothing: every field is checked against `_BODY`, the fields against each other and the name of the
file, the extents against the layout and the data files. Whatever is wrong is a `CheckpointError` that names the file.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from fnmatch import fnmatch
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import xxhash

from infinity import schema
from infinity.checkpoint.description import DESCRIPTION, RunDescription
from infinity.checkpoint.durable import write_durably
from infinity.checkpoint.extra import load_extra, save_extra
from infinity.checkpoint.values import setting
from infinity.content.format import Role
from infinity.content.layout import PAGE_ALIGNMENT, Layout
from infinity.errors import CheckpointError
from infinity.schema import MOST, brief, index, integer, number, record, row, sequence, table, text
from infinity.store.extents import Extent
from infinity.store.folder import RunFolder
from infinity.store.page_store import Version
from infinity.untrusted_files import read_regular

FORMAT = 2
_MOST = 1 << 30  # bytes of a manifest, which takes about a hundred for a page; a longer one is not read into memory
_MOST_STATE = 1 << 40  # of a state file, which has the model's buffers
_NAME = re.compile(r"step(\d{12,})\.rank(\d{5,})-of-(\d{5,})(?:\.([0-9a-f]{24}))?\.json", re.ASCII)
_CHECKSUM = text("[0-9a-f]{16}")
_WORD = integer(0, (1 << 32) - 1)
_PAGE = row(
    integer(0),
    integer(0, multiple=PAGE_ALIGNMENT),
    integer(PAGE_ALIGNMENT, multiple=PAGE_ALIGNMENT),
    _CHECKSUM,
)


def _version(value: Any) -> Version:
    """Where the version of a page lies, and its checksum: [path, offset, length, checksum]."""
    *place, digest = _PAGE(value)
    return Version(Extent(*place), int(digest, 16))


_ENVELOPE = record(checksum=_CHECKSUM, body=text())
_BODY = record(
    run_id=text(),
    step=integer(0),
    identity=text("[0-9a-f]{24}"),
    rank=integer(0),
    world_size=integer(1),
    created=number(0, 1 << 40),
    layout=_CHECKSUM,
    page_bytes=integer(PAGE_ALIGNMENT, 1 << 40, multiple=PAGE_ALIGNMENT),
    description=DESCRIPTION,
    optimizer=text(r"\S{1,200}"),
    weights=sequence(number(1e-30, 1e30), least=1),
    pages=table(index, _version),
    scalars=table(index, table(text(), setting)),
    groups=sequence(record(params=sequence(integer(0)), settings=table(text(r"(?!params$)(?s:.*)"), setting))),
    random=record(
        python=row(integer(3, 3), row(*[_WORD] * 624, integer(0, 624)), schema.optional(number())),
        numpy=row(schema.one_of("MT19937"), integer(0, 624), integer(0, 1), number()),
    ),
    state_checksum=_CHECKSUM,
    extra=table(text(), schema.anything),
    own=table(text(), setting),
    updated_on=text(r"[a-z]{1,40}"),
)


@dataclass(frozen=True, order=True)
class CheckpointName:
    """What the manifests of one checkpoint have in common; sorts by step, then by age."""

    step: int
    """That it is of, counted from the begin of the run."""
    identity: str
    """24 hexadecimal digits; those of a later checkpoint are greater."""
    world_size: int
    """How many ranks have a manifest of it."""

    def of(self, rank: int) -> Published:
        """Return the name of the manifest of one rank."""
        return Published(self.step, self.identity, self.world_size, rank)

    def __str__(self) -> str:
        return f"checkpoint {self.identity} of step {self.step}"


@dataclass(frozen=True, order=True)
class Published:
    """What the name of a manifest says: this rank has published its part of this checkpoint."""

    step: int
    """That the checkpoint is of."""
    identity: str
    """Of the checkpoint; empty in names of format 1, which had none."""
    world_size: int
    """How many ranks have a manifest of the checkpoint."""
    rank: int
    """Whose manifest it is."""

    @property
    def checkpoint(self) -> CheckpointName:
        """The checkpoint."""
        return CheckpointName(self.step, self.identity, self.world_size)

    @property
    def file_name(self) -> str:
        """Name of the manifest."""
        identity = f".{self.identity}" if self.identity else ""
        return f"step{self.step:012d}.rank{self.rank:05d}-of-{self.world_size:05d}{identity}.json"

    @property
    def state_file(self) -> str:
        """Name of the state file."""
        return f"step{self.step:012d}.rank{self.rank:05d}.{self.identity}.safetensors"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything that a rank needs to continue, except the bytes of the pages.

    Attributes:
        run_id: of the run, and the name of its folders.
        step: optimizer steps that were done.
        identity: of the checkpoint [Note: the identity of a checkpoint].
        rank: whose part of the checkpoint this is.
        world_size: number of ranks.
        created: Unix time in seconds.
        description: what the pages hold.
        optimizer: name of its class.
        weights: shares of the paths, from which the slots follow; the name is that of the field on disk.
        pages: version by index of the page, gradients left out.
        scalars: of the optimizer, plain data by index of the shard.
        groups: of the optimizer: indices of shards (`params`) and `settings`, plain data.
        random: states of Python's and NumPy's generators. Tensors (buffers, torch's generators) are in the state file.
        state_checksum: of the state file, 16 hexadecimal digits.
        extra: the user's own.
        own: what the optimizer counts on itself.
        updated_on: type of the device that updates ran on, such as ``cpu``: another one has other bits.
    """

    run_id: str
    step: int
    identity: str
    rank: int
    world_size: int
    created: float
    description: RunDescription
    optimizer: str
    weights: Sequence[float]
    pages: dict[int, Version]
    scalars: dict[int, dict[str, Any]]
    groups: Sequence[dict[str, Any]]
    random: dict[str, Any]
    state_checksum: str
    extra: dict[str, Any]
    own: dict[str, Any] = field(default_factory=dict)
    updated_on: str = "cpu"

    @property
    def name(self) -> Published:
        """What the name of the file says."""
        return Published(self.step, self.identity, self.world_size, self.rank)

    @property
    def file_name(self) -> str:
        """Name of the file."""
        return self.name.file_name

    @property
    def state_file(self) -> str:
        """Name of the state file beside it."""
        return self.name.state_file

    @property
    def layout(self) -> Layout:
        """Which bytes lie in which page."""
        return self.description.layout


def new_identity(after: str) -> str:
    """Return an identity that no other checkpoint has, and that sorts behind the one given; that may be empty.

    The first half is the time in milliseconds, the second half is random.
    """
    now = max(time.time_ns() // 1_000_000, int(after[:12] or "0", 16) + 1)
    return f"{now:012x}{secrets.randbits(48):012x}"


def published_in(folder: Path) -> list[Published]:
    """Return what was published in a run's folder of checkpoints, in order;

    others are passed over. Raises `OSError`.
    """
    found = []
    for file_name in names_in(folder):
        if match := _NAME.fullmatch(file_name):
            step, rank, world_size, identity = match.groups()
            name = Published(int(step), identity or "", int(world_size), int(rank))
            if name.rank < name.world_size and name.file_name == file_name:
                found.append(name)
    return sorted(found)


def names_in(folder: Path) -> list[str]:
    """Return the names in a folder, none where there is none: another rank may have removed it. Raises `OSError`."""
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []


def left_over(folder: Path, published: Iterable[Published]) -> list[Path]:
    """Return state files of checkpoints of which no manifest is there: they were cut off, or a manifest was lost.

    Args:
        folder: of the run's checkpoints.
        published: what is in it.
    """
    names = list(published)
    known = {name.state_file for name in names}
    # Names of format 1 do not say which state file is theirs.
    unknown = {f"step{name.step:012d}.rank{name.rank:05d}" for name in names if not name.identity}
    found = sorted(name for name in names_in(folder) if fnmatch(name, "step*.safetensors"))
    return [folder / name for name in found if name not in known and ".".join(name.split(".")[:2]) not in unknown]


def complete_checkpoints(published: Iterable[Published]) -> list[CheckpointName]:
    """Return the checkpoints of which all ranks have published their part, in order: only they are checkpoints."""
    ranks = Counter(name.checkpoint for name in set(published))
    return sorted(checkpoint for checkpoint, number in ranks.items() if number == checkpoint.world_size)


def choose_checkpoint(run_id: str, checkpoints: Sequence[CheckpointName], step: int) -> CheckpointName:
    """Return the newest checkpoint, or the newest of a step.

    Args:
        checkpoints: in order.
        step: -1 is any.

    Raises:
        CheckpointError: it is not there; the steps that are there are listed.
    """
    found = [checkpoint for checkpoint in checkpoints if step in (-1, checkpoint.step)]
    if found:
        return found[-1]
    what = f"checkpoint of step {step}" if step >= 0 else "checkpoint"
    listed = ", ".join(map(str, sorted({checkpoint.step for checkpoint in checkpoints}))) or "none"
    raise CheckpointError(f"run {run_id} has no {what} of all its ranks (steps with a checkpoint: {listed})")


def checksum_of(data: bytes) -> str:
    """Return the checksum that protects manifests and state files."""
    return f"{xxhash.xxh3_64_intdigest(data):016x}"


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Publish a manifest: it is there completely, or it is not there.

    What was written is read back by the rules of `read_manifest` first.

    Raises:
        CheckpointError: it is not what a reader would take.
        OSError: the file system refused.
    """
    target = folder / manifest.file_name
    body = json.dumps({"format": FORMAT, **_encode(manifest)}, sort_keys=True, separators=(",", ":"))
    envelope = json.dumps({"checksum": checksum_of(body.encode()), "body": body})
    if len(envelope) > _MOST:
        raise CheckpointError(f"{target} would have {len(envelope)} bytes, at most {_MOST} are read; use larger pages")
    write_durably(target, envelope.encode(), check=partial(_decode, target))


def read_manifest(file: Path) -> Manifest:
    """Read and check a manifest.

    Raises:
        CheckpointError: it cannot be read, is malformed, or does not match its checksum or its name.
    """
    with using(file):
        content = read_regular(file, _MOST)
    return _decode(file, content)


def _decode(file: Path, content: bytes) -> Manifest:
    """Return the manifest that the content of a file is. Raises `CheckpointError`."""
    with using(file):
        outer = _ENVELOPE(_parse(content))
        if checksum_of(outer["body"].encode()) != outer["checksum"]:
            raise CheckpointError(f"{file} does not match its checksum; resume from another checkpoint")
        body = table(schema.anything, schema.anything)(_parse(outer["body"]))
        if (found := body.pop("format", None)) != FORMAT or type(found) is not int:
            raise CheckpointError(
                f"{file} has format {brief(found)}, this version reads {FORMAT}; use the version that wrote it"
            )
        values = _BODY(body)
        layout, page_bytes = values.pop("layout"), values.pop("page_bytes")
        values["description"] = RunDescription.from_plain(values["description"], page_bytes)
        values["extra"] = load_extra(values["extra"])
        manifest = Manifest(**values)
        _check_names(manifest, file)
        if manifest.layout.fingerprint != layout:
            raise ValueError(f"its description is of layout {manifest.layout.fingerprint}, its pages are of {layout}")
        _check_extents(manifest)
        _check_indices(manifest)
        return manifest


def _check_names(manifest: Manifest, file: Path) -> None:
    if manifest.rank >= manifest.world_size or manifest.file_name != file.name:
        raise ValueError(
            f"it is of rank {manifest.rank} of {manifest.world_size} at step {manifest.step}, checkpoint "
            f"{manifest.identity}"
        )
    if file.parent.parent.name != manifest.run_id:
        raise ValueError(f"it is of run {brief(manifest.run_id)}")


def _check_extents(manifest: Manifest) -> None:
    most = manifest.layout.page_bytes
    for page, (path, offset, length) in ((page, version.extent) for page, version in manifest.pages.items()):
        if path >= len(manifest.weights) or length > most or offset + length > MOST:
            raise ValueError(f"page {page} cannot be {length} bytes at offset {offset} of path {path}")
    for (path, offset, length), after in pairwise(sorted(version.extent for version in manifest.pages.values())):
        if after.path == path and after.offset < offset + length:
            raise ValueError(f"two pages share the bytes at offset {after.offset} of path {path}")


def _check_indices(manifest: Manifest) -> None:
    """Check that a checkpoint has the pages of its layout, all of them and each of its size, and no other
    parameters.
    """
    layout = manifest.layout
    expected = {page.index: page.nbytes for page in layout.pages if page.role is not Role.GRAD}
    if {page: version.extent.length for page, version in manifest.pages.items()} != expected:
        raise ValueError("its pages are not those of the run's layout")
    grouped = (shard for group in manifest.groups for shard in group["params"])
    if max((*manifest.scalars, *grouped), default=-1) >= len(layout.shards):
        raise ValueError("its scalars or groups are of parameters that the layout lacks")


def check_pages(manifest: Manifest, folder: RunFolder) -> None:
    """Check that the pages of a checkpoint are within the run's data files.

    Raises:
        CheckpointError: they are not, or the checkpoint lies on another number of paths; the file is named.
    """
    file = folder.checkpoints / manifest.file_name
    if len(manifest.weights) != len(folder.roots):
        raise CheckpointError(
            f"run {manifest.run_id} lies on {len(manifest.weights)} paths, {len(folder.roots)} were named; name them "
            "all, in the order of storage.paths"
        )
    ends = [0] * len(folder.roots)
    for path, offset, length in (version.extent for version in manifest.pages.values()):
        ends[path] = max(ends[path], offset + length)
    for path, end in enumerate(ends):
        data = folder.data_file(path, manifest.rank)
        size = data.stat().st_size if data.is_file() else 0
        if size < end:
            raise CheckpointError(f"{file} names {end} bytes of {data}, which has {size}")


@contextmanager
def using(file: Path) -> Iterator[None]:
    """Turn what is wrong with the content of a file, in the block, into a `CheckpointError` that names it.

    Raises:
        CheckpointError: for `OSError`, `ValueError`, `MemoryError` and `RecursionError`.
    """
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
    except MemoryError as error:
        raise CheckpointError(f"{file} cannot be read: it does not fit into memory") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is malformed: {error}") from error


def _parse(content: str | bytes) -> Any:
    return json.loads(content, object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    tree = dict(pairs)
    if len(tree) != len(pairs):
        raise ValueError("a key is there twice")
    return tree


def read_state_file(folder: Path, manifest: Manifest) -> bytes:
    """Return the content of a checkpoint's state file.

    Raises:
        CheckpointError: it is missing or does not match its checksum.
    """
    file = folder / manifest.state_file
    with using(file):
        data = read_regular(file, _MOST_STATE)
    if checksum_of(data) != manifest.state_checksum:
        raise CheckpointError(f"state file {file} of the checkpoint does not match its checksum")
    return data


def _encode(manifest: Manifest) -> dict[str, Any]:
    pages = {
        str(page): [*version.extent, f"{version.checksum:016x}"] for page, version in sorted(manifest.pages.items())
    }
    layout = manifest.layout
    return {
        **{field.name: getattr(manifest, field.name) for field in fields(manifest)},
        "pages": pages,
        "description": manifest.description.plain,
        "extra": save_extra(manifest.extra),
        "layout": layout.fingerprint,
        "page_bytes": layout.page_bytes,
    }
