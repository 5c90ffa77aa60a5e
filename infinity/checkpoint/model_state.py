"""What a checkpoint holds beside the pages: buffers, random states, scalars and group settings, as plain data."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save
from torch import nn

from infinity.errors import CheckpointError, UnsupportedError

_BUFFER, _TORCH, _CUDA, _NUMPY = "buffer.", "random.torch", "random.cuda.", "random.numpy"


@dataclass(frozen=True)
class ResumedState:
    """How far training has come, besides what is in the pages.

    `scalars` are those of the optimizer by shard, `extra` is the user's, `own` what the optimizer counts on itself.
    """

    step: int
    scalars: dict[int, dict[str, Any]]
    extra: dict[str, Any]
    own: dict[str, Any] = field(default_factory=dict)


def save_tensors(model: nn.Module) -> bytes:
    """Return the model's buffers and the states of torch's and NumPy's generators, as safetensors."""
    tensors = {_BUFFER + name: buffer.detach().cpu().contiguous() for name, buffer in _named_buffers(model)}
    tensors[_TORCH] = torch.get_rng_state()
    if torch.cuda.is_available():
        for index, state in enumerate(torch.cuda.get_rng_state_all()):
            tensors[f"{_CUDA}{index}"] = state
    tensors[_NUMPY] = torch.from_numpy(_numpy_state()[1].astype(np.int64))
    return bytes(save({name: tensor.clone() for name, tensor in tensors.items()}))


def _named_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all buffers, one that several modules share under each of its names, as `state_dict` does."""
    return model.named_buffers(remove_duplicate=False)


def check_buffers(model: nn.Module) -> None:
    """Check, before a run begins, that its checkpoints can have the buffers of a model.

    Raises:
        UnsupportedError: a buffer is sparse, or of a dtype that safetensors does not read back.
    """
    readable: dict[torch.dtype, bool] = {}
    for name, buffer in _named_buffers(model):
        if buffer.dtype not in readable:
            try:
                load(save({name: torch.empty(0, dtype=buffer.dtype)}))
            except Exception:  # what safetensors raises for a dtype that it does not know is not one kind
                readable[buffer.dtype] = False
            else:
                readable[buffer.dtype] = True
        dense = buffer.layout is torch.strided
        if not (dense and readable[buffer.dtype]):
            kind = str(buffer.dtype if dense else buffer.layout).removeprefix("torch.")
            raise UnsupportedError(
                f"the buffer {name} is {kind}, which a checkpoint cannot keep; register it in "
                "another dtype, or compute it from one (torch.view_as_real of a complex one); without checkpoints, set "
                "run.retained_checkpoints = 0"
            )


def load_buffers(data: bytes, model: nn.Module, persistent: Collection[str]) -> None:
    """Put back the buffers that `save_tensors` returned. Raises as `saved_buffers`."""
    saved = saved_buffers(data, model, persistent)
    with torch.no_grad():
        for name, buffer in _named_buffers(model):
            if name in saved:
                buffer.copy_(saved[name])


def saved_buffers(data: bytes, model: nn.Module, persistent: Collection[str]) -> dict[str, torch.Tensor]:
    """Return those buffers of a model that `save_tensors` returned, by their names in the model.

    One that is not persistent keeps its own value where the checkpoint has none of its shape: such are tables that a
    model
    computes when it first needs them, or makes longer.

    Args:
        persistent: names of the buffers that were persistent in the checkpoint.

    Raises:
        ValueError: the data are malformed.
        CheckpointError: a persistent buffer has another shape.
    """
    tensors = load_tensors(data)
    found = {}
    for name, buffer in _named_buffers(model):
        saved = tensors.get(_BUFFER + name)
        if saved is not None and saved.shape == buffer.shape:
            found[name] = saved
        elif name in persistent:
            there = "none" if saved is None else f"one of shape {tuple(saved.shape)}"
            raise CheckpointError(
                f"the buffer {name} of the model has the shape {tuple(buffer.shape)}, the checkpoint has {there}; build "
                "the model as it was"
            )
    return found


def saved_buffer(tensors: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """Return a buffer of those that `load_tensors` returned.

    Raises:
        ValueError: it is not there.
    """
    return _named(tensors, _BUFFER + name)


def load_tensors(data: bytes) -> dict[str, torch.Tensor]:
    """Return the tensors of a state file.

    Raises:
        ValueError: it is malformed.
    """
    try:
        return dict(load(data))
    except Exception as error:  # what safetensors and torch raise for malformed data is not one kind
        raise ValueError(f"it is not in the format safetensors: {error}") from error


def _named(tensors: Mapping[str, torch.Tensor], name: str, shape: Sequence[int] | None = None) -> torch.Tensor:
    found = tensors.get(name)
    if found is None or (shape is not None and found.shape != shape):
        raise ValueError(f"it has no {name}" + (f" of shape {tuple(shape)}" if shape is not None else ""))
    return found


def save_random() -> dict[str, Any]:
    """Return the states of Python's and NumPy's generators as plain data."""
    version, internal, gauss = random.getstate()
    kind, _, position, has_gauss, cached = _numpy_state()
    return {
        "python": [version, list(internal), gauss],
        "numpy": [kind, int(position), int(has_gauss), float(cached)],
    }


def load_random(saved: Mapping[str, Any], data: bytes) -> None:
    """Put back the states of all generators, from `save_random` and from the state file.

    Raises:
        ValueError: the data are malformed.
    """
    tensors = load_tensors(data)
    keys = _named(tensors, _NUMPY, (624,))
    if keys.dtype != torch.int64 or not ((keys >= 0) & (keys < 1 << 32)).all():
        raise ValueError(f"{_NUMPY} is not of 32-bit words")
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
        raise ValueError(f"a state of torch's generators cannot be used: {error}") from error


def _numpy_state() -> tuple[Any, ...]:
    state: Any = np.random.get_state(legacy=True)
    return tuple(state)


def save_scalars(scalars: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return optimizer scalars as plain data: a tensor becomes an object of type, shape and value."""
    return {shard: {key: _plain(value, key) for key, value in values.items()} for shard, values in scalars.items()}


def load_scalars(saved: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return what `save_scalars` was given."""
    return {shard: {key: _rich(value) for key, value in values.items()} for shard, values in saved.items()}


def save_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings, or what an optimizer keeps on itself, as plain data.

    Raises `CheckpointError`: one is no such.
    """
    return {key: _plain(value, key) for key, value in settings.items()}


def load_settings(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `save_settings` was given."""
    return {key: _rich(value) for key, value in saved.items()}


def save_groups(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return param groups, whose `params` are indices of shards, as plain data. Raises as `save_settings`."""
    return [
        {
            "params": group["params"],
            "settings": save_settings({key: value for key, value in group.items() if key != "params"}),
        }
        for group in groups
    ]


def read_groups(saved: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return what `save_groups` was given."""
    return [
        {**{key: _rich(value) for key, value in group["settings"].items()}, "params": list(group["params"])}
        for group in saved
    ]


def load_groups(
    saved: Sequence[Mapping[str, Any]], groups: list[dict[str, Any]], held: Sequence[Sequence[int]]
) -> None:
    """Put settings back into param groups; their parameters stay.

    Args:
        saved: what `save_groups` returned.
        groups: of the optimizer.
        held: the parameters of each of `groups`, by the indices that the checkpoint has for them.

    Raises:
        CheckpointError: there is another number of groups, or one has other parameters: it would get another's
            settings.
    """
    if len(saved) != len(groups):
        raise CheckpointError(f"the checkpoint has {len(saved)} param groups, the optimizer {len(groups)}")
    for number, (group, indices) in enumerate(zip(saved, held, strict=True)):
        if set(group["params"]) != set(indices):
            raise CheckpointError(
                f"param group {number} of the checkpoint has other parameters than that of the optimizer "
                f"({len(group['params'])} there, {len(indices)} here); give the optimizer the groups it had, in their "
                "order"
            )
    for values, group in zip(read_groups(saved), groups, strict=True):
        group.update({key: value for key, value in values.items() if key != "params"})


def _plain(value: Any, place: str) -> Any:
    if isinstance(value, np.generic):
        value = value.item()  # what a schedule has computed with NumPy
    if isinstance(value, torch.Tensor):
        return {"tensor": str(value.dtype).removeprefix("torch."), "shape": list(value.shape), "value": value.tolist()}
    if isinstance(value, tuple):
        return {"tuple": [_plain(item, place) for item in value]}
    if isinstance(value, list):
        return {"list": [_plain(item, place) for item in value]}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: _plain(item, f"{place}.{key}") for key, item in value.items()}}
    if isinstance(value, bool | int | float | str | None):
        return value
    raise CheckpointError(
        f"{place} of the optimizer is of type {type(value).__name__}, which cannot be checkpointed: {value!r}; make it a "
        "number, a text or a tensor, or a list or dictionary of these; without checkpoints, set run.retained_checkpoints = 0"
    )


def _rich(value: Any) -> Any:
    if isinstance(value, Mapping) and "tensor" in value:
        return torch.tensor(value["value"], dtype=getattr(torch, value["tensor"])).reshape(value["shape"])
    if isinstance(value, Mapping) and "tuple" in value:
        return tuple(_rich(item) for item in value["tuple"])
    if isinstance(value, Mapping) and "list" in value:
        return [_rich(item) for item in value["list"]]
    if isinstance(value, Mapping) and "dict" in value:
        return {key: _rich(item) for key, item in value["dict"].items()}
    return value
