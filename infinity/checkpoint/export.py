"""Commits out, in the ecosystem's formats."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from infinity.checkpoint.durable import write_durably
from infinity.checkpoint.reader import CommitReader
from infinity.errors import ConfigError
from infinity.fsdp import private

_INDEX = "model.safetensors.index.json"


def new_folder(folder: Path) -> None:
    """Make a folder, or take an empty one.

    Raises:
        ConfigError: it is not empty or cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError(f"{folder} is not empty; name a new folder")
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made: {error.strerror}") from error


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
    file; the index, without which the folder does not load, and config.json are written last.

    Args:
        folder: new, or empty.
        config: content of config.json; None writes none.
        dtype: of floating-point weights; by default as they are trained.
        file_bytes: most bytes of weights per file; a larger parameter gets a file of its own.
        advance: told the bytes of every parameter that was written.

    Raises:
        ConfigError: the folder is not empty or cannot be written to.
        StorageError, CorruptPageError, CommitError: the commit cannot be read.
    """
    new_folder(folder)
    sizes = [reader.nbytes(index, dtype) for index in range(len(reader.tensors))]
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
        try:
            save_file(tensors, folder / name, metadata={"format": "pt"})
        except OSError as error:
            raise ConfigError(f"{folder / name} cannot be written: {error.strerror}") from error
        weight_map.update(dict.fromkeys(tensors, name))
        written.append(folder / name)
    if config is not None:
        config = {**config, "dtype": str(dtype).removeprefix("torch.")} if dtype is not None else config
        write_durably(folder / "config.json", (json.dumps(config, indent=2) + "\n").encode())
        written.append(folder / "config.json")
    if len(groups) > 1:
        index_tree = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
        write_durably(folder / _INDEX, (json.dumps(index_tree, indent=2) + "\n").encode())
        written.append(folder / _INDEX)
    return written
