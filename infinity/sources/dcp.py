"""Initial values from a `torch.distributed.checkpoint` folder that contains a model, and optionally its optimizer."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor

from infinity import torch_private
from infinity.content.format import MASTER
from infinity.content.layout import Layout
from infinity.content.spans import full_spans, overlaps, sizes_of
from infinity.content.views import torch_dtype
from infinity.errors import CheckpointError, ConfigError
from infinity.formats.dcp import only_error
from infinity.formats.dcp_metadata import METADATA, MetadataReader
from infinity.fsdp.sharded_model import Member, local_spans
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
        # Position of each key in the saved state dict
        paths: Mapping[str, Sequence[Any]] = metadata.planner_data or {}
        self._paths = {key: tuple(map(str, paths.get(key, (key,)))) for key in self._stored}
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
        first = _name(members[0])
        root = self._only("models", {path[:-1] for path in self._paths.values() if path[-1] == first}, ("model",))
        self._model = "".join(f"{part}." for part in root)
        for member in members:
            shape, dtype = torch_private.full_shape(member.param), member.param.sharded_param.dtype
            self._check_tensor(self._model + _name(member), shape, dtype)
        in_memory = torch_private.tensors_in_memory(model)
        for name in torch_private.persistent_buffers(model):
            buffer = in_memory[name]
            self._check_tensor(self._model + torch_private.unwrapped_name(name), buffer.shape, buffer.dtype)
        known = {self._model + torch_private.unwrapped_name(name) for name in model.state_dict()}
        saved = {key for key, path in self._paths.items() if path[:-1] == root and self._is_tensor(key)}
        if unexpected := sorted(saved - known):
            more = f" and {len(unexpected) - _LISTED} more" if len(unexpected) > _LISTED else ""
            raise ConfigError(
                f"{self._folder} has tensors that the model does not have: {', '.join(unexpected[:_LISTED])}{more}. "
                "Build the model that was saved."
            )
        prefixes = {tuple(key.partition(_GROUPS)[0].split(".")) for key in self._stored if _GROUPS in key}
        if prefixes:
            self._optim = ".".join(self._only("optimizers", prefixes))
            names = {id(member.param.sharded_param): _name(member) for member in members}
            ignored = torch_private.ignored_parameters(model)
            names |= {id(param): torch_private.unwrapped_name(name) for name, param in ignored}
            groups = optimizer.param_groups
            self._groups = self._load_groups(
                [[names[id(param)] for param in group["params"]] for group in groups], groups
            )
            self._states = self._match_states(names, optimizer)

    def _only(self, what: str, found: set[tuple[str, ...]], default: tuple[str, ...] = ()) -> tuple[str, ...]:
        if len(found) > 1:
            listed = ", ".join(sorted(map(".".join, found)))
            raise ConfigError(f"{self._folder} has several {what} ({listed}). Save only one of them.")
        return found.pop() if found else default

    def _is_tensor(self, key: str) -> bool:
        return isinstance(self._stored.get(key), TensorStorageMetadata)

    def _check_tensor(self, key: str, shape: torch.Size, dtype: torch.dtype, *, convert: bool = True) -> None:
        if not self._is_tensor(key):
            raise ConfigError(f"{self._folder} has no tensor {key}. Save the result of get_state_dict for this model.")
        size, found = self._stored[key].size, self._stored[key].properties.dtype
        if sum(chunk.sizes.numel() for chunk in self._stored[key].chunks) < size.numel():
            raise ConfigError(f"{self._folder} contains only a part of {key}. Save it on all ranks together.")
        if size != shape or not (convertible(found, dtype) if convert else found == dtype):
            raise ConfigError(
                f"{key} in {self._folder} is {found} of shape {tuple(size)}, but this run needs {dtype} of shape "
                f"{tuple(shape)}. Build the model that was saved, or save only a model that matches."
            )

    def _load_groups(self, params: list[list[str]], here: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the saved settings of the param groups `here`, whose parameters are named `params`."""
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
        loaded = self._load("param groups", [key for settings in keys.values() for key in settings.values()])
        saved = [{setting: loaded[key] for setting, key in settings.items()} for settings in keys.values()]
        by_params = {frozenset(group["params"]): group for group in saved}
        groups = []
        for position, (names, group) in enumerate(zip(params, here, strict=True)):
            settings = by_params.get(frozenset(names))
            if settings is None:
                raise ConfigError(
                    f"no param group in {self._folder} has the parameters of param group {position}. Create the "
                    "optimizer with the param groups that were saved."
                )
            if missing := group.keys() - settings.keys() - {OWNER}:
                raise ConfigError(
                    f"param group {position} in {self._folder} has no setting {min(missing)}. Create the optimizer and "
                    "its schedulers as they were when it was saved."
                )
            groups.append({**settings, "params": names})
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
        without: list[str] = []
        for param in (param for group in optimizer.param_groups for param in group["params"]):
            name = names[id(param)]
            if not param.requires_grad or name not in saved:
                if param.requires_grad and param.ndim and kernel.discover(param).kinds:
                    without.append(name)
                continue
            if not param.ndim:  # not sharded, so `load_state_dict` checks its state
                matched[name] = saved[name]
                continue
            spec, found = kernel.discover(param), saved[name]
            if found.keys() != (needed := {*dict(spec.kinds), *spec.scalars}):
                raise ConfigError(
                    f"{prefix}{name} in {self._folder} has {', '.join(sorted(found))}, but this optimizer needs "
                    f"{', '.join(sorted(needed)) or 'no state'}. Create the optimizer that was saved."
                )
            for kind, dtype_name in spec.kinds:
                self._check_tensor(found[kind], param.shape, torch_dtype(dtype_name), convert=False)
            matched[name] = found
        if without and saved:
            _log.warning(
                "%s has no optimizer state for %d of the trained parameters, for example %s. Their state starts from "
                "the initial one.",
                self._folder, len(without), without[0],
            )  # fmt: skip
        return matched

    # Weights and buffers #

    def values(self, fsdp_module: str, members: Sequence[Member]) -> ValueOf:
        """Return a function that reads this rank's slices of the weights. `load` loads the optimizer states."""

        def value_of(position: int, section: str) -> torch.Tensor | None:
            if section != MASTER:
                return None
            member = members[position]
            key, spans = self._model + _name(member), local_spans(member.param)
            shape = torch_private.full_shape(member.param)
            slice_ = torch.empty(sizes_of(spans), dtype=member.param.sharded_param.dtype)
            for box, target in overlaps(full_spans(shape), spans):
                chunk = ChunkStorageMetadata(
                    torch.Size(each.start for each in box), torch.Size(each.stop - each.start for each in box)
                )
                items = create_read_items_for_chunk_list(key, self._stored[key], [chunk])
                try:
                    self._reader.read_data(LoadPlan(items), _Planner(slice_[target])).wait()
                except Exception as error:  # torch raises various exceptions for a damaged file
                    raise self._cannot_read(key, error) from error
            return slice_.reshape(-1)

        return value_of

    def buffers(self, model: nn.Module) -> Mapping[str, torch.Tensor]:
        """Return the persistent buffers, in the dtypes of the model."""
        in_memory = torch_private.tensors_in_memory(model)
        buffers = {name: in_memory[name] for name in torch_private.persistent_buffers(model)}
        keys = {name: self._model + torch_private.unwrapped_name(name) for name in buffers}
        loaded = self._load("buffers", keys.values())
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
        here: Any = get_optimizer_state_dict(model, optimizer)["state"]
        values = {key: here[name][kind] for name, keys in self._states.items() for kind, key in keys.items()}
        paged = {key: value for key, value in values.items() if isinstance(value, DTensor)}
        loaded = self._load("optimizer state", values.keys() - paged.keys(), paged)
        state = {name: {kind: loaded[key] for kind, key in keys.items()} for name, keys in self._states.items()}
        optimizer.load_state_dict({"state": state, "param_groups": self._groups})
        return max((int(states["step"]) for states in state.values() if "step" in states), default=0)

    # Reading #

    def _load(self, what: str, keys: Iterable[str], targets: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return saved tensors and objects by key. Tensors in `targets` are loaded in place."""
        state: dict[str, Any] = dict.fromkeys(keys)
        for key in filter(self._is_tensor, state):
            stored = self._stored[key]
            state[key] = torch.empty(stored.size, dtype=stored.properties.dtype)
        state.update(targets or {})
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled")
                load(state, storage_reader=self._reader, planner=_Planner(), no_dist=True)
        except CheckpointException as error:
            reason = only_error(error)
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
