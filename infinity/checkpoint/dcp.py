"""The format of `torch.distributed.checkpoint`: commits out, and the state of a plain FSDP2 run in.

Both ways the folder is that of `dcp.save({"model": …, "optim": …})` with the two halves of `get_state_dict(model,
optimizer)`. Ours has two entries more, `infinity.step` and `infinity.extra` (JSON), which a plain load passes over.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, WriteItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from infinity.checkpoint.dcp_metadata import read_metadata
from infinity.checkpoint.durable import NewFolder, sync_file
from infinity.checkpoint.export import cut, digest_of
from infinity.checkpoint.extra import load_extra, save_extra
from infinity.checkpoint.reader import CommitReader
from infinity.errors import CommitError, ConfigError, InfinityError
from infinity.fsdp import private
from infinity.fsdp.content import torch_dtype
from infinity.fsdp.first_values import FirstValues, Member, ResumedState, ValueOf, local_bounds
from infinity.layout import MASTER, Layout
from infinity.optim.probe import make_kernel

_log = logging.getLogger(__name__)

_METADATA = ".metadata"
_GROUPS, _STATE = "param_groups.", "state."
_STEP, _EXTRA = "infinity.step", "infinity.extra"


class DcpExport(DefaultSavePlanner):
    """A commit as a folder that plain FSDP2 loads with `dcp.load` and `set_state_dict`.

    Parameters that were never updated have no optimizer state, as in torch.
    """

    def __init__(self, reader: CommitReader) -> None:
        """Plan what is to be written; nothing is read from pages yet."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._reader = reader
        self._sections: dict[str, tuple[int, str]] = {}
        self._advance: Callable[[int], None] = lambda _: None
        self._written: dict[str, int] = {}  # digest of everything that was handed to the writer, by key
        self.set_up_planner(self._state())
        self._items: list[WriteItem] = sorted(self.create_local_plan().items, key=self._place)

    def _state(self) -> dict[str, Any]:
        """Return the state dict, with tensors on the meta device for what is in the pages."""
        reader, scalars = self._reader, self._reader.scalars()
        names = [[private.unwrapped_name(name) for name in spec.names] for spec in reader.tensors]
        model = {name: self._section(f"model.{name}", i, MASTER) for i, all_of in enumerate(names) for name in all_of}
        model.update((private.unwrapped_name(name), value) for name, value in reader.buffers())
        state = {
            names[index][0]: {
                **{
                    kind: self._section(f"optim.{_STATE}{names[index][0]}.{kind}", index, kind)
                    for kind, _ in reader.kinds(index)
                },
                **values,
            }
            for index, values in scalars.items()
        }
        groups = [{**group, "params": [names[index][0] for index in group["params"]]} for group in reader.groups]
        own = {"step": reader.step, "extra": json.dumps(save_extra(reader.extra))}
        return {"model": model, "optim": {"state": state, "param_groups": groups}, "infinity": own}

    def _section(self, key: str, index: int, name: str) -> torch.Tensor:
        self._sections[key] = (index, name)
        return torch.empty(self._reader.tensors[index].shape, dtype=self._reader.dtype(index, name), device="meta")

    def _place(self, item: WriteItem) -> int:
        """Parameter by parameter, small things first: master and states lie in the same pages."""
        return self._sections.get(item.index.fqn, (-1, ""))[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(map(_item_bytes, self._items))

    def write(self, folder: Path, *, file_bytes: int, advance: Callable[[int], None] = lambda _: None) -> list[Path]:
        """Write the folder and compare what is read back; it is there when all of it is durable.

        Memory is that of one file.

        Args:
            folder: new, or empty.
            file_bytes: most bytes of tensors per file; a larger one gets a file of its own.
            advance: told the bytes of every tensor that was read.

        Raises:
            ConfigError: the folder is not empty or cannot be written to, or what is read back is something else.
            StorageError, CorruptPageError, CommitError: the commit cannot be read.
        """
        self._advance = advance
        # The writer holds all tensors of a file until it is written, and has one file per rank. So the files are
        # those of as many ranks as are needed, one after the other.
        files = cut([_item_bytes(item) for item in self._items], file_bytes)
        plans = [replace(self.plan, items=[self._items[position] for position in file]) for file in files]
        new = NewFolder(folder, self.nbytes)
        with new as partial:
            writer = _Writer(partial, new.folder)
            try:
                writer.set_up_storage_writer(True)
                plans, metadata = self.create_global_plan([writer.prepare_local_plan(plan) for plan in plans])
                results = [writer.write_data(plan, self).wait() for plan in writer.prepare_global_plan(plans)]
                writer.finish(metadata, results)
                self._compare(partial)
            except (OSError, RuntimeError) as error:
                if isinstance(error, InfinityError):
                    raise
                # torch says of a full drive that the position in the file is unexpected
                raise ConfigError(f"{folder} cannot be written: {_reason(error)}") from error
            names = sorted(file.name for file in partial.iterdir())
        return [folder / name for name in names]

    def _compare(self, folder: Path) -> None:
        """Check that what a reader finds on the drive is what was handed to the writer.

        Raises:
            ConfigError: it is not.
        """
        for file in folder.iterdir():
            sync_file(file)
        reader, metadata = open_checkpoint(folder)
        for key, stored in metadata.state_dict_metadata.items():
            target = None
            if isinstance(stored, TensorStorageMetadata):
                target = torch.empty(stored.size, dtype=stored.properties.dtype)
            into = _Into(target)
            failure: Exception | None = None
            try:
                reader.read_data(create_default_local_load_plan({key: target}, metadata), into).wait()
            except Exception as error:  # what torch raises for a damaged file is not one kind
                failure = error
            if failure or digest_of(into.target if target is not None else into.content) != self._written[key]:
                raise ConfigError(f"{key} in {folder} is not what was written; look after that drive") from failure

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | BytesIO:
        """Return what is to be written, and note what it is."""
        data = super().resolve_data(write_item)
        self._written[write_item.index.fqn] = digest_of(data)
        return data

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return what is to be written under a key, read from the pages now."""
        if index.fqn in self._sections:
            value = self._reader.read(*self._sections[index.fqn])
        else:
            value = super().lookup_object(index)
        if isinstance(value, torch.Tensor):
            self._advance(value.nbytes)
        return value


def _item_bytes(item: WriteItem) -> int:
    data = item.tensor_data
    return data.size.numel() * data.properties.dtype.itemsize if data is not None else 0


class _Writer(FileSystemWriter):
    """Writes one folder that is to stand elsewhere."""

    def __init__(self, folder: Path, final: Path) -> None:
        super().__init__(folder, per_thread_copy_ahead=0)
        self._final = final

    def storage_meta(self) -> StorageMeta | None:
        """Return what the metadata say of the place."""
        return StorageMeta(checkpoint_id=str(self._final), save_id=self.save_id)


def _reason(error: BaseException) -> str:
    """Return why a folder could not be written, as the file system has said it."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.strerror:
            return seen.strerror
        seen = seen.__cause__ or seen.__context__
    return str(error)


def open_checkpoint(folder: Path) -> tuple[FileSystemReader, Metadata]:
    """Return what reads a folder, and its metadata.

    Raises:
        CommitError: they cannot be read, or a file is missing.
    """
    file = folder / _METADATA
    try:
        metadata = read_metadata(file)
        reader = FileSystemReader(folder)
        reader.set_up_storage_reader(metadata, True)
        for name in sorted({item.relative_path for item in metadata.storage_data.values()}):
            if not (folder / name).is_file():
                raise ValueError(f"it names {name}, which is no file")
    except OSError as error:
        raise CommitError(f"{file} cannot be read: {error.strerror}") from error
    except Exception as error:  # what a malformed pickle raises is not one kind
        raise CommitError(f"{file} cannot be read: {type(error).__name__}: {error}") from error
    return reader, metadata


class _Into(DefaultLoadPlanner):
    """Reads one tensor, or plain data, of which no code is run."""

    def __init__(self, target: Any) -> None:
        super().__init__()
        self.target = target
        self.content = BytesIO()

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self.target  # type: ignore[no-any-return]

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        self.content = BytesIO(value.getvalue())
        self.target = torch.load(value, weights_only=True)


class DcpFolder(FirstValues):
    """A folder that `torch.distributed.checkpoint` wrote, by any number of ranks; each rank reads its slices.

    The model's state may be on its own or beside the optimizer's, under any name. Memory is that of one tensor as it
    was saved, besides the slices that are asked for. Nothing that the folder says is run (`dcp_metadata`).
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Read the metadata.

        Raises:
            CommitError: it cannot be read.
        """
        self._folder = Path(folder)
        self._reader, self._metadata = open_checkpoint(self._folder)
        self._stored: Mapping[str, Any] = self._metadata.state_dict_metadata
        paths: Mapping[str, Sequence[Any]] = self._metadata.planner_data or {key: (key,) for key in self._stored}
        if missing := self._stored.keys() - paths.keys():
            raise CommitError(f"{self._folder / _METADATA} cannot be read: it does not say what {min(missing)} is")
        self._paths = {key: tuple(map(str, paths[key])) for key in self._stored}
        self._model = ""  # what stands before the names of the model's state, and of the optimizer's
        self._optim: str | None = None
        self._settings: list[dict[str, str]] = []  # for every group here, keys of its settings
        self._slices: dict[str, dict[str, str]] = {}  # for every parameter, keys of its element-wise states
        self._scalars: dict[str, dict[str, str]] = {}  # and of the others

    @staticmethod
    def is_at(folder: str | os.PathLike[str]) -> bool:
        """Whether a folder is one."""
        return (Path(folder) / _METADATA).is_file()

    def check(
        self, model: nn.Module, members: Sequence[Member], layout: Layout, optimizer: torch.optim.Optimizer
    ) -> None:
        """Check that all of the model is there, and all of the optimizer's state if there is any.

        Raises:
            ConfigError: something is missing, or of another shape or dtype; it is named.
            CommitError: something cannot be read.
        """
        self._model = self._find_model(_name(members[0]))
        for member in members:
            self._check_tensor(self._model + _name(member), tuple(private.full_shape(member.param)))
        for name in private.persistent_buffers(model):
            self._check_tensor(self._model + private.unwrapped_name(name), tuple(model.get_buffer(name).shape))
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
        roots = {key.partition(_GROUPS)[0] for key in self._stored if _GROUPS in key}
        if len(roots) > 1:
            raise ConfigError(f"{self._folder} has several optimizers ({', '.join(sorted(roots))}); save one only")
        return roots.pop() if roots else None

    def _check_tensor(self, key: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> None:
        stored = self._stored.get(key)
        if not isinstance(stored, TensorStorageMetadata):
            raise ConfigError(
                f"{self._folder} has no tensor {key}; save what get_state_dict returns for this model and optimizer"
            )
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
        prefix = f"{self._optim}{_GROUPS}"
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
            if missing := here.keys() - settings.keys():
                raise ConfigError(
                    f"{self._folder} has no {self._optim}{_GROUPS}{number}.{min(missing)}; make the optimizer, and "
                    "its schedulers, as they were when it was saved"
                )
            self._settings.append({setting: key for setting, key in settings.items() if setting != "params"})

    def _match_states(self, members: Sequence[Member], layout: Layout, optimizer: torch.optim.Optimizer) -> None:
        states: dict[str, dict[str, str]] = {}
        for key, path in self._paths.items():
            if key.startswith(f"{self._optim}{_STATE}"):
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
                    f"{self._optim}{_STATE}{name} in {self._folder} has {', '.join(sorted(found))}, "
                    f"{type(optimizer).__name__} as it is set here needs "
                    f"{', '.join(sorted({*kinds, *state.scalars})) or 'nothing'}; make the optimizer that was saved"
                )
            for kind, dtype in kinds.items():
                self._check_tensor(found[kind], tuple(private.full_shape(member.param)), torch_dtype(dtype))
            self._slices[name] = {kind: found[kind] for kind in kinds}
            self._scalars[name] = {scalar: found[scalar] for scalar in state.scalars}

    def values(self, unit: str, members: Sequence[Member]) -> ValueOf:
        """Return this rank's slices, which are read when they are asked for.

        Raises:
            CommitError: when asked: a file cannot be read.
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
            name: self._read(self._model + private.unwrapped_name(name)).to(model.get_buffer(name).dtype)
            for name in private.persistent_buffers(model)
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
        step = self._read(_STEP) if _STEP in self._stored else max(counted, default=0)
        extra = load_extra(json.loads(self._read(_EXTRA))) if _EXTRA in self._stored else {}
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
        into = _Into(target)
        try:
            self._reader.read_data(plan, into).wait()
        except Exception as error:
            raise CommitError(f"{key} in {self._folder} cannot be read: {type(error).__name__}: {error}") from error
        return into.target


def _name(member: Member) -> str:
    return private.unwrapped_name(member.names[0])
