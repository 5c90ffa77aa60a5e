"""Initial values from a `torch.distributed.checkpoint` folder that contains a model, and optionally its optimizer."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor

from infinity import torch_private
from infinity.content.format import MASTER
from infinity.content.layout import Layout
from infinity.content.views import torch_dtype
from infinity.errors import CheckpointError, ConfigError, InfinityError
from infinity.formats.dcp_metadata import METADATA, MetadataReader
from infinity.fsdp.sharded_model import Member, local_bounds
from infinity.optim.multi_optimizer import OWNER
from infinity.optim.slicing_check import make_kernel
from infinity.sources.first_values import FirstValues, ValueOf, convertible

_log = logging.getLogger(__name__)
_GROUPS, _STATE = "param_groups.", "state."
_LISTED = 3
"""Maximum number of keys that an error message lists."""


class DcpFolder(FirstValues):
    """Source of initial values: a `torch.distributed.checkpoint` folder, written by any number of ranks.

    The state dicts of the model and the optimizer may have any position in the saved state dict. Each rank reads its
    own slices, one tensor at a time. Nothing in the folder is executed: see `MetadataReader`, and objects are loaded
    with ``weights_only=True``.

    Args:
        folder: folder to read.

    Raises:
        CheckpointError: if the metadata cannot be read, or a file is missing.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder)
        self._reader = MetadataReader(self._folder)
        metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(metadata, True)
        self._stored: Mapping[str, Any] = metadata.state_dict_metadata
        paths: Mapping[str, Sequence[Any]] = metadata.planner_data or {key: (key,) for key in self._stored}
        if missing := self._stored.keys() - paths.keys():
            raise CheckpointError(f"{self._folder / METADATA} cannot be read: it has no path for {min(missing)}")
        # Position of each key in the saved state dict
        self._paths = {key: tuple(map(str, paths[key])) for key in self._stored}
        # Set by `check`: prefixes of the keys of the model and of the optimizer (None without optimizer state), saved
        # settings of the param groups, and keys of the states by parameter
        self._model = ""
        self._optim: str | None = None
        self._groups: list[dict[str, Any]] = []
        self._states: dict[str, dict[str, str]] = {}

    @staticmethod
    def is_at(folder: str | os.PathLike[str]) -> bool:
        """Return whether a path is a `torch.distributed.checkpoint` folder."""
        return (Path(folder) / METADATA).is_file()

    def check(
        self, model: nn.Module, members: Sequence[Member], layout: Layout, optimizer: torch.optim.Optimizer
    ) -> None:
        """Check that the folder contains all parameters and persistent buffers of the model and no other tensors of a
        model. If it contains optimizer state, check that it is the state of the same optimizer and param groups.

        Raises:
            ConfigError: if it does not match. The message names the difference.
            CheckpointError: if a file cannot be read.
        """
        root = self._find_model(_name(members[0]))
        self._model = "".join(f"{part}." for part in root)
        if apart := [member.names[0] for member in members if torch_private.is_tensor_parallel(member.param)]:
            raise ConfigError(
                f"{apart[0]} is tensor-parallel, and {self._folder} contains whole parameters. Load the folder into a "
                "model on a real device, or without tensor parallelism."
            )
        for member in members:
            self._check_tensor(
                self._model + _name(member),
                tuple(torch_private.full_shape(member.param)),
                member.param.sharded_param.dtype,
            )
        for name in torch_private.persistent_buffers(model):
            buffer = model.get_buffer(name)
            self._check_tensor(self._model + torch_private.unwrapped_name(name), tuple(buffer.shape), buffer.dtype)
        known = {self._model + torch_private.unwrapped_name(name) for name in model.state_dict()}
        saved = {key for key, path in self._paths.items() if path[:-1] == root and self._is_tensor(key)}
        if unexpected := sorted(saved - known):
            more = f" and {len(unexpected) - _LISTED} more" if len(unexpected) > _LISTED else ""
            raise ConfigError(
                f"{self._folder} has tensors that the model does not have: {', '.join(unexpected[:_LISTED])}{more}. "
                "Build the model that was saved."
            )
        self._optim = self._find_optimizer()
        if self._optim is not None:
            names = {id(member.param.sharded_param): _name(member) for member in members}
            named = [
                {**group, "params": [names[id(param)] for param in group["params"]]} for group in optimizer.param_groups
            ]
            self._groups = self._load_groups(named)
            self._states = self._match_states(names, optimizer)

    def _find_model(self, first: str) -> tuple[str, ...]:
        roots = {path[:-1] for path in self._paths.values() if path[-1] == first}
        if len(roots) > 1:
            found = ", ".join(sorted(map(".".join, roots)))
            raise ConfigError(f"{self._folder} has several models ({found}). Save one of them on its own.")
        return roots.pop() if roots else ("model",)

    def _find_optimizer(self) -> str | None:
        roots = {key.partition(_GROUPS)[0] for key in self._stored if _GROUPS in key}
        if len(roots) > 1:
            raise ConfigError(f"{self._folder} has several optimizers ({', '.join(sorted(roots))}). Save only one.")
        return roots.pop() if roots else None

    def _is_tensor(self, key: str) -> bool:
        return isinstance(self._stored.get(key), TensorStorageMetadata)

    def _check_tensor(self, key: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        if not self._is_tensor(key):
            raise ConfigError(f"{self._folder} has no tensor {key}. Save the result of get_state_dict for this model.")
        stored = self._stored[key]
        if sum(chunk.sizes.numel() for chunk in stored.chunks) < stored.size.numel():
            raise ConfigError(f"{self._folder} contains only a part of {key}. Save it on all ranks together.")
        if tuple(stored.size) != shape:
            raise ConfigError(
                f"{key} in {self._folder} has shape {tuple(stored.size)}, but this run needs {shape}. Build the model "
                "that was saved."
            )
        if not convertible(stored.properties.dtype, dtype):
            raise ConfigError(
                f"{key} in {self._folder} has dtype {stored.properties.dtype}, which cannot be converted to {dtype}. "
                "Save it in the dtype in which it is trained."
            )

    def _load_groups(self, here: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the saved settings of the param groups of this optimizer."""
        keys: dict[str, dict[str, str]] = {}  # by number of the saved group, and setting
        prefix = f"{self._optim}{_GROUPS}"
        for key in self._stored:
            if key.startswith(prefix):
                number, _, setting = key.removeprefix(prefix).partition(".")
                keys.setdefault(number, {})[setting] = key
        if not all(number.isdigit() and "params" in settings for number, settings in keys.items()):
            raise ConfigError(
                f"{self._folder} has a flattened optimizer state. Save it without flatten_optimizer_state_dict."
            )
        targets = {key: self._empty(key) for settings in keys.values() for key in settings.values()}
        loaded = self._load("param groups", targets)
        saved = {frozenset(loaded[settings["params"]]): settings for settings in keys.values()}
        groups = []
        for number, group in enumerate(here):
            settings = saved.get(frozenset(group["params"]))
            if settings is None:
                raise ConfigError(
                    f"no param group in {self._folder} has the parameters of param group {number}. Create the "
                    "optimizer with the param groups that were saved."
                )
            if missing := group.keys() - settings.keys() - {OWNER}:
                raise ConfigError(
                    f"param group {number} in {self._folder} has no setting {min(missing)}. Create the optimizer and "
                    "its schedulers as they were when it was saved."
                )
            groups.append({**{setting: loaded[key] for setting, key in settings.items()}, "params": group["params"]})
        return groups

    def _match_states(self, names: Mapping[int, str], optimizer: torch.optim.Optimizer) -> dict[str, dict[str, str]]:
        """Return the keys of the saved states of each parameter.

        A parameter that was never updated may have no saved state. Its states remain the initial ones.
        """
        saved: dict[str, dict[str, str]] = {}
        prefix = f"{self._optim}{_STATE}"
        for key in self._stored:
            if key.startswith(prefix):
                name, _, kind = key.removeprefix(prefix).rpartition(".")
                saved.setdefault(name, {})[kind] = key
        kernel, matched = make_kernel(optimizer), {}
        for param, group in ((param, group) for group in optimizer.param_groups for param in group["params"]):
            name = names[id(param)]
            if not param.requires_grad or name not in saved:
                continue
            spec, found = kernel.discover(param, group), saved[name]
            if found.keys() != (needed := {*dict(spec.kinds), *spec.scalars}):
                raise ConfigError(
                    f"{prefix}{name} in {self._folder} has {', '.join(sorted(found))}, but this optimizer needs "
                    f"{', '.join(sorted(needed)) or 'no state'}. Create the optimizer that was saved."
                )
            for kind, dtype_name in spec.kinds:
                dtype, key = torch_dtype(dtype_name), found[kind]
                self._check_tensor(key, tuple(param.shape), dtype)
                if (saved_dtype := self._stored[key].properties.dtype) != dtype:
                    raise ConfigError(
                        f"{key} in {self._folder} has dtype {saved_dtype}, but this run needs {dtype}. Train in the "
                        "dtype that was saved, or save the model without its optimizer."
                    )
            matched[name] = found
        return matched

    # Weights and buffers #

    def values(self, fsdp_module: str, members: Sequence[Member]) -> ValueOf:
        """Return a function that reads this rank's slices of the weights. `load` loads the optimizer states."""

        def value_of(position: int, section: str) -> torch.Tensor | None:
            if section != MASTER:
                return None
            member = members[position]
            key, (offsets, sizes) = self._model + _name(member), map(torch.Size, local_bounds(member.param))
            slice_ = torch.empty(sizes, dtype=member.param.sharded_param.dtype)
            items = create_read_items_for_chunk_list(key, self._stored[key], [ChunkStorageMetadata(offsets, sizes)])
            try:
                self._reader.read_data(LoadPlan(items), _Planner(slice_)).wait()
            except Exception as error:  # torch raises various exceptions for a damaged file
                raise self._cannot_read(key, error) from error
            return slice_.reshape(-1)

        return value_of

    def buffers(self, model: nn.Module) -> Mapping[str, torch.Tensor]:
        """Return the persistent buffers, in the dtypes of the model."""
        buffers = {name: model.get_buffer(name) for name in torch_private.persistent_buffers(model)}
        keys = {name: self._model + torch_private.unwrapped_name(name) for name in buffers}
        loaded = self._load("buffers", {key: self._empty(key) for key in keys.values()})
        return {name: loaded[keys[name]].to(buffer.dtype) for name, buffer in buffers.items()}

    # Optimizer state #

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> int | None:
        """Load the optimizer state into an offloaded model, in place.

        Raises:
            CheckpointError: if a file cannot be read.
        """
        if self._optim is None:
            _log.warning("%s has no optimizer state: moments and step counts start from zero", self._folder)
            return None
        here = get_optimizer_state_dict(model, optimizer)["state"]
        targets = {
            key: here[name][kind] if isinstance(here[name][kind], DTensor) else self._empty(key)
            for name, keys in self._states.items()
            for kind, key in keys.items()
        }
        loaded = self._load("optimizer state", targets)
        state = {name: {kind: loaded[key] for kind, key in keys.items()} for name, keys in self._states.items()}
        optimizer.load_state_dict({"state": state, "param_groups": self._groups})
        return max((int(states["step"]) for states in state.values() if "step" in states), default=0)

    # Reading #

    def _empty(self, key: str) -> torch.Tensor | None:
        """Return a tensor into which a saved tensor can be loaded, or None for an object."""
        stored = self._stored[key]
        return torch.empty(stored.size, dtype=stored.properties.dtype) if self._is_tensor(key) else None

    def _load(self, what: str, state: dict[str, Any]) -> dict[str, Any]:
        """Load tensors in place, and objects, by their keys. Each rank loads on its own."""
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled")
                dcp.load(state, storage_reader=self._reader, planner=_Planner(), no_dist=True)
        except CheckpointException as error:
            ((reason, _),) = error.failures.values()
            if isinstance(reason, InfinityError) or not isinstance(reason, Exception):
                raise reason from None
            raise self._cannot_read(what, reason) from reason
        return state

    def _cannot_read(self, what: str, error: Exception) -> CheckpointError:
        return CheckpointError(f"{what} in {self._folder} cannot be read: {type(error).__name__}: {error}")


class _Planner(DefaultLoadPlanner):
    """Load plan for a flat state dict, or for `target`, a slice of one tensor. Objects are loaded without pickle."""

    def __init__(self, target: torch.Tensor | None = None) -> None:
        super().__init__()
        self._target = target

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self._target if self._target is not None else super().lookup_tensor(index)  # type: ignore[no-any-return]

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        self.original_state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


def _name(member: Member) -> str:
    return torch_private.unwrapped_name(member.names[0])
