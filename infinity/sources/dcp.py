"""First values from a folder of `torch.distributed.checkpoint`: of a model, or of a training that goes on."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from infinity import torch_private
from infinity.checkpoint.extra import load_extra
from infinity.checkpoint.model_state import ResumedState
from infinity.content.format import MASTER
from infinity.content.layout import Layout
from infinity.content.views import torch_dtype
from infinity.errors import CheckpointError, ConfigError
from infinity.formats.dcp import EXTRA, GROUPS, METADATA, STATE, STEP, ReadOne, open_checkpoint
from infinity.fsdp.sharded_model import Member, local_bounds
from infinity.optim.multi_optimizer import OWNER, name_of
from infinity.optim.slicing_check import make_kernel
from infinity.sources.first_values import FirstValues, ValueOf, convertible

_log = logging.getLogger(__name__)


class DcpFolder(FirstValues):
    """A folder that `torch.distributed.checkpoint` wrote, by any number of ranks; each rank reads its slices.

    The model's state may be on its own or beside the optimizer's, under any name. Memory is that of one tensor as it
    was saved, besides the slices that are asked for. Nothing that the folder says is run (`dcp_metadata`).
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Read the metadata.

        Raises:
            CheckpointError: it cannot be read.
        """
        self._folder = Path(folder)
        self._reader, self._metadata = open_checkpoint(self._folder)
        self._stored: Mapping[str, Any] = self._metadata.state_dict_metadata  # by key: what the metadata say of a value
        paths: Mapping[str, Sequence[Any]] = self._metadata.planner_data or {key: (key,) for key in self._stored}
        if missing := self._stored.keys() - paths.keys():
            raise CheckpointError(f"{self._folder / METADATA} cannot be read: it does not say what {min(missing)} is")
        self._paths = {
            key: tuple(map(str, paths[key])) for key in self._stored
        }  # by key: where it was in the state dict
        # What follows is found by `check`.
        self._model = ""  # what stands before the names of the model's state
        self._optim: str | None = None  # and before those of the optimizer's; None: it has none
        self._settings: list[dict[str, str]] = []  # for every group here, keys of its settings
        self._slices: dict[str, dict[str, str]] = {}  # for every parameter, keys of its element-wise states
        self._scalars: dict[str, dict[str, str]] = {}  # and of the others

    @staticmethod
    def is_at(folder: str | os.PathLike[str]) -> bool:
        """Whether a folder is one."""
        return (Path(folder) / METADATA).is_file()

    def check(
        self, model: nn.Module, members: Sequence[Member], layout: Layout, optimizer: torch.optim.Optimizer
    ) -> None:
        """Check that all of the model is there, and all of the optimizer's state if there is any.

        Raises:
            ConfigError: something is missing, or of another shape or dtype; it is named.
            CheckpointError: something cannot be read.
        """
        self._model = self._find_model(_name(members[0]))
        if apart := [member.names[0] for member in members if torch_private.is_tensor_parallel(member.param)]:
            raise ConfigError(
                f"{apart[0]} is tensor-parallel, and {self._folder} has whole parameters; load it into a model on a "
                "real device, or without tensor parallelism"
            )
        for member in members:
            key = self._model + _name(member)
            self._check_tensor(key, tuple(torch_private.full_shape(member.param)))
            self._check_kind(key, member.param.sharded_param.dtype)
        for name in torch_private.persistent_buffers(model):
            key, buffer = self._model + torch_private.unwrapped_name(name), model.get_buffer(name)
            self._check_tensor(key, tuple(buffer.shape))
            self._check_kind(key, buffer.dtype)
        self._optim = self._find_optimizer()
        if self._optim is not None:
            self._match_groups(members, optimizer)
            self._match_states(members, layout, optimizer)

    def _find_model(self, first: str) -> str:
        roots = {path[:-1] for path in self._paths.values() if path[-1] == first}
        if len(roots) > 1:
            found = ", ".join(sorted(map(".".join, roots)))
            raise ConfigError(f"{self._folder} has several models ({found}); save one of them on its own")
        return "".join(f"{part}." for root in roots for part in root) if roots else "model."

    def _find_optimizer(self) -> str | None:
        roots = {key.partition(GROUPS)[0] for key in self._stored if GROUPS in key}
        if len(roots) > 1:
            raise ConfigError(f"{self._folder} has several optimizers ({', '.join(sorted(roots))}); save one only")
        return roots.pop() if roots else None

    def _check_kind(self, key: str, wanted: torch.dtype) -> None:
        found = self._stored[key].properties.dtype
        if not convertible(found, wanted):
            raise ConfigError(f"{key} in {self._folder} is {found}, this run needs {wanted}; save it as it is trained")

    def _check_tensor(self, key: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> None:
        stored = self._stored.get(key)
        if not isinstance(stored, TensorStorageMetadata):
            raise ConfigError(
                f"{self._folder} has no tensor {key}; save what get_state_dict returns for this model and optimizer"
            )
        if sum(chunk.sizes.numel() for chunk in stored.chunks) < stored.size.numel():
            raise ConfigError(f"{self._folder} has only a part of {key}; save it by all ranks together")
        if tuple(stored.size) != shape:
            raise ConfigError(
                f"{key} in {self._folder} has shape {tuple(stored.size)}, this run needs {shape}; build the model that "
                "was saved"
            )
        if dtype is not None and stored.properties.dtype != dtype:
            raise ConfigError(
                f"{key} in {self._folder} is {stored.properties.dtype}, this run needs {dtype}; train in the dtype in "
                "which it was trained, or save the model without its optimizer"
            )

    def _saved_groups(self) -> dict[str, dict[str, str]]:
        """Return the keys of settings by group."""
        groups: dict[str, dict[str, str]] = {}
        prefix = f"{self._optim}{GROUPS}"
        for key in self._stored:
            if key.startswith(prefix):
                group, _, setting = key.removeprefix(prefix).partition(".")
                groups.setdefault(group, {})[setting] = key
        if not all(group.isdigit() and "params" in settings for group, settings in groups.items()):
            raise ConfigError(
                f"{self._folder} has a flattened optimizer state; save it without flatten_optimizer_state_dict"
            )
        return groups

    def _match_groups(self, members: Sequence[Member], optimizer: torch.optim.Optimizer) -> None:
        groups = self._saved_groups()
        group_of = {name: group for group, settings in groups.items() for name in self._read(settings["params"])}
        names = {id(member.param.sharded_param): _name(member) for member in members}
        for number, here in enumerate(optimizer.param_groups):
            of_group = [names[id(param)] for param in here["params"]]
            found = {group_of.get(name, "none"): name for name in of_group}
            if len(found) != 1 or "none" in found:
                raise ConfigError(
                    f"the parameters of group {number} are not of one group in {self._folder} "
                    f"({', '.join(f'{name} is in {group}' for group, name in sorted(found.items()))}); give the "
                    "optimizer the groups that it had when it was saved"
                )
            settings = groups[group_of[of_group[0]]]
            if missing := here.keys() - settings.keys() - {OWNER}:
                lacking = f"{self._optim}{GROUPS}{group_of[of_group[0]]}.{min(missing)}"
                raise ConfigError(
                    f"{self._folder} has no {lacking}; make the optimizer, and "
                    "its schedulers, as they were when it was saved"
                )
            self._settings.append({setting: key for setting, key in settings.items() if setting != "params"})

    def _match_states(self, members: Sequence[Member], layout: Layout, optimizer: torch.optim.Optimizer) -> None:
        states: dict[str, dict[str, str]] = {}
        for key, path in self._paths.items():
            if key.startswith(f"{self._optim}{STATE}"):
                states.setdefault(path[-2], {})[path[-1]] = key
        kernel = make_kernel(optimizer)
        group_of = {id(param): group for group in optimizer.param_groups for param in group["params"]}
        for member, placed in zip(members, layout.shards, strict=True):
            name, param = _name(member), member.param.sharded_param
            if not placed.spec.trainable or name not in states:
                continue
            group, found = group_of[id(param)], states[name]
            state = kernel.discover(param, group)
            kinds = dict(state.kinds)
            if found.keys() != kinds.keys() | set(state.scalars):
                raise ConfigError(
                    f"{self._optim}{STATE}{name} in {self._folder} has {', '.join(sorted(found))}, "
                    f"{name_of(optimizer)} as it is set here needs "
                    f"{', '.join(sorted({*kinds, *state.scalars})) or 'nothing'}; make the optimizer that was saved"
                )
            for kind, dtype in kinds.items():
                self._check_tensor(found[kind], tuple(torch_private.full_shape(member.param)), torch_dtype(dtype))
            self._slices[name] = {kind: found[kind] for kind in kinds}
            self._scalars[name] = {scalar: found[scalar] for scalar in state.scalars}

    def values(self, fsdp_module: str, members: Sequence[Member]) -> ValueOf:
        """Return this rank's slices, which are read when they are asked for.

        Raises:
            CheckpointError: when asked: a file cannot be read.
        """

        def value_of(position: int, section: str) -> torch.Tensor | None:
            member = members[position]
            if section == MASTER:
                return self._slice(self._model + _name(member), member, member.param.sharded_param.dtype)
            key = self._slices.get(_name(member), {}).get(section)
            return None if key is None else self._slice(key, member, self._stored[key].properties.dtype)

        return value_of

    def buffers(self, model: nn.Module) -> Mapping[str, torch.Tensor]:
        """Return the persistent buffers, in the dtypes of the model."""
        return {
            name: self._read(self._model + torch_private.unwrapped_name(name)).to(model.get_buffer(name).dtype)
            for name in torch_private.persistent_buffers(model)
        }

    def restore(self, model: nn.Module, members: Sequence[Member], groups: list[dict[str, Any]]) -> ResumedState | None:
        """Put back settings of groups; return step counts.

        The step is that of the run which was exported, else the highest that the optimizer has counted for a parameter.
        """
        if self._optim is None:
            _log.warning("%s has no optimizer state: moments and step counts begin anew", self._folder)
            return None
        for group, settings in zip(groups, self._settings, strict=True):
            group.update({setting: self._read(key) for setting, key in settings.items()})
        scalars = {
            shard: {scalar: self._read(key) for scalar, key in self._scalars[_name(member)].items()}
            for shard, member in enumerate(members)
            if _name(member) in self._scalars
        }
        counted = [int(values["step"]) for values in scalars.values() if "step" in values]
        step = self._read(STEP) if STEP in self._stored else max(counted, default=0)
        extra = load_extra(json.loads(self._read(EXTRA))) if EXTRA in self._stored else {}
        return ResumedState(step, scalars, extra)

    def _read(self, key: str) -> Any:
        """Return a whole tensor or plain data."""
        stored = self._stored[key]
        target = torch.empty(stored.size, dtype=stored.properties.dtype) if hasattr(stored, "size") else None
        return self._load(key, create_default_local_load_plan({key: target}, self._metadata), target)

    def _slice(self, key: str, member: Member, dtype: torch.dtype) -> torch.Tensor:
        """Return this rank's elements of a whole tensor, flat."""
        offsets, sizes = map(torch.Size, local_bounds(member.param))
        target = torch.empty(sizes, dtype=dtype)
        items = create_read_items_for_chunk_list(key, self._stored[key], [ChunkStorageMetadata(offsets, sizes)])
        return self._load(key, LoadPlan(items), target).reshape(-1)  # type: ignore[no-any-return]

    def _load(self, key: str, plan: LoadPlan, target: Any) -> Any:
        into = ReadOne(target)
        try:
            self._reader.read_data(plan, into).wait()
        except Exception as error:
            raise CheckpointError(f"{key} in {self._folder} cannot be read: {type(error).__name__}: {error}") from error
        return into.target


def _name(member: Member) -> str:
    return torch_private.unwrapped_name(member.names[0])
