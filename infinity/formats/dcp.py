"""Export of a checkpoint with `torch.distributed.checkpoint`."""

from __future__ import annotations

import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torch.utils._pytree import tree_leaves

from infinity import torch_private
from infinity.checkpoint.durable import NewFolder, sync_file
from infinity.checkpoint.reader import CheckpointReader
from infinity.content.format import MASTER
from infinity.errors import ConfigError, InfinityError, UnsupportedError
from infinity.fsdp.paged_tensor import PagedTensor

# Initial values of states and scalars in torch's optimizers, for parameters that were never updated.
_INITIAL = {"step": 0, "mu_product": 1} | dict.fromkeys(
    ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg", "acc_delta"), 0
)


@dataclass(frozen=True)
class _Section:
    """A parameter or one of its optimizer states, which is read when it is saved. Implements `TensorHandle`."""

    reader: CheckpointReader
    index: int
    kind: str
    updated: bool
    advance: Callable[[int], None]

    @property
    def name(self) -> str:
        """Name for error messages."""
        return f"{self.kind} of {self.reader.tensors[self.index].names[0]}"

    def load(self) -> torch.Tensor:
        """Return all elements, flat."""
        if self.updated:
            found = self.reader.read(self.index, self.kind).reshape(-1)
        else:
            numel, dtype = self.reader.tensors[self.index].parameters, self.reader.dtype(self.index, self.kind)
            found = torch.full((numel,), _INITIAL[self.kind], dtype=dtype)
        self.advance(found.nbytes)
        return found

    def save(self, content: torch.Tensor) -> None:
        """Raise an error, because a checkpoint does not change."""
        self.fail(UnsupportedError(f"{self.name} is in a checkpoint and cannot be changed"))

    def fail(self, error: Exception) -> None:
        """Raise `error`."""
        raise error


def _state_dict(reader: CheckpointReader, advance: Callable[[int], None] = lambda _: None) -> dict[str, Any]:
    """Return the results of `get_state_dict` for a checkpoint. Parameters and their states are `PagedTensor`s."""

    def stored(index: int, kind: str, *, updated: bool = True) -> torch.Tensor:
        handle = _Section(reader, index, kind, updated, advance)
        return PagedTensor.stored(handle, reader.tensors[index].shape, reader.dtype(index, kind), torch.device("cpu"))

    names = [[torch_private.unwrapped_name(name) for name in spec.names] for spec in reader.tensors]
    model = {name: stored(index, MASTER) for index, all_names in enumerate(names) for name in all_names}
    model |= {torch_private.unwrapped_name(name): value for name, value in reader.buffers()}
    state: dict[str, dict[str, Any]] = {}
    groups, scalars = reader.groups, reader.scalars()
    for group in groups:
        initial = _initial_scalars([scalars[index] for index in group["params"] if index in scalars])
        for index in group["params"]:
            kinds = [kind for kind, _ in reader.kinds(index)]
            known = scalars.get(index, initial if kinds and _INITIAL.keys() >= {*kinds} else None)
            if known is not None:
                state[names[index][0]] = {kind: stored(index, kind, updated=index in scalars) for kind in kinds} | known
        group["params"] = [names[index][0] for index in group["params"]]
    for name, (number, own) in reader.ignored_states().items():
        groups[number]["params"].append(torch_private.unwrapped_name(name))
        state |= {torch_private.unwrapped_name(name): own} if own else {}
    return {"model": model, "optim": {"state": state, "param_groups": groups}}


def _initial_scalars(updated: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the scalars of a parameter before its first update, or ``None`` if they are not known.

    Args:
        updated: scalars of the updated parameters in the same param group.
    """
    if not updated or not _INITIAL.keys() >= updated[0].keys():
        return None
    return {
        key: torch.full_like(value, _INITIAL[key]) if isinstance(value, torch.Tensor) else type(value)(_INITIAL[key])
        for key, value in updated[0].items()
    }


def dcp_bytes(reader: CheckpointReader) -> int:
    """Return the total size, in bytes, of the parameters and states that an export contains."""
    return sum(leaf.nbytes for leaf in tree_leaves(_state_dict(reader)) if isinstance(leaf, PagedTensor))


def export_dcp(
    reader: CheckpointReader, folder: Path, *, advance: Callable[[int], None] = lambda _: None
) -> list[Path]:
    """Write a folder that plain FSDP2 loads with `dcp.load` and `set_state_dict`.

    It has the same keys as `dcp.save({"model": …, "optim": …})` with the results of `get_state_dict(model, optimizer)`.
    Every tensor is in a separate file, and peak memory is one tensor. Every file is read back, and its checksums are
    verified. The folder only appears under its name when all files are durable.

    As `dcp.load` in a new run requires, the state of a parameter that was never updated is included, if it is known.

    Args:
        reader: checkpoint to read.
        folder: target folder, which must be new or empty.
        advance: function that is called with the size, in bytes, of every tensor that was read.

    Returns:
        Paths of the files.

    Raises:
        ConfigError: if the folder is not empty or not writable, or a file is damaged when it is read back.
        StorageError, CorruptPageError, CheckpointError: if the state cannot be read.
    """
    with NewFolder(folder, dcp_bytes(reader)) as partial:
        # With one file for all tensors, the writer would keep them in memory until the file is complete.
        writer = FileSystemWriter(partial, single_file_per_rank=False, sync_files=False)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled")
                save(_state_dict(reader, advance), storage_writer=writer, no_dist=True)
            for file in partial.glob("*.distcp"):
                sync_file(file)
                if _is_damaged(file):
                    raise ConfigError(f"{file} differs from the data that was written; check the drive")
        except CheckpointException as failure:
            error = only_error(failure)
            raise ConfigError(f"{folder} cannot be written: {_reason(error)}") from error
        except OSError as error:
            raise ConfigError(f"{folder} cannot be written: {_reason(error)}") from error
        return sorted(folder / file.name for file in partial.iterdir())


def only_error(failure: CheckpointException) -> Exception:
    """Return the error of a save or load without process group.

    Raises:
        InfinityError: the error itself, if it is one. Interrupts are raised, too.
    """
    ((error, _),) = failure.failures.values()
    if isinstance(error, InfinityError) or not isinstance(error, Exception):
        raise error from None
    return error


def _is_damaged(file: Path) -> bool:
    """Return whether a file that `torch.save` wrote, which is a ZIP file, does not match its checksums."""
    try:
        with zipfile.ZipFile(file) as opened:
            return opened.testzip() is not None
    except (ValueError, zipfile.BadZipFile):
        return True


def _reason(error: BaseException) -> str:
    """Return the message of the file system. It may be a cause, because torch reports "unexpected pos" instead."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.strerror:
            return seen.strerror
        seen = seen.__cause__ or seen.__context__
    return str(error)
