"""Checkpoint manifests: one JSON file per rank, with everything needed to read the rank's pages.

docs/reference/on-disk-format.md describes the format.

[Note: identity of a checkpoint] Every checkpoint has its own identity, which is part of the file names and manifests of
all its ranks. If a step is checkpointed again, or is checkpointed on another branch of the run, the result is a
different checkpoint. Therefore manifests of different checkpoints are never combined, and no checkpoint is replaced
before all ranks have published the next one.

Readers trust no input. They validate every field against `_BODY`, check the fields against each other and against the
file name, and check the extents against the layout and the data files. Any mismatch raises a `CheckpointError` that
names the file.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import time
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
from infinity.checkpoint.parts import Part
from infinity.checkpoint.values import load_values, save_extra, save_settings
from infinity.content.format import Role
from infinity.content.layout import PAGE_ALIGNMENT, Layout
from infinity.errors import CheckpointError
from infinity.schema import MOST, brief, index, integer, number, record, row, sequence, table, text
from infinity.store.extents import Extent
from infinity.store.folder import RunFolder
from infinity.store.page_store import Version
from infinity.untrusted_files import read_regular

FORMAT = 4
_MOST = 1 << 30  # maximum bytes of a manifest, which uses about 100 per page; larger files are not read into memory
MOST_STATE = 1 << 40  # maximum bytes of a state file, which contains the model's buffers
_NAME = re.compile(r"step(\d{12,})\.rank(\d{5,})-of-(\d{5,})\.([0-9a-f]{24})\.json", re.ASCII)
_CHECKSUM = text("[0-9a-f]{16}")
_WORD = integer(0, (1 << 32) - 1)
_PAGE = row(
    integer(0),
    integer(0, multiple=PAGE_ALIGNMENT),
    integer(PAGE_ALIGNMENT, multiple=PAGE_ALIGNMENT),
    _CHECKSUM,
)
_PART = row(text(r"[!-~]{1,255}"), _CHECKSUM, _CHECKSUM, schema.optional(integer(0)))


def _version(value: Any) -> Version:
    """Parse [path, offset, length, checksum], the location and checksum of a page version."""
    *place, digest = _PAGE(value)
    return Version(Extent(*place), int(digest, 16))


def _part(value: Any) -> Part:
    """Parse [host, slices, content, replica], the part of one rank."""
    return Part(*_PART(value))


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
    stripe_weights=sequence(number(1e-30, 1e30), least=1),
    pages=table(index, _version),
    scalars=table(index, table(text(), schema.anything)),
    groups=sequence(record(params=sequence(integer(0)), settings=table(text(r"(?!params$)(?s:.*)"), schema.anything))),
    random=record(
        python=row(integer(3, 3), row(*[_WORD] * 624, integer(0, 624)), schema.optional(number())),
        numpy=row(schema.one_of("MT19937"), integer(0, 624), integer(0, 1), number()),
    ),
    state_checksum=_CHECKSUM,
    extra=table(text(), schema.anything),
    own=table(text(), schema.anything),
    updated_on=text(r"[a-z]{1,40}"),
    parts=sequence(_part),
)


@dataclass(frozen=True, order=True)
class CheckpointName:
    """Properties that all manifests of a checkpoint share. Sorts by step, then by age."""

    step: int
    """Number of optimizer steps since the start of the run."""
    identity: str
    """24 hexadecimal digits, greater than the identity of every earlier checkpoint."""
    world_size: int
    """Number of ranks. Each rank has a manifest."""

    def of(self, rank: int) -> Published:
        """Return the name of a rank's manifest."""
        return Published(self.step, self.identity, self.world_size, rank)

    def __str__(self) -> str:
        return f"checkpoint {self.identity} of step {self.step}"


@dataclass(frozen=True, order=True)
class Published:
    """Parsed name of a manifest, which shows that a rank has published its part of a checkpoint."""

    step: int
    """Step of the checkpoint."""
    identity: str
    """Identity of the checkpoint."""
    world_size: int
    """Number of ranks that have a manifest of the checkpoint."""
    rank: int
    """Rank that wrote the manifest."""

    @property
    def checkpoint(self) -> CheckpointName:
        """Checkpoint that the manifest belongs to."""
        return CheckpointName(self.step, self.identity, self.world_size)

    @property
    def file_name(self) -> str:
        """File name of the manifest."""
        return f"step{self.step:012d}.rank{self.rank:05d}-of-{self.world_size:05d}.{self.identity}.json"

    @property
    def state_file(self) -> str:
        """File name of the state file."""
        return f"step{self.step:012d}.rank{self.rank:05d}.{self.identity}.safetensors"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything that a rank needs to resume, except the contents of its pages.

    Attributes:
        run_id: Run id, which is also the name of the run folders.
        step: Number of completed optimizer steps.
        identity: Identity of the checkpoint. [Note: identity of a checkpoint]
        rank: Rank that wrote this part of the checkpoint.
        world_size: Number of ranks of the run.
        created: Creation time, in seconds of Unix time.
        description: Description of the contents of the pages.
        optimizer: Name of the optimizer class.
        stripe_weights: Stripe weights of the paths, which determine the slots in the data files.
        pages: Version of every page except gradient pages, by page index.
        scalars: Scalar optimizer states, by shard index.
        groups: Parameter groups of the optimizer, whose `params` are shard indices.
        random: States of Python's and NumPy's random generators. Tensors (buffers and torch's random states) are in the
            state file.
        state_checksum: Checksum of the state file, 16 hexadecimal digits.
        extra: User data.
        own: Persistent attributes of the optimizer object, such as counters.
        updated_on: Type of the device that ran updates, e.g. ``cpu``. A different type would produce different bits.
        parts: Host, slices, content and replica of all ranks, by rank.
    """

    run_id: str
    step: int
    identity: str
    rank: int
    world_size: int
    created: float
    description: RunDescription
    optimizer: str
    stripe_weights: Sequence[float]
    pages: dict[int, Version]
    scalars: dict[int, dict[str, Any]]
    groups: Sequence[dict[str, Any]]
    random: dict[str, Any]
    state_checksum: str
    extra: dict[str, Any]
    parts: Sequence[Part]
    own: dict[str, Any] = field(default_factory=dict)
    updated_on: str = "cpu"

    @property
    def name(self) -> Published:
        """Parsed file name of the manifest."""
        return Published(self.step, self.identity, self.world_size, self.rank)

    @property
    def file_name(self) -> str:
        """File name of the manifest."""
        return self.name.file_name

    @property
    def state_file(self) -> str:
        """File name of the state file in the same folder."""
        return self.name.state_file

    @property
    def layout(self) -> Layout:
        """Page layout of the rank."""
        return self.description.layout


def new_identity(after: str) -> str:
    """Return a unique identity that sorts after the given one.

    The first half is the time in milliseconds; the second half is random.

    Args:
        after: Identity of an earlier checkpoint, or an empty string.
    """
    # Greater than `after` even if the clock was set back, because the newest checkpoint is the one that sorts last.
    now = max(time.time_ns() // 1_000_000, int(after[:12] or "0", 16) + 1)
    return f"{now:012x}{secrets.randbits(48):012x}"


def published_in(folder: Path) -> list[Published]:
    """Return the published manifests in a checkpoint folder, sorted. Other files are ignored. Raises `OSError`."""
    return published_among(names_in(folder))


def published_among(names: Iterable[str]) -> list[Published]:
    """Return the published manifests among the names of files, sorted. Other names are ignored."""
    found = []
    for file_name in names:
        if match := _NAME.fullmatch(file_name):
            step, rank, world_size, identity = match.groups()
            name = Published(int(step), identity, int(world_size), int(rank))
            if name.rank < name.world_size and name.file_name == file_name:
                found.append(name)
    return sorted(found)


def names_in(folder: Path) -> list[str]:
    """Return the names in a folder, or an empty list if another rank has removed it. Raises `OSError`."""
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []


def left_over(folder: Path, published: Iterable[Published]) -> list[Path]:
    """Return the state files without a manifest, left by an interrupted checkpoint or a lost manifest.

    Args:
        folder: Checkpoint folder of the run.
        published: Manifests in the folder.
    """
    known = {name.state_file for name in published}
    return [
        folder / name for name in sorted(names_in(folder)) if fnmatch(name, "step*.safetensors") and name not in known
    ]


def checksum_of(data: bytes | bytearray) -> str:
    """Return the checksum that protects manifests and state files."""
    return f"{xxhash.xxh3_64_intdigest(data):016x}"


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Publish a manifest atomically: after a failure, the file does not exist.

    Before the file is renamed, the written bytes are read back and validated as in `read_manifest`.

    Raises:
        CheckpointError: if a reader would reject the manifest.
        OSError: if the file system fails.
    """
    target = folder / manifest.file_name
    body = json.dumps({"format": FORMAT, **_encode(manifest)}, sort_keys=True, separators=(",", ":"))
    envelope = json.dumps({"checksum": checksum_of(body.encode()), "body": body})
    if len(envelope) > _MOST:
        raise CheckpointError(f"{target} would need {len(envelope)} bytes, but the limit is {_MOST}. Use larger pages.")
    # Validated before the rename, so that an unreadable manifest never replaces an earlier checkpoint.
    write_durably(target, envelope.encode(), check=partial(decode_manifest, target))


def read_manifest(file: Path, *, decode: bool = True) -> Manifest:
    """Read and validate a manifest.

    Args:
        file: Manifest.
        decode: If ``False``, `extra`, `own`, `scalars` and `groups` are returned as they are stored, because decoding
            their tensors imports torch.

    Raises:
        CheckpointError: if the manifest cannot be read, is malformed, or does not match its checksum or its name.
    """
    return decode_manifest(file, content_of(file), decode=decode)


def content_of(file: Path) -> bytes:
    """Return the contents of a manifest without validating them. Raises `CheckpointError`."""
    with using(file):
        return read_regular(file, _MOST)


def decode_manifest(file: Path, content: bytes | bytearray, *, decode: bool = True) -> Manifest:
    """Validate the contents of a manifest. See `read_manifest`; `file` is the name of the manifest."""
    with using(file):
        outer = _ENVELOPE(_parse(content))
        if checksum_of(outer["body"].encode()) != outer["checksum"]:
            raise CheckpointError(f"{file} does not match its checksum. Resume from another checkpoint.")
        body = table(schema.anything, schema.anything)(_parse(outer["body"]))
        if (found := body.pop("format", None)) != FORMAT or type(found) is not int:
            raise CheckpointError(
                f"{file} has format {brief(found)}, but this version reads format {FORMAT}. Use the infinity version "
                "that wrote it."
            )
        values = _BODY(body)
        layout, page_bytes = values.pop("layout"), values.pop("page_bytes")
        values["description"] = RunDescription.from_plain(values["description"], page_bytes)
        if decode:
            values["extra"], values["own"] = load_values(values["extra"]), load_values(values["own"])
            values["scalars"] = {shard: load_values(scalars) for shard, scalars in values["scalars"].items()}
            values["groups"] = [
                {**load_values(group["settings"]), "params": group["params"]} for group in values["groups"]
            ]
        manifest = Manifest(**values)
        _check_names(manifest, file)
        if manifest.layout.fingerprint != layout:
            raise ValueError(f"its description has layout {manifest.layout.fingerprint}, but it records {layout}")
        _check_extents(manifest)
        _check_indices(manifest)
        return manifest


def _check_names(manifest: Manifest, file: Path) -> None:
    if manifest.rank >= manifest.world_size or manifest.file_name != file.name:
        raise ValueError(
            f"its contents belong to rank {manifest.rank} of {manifest.world_size}, step {manifest.step}, checkpoint "
            f"{manifest.identity}"
        )
    if len(manifest.parts) != manifest.world_size:
        raise ValueError(f"it lists {len(manifest.parts)} parts for {manifest.world_size} ranks")
    if file.parent.parent.name != manifest.run_id:
        raise ValueError(f"it belongs to run {brief(manifest.run_id)}")


def _check_extents(manifest: Manifest) -> None:
    most = manifest.layout.page_bytes
    for page, (path, offset, length) in ((page, version.extent) for page, version in manifest.pages.items()):
        if path >= len(manifest.stripe_weights) or length > most or offset + length > MOST:
            raise ValueError(f"page {page} has an invalid extent: {length} bytes at offset {offset} of path {path}")
    for (path, offset, length), after in pairwise(sorted(version.extent for version in manifest.pages.values())):
        if after.path == path and after.offset < offset + length:
            raise ValueError(f"two pages share the bytes at offset {after.offset} of path {path}")


def _check_indices(manifest: Manifest) -> None:
    """Check that a checkpoint contains exactly the pages of its layout, with the right sizes, and no unknown
    parameters.
    """
    layout = manifest.layout
    expected = {page.index: page.nbytes for page in layout.pages if page.role is not Role.GRAD}
    if {page: version.extent.length for page, version in manifest.pages.items()} != expected:
        raise ValueError("its pages do not match the layout of the run")
    grouped = (shard for group in manifest.groups for shard in group["params"])
    if max((*manifest.scalars, *grouped), default=-1) >= len(layout.shards):
        raise ValueError("its scalars or groups refer to parameters that are not in the layout")


def check_pages(manifest: Manifest, folder: RunFolder) -> None:
    """Check that the pages of a checkpoint are within the run's data files.

    Raises:
        CheckpointError: if they are not, or if the checkpoint uses a different number of paths. The message names the
            file.
    """
    file = folder.checkpoints / manifest.file_name
    if len(manifest.stripe_weights) != len(folder.roots):
        raise CheckpointError(
            f"run {manifest.run_id} uses a different number of paths ({len(manifest.stripe_weights)} in its manifest, "
            f"{len(folder.roots)} given). List all of its paths, in the order of storage.paths."
        )
    ends = [0] * len(folder.roots)
    for path, offset, length in (version.extent for version in manifest.pages.values()):
        ends[path] = max(ends[path], offset + length)
    for path, end in enumerate(ends):
        data = folder.data_file(path, manifest.rank)
        size = data.stat().st_size if data.is_file() else 0
        if size < end:
            raise CheckpointError(f"{file} refers to {end} bytes of {data}, which has only {size}")


@contextmanager
def using(file: Path) -> Iterator[None]:
    """Convert errors that a file's contents cause in the ``with`` block to a `CheckpointError` that names the file.

    Raises:
        CheckpointError: instead of an `OSError`, `ValueError`, `MemoryError` or `RecursionError`.
    """
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
    except MemoryError as error:
        raise CheckpointError(f"{file} cannot be read: it does not fit into memory") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is malformed: {error}") from error


def _parse(content: str | bytes | bytearray) -> Any:
    return json.loads(content, object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    tree = dict(pairs)
    if len(tree) != len(pairs):
        raise ValueError("duplicate key")
    return tree


def read_state_file(folder: Path, manifest: Manifest) -> bytes:
    """Return the contents of a checkpoint's state file.

    Raises:
        CheckpointError: if the file is missing or does not match its checksum.
    """
    file = folder / manifest.state_file
    with using(file):
        data = read_regular(file, MOST_STATE)
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
        "scalars": {shard: save_settings(scalars) for shard, scalars in manifest.scalars.items()},
        "groups": [
            {
                "params": group["params"],
                "settings": save_settings({key: value for key, value in group.items() if key != "params"}),
            }
            for group in manifest.groups
        ],
        "extra": save_extra(manifest.extra),
        "own": save_settings(manifest.own),
        "layout": layout.fingerprint,
        "page_bytes": layout.page_bytes,
    }
