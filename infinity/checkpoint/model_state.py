"""Checkpointed state that is not in pages: buffers, random states and group settings."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save
from torch import nn

from infinity import torch_private
from infinity.checkpoint.module_state import ExtraState, assign, packed_state
from infinity.errors import CheckpointError, UnsupportedError

_BUFFER, _TORCH, _CUDA, _NUMPY = "buffer.", "random.torch", "random.cuda.", "random.numpy"


@dataclass(frozen=True)
class ResumedState:
    """Training state outside the pages.

    `scalars` contains the scalar optimizer states by shard, `extra` the user data, `own` the persistent attributes of
    the optimizer object, and `modules` the result of `saved_state`, or None if the source has no such state.
    """

    step: int
    scalars: dict[int, dict[str, Any]]
    extra: dict[str, Any]
    own: dict[str, Any] = field(default_factory=dict)
    modules: dict[str, Any] | None = None


def save_tensors(model: nn.Module, outermost: nn.Module, ignored: ExtraState) -> bytes:
    """Return the state of modules and of the random generators of torch and NumPy as safetensors data.

    Args:
        model: Sharded model, whose buffers are saved.
        outermost: Module that contains `model`, or `model` itself. See `module_state`.
        ignored: Optimizer state of the parameters that `fully_shard` ignores.
    """
    tensors = {_BUFFER + name: buffer.detach().cpu().contiguous() for name, buffer in _named_buffers(model)}
    tensors[_TORCH] = torch.get_rng_state()
    if torch.cuda.is_available():
        for index, state in enumerate(torch.cuda.get_rng_state_all()):
            tensors[f"{_CUDA}{index}"] = state
    tensors[_NUMPY] = torch.from_numpy(_numpy_state()[1].astype(np.int64))
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    return bytes(save(tensors | packed_state(outermost, model, ignored)))


def _named_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all buffers, and the parameters that `fully_shard` ignores, which are stored like persistent buffers.

    As in `state_dict`, a buffer that modules share is yielded under each of its names.
    """
    return iter(torch_private.tensors_in_memory(model).items())


def check_buffers(model: nn.Module) -> None:
    """Check, before a run starts, that checkpoints can store the buffers of a model.

    Raises:
        UnsupportedError: if a buffer is sparse, or has a dtype that safetensors cannot restore.
    """
    readable: dict[torch.dtype, bool] = {}
    for name, buffer in _named_buffers(model):
        if buffer.dtype not in readable:
            try:
                load(save({name: torch.empty(0, dtype=buffer.dtype)}))
            except Exception:  # safetensors raises various types for an unknown dtype
                readable[buffer.dtype] = False
            else:
                readable[buffer.dtype] = True
        dense = buffer.layout is torch.strided
        if not (dense and readable[buffer.dtype]):
            kind = str(buffer.dtype if dense else buffer.layout).removeprefix("torch.")
            raise UnsupportedError(
                f"buffer {name} is {kind}, which checkpoints do not support. Register it with a supported dtype, or "
                "derive it from a buffer that has one (for a complex buffer, torch.view_as_real). To train without "
                "checkpoints, set run.retained_checkpoints = 0."
            )


def load_buffers(data: bytes, model: nn.Module, persistent: Collection[str]) -> None:
    """Restore the buffers in the data that `save_tensors` returned. Raises the same exceptions as `saved_buffers`."""
    saved = saved_buffers(data, model, persistent)
    for name, buffer in _named_buffers(model):
        if name in saved:
            try:
                assign(buffer, saved[name])
            except RuntimeError as error:
                raise CheckpointError(
                    f"buffer {name} cannot be restored from its value in the checkpoint: {error}"
                ) from error


def saved_buffers(data: bytes, model: nn.Module, persistent: Collection[str]) -> dict[str, torch.Tensor]:
    """Return a model's buffers, by name, from the data that `save_tensors` returned.

    A non-persistent buffer keeps its current value if the checkpoint has no buffer of the same shape. Examples are
    tables that a model computes on first use or extends later.

    Args:
        data: Contents of a state file.
        model: Model whose buffers are looked up.
        persistent: Names of the buffers that were persistent in the checkpoint.

    Raises:
        ValueError: if the data are malformed.
        CheckpointError: if the model has other persistent buffers, or one has a different shape.
    """
    check_persistent(model, persistent)
    tensors = load_tensors(data)
    found = {}
    for name, buffer in _named_buffers(model):
        saved = tensors.get(_BUFFER + name)
        if saved is not None and saved.shape == buffer.shape:
            found[name] = saved
        elif name in persistent:
            there = "no such buffer" if saved is None else f"shape {tuple(saved.shape)}"
            raise CheckpointError(
                f"buffer {name} of the model has shape {tuple(buffer.shape)}, but the checkpoint has {there}. Build "
                "the same model as for the checkpoint."
            )
    return found


def check_persistent(model: nn.Module, names: Collection[str]) -> None:
    """Check that a model has the persistent buffers that a checkpoint describes.

    Args:
        model: Sharded model.
        names: Names of the persistent buffers in the checkpoint.

    Raises:
        CheckpointError: if the names differ. The message contains one of them.
    """
    here = torch_private.persistent_buffers(model)
    if different := sorted(set(here) ^ set(names)):
        place, other = ("model", "checkpoint") if different[0] in here else ("checkpoint", "model")
        raise CheckpointError(
            f"the {place} has the persistent buffer {different[0]}, but the {other} does not. Register persistent "
            "buffers before infinity.offload, and build the same model as for the checkpoint."
        )


def saved_buffer(tensors: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """Return one buffer from the tensors that `load_tensors` returned.

    Raises:
        ValueError: if the buffer is missing.
    """
    return _named(tensors, _BUFFER + name)


def load_tensors(data: bytes) -> dict[str, torch.Tensor]:
    """Return the tensors of a state file.

    Raises:
        ValueError: if the data are malformed.
    """
    try:
        return dict(load(data))
    except Exception as error:  # safetensors and torch raise various types for malformed data
        raise ValueError(f"it is not valid safetensors data: {error}") from error


def _named(tensors: Mapping[str, torch.Tensor], name: str, shape: Sequence[int] | None = None) -> torch.Tensor:
    found = tensors.get(name)
    if found is None or (shape is not None and found.shape != shape):
        raise ValueError(f"it has no {name}" + (f" of shape {tuple(shape)}" if shape is not None else ""))
    return found


def save_random() -> dict[str, Any]:
    """Return the states of Python's and NumPy's random generators as plain data."""
    version, internal, gauss = random.getstate()
    kind, _, position, has_gauss, cached = _numpy_state()
    return {
        "python": [version, list(internal), gauss],
        "numpy": [kind, int(position), int(has_gauss), float(cached)],
    }


def load_random(saved: Mapping[str, Any], data: bytes) -> None:
    """Restore the states of all random generators from the result of `save_random` and from the state file.

    Raises:
        ValueError: if the data are malformed.
    """
    tensors = load_tensors(data)
    keys = _named(tensors, _NUMPY, (624,))
    if keys.dtype != torch.int64 or not ((keys >= 0) & (keys < 1 << 32)).all():
        raise ValueError(f"{_NUMPY} does not consist of 32-bit words")
    version, internal, gauss = saved["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, position, has_gauss, cached = saved["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    try:
        torch.set_rng_state(_named(tensors, _TORCH))
        if torch.cuda.is_available():
            for index in range(torch.cuda.device_count()):
                if f"{_CUDA}{index}" in tensors:
                    torch.cuda.set_rng_state(tensors[f"{_CUDA}{index}"], index)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"a state of torch's random generators is not valid: {error}") from error


def _numpy_state() -> tuple[Any, ...]:
    state: Any = np.random.get_state(legacy=True)
    return tuple(state)


def load_groups(
    saved: Sequence[Mapping[str, Any]], groups: list[dict[str, Any]], held: Sequence[Sequence[int]]
) -> None:
    """Restore the settings of parameter groups, leaving their parameters unchanged.

    Args:
        saved: Parameter groups in the checkpoint, whose `params` are shard indices.
        groups: Parameter groups of the optimizer.
        held: Parameters of each group, as the indices that they have in the checkpoint.

    Raises:
        CheckpointError: if the number of groups differs, or if a group contains different parameters and would
            therefore get another group's settings.
    """
    if len(saved) != len(groups):
        raise CheckpointError(f"the checkpoint has {len(saved)} param groups, but the optimizer has {len(groups)}")
    for number, (group, indices) in enumerate(zip(saved, held, strict=True)):
        if set(group["params"]) != set(indices):
            raise CheckpointError(
                f"param group {number} contains different parameters in the checkpoint and in the optimizer "
                f"({len(group['params'])} in the checkpoint, {len(indices)} in the optimizer). Pass the same groups in "
                "the same order as for the checkpoint."
            )
    for values, group in zip(saved, groups, strict=True):
        group.update({key: value for key, value in values.items() if key != "params"})
