"""Commits out, in the ecosystem's formats."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from infinity.checkpoint.durable import NewFolder, sync_file
from infinity.checkpoint.reader import CommitReader
from infinity.errors import ConfigError
from infinity.fsdp import private

_INDEX = "model.safetensors.index.json"


def digest_of(value: torch.Tensor | BytesIO) -> int:
    """Return a digest of the bytes of a tensor on the CPU, or of a file in memory."""
    if isinstance(value, BytesIO):
        return int(xxhash.xxh3_64_intdigest(value.getbuffer()))
    return int(xxhash.xxh3_64_intdigest(value.contiguous().reshape(-1).view(torch.uint8).numpy().data))


def _save(tensors: Mapping[str, torch.Tensor], file: Path) -> None:
    """Write a file of safetensors, and compare what is on the drive with what was written.

    Raises:
        ConfigError: it cannot be written, or is something else.
    """
    try:
        save_file(dict(tensors), file, metadata={"format": "pt"})
        sync_file(file)
        with safe_open(file, framework="pt") as found:
            good = found.keys() == sorted(tensors) and all(
                digest_of(found.get_tensor(name)) == digest_of(value) for name, value in tensors.items()
            )
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{file} cannot be written: {getattr(error, 'strerror', None) or error}") from error
    if not good:
        raise ConfigError(f"{file} is not what was written; look after that drive")


def cut(sizes: Sequence[int], most: int) -> list[list[int]]:
    """Return positions file by file, in order: at most `most` bytes in each, or one that is larger."""
    files: list[list[int]] = [[]]
    filled = 0
    for position, size in enumerate(sizes):
        if files[-1] and filled + size > most:
            files.append([])
            filled = 0
        files[-1].append(position)
        filled += size
    return files


def export_safetensors(
    reader: CommitReader,
    folder: Path,
    *,
    config: Mapping[str, Any] | None,
    dtype: torch.dtype | None = None,
    file_bytes: int,
    advance: Callable[[int], None] = lambda _: None,
) -> list[Path]:
    """Write a folder that `from_pretrained` loads: weights in one or several files, their index, config.json.

    A tied parameter is written once, under the first of its names, as `save_pretrained` does. Memory is that of one
    file. Every file is read back and compared; the folder is there when all of it is durable.

    Args:
        folder: new, or empty.
        config: content of config.json; None writes none.
        dtype: of floating-point weights; by default as they are trained.
        file_bytes: most bytes of weights per file; a larger parameter gets a file of its own.
        advance: told the bytes of every parameter that was written.

    Raises:
        ConfigError: the folder is not empty or cannot be written to, or what is read back is something else.
        StorageError, CorruptPageError, CommitError: the commit cannot be read.
    """
    sizes = [reader.nbytes(index, dtype) for index in range(len(reader.tensors))]
    with NewFolder(folder, sum(sizes)) as partial:
        written = _write_safetensors(reader, partial, config, dtype, file_bytes, sizes, advance)
    return [folder / file.name for file in written]


def _write_safetensors(
    reader: CommitReader,
    folder: Path,
    config: Mapping[str, Any] | None,
    dtype: torch.dtype | None,
    file_bytes: int,
    sizes: Sequence[int],
    advance: Callable[[int], None],
) -> list[Path]:
    """Write the files; what is needed to load several comes last."""
    groups = cut(sizes, file_bytes)
    weight_map: dict[str, str] = {}
    written: list[Path] = []
    for number, group in enumerate(groups, 1):
        single = len(groups) == 1
        name = "model.safetensors" if single else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        tensors: dict[str, torch.Tensor] = {}
        for index in group:
            value = reader.read(index)
            if dtype is not None and value.is_floating_point():
                value = value.to(dtype)
            tensors[private.unwrapped_name(reader.tensors[index].names[0])] = value.contiguous()
            advance(sizes[index])
        if number == len(groups):
            tensors.update((private.unwrapped_name(key), value.contiguous()) for key, value in reader.buffers())
        _save(tensors, folder / name)
        weight_map.update(dict.fromkeys(tensors, name))
        written.append(folder / name)
    if config is not None:
        config = {**config, "dtype": str(dtype).removeprefix("torch.")} if dtype is not None else config
        _write_json(folder / "config.json", config)
        written.append(folder / "config.json")
    if len(groups) > 1:
        index_tree = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
        _write_json(folder / _INDEX, index_tree)
        written.append(folder / _INDEX)
    return written


def _write_json(file: Path, tree: Mapping[str, Any]) -> None:
    """Write JSON, and compare what is on the drive with it. Raises `ConfigError`."""
    text = json.dumps(tree, indent=2) + "\n"
    try:
        file.write_text(text)
        sync_file(file)
        good = file.read_text() == text
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}") from error
    if not good:
        raise ConfigError(f"{file} is not what was written; look after that drive")
