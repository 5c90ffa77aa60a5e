"""First values from a folder of safetensors, as `save_pretrained` writes it; tensors are read slice by slice."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from infinity.errors import ConfigError
from infinity.fsdp import private
from infinity.fsdp.first_values import FirstValues, Member, ValueOf, local_bounds
from infinity.layout import MASTER


class PretrainedFolder(FirstValues):
    """A folder of safetensors, as `save_pretrained` writes it; tensors are read slice by slice."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder)
        self._file_of = self._index()

    def _index(self) -> dict[str, Path]:
        index = self._folder / "model.safetensors.index.json"
        if index.is_file():
            names = json.loads(index.read_text())["weight_map"]
            return {name: self._folder / file for name, file in names.items()}
        files = sorted(self._folder.glob("*.safetensors"))
        if not files:
            raise ConfigError(f"{self._folder} has no *.safetensors; name a folder that save_pretrained wrote")
        from safetensors import safe_open

        found: dict[str, Path] = {}
        for file in files:
            with safe_open(file, framework="pt") as opened:
                found.update(dict.fromkeys(opened.keys(), file))
        return found

    def values(self, unit: str, members: Sequence[Member]) -> ValueOf:
        """Return the tensors of the folder, which are read when they are asked for.

        Raises:
            ConfigError: when asked: a tensor is missing or has another shape; both shapes are named.
        """
        return lambda position, section: self._value(members[position]) if section == MASTER else None

    def _value(self, member: Member) -> torch.Tensor:
        from safetensors import safe_open

        name = next((name for name in self._candidates(member) if name in self._file_of), None)
        if name is None:
            raise ConfigError(f"{self._folder} has no tensor named {' or '.join(member.names)}")
        param = member.param
        with safe_open(self._file_of[name], framework="pt") as opened:
            part = opened.get_slice(name)
            shape = tuple(part.get_shape())
            if shape != tuple(private.full_shape(param)):
                raise ConfigError(
                    f"{name} in {self._folder} has shape {shape}, the model needs {tuple(private.full_shape(param))}"
                )
            bounds = zip(*local_bounds(param), strict=True)
            value: torch.Tensor = part[tuple(slice(offset, offset + size) for offset, size in bounds)]
        dtype: torch.dtype = param.sharded_param.dtype
        return value.reshape(-1).to(dtype)

    def _candidates(self, member: Member) -> Iterator[str]:
        """Names to look for: the model's own, without up to two modules around it, with the base model's prefix."""
        for name in map(private.unwrapped_name, member.names):
            yield name
            parts = name.split(".")
            yield from (".".join(parts[outer:]) for outer in (1, 2) if len(parts) > outer + 1)
            yield f"model.{name}"
            yield f"transformer.{name}"
