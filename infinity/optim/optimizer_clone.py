"""Copies of the user's optimizer for different parameters.

A copy has all attributes of the original, but no tensors of the size of the model. `copy.deepcopy` is not sufficient,
because PyTorch optimizers pickle only their param groups, defaults and state, but not the attributes of a subclass.
"""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from infinity import torch_private
from infinity.errors import UnsupportedError
from infinity.optim.multi_optimizer import Optimizers, name_of, parts

_LARGEST = 4096
"""Maximum number of elements in a tensor that is an attribute of an optimizer."""
_NOT_COPIED = {"state", "param_groups"}
_DEPTH = 4

Groups = list[dict[str, Any]]


def is_plain(value: Any, depth: int = _DEPTH) -> bool:
    """Return whether a value is plain data, which checkpoints can store.

    Plain data are numbers, strings, small tensors, and nested tuples, lists and dicts of these.
    """
    if isinstance(value, torch.Tensor):
        return (
            type(value) is torch.Tensor
            and value.numel() <= _LARGEST
            and not value.is_meta
            and value.layout is torch.strided
        )
    if type(value) in (tuple, list):
        return depth > 0 and all(is_plain(item, depth - 1) for item in value)
    if type(value) is dict:
        return depth > 0 and all(type(key) is str and is_plain(item, depth - 1) for key, item in value.items())
    return value is None or type(value) in (bool, int, float, str)


def content(value: Any, depth: int = _DEPTH) -> Any:
    """Return a representation of a value. Representations of bitwise equal values compare equal with ``==``.

    Objects are represented by their attributes. All objects of a type without attributes are equal.
    """
    if isinstance(value, torch.Tensor):
        if value.is_meta or value.numel() > _LARGEST:
            return (str(value.dtype), tuple(value.shape))
        return (str(value.dtype), tuple(value.shape), bits(value.detach()).tolist())
    if isinstance(value, float):
        return value.hex()
    if value is None or isinstance(value, bool | int | str | bytes):
        return value
    if not depth:
        return type(value).__name__
    if isinstance(value, tuple | list | deque):
        return (type(value).__name__, [content(item, depth - 1) for item in value])
    if isinstance(value, Mapping):
        return [(str(key), content(item, depth - 1)) for key, item in value.items() if isinstance(key, str | int)]
    attributes = getattr(value, "__dict__", None)
    if callable(value) or isinstance(value, torch.optim.Optimizer) or not attributes:
        return type(value).__name__
    return (type(value).__name__, content(attributes, depth - 1))


def is_object(value: Any) -> bool:
    """Return whether a value is an object with mutable attributes, rather than plain data."""
    return not is_plain(value) and not isinstance(
        value, torch.optim.Optimizer | FunctionType | MethodType | BuiltinFunctionType | type | torch.Tensor
    )


def object_content(value: Any) -> Any:
    """Return a representation of an object that changes if anything in the object changes, at any depth.

    `content` represents objects that cannot be pickled.
    """
    try:
        return pickle.dumps(value)
    except Exception:
        return content(value, 2 * _DEPTH)


def bits(value: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor as a flat CPU tensor, so that NaNs equal themselves."""
    return value.cpu().contiguous().reshape(-1).view(torch.uint8)


def attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the attributes of an optimizer, except param groups, state and hooks."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name not in _NOT_COPIED and not torch_private.is_bookkeeping(name, value)
    }


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a param group's settings that later in-place changes do not affect.

    Raises:
        UnsupportedError: if a setting cannot be copied.
    """
    return {key: _fixed(key, value) for key, value in group.items() if key != "params"}


def _fixed(key: str, value: Any) -> Any:
    if isinstance(value, tuple | list) and all(isinstance(item, float | int | str) for item in value):
        return value if type(value) is tuple else copy.copy(value)  # such as betas, or the names of all parameters
    try:
        return copied(value)
    except Exception as error:
        raise UnsupportedError(
            f"setting {key} of type {type(value).__name__} in a param group cannot be copied, but updates need a copy "
            f"of the settings at the time of the step: {error}"
        ) from error


def copied(value: Any) -> Any:
    """Return a copy of a setting or a scalar. Tensors are copied to the CPU.

    Copying a tensor from a GPU waits for the GPU. In-memory training does not: PyTorch's kernels read a learning rate
    directly from GPU memory.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if type(value) in (tuple, list) and any(isinstance(item, torch.Tensor) for item in value):  # such as betas
        return type(value)(map(copied, value))
    return copy.deepcopy(value)


def in_place_of(there: Any, value: Any) -> Any:
    """Return a copy of `value` with which to replace `there`. A tensor is copied to the device of `there`."""
    found = copied(value)
    both = isinstance(there, torch.Tensor) and isinstance(found, torch.Tensor)
    return found.to(there.device) if both else found


class Template:
    """Optimizer without parameters, from which copies are created.

    Parameters that attributes of the optimizer reference are replaced with parameters that have a single element.

    Raises:
        UnsupportedError: if an attribute cannot be copied, or if updates depend on an attribute that is a module or a
            large tensor.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        name = name_of(optimizer)
        params = [param for group in optimizer.param_groups for param in group["params"]]
        known = {id(param) for param in params}
        own = [item for part in parts(optimizer) for item in attributes(part).items()]
        if "step" in dict(own):
            raise UnsupportedError(
                f"step() of this {name} was replaced on the instance, but updates of pages would not call the "
                "replacement; pass the unmodified optimizer"
            )
        for attribute, value in own:
            for found in _tensors_and_modules(value):
                if isinstance(found, nn.Module) or (id(found) not in known and found.numel() > _LARGEST):
                    what = "a module" if isinstance(found, nn.Module) else f"a tensor of shape {tuple(found.shape)}"
                    raise UnsupportedError(
                        f"{name} has {what} as its attribute {attribute}, so its updates depend on more than one "
                        "parameter; use an element-wise optimizer such as AdamW"
                    )
        stand_ins = {id(param): nn.Parameter(torch.zeros(1, dtype=param.dtype)) for param in params}
        # All other copies are made from this copy, which references no parameters of the model.
        self._master = self._copy(optimizer, [], dict(stand_ins))

    def over(self, groups: Groups) -> torch.optim.Optimizer:
        """Return a copy of the optimizer with the given param groups and no state."""
        return self._copy(self._master, groups, {})

    def _copy(self, optimizer: torch.optim.Optimizer, groups: Groups, memo: dict[int, Any]) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = object.__new__(type(optimizer))
        state: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        memo |= {id(optimizer): made, id(optimizer.param_groups): groups, id(optimizer.state): state}
        made.__dict__.update(param_groups=groups, state=state)
        for name in vars(optimizer):
            if torch_private.is_hooks(name):
                made.__dict__[name] = OrderedDict()  # hooks run once per step, on the optimizer that the user calls
        for name, value in attributes(optimizer).items():
            if isinstance(optimizer, Optimizers) and name == "optimizers":
                made.__dict__[name] = [self._copy(part, [], memo) for part in value]  # `step` assigns their groups
                continue
            if isinstance(value, torch.optim.Optimizer) and id(value) not in memo:
                inner = groups if value.param_groups is optimizer.param_groups else [*value.param_groups]
                made.__dict__[name] = self._copy(value, inner, memo)
                continue
            try:
                made.__dict__[name] = copy.deepcopy(value, memo)
            except Exception as error:
                raise UnsupportedError(
                    f"attribute {name} of {type(optimizer).__name__}, of type {type(value).__name__}, cannot be copied "
                    f"({error}), but pages are updated by copies of the optimizer"
                ) from error
        return made


def _tensors_and_modules(value: Any, depth: int = _DEPTH) -> Iterator[Any]:
    if isinstance(value, torch.Tensor | nn.Module):
        yield value
    elif depth and not isinstance(value, torch.optim.Optimizer):
        items: Iterable[Any] = ()
        if isinstance(value, Mapping):
            items = value.values()
        elif isinstance(value, tuple | list | set | deque):
            items = value
        for item in items:
            yield from _tensors_and_modules(item, depth - 1)
