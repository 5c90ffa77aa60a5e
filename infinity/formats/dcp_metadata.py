"""Reads the `.metadata` of a folder of `torch.distributed.checkpoint` without running anything that it says.

The file is a pickle, which can name any function of any module to be called. This reader admits the few names that
such metadata are made of, and none of them is the real one: records that only hold what the pickle puts into them are
made instead, and what is in them is checked before the real metadata are made of it.
"""

from __future__ import annotations

import io
import math
import os
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from infinity.untrusted_files import read_regular

_MOST = 1 << 30  # bytes of metadata, which take some hundred for a slice of a tensor
_METADATA, _FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
_RECORDS = {
    *((_METADATA, kind.__name__) for kind in (BytesStorageMetadata, ChunkStorageMetadata, Metadata, MetadataIndex)),
    *((_METADATA, kind.__name__) for kind in (TensorProperties, TensorStorageMetadata)),
    (_METADATA, "StorageMeta"),
    (_FILES, "_StorageInfo"),
}


class _Record:
    """An object of a pickle: the name of its class, and its state."""

    __slots__ = ("state",)
    kind = ""

    def __init__(self) -> None:
        self.state: Any = {}

    def __new__(cls) -> _Record:
        made = super().__new__(cls)
        made.state = {}
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __hash__(self) -> int:  # a `MetadataIndex` is a key before it has its state
        return id(self)


class _Value:
    """A call whose result is not needed, or is its argument."""

    __slots__ = ("_result",)

    def __init__(self, result: Callable[..., Any]) -> None:
        self._result = result

    def __call__(self, *arguments: Any) -> Any:
        return self._result(*arguments)


class _Unpickler(pickle.Unpickler):
    """Admits what metadata are made of, and refuses every other name."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _RECORDS:
            return type(name, (_Record,), {"__slots__": (), "kind": name})
        if (module, name) == ("torch", "Size"):
            return tuple
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if (module, name) in ((_METADATA, "_MEM_FORMAT_ENCODING"), ("torch.serialization", "_get_layout")):
            return _Value(lambda code: code)
        if module in ("pathlib", "pathlib._local") and name in ("PosixPath", "PurePosixPath", "Path"):
            return _Value(lambda *parts: "/".join(map(str, parts)))
        raise pickle.UnpicklingError(
            f"it names {module}.{name}, which is no part of a checkpoint's metadata and could run code"
        )


@dataclass(frozen=True)
class StoredItem:
    """Where an item lies; what `FileSystemReader` reads of torch's own `_StorageInfo`."""

    relative_path: str
    """Of the file, in the checkpoint's folder."""
    offset: int
    """Of its first byte in the file."""
    length: int
    """Bytes."""
    transform_descriptors: tuple[str, ...]
    """What was done to the bytes; empty: nothing."""


def read_metadata(file: Path) -> Metadata:
    """Return the metadata of a checkpoint, whose files are in the folder of this one.

    Raises:
        OSError: it cannot be read.
        pickle.UnpicklingError, ValueError, EOFError: it is malformed, names what is no metadata, or a file elsewhere.
    """
    content = read_regular(os.path.realpath(file), _MOST)  # caches of downloads have links in the place of files
    found = _Unpickler(io.BytesIO(content)).load()
    state = _state(found, "Metadata")
    return Metadata(
        state_dict_metadata={_text(key): _entry(entry) for key, entry in _table(state["state_dict_metadata"])},
        planner_data=_paths(state.get("planner_data")),
        storage_data={_index(key): _item(item) for key, item in _table(state["storage_data"])},
    )


def _state(record: Any, kind: str) -> Mapping[str, Any]:
    if not isinstance(record, _Record) or record.kind != kind or not isinstance(record.state, dict):
        raise ValueError(f"there is no {kind} where one is to be")
    return record.state


def _table(value: Any) -> Iterable[tuple[Any, Any]]:
    if not isinstance(value, dict):
        raise ValueError("there is no table where one is to be")
    return value.items()


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("there is no text where one is to be")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError("there is no number where one is to be")
    return value


def _size(value: Any) -> torch.Size:
    if not isinstance(value, tuple):
        raise ValueError("there is no size where one is to be")
    return torch.Size([_count(item) for item in value])


def _entry(entry: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if isinstance(entry, _Record) and entry.kind == "BytesStorageMetadata":
        return BytesStorageMetadata()
    state = _state(entry, "TensorStorageMetadata")
    properties = state["properties"]
    if not isinstance(properties, _Record) or not isinstance(properties.state, tuple):
        raise ValueError("there are no properties of a tensor where they are to be")
    dtype = properties.state[0]
    if not isinstance(dtype, torch.dtype):
        raise ValueError("there is no dtype where one is to be")
    size = _size(state["size"])
    states = [_state(chunk, "ChunkStorageMetadata") for chunk in state["chunks"]]
    chunks = [ChunkStorageMetadata(_size(chunk["offsets"]), _size(chunk["sizes"])) for chunk in states]
    _check_chunks(size, chunks)
    return TensorStorageMetadata(properties=TensorProperties(dtype=dtype), size=size, chunks=chunks)


def _check_chunks(size: torch.Size, chunks: Sequence[ChunkStorageMetadata]) -> None:
    """Check that chunks lie inside of their tensor, and no element is in two: as many elements are all then."""
    for chunk in chunks:
        if not len(chunk.offsets) == len(chunk.sizes) == len(size):
            raise ValueError("a chunk has another number of dimensions than its tensor")
        if any(first + count > most for first, count, most in zip(chunk.offsets, chunk.sizes, size, strict=True)):
            raise ValueError("a chunk is not inside of its tensor")
    cut = sorted(range(len(size)), key=lambda dim: -len({chunk.offsets[dim] for chunk in chunks}))[:1]
    filled = [chunk for chunk in chunks if math.prod(chunk.sizes)]
    filled.sort(key=lambda chunk: [chunk.offsets[dim] for dim in cut])  # along the dimension that is cut most often
    for position, one in enumerate(filled):
        for other in filled[position + 1 :]:
            if any(other.offsets[dim] >= one.offsets[dim] + one.sizes[dim] for dim in cut):
                break  # nor does any behind it meet this one
            if all(
                a < b + n and b < a + m
                for a, m, b, n in zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
            ):
                raise ValueError("an element is in two chunks of its tensor")


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
        raise ValueError(f"it names {str(path)[:200]!r}, which is not in the folder")
    transforms = tuple(_text(name) for name in state.get("transform_descriptors") or ())
    return StoredItem(str(path), _count(state["offset"]), _count(state["length"]), transforms)


def _paths(value: Any) -> dict[str, tuple[str | int, ...]] | None:
    """Return where in the state dict each key stands: names of mappings and numbers in lists."""
    if value is None:
        return None
    paths = {_text(key): path for key, path in _table(value)}
    if not all(isinstance(path, tuple) and all(type(part) in (str, int) for part in path) for path in paths.values()):
        raise ValueError("there is no path where one is to be")
    return paths
