"""The format of `torch.distributed.checkpoint`: the state of a run out, that of a plain FSDP2 run in.

Both ways the folder is that of `dcp.save({"model": …, "optim": …})` with the two halves of `get_state_dict(model,
optimizer)`. Ours has two entries more, `infinity.step` and `infinity.extra` (JSON), which a plain load passes over.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem, WriteItem

from infinity import torch_private
from infinity.checkpoint.durable import NewFolder, sync_file
from infinity.checkpoint.extra import save_extra
from infinity.checkpoint.full_state import FullState
from infinity.content.format import MASTER
from infinity.errors import CheckpointError, ConfigError, InfinityError
from infinity.formats.dcp_metadata import read_metadata
from infinity.formats.safetensors import cut, digest_of

_log = logging.getLogger(__name__)

METADATA = ".metadata"
GROUPS, STATE = "param_groups.", "state."
STEP, EXTRA = "infinity.step", "infinity.extra"


class DcpExport(DefaultSavePlanner):
    """The state of a run as a folder that plain FSDP2 loads with `dcp.load` and `set_state_dict`.

    Parameters that were never updated have no optimizer state, as in torch.
    """

    def __init__(self, reader: FullState) -> None:
        """Plan what is to be written; nothing is read from pages yet."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._reader = reader
        self._sections: dict[str, tuple[int, str]] = {}  # by key: parameter and section that its tensor is
        self._advance: Callable[[int], None] = lambda _: None  # told of bytes that were written; set by `write`
        self._written: dict[str, int] = {}  # digest of everything that was handed to the writer, by key
        self.set_up_planner(self._state())
        self._items: list[WriteItem] = sorted(
            self.create_local_plan().items, key=self._place
        )  # in the order in which they are written

    def _state(self) -> dict[str, Any]:
        """Return the state dict, with tensors on the meta device for what is in the pages."""
        reader, scalars = self._reader, self._reader.scalars()
        names = [[torch_private.unwrapped_name(name) for name in spec.names] for spec in reader.tensors]
        model = {name: self._section(f"model.{name}", i, MASTER) for i, all_of in enumerate(names) for name in all_of}
        model.update((torch_private.unwrapped_name(name), value) for name, value in reader.buffers())
        state = {
            names[index][0]: {
                **{
                    kind: self._section(f"optim.{STATE}{names[index][0]}.{kind}", index, kind)
                    for kind, _ in reader.kinds(index)
                },
                **dict(sorted(values.items())),
            }
            for index, values in sorted(scalars.items())
        }
        groups = [
            {**dict(sorted(group.items())), "params": [names[index][0] for index in group["params"]]}
            for group in reader.groups
        ]
        own = {"step": reader.step, "extra": json.dumps(save_extra(reader.extra), sort_keys=True)}
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
            StorageError, CorruptPageError, CheckpointError: the state cannot be read.
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
            into = ReadOne(target)
            failure: Exception | None = None
            try:
                reader.read_data(create_default_local_load_plan({key: target}, metadata), into).wait()
            except Exception as error:  # what torch raises for a damaged file is not one kind
                failure = error
            if failure or digest_of(into.target if target is not None else into.content) != self._written[key]:
                raise ConfigError(f"{key} in {folder} differs from what was written; check the drive") from failure

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
        self._final = final  # where the folder will stand

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
        CheckpointError: they cannot be read, or a file is missing.
    """
    file = folder / METADATA
    try:
        metadata = read_metadata(file)
        reader = FileSystemReader(folder)
        reader.set_up_storage_reader(metadata, True)
        for name in sorted({item.relative_path for item in metadata.storage_data.values()}):
            if not (folder / name).is_file():
                raise ValueError(f"it names {name}, which is no file")
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
    except Exception as error:  # what a malformed pickle raises is not one kind
        raise CheckpointError(f"{file} cannot be read: {type(error).__name__}: {error}") from error
    return reader, metadata


class ReadOne(DefaultLoadPlanner):
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
