"""Lossless conversion of user data, and of settings and scalars of optimizers, to JSON and back.

Numbers, strings, None, lists, and dicts with string keys are stored unchanged. JSON supports neither tuples nor
non-string keys, but the state dicts of schedulers contain both. Therefore a tuple is stored as `{"tuple": [item, …]}`.
A dict with a key that is not a string is stored as `{"pairs": [[key, value], …]}`, and so is a dict whose only key is
"tuple", "pairs" or "tensor". A tensor of an optimizer is stored as `{"tensor": [dtype, shape, nested list]}`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infinity.content.format import ITEMSIZE
from infinity.errors import CheckpointError
from infinity.schema import brief

_MOST_NESTED = 100
_MOST_BITS = 1 << 13  # bits of an integer; below the length limit of Python's conversion between integers and strings
_MARKS = ({"tuple"}, {"pairs"}, {"tensor"})
_HINTS = {
    False: "Use numbers, strings, None, and lists, tuples or dicts of these (for a tensor or an array, call tolist()).",
    True: "Use numbers, strings, None, tensors, and lists, tuples or dicts of these. To train without checkpoints, set "
    "run.retained_checkpoints = 0.",
}
"""Supported types in user data, and in the state of optimizers."""


def save_extra(extra: Any) -> dict[str, Any]:
    """Return the user data of a checkpoint as plain JSON data.

    NaN and infinities are accepted because schedulers use them and Python's JSON module restores them.

    Raises:
        CheckpointError: if a value would be restored incorrectly or not at all. The message gives its position.
    """
    if not isinstance(extra, dict) or not all(isinstance(key, str) for key in extra):
        raise CheckpointError(f"extra is {brief(extra)}. It must be a dict with string keys.")
    return {_key(key, "extra"): _plain(value, f"extra[{brief(key)}]", _MOST_NESTED) for key, value in extra.items()}


def save_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings, scalars or attributes of an optimizer as plain JSON data. NumPy scalars become numbers.

    Raises:
        CheckpointError: if a value has an unsupported type.
    """
    return {
        key: _plain(value, f"{key} of the optimizer", _MOST_NESTED, tensors=True) for key, value in settings.items()
    }


def _plain(value: Any, place: str, depth: int, *, tensors: bool = False) -> Any:
    if not depth:
        raise CheckpointError(f"{place[:200]}… is nested more than {_MOST_NESTED} levels deep, or contains itself")
    if tensors:
        import numpy as np  # commands that only list runs do not import NumPy and torch
        import torch

        from infinity.content.views import dtype_name

        if isinstance(value, torch.Tensor) and dtype_name(value.dtype) in ITEMSIZE:
            return {"tensor": [dtype_name(value.dtype), list(value.shape), value.tolist()]}
        if isinstance(value, np.generic):
            value = value.item()  # computed by a scheduler with NumPy
    if isinstance(value, dict):
        items = [
            (_key(key, place), _plain(item, f"{place}[{brief(key)}]", depth - 1, tensors=tensors))
            for key, item in value.items()
        ]
        if all(isinstance(key, str) for key in value) and set(value) not in _MARKS:
            return dict(items)
        return {"pairs": [list(item) for item in items]}
    if isinstance(value, list | tuple):
        plain = [_plain(item, f"{place}[{number}]", depth - 1, tensors=tensors) for number, item in enumerate(value)]
        return {"tuple": plain} if isinstance(value, tuple) else plain
    return _atom(value, place, _HINTS[tensors])


def _key(key: Any, place: str) -> Any:
    if isinstance(key, tuple):
        raise CheckpointError(f"{place} has the key {brief(key)}. Use strings or numbers as keys.")
    return _atom(key, f"a key of {place}", _HINTS[False])


def _atom(value: Any, place: str, hint: str) -> Any:
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise CheckpointError(
                f"{place} is a string that cannot be encoded as UTF-8: {brief(value)}. To save bytes, use hex()."
            ) from error
    elif isinstance(value, int) and value.bit_length() > _MOST_BITS:
        raise CheckpointError(f"{place} is an integer of more than {_MOST_BITS} bits. Save it as a string.")
    elif not isinstance(value, int | float | None):
        raise CheckpointError(f"{place} has the unsupported type {type(value).__name__}. {hint}")
    return value


def load_values(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the data that was passed to `save_extra` or `save_settings`.

    Raises:
        ValueError: if the input was not produced by one of these functions.
    """
    return {key: _rich(value) for key, value in saved.items()}


def _rich(value: Any) -> Any:
    if isinstance(value, list):
        return [_rich(item) for item in value]
    if not isinstance(value, dict):
        return value
    if set(value) not in _MARKS:
        return {key: _rich(item) for key, item in value.items()}
    ((mark, items),) = value.items()
    if not isinstance(items, list):
        raise ValueError(f"{brief(value)} does not contain the items of a {mark}")
    if mark == "tuple":
        return tuple(_rich(item) for item in items)
    if mark == "tensor":
        import torch

        from infinity.content.views import torch_dtype

        try:
            dtype, shape, content = items
            if dtype not in ITEMSIZE:
                raise ValueError(f"the dtype {brief(dtype)} is not supported")
            return torch.tensor(content, dtype=torch_dtype(dtype)).reshape(shape)
        except (AttributeError, TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise ValueError(f"{brief(value)} is not a tensor: {error}") from error
    if any(not isinstance(item, list) or len(item) != 2 or isinstance(item[0], list | dict) for item in items):
        raise ValueError(f"{brief(value)} does not consist of [key, value] pairs")
    return {key: _rich(item) for key, item in items}
