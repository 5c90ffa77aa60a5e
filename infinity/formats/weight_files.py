"""Safetensors files of a folder: selection of the weight files as in transformers, and their content."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from infinity.errors import ConfigError
from infinity.untrusted_files import read_regular

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_MOST = 1 << 30  # limit for a JSON file, in bytes
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
_TORCH_FILES = ("*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.ckpt")


class WeightFiles:
    """Tensors in the weight files of a folder. Only headers are read until a tensor is requested."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Select the files and read their headers.

        Args:
            path: folder whose weights are `model.safetensors`, otherwise the files named by
                `model.safetensors.index.json` (or by `transformers_weights` in its config.json), as in transformers;
                or one of such files.

        Raises:
            ConfigError: if there are no such files, or one is malformed. The message names it.
        """
        self.path = Path(path)
        chosen = _choose(self.path)
        self.folder = chosen.parent
        self.tensors: dict[str, torch.Tensor] = {}
        """Shapes and dtypes by name, on the meta device."""
        self._file_of: dict[str, Path] = {}  # by name of the tensor
        index = read_index(chosen) if chosen.name.endswith(".json") else {}
        files = sorted({self.folder / file for file in index.values()}) or [chosen]
        for file in files:
            if not file.is_file():
                raise ConfigError(
                    f"{chosen} names {file.name}, which does not exist; copy the folder again, with all files"
                )
            opened = _open(file)
            for name in opened.keys():  # noqa: SIM118  # it is no mapping
                self._add(name, file, index, opened.get_slice(name))
        for name, in_file in index.items():
            if name not in self._file_of:
                raise ConfigError(
                    f"{chosen} says that {name} is in {in_file}, which does not contain it; copy the folder again"
                )

    def _add(self, name: str, file: Path, index: dict[str, str], part: Any) -> None:
        if index.get(name, file.name) != file.name:
            return  # the index decides between several files
        if name in self._file_of:
            raise ConfigError(f"{name} is in {self._file_of[name].name} and in {file}; remove one of the files")
        dtype = _DTYPES.get(part.get_dtype())
        if dtype is None:
            raise ConfigError(f"{name} in {file} has dtype {part.get_dtype()}, which is not supported; save it as F32")
        self.tensors[name] = torch.empty(part.get_shape(), dtype=dtype, device="meta")
        self._file_of[name] = file

    def reader(self) -> WeightReader:
        """Return a reader of the tensors."""
        return WeightReader(self._file_of)


class WeightReader:
    """Reads tensors slice by slice. Files stay mapped until `close`."""

    def __init__(self, file_of: dict[str, Path]) -> None:
        self._file_of = file_of
        self._opened: dict[Path, Any] = {}  # open safetensors files, by path

    def __call__(self, name: str, bounds: Sequence[slice] | None = None) -> torch.Tensor:
        """Return a tensor, or a slice of it.

        Args:
            name: name of the tensor.
            bounds: one slice per dimension; None for the full tensor.

        Raises:
            ConfigError: if its file cannot be read.
        """
        file = self._file_of[name]
        if file not in self._opened:
            self._opened[file] = _open(file)
        try:
            part = self._opened[file].get_slice(name)
            if bounds and part.get_shape():
                value: torch.Tensor = part[tuple(bounds)]
                return value
            whole: torch.Tensor = self._opened[file].get_tensor(name)
            return whole
        except Exception as error:
            raise _malformed(file, error) from error

    def close(self) -> None:
        """Close the files."""
        self._opened.clear()


def _open(file: Path) -> Any:
    from safetensors import safe_open

    try:
        return safe_open(file, framework="pt")
    except Exception as error:  # safetensors raises errors of several kinds for malformed files
        raise _malformed(file, error) from error


def _malformed(file: Path, error: Exception) -> ConfigError:
    return ConfigError(f"{file} cannot be read as safetensors: {error}; if its size is wrong, copy it again")


def _choose(path: Path) -> Path:
    """Return the file, or the index, with the weights of a folder."""
    if path.is_file():
        if path.name.endswith((".safetensors", ".safetensors.index.json")):
            return path
        raise ConfigError(f"{path} is neither *.safetensors nor *.safetensors.index.json; {_RESAVE}")
    if not path.is_dir():
        raise ConfigError(f"{path} is neither a folder nor a file")
    explicit = read_json(path / "config.json").get("transformers_weights") if (path / "config.json").is_file() else None
    for name in [str(explicit)] if explicit else [SINGLE, INDEX]:
        if (path / name).is_file():
            return path / name
    if explicit:
        raise ConfigError(f"{path / 'config.json'} says that the weights are in {explicit}, which does not exist")
    raise ConfigError(f"{path} has neither {SINGLE} nor {INDEX}; {_instead(path)}")


_RESAVE = "load them with from_pretrained of transformers and save them with save_pretrained, which writes safetensors"


def _instead(folder: Path) -> str:
    """Return advice for a folder without weights under the usual names."""
    if any(folder.glob("adapter_model.*")):
        return (
            "it contains an adapter: merge it into its base model with peft, and save the result with save_pretrained"
        )
    others = sorted(file.name for file in folder.glob("*.safetensors*"))
    if others:
        named = [name for name in others if name.endswith(".index.json")] or others
        return f"to load another file, name it: weights={str(folder / named[0])!r} (there: {', '.join(others)})"
    found = sorted({file.name for pattern in _TORCH_FILES for file in folder.glob(pattern)})
    if found:
        return f"it has {', '.join(found)}, which are pickles and are not read: {_RESAVE}"
    below = sorted(file.parent for name in (SINGLE, INDEX) for file in folder.glob(f"*/{name}"))
    if below:
        return f"they are in {below[0]}: name that folder"
    return "name a folder that save_pretrained wrote"


def check_not_quantized(config: Mapping[str, Any], where: object) -> None:
    """Raise if a configuration says that the weights are quantized, because quantized weights cannot be trained.

    Raises:
        ConfigError: if the weights are quantized. The message names `where`.
    """
    if found := config.get("quantization_config"):
        method = found.get("quant_method", "") if isinstance(found, dict) else found
        raise ConfigError(
            f"{where} is quantized ({method}), which cannot be trained; load it with from_pretrained of "
            "transformers, dequantize it, and save it with save_pretrained"
        )


def read_index(file: Path) -> dict[str, str]:
    """Return the file of every tensor by name, as the index says."""
    names = read_json(file).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise ConfigError(f"{file} has no weight_map from names to files; copy it again")
    for name in set(names.values()):
        if Path(name).name != name:
            raise ConfigError(f"{file} names {name}, which is not a file of its folder")
    return names


def read_json(file: Path) -> dict[str, Any]:
    """Return the content of a JSON file.

    Raises:
        ConfigError: if the file cannot be read, or is not a JSON object.
    """
    try:
        found = json.loads(read_regular(os.path.realpath(file), _MOST))  # download caches use links to files
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}; copy it again") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read: {error}; copy it again") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file} is not a JSON object; copy it again")
    return found
