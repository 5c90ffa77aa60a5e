"""The weights of a checkpoint, or of a run that trains, as a folder for transformers."""

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
from infinity.formats.companions import CONFIG, Companions, companion_files
from infinity.formats.transformers_names import Conversion
from infinity.formats.weight_files import INDEX, SINGLE
from infinity.units import parse_size

FILE_BYTES = "1GiB"
"""Most bytes of tensors per file where nothing else is said."""


def file_size(value: int | str, *, name: str = "file_bytes") -> int:
    """Return the most bytes per file. Raises `ConfigError` for what is no size of a file."""
    found = parse_size(value, name=name)
    if found == 0:
        raise ConfigError(f"{name} {value} is no size of a file; the default is {FILE_BYTES}")
    return found


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
    reader: FullState,
    folder: Path,
    *,
    config: Mapping[str, Any] | None = None,
    companions: Path | None = None,
    dtype: torch.dtype | None = None,
    file_bytes: int,
    advance: Callable[[int], None] = lambda _: None,
) -> list[Path]:
    """Write a folder that `from_pretrained` loads: weights in one or several files, their index, config.json.

    Tensors have the names and shapes that `save_pretrained` of the model in config.json gives them: what transformers
    renames, fuses or splits when it loads is undone, and a tied parameter is written once. Without a config.json, or
    where it is not of a class of transformers, they are those of the model. Memory is that of one file and of what one
    conversion takes and makes. Every file is read back and compared; the folder is there when all of it is durable.

    Of a `PeftModel` it is what `PeftModel.from_pretrained` loads: its adapters, with the names that peft gives them.

    Args:
        folder: new, or empty.
        config: content of config.json; by default what the run has kept, and none is written where it has none.
        companions: folder whose tokenizer, generation_config.json and the like are copied along; by default what the
            run has kept: those of its `weights`.
        dtype: of floating-point weights; by default as they are trained.
        file_bytes: most bytes of weights per file; a larger parameter gets a file of its own.
        advance: told the bytes of every parameter that was read.

    Raises:
        ConfigError: the folder is not empty or cannot be written to, what is read back is something else, or
            config.json is not that of the model.
        StorageError, CorruptPageError, CheckpointError: the weights cannot be read.
    """
    if companions is not None and not companions.is_dir():
        raise ConfigError(f"companions {str(companions)!r} is not a folder")
    kept = Companions.of_run(reader.folder.checkpoints)
    if kept.adapters:
        return _export_adapters(reader, kept.adapters, folder, dtype, advance)
    config = kept.config if config is None else config
    beside = kept.files if companions is None else tuple(companion_files(companions))
    outgoing = _Outgoing(reader, config, kept.loaded_from, dtype, advance)
    with NewFolder(folder, sum(tensor.nbytes for _, _, tensor in outgoing.tensors)) as partial:
        written = _write_safetensors(outgoing, partial, config, beside, dtype, file_bytes)
    return [folder / file.name for file in written]


def _write_safetensors(
    outgoing: _Outgoing,
    folder: Path,
    config: Mapping[str, Any] | None,
    beside: Sequence[Path],
    dtype: torch.dtype | None,
    file_bytes: int,
) -> list[Path]:
    """Write the files; what is needed to load several comes last."""
    groups = cut([tensor.nbytes for _, _, tensor in outgoing.tensors], file_bytes)
    weight_map: dict[str, str] = {}
    written: list[Path] = []
    for number, group in enumerate(groups, 1):
        name = SINGLE if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        tensors = dict(outgoing.read(index) for index in group)
        _save(tensors, folder / name)
        weight_map.update(dict.fromkeys(tensors, name))
        written.append(folder / name)
    for file in beside:
        try:
            content = file.read_bytes()
        except OSError as error:
            raise ConfigError(f"{file} cannot be read: {error.strerror}; take it away, or mend it") from error
        _write(folder / file.name, content)
        written.append(folder / file.name)
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
    """Write adapters as `PeftModel.save_pretrained` does: each is read whole, as they are small."""
    if unnamed := [adapter.name for adapter in adapters if adapter.tensors is None]:
        raise ConfigError(
            f"adapter {unnamed[0]} is computed from several parameters, which an export does not do: call "
            "model.save_pretrained(folder) of the model that trains"
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


def export_bytes(reader: FullState, dtype: torch.dtype | None = None) -> int:
    """Return how many bytes of parameters an export reads: of all, or of adapters where those are what was trained.

    Raises:
        ConfigError: what the run has kept for exports is malformed.
    """
    adapters = Companions.of_run(reader.folder.checkpoints).adapters
    chosen = {source for adapter in adapters for source in (adapter.tensors or {}).values()}
    return sum(
        reader.nbytes(index, dtype)
        for index, spec in enumerate(reader.tensors)
        if not adapters or chosen.intersection(map(torch_private.unwrapped_name, spec.names))
    )


def _write(file: Path, data: bytes) -> None:
    """Write a file, and compare what is on the drive with it. Raises `ConfigError`."""
    try:
        file.write_bytes(data)
        sync_file(file)
        good = file.read_bytes() == data
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}") from error
    if not good:
        raise ConfigError(f"{file} is not what was written; look after that drive")


class _Outgoing:
    """The tensors of an export, and the parameters and buffers that they are made of."""

    def __init__(
        self,
        reader: FullState,
        config: Mapping[str, Any] | None,
        loaded_from: Sequence[str] | None,
        dtype: torch.dtype | None,
        advance: Callable[[int], None],
    ) -> None:
        """Find what is written; nothing is read from pages yet.

        Args:
            reader: of the state.
            config: that of the model, of transformers; None for another model.
            loaded_from: names that the checkpoint had that the model was loaded from, if any.
            dtype: of floating-point tensors in the export; None: as they are trained.
            advance: told of bytes that were read.
        """
        self._reader, self._dtype, self._advance = reader, dtype, advance
        self._buffers = {torch_private.unwrapped_name(name): value for name, value in reader.buffers()}
        self._index = {  # of parameters, by all their names
            torch_private.unwrapped_name(name): index
            for index, spec in enumerate(reader.tensors)
            for name in spec.names
        }
        conversions = self._conversions(config, loaded_from)
        self.tensors: list[tuple[Conversion, str, torch.Tensor]] = [
            (conversion, name, tensor) for conversion in conversions for name, tensor in conversion.targets.items()
        ]
        """What is written, in order: by which conversion, name, and on the meta device shape and dtype."""
        self._last: tuple[Conversion, dict[str, torch.Tensor]] | None = None  # one may be of two files

    def read(self, index: int) -> tuple[str, torch.Tensor]:
        """Return name and value of a tensor; they must be read in their order."""
        conversion, name, _ = self.tensors[index]
        if self._last is None or self._last[0] is not conversion:
            self._last = None  # before the next one takes memory
            self._last = (conversion, conversion.run({source: self.value(source) for source in conversion.sources}))
        return name, self._last[1].pop(name).contiguous()

    def value(self, name: str) -> torch.Tensor:
        """Return a parameter or a buffer, by one of its names in the model."""
        if name in self._buffers:
            return self._buffers[name]
        index = self._index[name]
        value = self._reader.read(index)
        self._advance(self._reader.nbytes(index, self._dtype))
        return value.to(self._dtype) if self._dtype is not None and value.is_floating_point() else value

    def _like(self, name: str) -> torch.Tensor:
        """Return a tensor on the meta device."""
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
            # What is only written down may be more than the model of the config has, as an adapter; never less.
            if foreign := sorted(model.all ^ known if converts else model.all - known):
                raise ConfigError(
                    f"config.json is of another model than the checkpoint, as for {', '.join(foreign[:5])}; give that of "
                    "the model that was trained (--model-config)"
                )
            if not converts:
                return self._plain(chosen)
            return names.reverted({name: self._like(name) for name in chosen}, model.model, loaded_from)
        except ValueError as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"config.json is not that of the model that was trained: {error}") from error

    def _plain(self, chosen: Iterable[str]) -> tuple[Conversion, ...]:
        return tuple(Conversion({name: self._like(name)}, {name: self._like(name)}) for name in chosen)

    def _chosen(self, model: names.Outgoing) -> list[str]:
        """Return the names to write, in the order of `save_pretrained`; what that does not know comes last.

        A parameter that is one here and two in a model of this config is written twice, and two that would be tied
        there are both written: what is loaded is what was trained.
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
