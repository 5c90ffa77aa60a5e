"""Export a checkpoint or a run in progress to a folder of safetensors files that transformers can load."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from infinity import torch_private
from infinity.checkpoint.durable import NewFolder, sync_file
from infinity.checkpoint.full_state import FullState
from infinity.errors import ConfigError
from infinity.formats import transformers_names as names
from infinity.formats.adapters import ADAPTER, ADAPTER_CONFIG, Adapter
from infinity.formats.companions import CONFIG, Companions
from infinity.formats.merged import MergedState
from infinity.formats.transformers_names import Conversion
from infinity.formats.weight_files import INDEX, SINGLE
from infinity.units import parse_size

FILE_BYTES = "1GiB"
"""Default limit for the total size of the tensors in one file."""


def file_size(value: int | str, *, name: str = "file_bytes") -> int:
    """Return the file size limit in bytes. Raises `ConfigError` if `value` is not a positive size."""
    found = parse_size(value, name=name)
    if found == 0:
        raise ConfigError(f"{name} {value} is not a valid file size; the default is {FILE_BYTES}")
    return found


def digest_of(value: torch.Tensor | BytesIO) -> int:
    """Return a digest of the bytes of a CPU tensor or an in-memory file."""
    if isinstance(value, BytesIO):
        return int(xxhash.xxh3_64_intdigest(value.getbuffer()))
    return int(xxhash.xxh3_64_intdigest(value.contiguous().reshape(-1).view(torch.uint8).numpy().data))


def _save(tensors: Mapping[str, torch.Tensor], file: Path) -> None:
    """Write a safetensors file, and verify it by reading it back.

    Raises:
        ConfigError: if the file cannot be written, or differs when it is read back.
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
        raise ConfigError(f"{file} differs from the data that was written; check the drive")


def cut(sizes: Sequence[int], most: int) -> list[list[int]]:
    """Divide items into consecutive files of at most `most` bytes. A larger item gets a separate file."""
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
    reader: FullState,
    folder: Path,
    *,
    config: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    merge: bool = False,
    file_bytes: int,
    advance: Callable[[int], None] = lambda _: None,
) -> list[Path]:
    """Write a folder for `from_pretrained`: weights in one or several files, their index, and config.json.

    Tensors have the names and shapes that `save_pretrained` would give them for the model in config.json: the renaming,
    fusing and splitting that transformers applies when loading is reversed, and a tied parameter is written once. The
    run's copies of the tokenizer and of the other files next to its initial weights are included.
    Without a config.json, or if its class is not from transformers, the model's own names are used. Peak memory is one
    file plus the input and output of one conversion. Every file is read back and compared. The folder only appears
    under its name when all files are durable.

    For a `PeftModel`, the folder contains the adapters under PEFT's names, for `PeftModel.from_pretrained`, or with
    `merge` the base model with the LoRA adapter folded into its weights.

    Args:
        reader: checkpoint or run to read.
        folder: target folder, which must be new or empty.
        config: content of config.json. Default: the run's copy. Without a copy, no config.json is written.
        dtype: dtype of floating-point weights. Default: the dtype in which they are trained.
        merge: whether to write the base model with the adapter instead of the adapter alone.
        file_bytes: limit for the weights in one file. A larger parameter gets a separate file.
        advance: function that is called with the size, in bytes, of every parameter that was read.

    Raises:
        ConfigError: if the folder is not empty or not writable, a file differs when it is read back, or config.json
            belongs to a different model.
        StorageError, CorruptPageError, CheckpointError: if the weights cannot be read.
    """
    kept = Companions.of_run(reader.checkpoints)
    if merge:
        reader = MergedState(reader, kept.adapters)
    elif kept.adapters:
        return _export_adapters(reader, kept.adapters, folder, dtype, advance)
    config = kept.config if config is None else config
    outgoing = _Outgoing(reader, config, kept.loaded_from, dtype, advance)
    with NewFolder(folder, sum(tensor.nbytes for _, _, tensor in outgoing.tensors)) as partial:
        written = _write_safetensors(outgoing, partial, config, kept.files, dtype, file_bytes)
    return [folder / file.relative_to(partial) for file in written]


def _write_safetensors(
    outgoing: _Outgoing,
    folder: Path,
    config: Mapping[str, Any] | None,
    beside: Mapping[str, Path],
    dtype: torch.dtype | None,
    file_bytes: int,
) -> list[Path]:
    groups = cut([tensor.nbytes for _, _, tensor in outgoing.tensors], file_bytes)
    weight_map: dict[str, str] = {}
    written: list[Path] = []
    for number, group in enumerate(groups, 1):
        name = SINGLE if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        tensors = dict(outgoing.read(index) for index in group)
        _save(tensors, folder / name)
        weight_map.update(dict.fromkeys(tensors, name))
        written.append(folder / name)
    for name, file in beside.items():
        try:
            content = file.read_bytes()
        except OSError as error:
            raise ConfigError(f"{file} cannot be read: {error.strerror}; remove the file, or repair it") from error
        (folder / name).parent.mkdir(exist_ok=True)
        _write(folder / name, content)
        written.append(folder / name)
    if config is not None:
        config = {**config, "dtype": str(dtype).removeprefix("torch.")} if dtype is not None else config
        _write(folder / CONFIG, (json.dumps(config, indent=2) + "\n").encode())
        written.append(folder / CONFIG)
    if len(groups) > 1:
        total = sum(tensor.nbytes for _, _, tensor in outgoing.tensors)
        index_tree = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write(folder / INDEX, (json.dumps(index_tree, indent=2) + "\n").encode())
        written.append(folder / INDEX)
    return written


def _export_adapters(
    reader: FullState,
    adapters: Sequence[Adapter],
    folder: Path,
    dtype: torch.dtype | None,
    advance: Callable[[int], None],
) -> list[Path]:
    """Write adapters as `PeftModel.save_pretrained` does. Adapters are small, so each is loaded into memory at once."""
    if unnamed := [adapter.name for adapter in adapters if adapter.tensors is None]:
        raise ConfigError(
            f"adapter {unnamed[0]} is computed from several parameters, which exports do not support; call "
            "model.save_pretrained(folder) during training"
        )
    outgoing = _Outgoing(reader, None, None, dtype, advance)
    written: list[Path] = []
    with NewFolder(folder, export_bytes(reader, dtype)) as partial:
        for adapter in adapters:
            place = Path() if adapter.name == "default" else Path(adapter.name)
            (partial / place).mkdir(exist_ok=True)
            tensors = {name: outgoing.value(source).contiguous() for name, source in (adapter.tensors or {}).items()}
            _save(tensors, partial / place / ADAPTER)
            _write(partial / place / ADAPTER_CONFIG, (json.dumps(adapter.config, indent=2) + "\n").encode())
            written += [place / ADAPTER, place / ADAPTER_CONFIG]
    return [folder / file for file in written]


def export_bytes(reader: FullState, dtype: torch.dtype | None = None, *, merge: bool = False) -> int:
    """Return the total size, in bytes, of the parameters that an export reads: the adapters if there are any and they
    are not merged, else all.

    Raises:
        ConfigError: if the run's copies of files for exports are malformed.
    """
    adapters = Companions.of_run(reader.checkpoints).adapters
    if merge:
        reader, adapters = MergedState(reader, adapters), ()
    chosen = {source for adapter in adapters for source in (adapter.tensors or {}).values()}
    return sum(
        reader.nbytes(index, dtype)
        for index, spec in enumerate(reader.tensors)
        if not adapters or chosen.intersection(map(torch_private.unwrapped_name, spec.names))
    )


def _write(file: Path, data: bytes) -> None:
    """Write a file, and verify it by reading it back. Raises `ConfigError`."""
    try:
        file.write_bytes(data)
        sync_file(file)
        good = file.read_bytes() == data
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}") from error
    if not good:
        raise ConfigError(f"{file} differs from the data that was written; check the drive")


class _Outgoing:
    """Tensors to export, and the parameters and buffers from which they are computed."""

    def __init__(
        self,
        reader: FullState,
        config: Mapping[str, Any] | None,
        loaded_from: Sequence[str] | None,
        dtype: torch.dtype | None,
        advance: Callable[[int], None],
    ) -> None:
        """Determine the tensors to write, without reading any page.

        Args:
            reader: checkpoint or run to read.
            config: configuration of a transformers model, or None for any other model.
            loaded_from: names in the checkpoint from which the model was loaded, if any.
            dtype: dtype of floating-point tensors in the export. None: the dtype in which they are trained.
            advance: function that is called with the number of bytes that were read.
        """
        self._reader, self._dtype, self._advance = reader, dtype, advance
        self._buffers = {torch_private.unwrapped_name(name): value for name, value in reader.buffers()}
        self._index = {  # index of each parameter, by all of its names
            torch_private.unwrapped_name(name): index
            for index, spec in enumerate(reader.tensors)
            for name in spec.names
        }
        conversions = self._conversions(config, loaded_from)
        self.tensors: list[tuple[Conversion, str, torch.Tensor]] = [
            (conversion, name, tensor) for conversion in conversions for name, tensor in conversion.targets.items()
        ]
        """Tensors to write, in order: conversion, name, and shape and dtype on the meta device."""
        # the targets of one conversion may be written to two files
        self._last: tuple[Conversion, dict[str, torch.Tensor]] | None = None

    def read(self, index: int) -> tuple[str, torch.Tensor]:
        """Return the name and value of a tensor. Tensors must be read in order."""
        conversion, name, _ = self.tensors[index]
        if self._last is None or self._last[0] is not conversion:
            self._last = None  # free the previous targets before the next conversion allocates memory
            self._last = (conversion, conversion.run({source: self.value(source) for source in conversion.sources}))
        return name, self._last[1].pop(name).contiguous()

    def value(self, name: str) -> torch.Tensor:
        if name in self._buffers:
            return self._buffers[name]
        index = self._index[name]
        value = self._reader.read(index)
        self._advance(self._reader.nbytes(index, self._dtype))
        return value.to(self._dtype) if self._dtype is not None and value.is_floating_point() else value

    def _like(self, name: str) -> torch.Tensor:
        if name in self._buffers:
            return self._buffers[name].to("meta")
        index = self._index[name]
        own = self._reader.dtype(index)
        dtype = self._dtype if self._dtype is not None and own.is_floating_point else own
        return torch.empty(self._reader.tensors[index].shape, dtype=dtype, device="meta")

    def _conversions(
        self, config: Mapping[str, Any] | None, loaded_from: Sequence[str] | None
    ) -> tuple[Conversion, ...]:
        own = [torch_private.unwrapped_name(spec.names[0]) for spec in self._reader.tensors] + [*self._buffers]
        if config is None:
            return self._plain(own)
        try:
            model = names.outgoing(config)
            if model is None:
                return self._plain(own)
            chosen = self._chosen(model)
            converts, known = model.converts(loaded_from), {*self._index, *self._buffers}
            # A model may have more tensors than its config describes, for example those of an adapter, but never fewer.
            if foreign := sorted(model.all ^ known if converts else model.all - known):
                raise ConfigError(
                    f"config.json does not match the checkpoint: {', '.join(foreign[:5])}; pass the config.json of "
                    "the trained model (--model-config)"
                )
            if not converts:
                return self._plain(chosen)
            return names.reverted({name: self._like(name) for name in chosen}, model.model, loaded_from)
        except ValueError as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"config.json does not match the trained model: {error}") from error

    def _plain(self, chosen: Iterable[str]) -> tuple[Conversion, ...]:
        return tuple(Conversion({name: self._like(name)}, {name: self._like(name)}) for name in chosen)

    def _chosen(self, model: names.Outgoing) -> list[str]:
        """Return the names to write, in the order of `save_pretrained`. Names that it does not know come last.

        A parameter that is tied in the trained model but not in a model of this config is written under both names. If
        only a model of this config ties two parameters, both are written. A loaded export therefore equals the trained
        model.
        """
        all_names = [
            *([torch_private.unwrapped_name(name) for name in spec.names] for spec in self._reader.tensors),
            *([name] for name in self._buffers),
        ]
        order = {name: place for place, name in enumerate(model.kept)}
        chosen: list[str] = []
        for of_one in all_names:
            known = [name for name in of_one if name in order]
            if known or not model.left_out.issuperset(of_one):
                chosen += known or of_one[:1]
        return sorted(chosen, key=lambda name: order.get(name, len(order)))
