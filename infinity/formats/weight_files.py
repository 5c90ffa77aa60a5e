"""Safetensors files in a folder: select the weight files as transformers does, and read their tensors."""

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
_MOST = 1 << 30  # maximum size of a JSON file, in bytes
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
_DEEPSPEED = ("*_optim_states.pt", "*/*_optim_states.pt", "zero/*/fp32.pt")  # the last one: universal checkpoints
_TORCH_FILES = ("*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.ckpt")


class WeightFiles:
    """Tensors in the weight files of a folder. Only the headers are read until a tensor is requested."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Select the files and read their headers.

        Args:
            path: folder with weights, or one such file. As in transformers, the weights of a folder are in
                `model.safetensors` or, if it does not exist, in the files listed in `model.safetensors.index.json`.
                `transformers_weights` in config.json may specify a different file.

            Raises:
                ConfigError: if there are no such files, or one is malformed. The message includes its path.
        """
        self.path = Path(path)
        chosen = _choose(self.path)
        self.folder = chosen.parent
        self.tensors: dict[str, torch.Tensor] = {}
        """Tensors on the meta device, which give the shapes and dtypes, by name."""
        self._file_of: dict[str, Path] = {}  # by tensor name
        index = read_index(chosen) if chosen.name.endswith(".json") else {}
        files = sorted({self.folder / file for file in index.values()}) or [chosen]
        for file in files:
            if not file.is_file():
                raise ConfigError(
                    f"{chosen} refers to {file.name}, which does not exist; download or copy the complete folder again"
                )
            opened = _open(file)
            for name in opened.keys():  # noqa: SIM118  # it is no mapping
                self._add(name, file, index, opened.get_slice(name))
        for name, in_file in index.items():
            if name not in self._file_of:
                raise ConfigError(
                    f"according to {chosen}, {name} is in {in_file}, but it is not; download or copy the folder again"
                )

    def _add(self, name: str, file: Path, index: dict[str, str], part: Any) -> None:
        if index.get(name, file.name) != file.name:
            return  # the index specifies a different file
        if name in self._file_of:
            raise ConfigError(f"both {self._file_of[name].name} and {file} contain {name}; remove one of the files")
        dtype = _DTYPES.get(part.get_dtype())
        if dtype is None:
            raise ConfigError(f"{name} in {file} has dtype {part.get_dtype()}, which is not supported; save it as F32")
        self.tensors[name] = torch.empty(part.get_shape(), dtype=dtype, device="meta")
        self._file_of[name] = file

    def reader(self) -> WeightReader:
        """Return a reader of the tensors."""
        return WeightReader(self._file_of)


class WeightReader:
    """Reads tensors or slices of them. Files stay mapped into memory until `close`."""

    def __init__(self, file_of: dict[str, Path]) -> None:
        self._file_of = file_of
        self._opened: dict[Path, Any] = {}  # open safetensors files, by path

    def __call__(self, name: str, bounds: Sequence[slice] | None = None) -> torch.Tensor:
        """Return a tensor, or a slice of it.

        Args:
            name: name of the tensor.
            bounds: one slice per dimension, or None for the full tensor.

            Raises:
                ConfigError: if the file cannot be read.
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
    except Exception as error:  # safetensors raises several kinds of errors for malformed files
        raise _malformed(file, error) from error


def _malformed(file: Path, error: Exception) -> ConfigError:
    return ConfigError(f"{file} cannot be read as safetensors: {error}; it may be damaged, download or copy it again")


def _choose(path: Path) -> Path:
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
        raise ConfigError(
            f"according to {path / 'config.json'}, the weights are in {explicit}, which does not exist; download or "
            "copy the folder again"
        )
    raise ConfigError(f"{path} has neither {SINGLE} nor {INDEX}; {_instead(path)}")


_RESAVE = "load them with transformers' from_pretrained, and save them with save_pretrained, which writes safetensors"


def _instead(folder: Path) -> str:
    if any(folder.glob("adapter_model.*")):
        return (
            "it contains an adapter: merge it into its base model with peft, and save the result with save_pretrained"
        )
    if any(next(folder.glob(pattern), None) for pattern in _DEEPSPEED):
        return (
            f"it is a DeepSpeed checkpoint: convert its weights with `python zero_to_fp32.py {folder} FOLDER "
            "--safe_serialization`, and pass FOLDER; its optimizer state cannot be imported (docs/how-to/migrate.md)"
        )
    others = sorted(file.name for file in folder.glob("*.safetensors*"))
    if others:
        named = [name for name in others if name.endswith(".index.json")] or others
        return f"pass the file to load, e.g. weights={str(folder / named[0])!r} (found: {', '.join(others)})"
    found = sorted({file.name for pattern in _TORCH_FILES for file in folder.glob(pattern)})
    if found:
        return f"it contains {', '.join(found)}, and pickle files are not supported; {_RESAVE}"
    below = sorted(file.parent for name in (SINGLE, INDEX) for file in folder.glob(f"*/{name}"))
    if below:
        return f"pass {below[0]}, which contains weights"
    return "pass a folder that save_pretrained wrote"


def check_not_quantized(config: Mapping[str, Any], where: object) -> None:
    """Check that a configuration does not describe quantized weights, which cannot be trained.

    Raises:
        ConfigError: if the weights are quantized. The message includes `where`.
    """
    if found := config.get("quantization_config"):
        method = found.get("quant_method", "") if isinstance(found, dict) else found
        raise ConfigError(
            f"{where} is quantized ({method}), and quantized weights cannot be trained; load it with transformers' "
            "from_pretrained, dequantize it, and save it with save_pretrained"
        )


def read_index(file: Path) -> dict[str, str]:
    """Return the map from tensor names to file names in an index."""
    names = read_json(file).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise ConfigError(f"{file} has no valid weight_map; it may be damaged, download or copy it again")
    for name in set(names.values()):
        if Path(name).name != name:
            raise ConfigError(f"{file} refers to {name}, which is not a plain file name; use only files in its folder")
    return names


def read_json(file: Path) -> dict[str, Any]:
    """Return the content of a JSON file.

    Raises:
        ConfigError: if the file cannot be read, or does not contain a JSON object.
    """
    try:
        found = json.loads(read_regular(os.path.realpath(file), _MOST))  # download caches use links to files
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}; if damaged, download or copy it again") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read: {error}; it may be damaged, download or copy it again") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file} does not contain a JSON object; it may be damaged, download or copy it again")
    return found
