"""First values of a model's shards: those it has, its own initialisation, unit by unit, or a folder of safetensors.

Peak memory is one whole unit, whatever the size of the model. Every module is initialised under a seed of its
own, derived from the run's seed and the module's name; so the values depend on neither world size, nor paths,
nor the order of units.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.errors import ConfigError, UnsupportedError
from infinity.fsdp import private
from infinity.layout import MASTER, Layout

InitFunction = Callable[[nn.Module], None]
ValueOf = Callable[[int, str], torch.Tensor | None]
"""One section (``master`` or a state kind) of a unit's member, given its position: this rank's elements, flat; None for
zeros."""


@dataclass(frozen=True)
class Member:
    """One parameter of a unit: FSDP2's object, and all names that the model has for it."""

    param: Any
    names: tuple[str, ...]


@dataclass(frozen=True)
class ResumedState:
    """How far training has come, besides what is in the pages: scalars by shard, and the user's `extra`."""

    step: int
    scalars: dict[int, dict[str, Any]]
    extra: dict[str, Any]


class FirstValues:
    """Where the first content of a run's pages comes from."""

    def check(
        self, model: nn.Module, members: Sequence[Member], layout: Layout, optimizer: torch.optim.Optimizer
    ) -> None:
        """Check, before anything is written, that the values are of this model and optimizer.

        Args:
            members: all parameters, in the order of the layout's shards.

        Raises:
            ConfigError, CommitError: they are not; what differs is named.
        """

    def values(self, unit: str, members: Sequence[Member]) -> ValueOf:
        """Return the values of one unit; the master in the dtype that is trained."""
        raise NotImplementedError

    def restore(self, model: nn.Module, members: Sequence[Member], groups: list[dict[str, Any]]) -> ResumedState | None:
        """Put what belongs to the values into buffers and param groups; return how far training has come.

        Returns:
            None for a run that begins.
        """
        return None


def local_bounds(param: Any) -> tuple[list[int], list[int]]:
    """Return offsets and sizes of this rank's slice of a whole parameter, one per dimension."""
    sizes = list(private.full_shape(param))
    offsets = [0] * len(sizes)
    rank, size = private.shard_rank_and_size(param)
    dim = private.shard_dim(param)
    rows = -(-sizes[dim] // size)
    offsets[dim] = min(rank * rows, sizes[dim])
    sizes[dim] = min(rows, sizes[dim] - offsets[dim])
    return offsets, sizes


def local_slice(param: Any, whole: torch.Tensor) -> torch.Tensor:
    """Return this rank's real elements of a whole parameter, flat."""
    rank, size = private.shard_rank_and_size(param)
    chunks = torch.chunk(whole, size, dim=private.shard_dim(param))
    return chunks[rank].reshape(-1) if rank < len(chunks) else whole.new_empty(0)


def module_seed(seed: int, name: str) -> int:
    """Return the seed of one module."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8]) >> 1


class OwnValues(FirstValues):
    """The values that a model has already."""

    def values(self, unit: str, members: Sequence[Member]) -> ValueOf:
        """Return copies of the local elements."""

        def value_of(position: int, section: str) -> torch.Tensor | None:
            if section != MASTER:
                return None
            return private.local_tensor(members[position].param).detach().reshape(-1).cpu()

        return value_of


class ModuleInitialiser(FirstValues):
    """Runs a model's own initialisation for one unit at a time."""

    def __init__(self, model: nn.Module, seed: int, function: InitFunction | None) -> None:
        self._model, self._seed, self._function = model, seed, function
        # Children before parents, as `nn.Module.apply` does: a parent may overwrite what its children set.
        self._modules = [(name, module) for name, module in _post_order(model)]

    def values(self, unit: str, members: Sequence[Member]) -> ValueOf:
        """Return what the modules of a unit set.

        Raises:
            UnsupportedError: a module has parameters but no way to initialise them.
        """
        owners = {id(private.owner(member.param)[0]) for member in members}
        with _whole_parameters(members) as wholes:
            for name, module in self._modules:
                if id(module) in owners or self._reaches(module, owners):
                    self._initialise(name, module, id(module) in owners)
            missing = [m.names[0] for m, whole in zip(members, wholes, strict=True) if torch.isnan(whole).any()]
            if missing:
                raise UnsupportedError(
                    f"nothing initialised {', '.join(missing)} of unit {unit}: give the model `_init_weights` or its "
                    "modules `reset_parameters`, or pass init=function to infinity.offload"
                )
            found = [
                local_slice(member.param, whole.detach()).clone() for member, whole in zip(members, wholes, strict=True)
            ]
            return lambda position, section: found[position] if section == MASTER else None

    def _reaches(self, module: nn.Module, owners: set[int]) -> bool:
        """Whether a module without parameters of its own may set those of its direct children."""
        return any(id(child) in owners for child in module.children())

    def _initialise(self, name: str, module: nn.Module, required: bool) -> None:
        function = self._function or self._enclosing_init(name)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(module_seed(self._seed, name))
            if function is not None:
                function(module)
            elif required and callable(reset := getattr(module, "reset_parameters", None)):
                reset()

    def _enclosing_init(self, name: str) -> InitFunction | None:
        """Return `_init_weights` of the module or of the nearest module around it."""
        while True:
            function: InitFunction | None = getattr(self._model.get_submodule(name), "_init_weights", None)
            if callable(function) or not name:
                return function
            name = name.rpartition(".")[0]

    def buffers(self, device: torch.device) -> None:
        """Give every buffer that is still on the meta device its real value.

        Raises:
            UnsupportedError: a buffer cannot be computed.
        """
        for name, module in self._modules:
            meta = {key: buffer for key, buffer in module._buffers.items() if buffer is not None and buffer.is_meta}
            if not meta:
                continue
            for key, buffer in meta.items():
                fill = (
                    torch.full(buffer.shape, float("nan")) if buffer.is_floating_point() else torch.zeros(buffer.shape)
                )
                module._buffers[key] = fill.to(buffer.dtype).to(device)
            parameters, module._parameters = module._parameters, {}  # only the buffers are to be set here
            try:
                rebuilt = _rebuilt(module)
                if rebuilt is not None:
                    for key in meta:
                        module._buffers[key] = rebuilt._buffers[key].to(device)  # type: ignore[union-attr]
                else:
                    self._initialise(name, module, True)
            finally:
                module._parameters = parameters
            unset = [key for key in meta if torch.isnan(module._buffers[key].float()).any()]  # type: ignore[union-attr]
            if unset:
                raise UnsupportedError(
                    f"buffers {', '.join(unset)} of module {name or 'root'} are on the meta device and nothing "
                    "computes them; build the model with torch.device('meta') around its parameters only, or pass "
                    "init=function"
                )


def _rebuilt(module: nn.Module) -> nn.Module | None:
    """Build a module without parameters again, off the meta device, when its class takes just a config."""
    config = getattr(module, "config", None)
    if config is None or any(True for _ in module.children()):
        return None
    try:
        with torch.device("cpu"):
            return type(module)(config)
    except TypeError:
        return None


def _post_order(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        yield from _post_order(child, f"{prefix}.{name}" if prefix else name)
    yield prefix, module


@contextmanager
def _whole_parameters(members: Sequence[Member]) -> Iterator[list[torch.Tensor]]:
    """Register whole, real parameters (NaN until set) on the modules of a unit."""
    wholes: list[torch.Tensor] = []
    for member in members:
        if private.is_tensor_parallel(member.param):
            raise UnsupportedError(
                f"{member.names[0]} is tensor-parallel and on the meta device; build the model on a real device"
            )
        dtype = member.param.sharded_param.dtype
        whole = nn.Parameter(
            torch.full(private.full_shape(member.param), float("nan"), dtype=dtype),
            requires_grad=member.param.sharded_param.requires_grad,
        )
        private.set_full_parameter(member.param, whole)
        wholes.append(whole)
    try:
        yield wholes
    finally:
        for member in members:
            private.set_sharded_parameter(member.param)


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
