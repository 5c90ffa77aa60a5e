"""Restricted reader for the `.metadata` file of a `torch.distributed.checkpoint` folder.

The file is a pickle, which could call any function of any module. This reader permits only the names of the few classes
that such metadata consist of, and does not use these classes either: it creates records that store the unpickled state.
The state is validated, and then the metadata are created from it.
"""

from __future__ import annotations

import io
import math
import os
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from infinity.errors import CheckpointError
from infinity.untrusted_files import read_regular

METADATA: Final = ".metadata"
"""Name of the file that makes a folder a `torch.distributed.checkpoint` folder."""
_MAX_BYTES = 1 << 30
"""Maximum size of the metadata. They contain a few hundred bytes per slice of a tensor."""
_METADATA, _FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
_RECORDS = {
    *((_METADATA, kind.__name__) for kind in (BytesStorageMetadata, ChunkStorageMetadata, Metadata, MetadataIndex)),
    *((_METADATA, kind.__name__) for kind in (TensorProperties, TensorStorageMetadata)),
    (_METADATA, "StorageMeta"),
    (_FILES, "_StorageInfo"),
}


class _Record:
    """Unpickled object: the name of its class, and its state."""

    __slots__ = ("state",)
    kind = ""
    state: Any

    def __new__(cls) -> _Record:
        made = super().__new__(cls)
        made.state = {}
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    """Unpickler that raises an error for every name that is not part of such metadata."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _RECORDS:
            return type(name, (_Record,), {"__slots__": (), "kind": name})
        if (module, name) == ("torch", "Size"):
            return tuple
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if (module, name) in ((_METADATA, "_MEM_FORMAT_ENCODING"), ("torch.serialization", "_get_layout")):
            return lambda code: code  # the result is not used
        if module in ("pathlib", "pathlib._local") and name in ("PosixPath", "PurePosixPath", "Path"):
            return lambda *parts: "/".join(map(str, parts))
        raise pickle.UnpicklingError(
            f"it names {module}.{name}, which is not part of checkpoint metadata and could execute code"
        )


@dataclass(frozen=True)
class StoredItem:
    """Location of an item: the attributes of torch's `_StorageInfo` that `FileSystemReader` uses."""

    relative_path: str
    """Path of the file in the folder."""
    offset: int
    """Offset of the first byte in the file."""
    length: int
    """Size in bytes."""
    transform_descriptors: tuple[str, ...]
    """Transforms that were applied to the bytes."""


class MetadataReader(FileSystemReader):
    """`FileSystemReader` that reads the metadata with `read_metadata`, once.

    Args:
        folder: folder to read.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder = folder
        self._metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata of the folder.

        Raises:
            CheckpointError: if they cannot be read, or a file is missing.
        """
        if self._metadata is None:
            file = self._folder / METADATA
            try:
                metadata = read_metadata(file)
                for name in sorted({item.relative_path for item in metadata.storage_data.values()}):
                    if not (self._folder / name).is_file():
                        raise ValueError(f"it refers to {name}, which is not a file")
            except OSError as error:
                raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
            except Exception as error:  # a malformed pickle raises various exceptions
                raise CheckpointError(f"{file} cannot be read: {type(error).__name__}: {error}") from error
            self._metadata = metadata
        return self._metadata


def read_metadata(file: Path) -> Metadata:
    """Return the metadata in a file.

    Raises:
        OSError: if the file cannot be read.
        pickle.UnpicklingError, ValueError, EOFError: if it is malformed, names anything that is not part of such
            metadata, or refers to a file outside of its folder.
    """
    content = read_regular(os.path.realpath(file), _MAX_BYTES)  # download caches contain symbolic links
    found = _Unpickler(io.BytesIO(content)).load()
    state = _state(found, "Metadata")
    return Metadata(
        state_dict_metadata={_text(key): _entry(entry) for key, entry in _table(state["state_dict_metadata"])},
        planner_data=_paths(state.get("planner_data")),
        storage_data={_index(key): _item(item) for key, item in _table(state["storage_data"])},
    )


def _state(record: Any, kind: str) -> Mapping[str, Any]:
    if not isinstance(record, _Record) or record.kind != kind or not isinstance(record.state, dict):
        raise ValueError(f"{kind} expected")
    return record.state


def _table(value: Any) -> Iterable[tuple[Any, Any]]:
    if not isinstance(value, dict):
        raise ValueError("dict expected")
    return value.items()


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("string expected")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError("number expected")
    return value


def _size(value: Any) -> torch.Size:
    if not isinstance(value, tuple):
        raise ValueError("size expected")
    return torch.Size([_count(item) for item in value])


def _entry(entry: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if isinstance(entry, _Record) and entry.kind == "BytesStorageMetadata":
        return BytesStorageMetadata()
    state = _state(entry, "TensorStorageMetadata")
    properties = state["properties"]
    if not isinstance(properties, _Record) or not isinstance(properties.state, tuple):
        raise ValueError("tensor properties expected")
    dtype = properties.state[0]
    if not isinstance(dtype, torch.dtype):
        raise ValueError("dtype expected")
    size = _size(state["size"])
    states = [_state(chunk, "ChunkStorageMetadata") for chunk in state["chunks"]]
    chunks = [ChunkStorageMetadata(_size(chunk["offsets"]), _size(chunk["sizes"])) for chunk in states]
    _check_chunks(size, chunks)
    return TensorStorageMetadata(properties=TensorProperties(dtype=dtype), size=size, chunks=chunks)


def _check_chunks(size: torch.Size, chunks: Sequence[ChunkStorageMetadata]) -> None:
    """Check that chunks do not exceed their tensor and do not overlap, so that their sizes tell if any are missing."""
    for chunk in chunks:
        if not len(chunk.offsets) == len(chunk.sizes) == len(size):
            raise ValueError("a chunk and its tensor have different numbers of dimensions")
        if any(first + count > most for first, count, most in zip(chunk.offsets, chunk.sizes, size, strict=True)):
            raise ValueError("a chunk exceeds its tensor")
    cut = sorted(range(len(size)), key=lambda dim: -len({chunk.offsets[dim] for chunk in chunks}))[:1]
    filled = [chunk for chunk in chunks if math.prod(chunk.sizes)]
    filled.sort(key=lambda chunk: [chunk.offsets[dim] for dim in cut])  # along the dimension that is split most often
    for position, one in enumerate(filled):
        for other in filled[position + 1 :]:
            if any(other.offsets[dim] >= one.offsets[dim] + one.sizes[dim] for dim in cut):
                break  # the following chunks do not overlap with this one either
            if all(
                a < b + n and b < a + m
                for a, m, b, n in zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
            ):
                raise ValueError("two chunks of a tensor overlap")


def _index(key: Any) -> MetadataIndex:
    state = _state(key, "MetadataIndex")
    offset, index = state.get("offset"), state.get("index")
    return MetadataIndex(
        _text(state["fqn"]), None if offset is None else _size(offset), None if index is None else _count(index)
    )


def _item(item: Any) -> StoredItem:
    state = _state(item, "_StorageInfo")
    path = PurePosixPath(_text(state["relative_path"]))
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"it names {str(path)[:200]!r}, which is outside of the folder")
    transforms = tuple(_text(name) for name in state.get("transform_descriptors") or ())
    return StoredItem(str(path), _count(state["offset"]), _count(state["length"]), transforms)


def _paths(value: Any) -> dict[str, tuple[str | int, ...]] | None:
    """Return the position of each key in the state dict: keys of dicts and indices of lists."""
    if value is None:
        return None
    paths = {_text(key): path for key, path in _table(value)}
    if not all(isinstance(path, tuple) and all(type(part) in (str, int) for part in path) for path in paths.values()):
        raise ValueError("path expected")
    return paths
