"""Restricted reader for the `.metadata` file of a `torch.distributed.checkpoint` folder.

The file is a pickle, which could call any function of any module. This reader permits only the names of the few classes
that such metadata consist of, and validates the result.
"""

from __future__ import annotations

import io
import math
import os
import pickle
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Final

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from infinity.errors import CheckpointError
from infinity.untrusted_files import read_regular

METADATA: Final = ".metadata"
"""Name of the file that makes a folder a `torch.distributed.checkpoint` folder."""
_MAX_BYTES = 1 << 30
"""Maximum size of the metadata. They contain a few hundred bytes per slice of a tensor."""
_CLASSES = {
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
}  # fmt: skip
"""Permitted classes. Their objects only store their state."""
_LAYOUTS = {str(value): value for value in vars(torch).values() if isinstance(value, torch.layout)}


class _Sealed(type):
    """Metaclass whose classes reject attribute assignment, because a pickle could otherwise modify every class that it
    names.
    """

    def __setattr__(cls, name: str, value: Any) -> None:
        raise AttributeError(f"{name} cannot be set")


class _MemoryFormat(int, metaclass=_Sealed):
    """Integer that equals a member of torch's enum of memory formats, which a pickle could modify."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return int(self) == getattr(other, "value", None)

    __hash__ = int.__hash__


class _Unpickler(pickle.Unpickler):
    """Unpickler that raises an error for every name that is not part of such metadata."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _CLASSES.get(module, ()):
            kind = super().find_class(module, name)
            return _Sealed(name, (kind,), {"__class__": kind})
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)
        if (module, name) == ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"):
            return _MemoryFormat
        if (module, name) == ("torch.serialization", "_get_layout"):
            return _LAYOUTS.get
        if module in ("pathlib", "pathlib._local") and name in ("PosixPath", "PurePosixPath", "Path"):
            return lambda *parts: "/".join(map(str, parts))
        raise pickle.UnpicklingError(
            f"it names {module}.{name}, which is not part of checkpoint metadata and could execute code"
        )


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
    if not isinstance(found, Metadata):
        raise ValueError("Metadata expected")
    for key, entry in found.state_dict_metadata.items():
        _expect(isinstance(key, str), "string")
        if not isinstance(entry, BytesStorageMetadata):
            _expect(isinstance(entry, TensorStorageMetadata), "tensor")
            _expect(isinstance(entry.properties.dtype, torch.dtype), "dtype")
            _check_chunks(entry.size, entry.chunks)
    for index, item in found.storage_data.items():
        _expect(isinstance(index, MetadataIndex) and isinstance(index.fqn, str), "index")
        _expect(index.offset is None or _is_size(index.offset), "size")
        _expect(type(item).__name__ == "_StorageInfo", "storage info")  # a private class of torch
        numbers = (item.offset, item.length, 0 if index.index is None else index.index)
        _expect(all(type(number) is int and number >= 0 for number in numbers), "number")
        transforms = item.transform_descriptors or ()
        _expect(isinstance(transforms, list | tuple) and all(isinstance(one, str) for one in transforms), "transform")
        path = PurePosixPath(item.relative_path)
        if path.is_absolute() or ".." in path.parts:
            raise ValueError(f"it names {str(path)[:200]!r}, which is outside of the folder")
    for key, parts in (found.planner_data or {}).items():
        _expect(isinstance(key, str) and isinstance(parts, tuple), "path")
        _expect(all(type(part) in (str, int) for part in parts), "path")
    return found


def _expect(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(f"{what} expected")


def _is_size(value: Any) -> bool:
    return isinstance(value, torch.Size) and all(item >= 0 for item in value)


def _check_chunks(size: torch.Size, chunks: Sequence[ChunkStorageMetadata]) -> None:
    """Check that chunks do not exceed their tensor and do not overlap, so that their sizes tell if any are missing."""
    _expect(_is_size(size), "size")
    for chunk in chunks:
        _expect(isinstance(chunk, ChunkStorageMetadata) and _is_size(chunk.offsets) and _is_size(chunk.sizes), "chunk")
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
