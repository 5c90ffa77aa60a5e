"""State of modules that is neither in pages nor in a buffer of the sharded model.

`state_dict()` also contains the return values of `get_extra_state`. If the sharded model is part of another module, for
example a LightningModule, it contains the buffers of that module, too. Checkpoints store these entries under their keys
in the `state_dict()` of the outermost module. Entries that are none of these are reported when a run starts.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from infinity import torch_private
from infinity.errors import CheckpointError, UnsupportedError

_PREFIX = "state."
IGNORED = "optimizer state of ignored_params"
"""Key of the optimizer state of the parameters that `fully_shard` ignores."""
_REMEDY = "To train without checkpoints, set run.retained_checkpoints = 0."


def assign(buffer: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a saved value into a buffer. Elements that share memory, as after `expand`, are written once."""
    with torch.inference_mode(buffer.is_inference()), torch.no_grad():  # the first enables gradients
        for dim in range(buffer.dim()):
            if buffer.stride(dim) == 0 and buffer.shape[dim] > 1:
                buffer, value = buffer.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
        buffer.copy_(value)


class ExtraState(Protocol):
    """Object that saves and restores its state like a module."""

    def get_extra_state(self) -> Any:
        """Return the state; None if there is nothing to save."""

    def set_extra_state(self, state: Any) -> None:
        """Restore the state."""


def check_state_dict(outermost: nn.Module, model: nn.Module, ignored: ExtraState) -> dict[str, torch.Tensor]:
    """Check, before a run starts, that checkpoints contain everything that `outermost.state_dict()` returns.

    Args:
        outermost: Module that contains `model`, or `model` itself.
        model: Sharded model.
        ignored: See `packed_state`.

    Returns:
        The result of `packed_state`.

    Raises:
        UnsupportedError: if an entry would be missing from checkpoints or could not be restored. The message names it.
    """
    for key, module in torch_private.modules_with_extra_state(outermost):
        if not torch_private.restores_extra_state(module):
            raise UnsupportedError(
                f"{type(module).__name__} defines get_extra_state but not set_extra_state, so {key} could not be "
                f"restored from a checkpoint. Define both. {_REMEDY}"
            )
    packed = packed_state(outermost, model, ignored)
    for key, value in packed.items():
        try:
            _unpacked(key, value)
        except ValueError as error:
            raise UnsupportedError(
                f"{error}. Let get_extra_state return tensors, numbers, strings, or collections of these. {_REMEDY}"
            ) from error
    tensors = dict(
        chain(outermost.named_parameters(remove_duplicate=False), outermost.named_buffers(remove_duplicate=False))
    )
    known = {torch_private.unwrapped_name(key) for key in tensors}
    known.update(torch_private.unwrapped_name(key) for key, _ in torch_private.modules_with_extra_state(outermost))
    storages = {torch_private.storage_key(tensor) for tensor in tensors.values() if not isinstance(tensor, DTensor)}
    for key, value in outermost.state_dict().items():
        # Hooks may rename entries or compute them from parameters, which are DTensors.
        if torch_private.unwrapped_name(key) in known or isinstance(value, DTensor):
            continue
        if not (isinstance(value, torch.Tensor) and torch_private.storage_key(value) in storages):
            raise UnsupportedError(
                f"state_dict() contains {key}, which is neither a parameter, a buffer nor extra state, so checkpoints "
                f"would not contain it. Register it as a buffer, or return it from get_extra_state(). {_REMEDY}"
            )
    return packed


def packed_state(outermost: nn.Module, model: nn.Module, ignored: ExtraState) -> dict[str, torch.Tensor]:
    """Return the entries as tensors for a state file: one tensor of bytes per entry, as written by `torch.save`.

    Args:
        outermost: Module that contains `model`, or `model` itself.
        model: Sharded model.
        ignored: Optimizer state of the parameters that `fully_shard` ignores. It is one of the entries.
    """
    packed = {}
    values: dict[str, Any] = {key: buffer.detach().clone() for key, buffer in _outer_buffers(outermost, model).items()}
    values.update((key, module.get_extra_state()) for key, module in torch_private.modules_with_extra_state(outermost))
    if (state := ignored.get_extra_state()) is not None:
        values[IGNORED] = state
    for key, value in values.items():
        content = io.BytesIO()
        try:
            torch.save(value, content)
        except Exception as error:  # pickle raises various types
            raise CheckpointError(f"{key} cannot be saved: {type(error).__name__}: {error}") from error
        packed[_PREFIX + key] = torch.frombuffer(bytearray(content.getbuffer()), dtype=torch.uint8)
    return packed


def saved_state(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return the entries in the tensors of a state file, by key.

    Raises:
        ValueError: if the data are malformed.
    """
    return {
        name.removeprefix(_PREFIX): _unpacked(name, tensor)
        for name, tensor in tensors.items()
        if name.startswith(_PREFIX)
    }


def load_state(saved: Mapping[str, Any], outermost: nn.Module, model: nn.Module, ignored: ExtraState) -> None:
    """Restore the result of `saved_state`.

    Raises:
        CheckpointError: if the modules have different entries, or a module rejects a value. The message names the
            entry.
    """
    setters: dict[str, Callable[[Any], object]] = {
        key: partial(assign, buffer) for key, buffer in _outer_buffers(outermost, model).items()
    }
    setters |= {key: module.set_extra_state for key, module in torch_private.modules_with_extra_state(outermost)}
    if ignored.get_extra_state() is not None:
        setters[IGNORED] = ignored.set_extra_state
    if different := sorted(setters.keys() ^ saved.keys()):
        where = "the checkpoint" if different[0] in saved else "the model"
        raise CheckpointError(
            f"only {where} has {different[0]}. Create the model as it was when the checkpoint was saved."
        )
    for key, value in saved.items():
        try:
            setters[key](value)
        except Exception as error:  # the user's code raises various types
            raise CheckpointError(
                f"{key} cannot be restored from its value in the checkpoint: {type(error).__name__}: {error}"
            ) from error


def _outer_buffers(outermost: nn.Module, model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the persistent buffers of modules around the model, by name."""
    inside = {id(tensor) for tensor in torch_private.tensors_in_memory(model).values()}
    found = torch_private.tensors_in_memory(outermost)
    return {name: found[name] for name in torch_private.persistent_buffers(outermost) if id(found[name]) not in inside}


def _unpacked(name: str, tensor: torch.Tensor) -> Any:
    try:
        return torch.load(io.BytesIO(tensor.numpy().tobytes()), map_location=_on_this_device, weights_only=True)
    except Exception as error:  # torch raises various types for malformed data, and for classes that it does not load
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{name.removeprefix(_PREFIX)} cannot be loaded: {reason}") from error


def _on_this_device(storage: Any, location: str) -> Any:
    """Move the storage of a saved GPU tensor to the current GPU, whose index may have changed."""
    return storage.cuda() if location.startswith("cuda") else storage
