"""Checks for optimizer features that do not work with paged parameters.

Copies of the optimizer update pages, and receive slices, which are different tensors from the model's parameters. A
rule for specific parameters never finds these parameters among the slices. A function that references the original
optimizer reads values that its copies do not change. An overridden `zero_grad` is never called.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from types import FunctionType, MethodType
from typing import Any, ClassVar

import torch
from torch import nn

from infinity.errors import UnsupportedError
from infinity.optim.multi_optimizer import name_of, parts
from infinity.optim.optimizer_clone import Template, attributes, bits, content, settings_of

_DEPTH = 8
_ZERO_GRADS = (True, True, False, False, True, True)
"""Values of `set_to_none` with which an overridden `zero_grad` is tested."""


def check_references(optimizer: torch.optim.Optimizer) -> None:
    """Check that an optimizer holds no parameters, and no functions that reference it or its parameters.

    Raises:
        UnsupportedError: if it does; the message names the attribute or the setting.
    """
    known = {id(param) for group in optimizer.param_groups for param in group["params"]}
    places = {f"its attribute {name}": value for name, value in attributes(optimizer).items()}
    for group in optimizer.param_groups:
        places |= {f"{key!r} of its param groups": value for key, value in group.items() if key != "params"}
    originals = {id(optimizer), id(optimizer.param_groups), id(optimizer.state), *map(id, optimizer.param_groups)}
    originals |= {id(value) for part in parts(optimizer) for value in (part, part.param_groups, part.state)}
    copied: set[int] = set()  # ids of objects of which each optimizer copy has its own copy
    shared: dict[int, str] = {}  # locations of objects that copies share because functions reference them, by id
    name = name_of(optimizer)
    for place, value in places.items():
        for found, by_function in _reached(value):
            if by_function:
                shared[id(found)] = place
            elif not isinstance(found, int | torch.optim.Optimizer):
                copied.add(id(found))
            if isinstance(found, torch.Tensor) and id(found) in known:
                what = "a parameter"
            elif type(found) is int and found in known:
                what = "the id of a parameter"
            elif isinstance(found, nn.Module) and any(id(param) in known for param in found.parameters()):
                what = "a module with parameters"
            else:
                continue
            raise UnsupportedError(
                f"{name} keeps {what} in {place}, but page updates run on slices, which are different tensors, so a "
                "rule for specific parameters would not apply; put these parameters into a param group with a setting "
                "of its own"
            )
    for number, place in shared.items():
        if number in originals or number in copied:
            raise UnsupportedError(
                f"{name} keeps a function in {place} that references the optimizer or its attributes through its "
                "closure or defaults, but pages are updated by copies of the optimizer, so the function would read "
                "values of the original; make it a method of the class"
            )


def reaches_an_optimizer(value: Any) -> bool:
    """Return whether a value contains an optimizer at any depth."""
    return any(isinstance(found, torch.optim.Optimizer) for found, _ in _reached(value))


def _reached(value: Any) -> Iterator[tuple[Any, bool]]:
    """Yield (object, whether a function references it) for every object reachable from a value.

    Immutable objects are omitted, except integers, which may be ids of parameters.
    """
    seen: set[tuple[int, bool]] = set()
    waiting = deque([(value, False, _DEPTH)])
    while waiting:
        found, by_function, depth = waiting.popleft()
        if found is None or isinstance(found, bool | float | complex | str | bytes | type):
            continue
        if (id(found), by_function) in seen:
            continue
        seen.add((id(found), by_function))
        if isinstance(found, FunctionType):
            inner: Iterable[Any] = _of_function(found)
            by_function = True
        else:
            yield found, by_function
            inner = _within(found)
        if depth:
            waiting.extend((item, by_function, depth - 1) for item in inner)


def _of_function(function: FunctionType) -> Iterator[Any]:
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    yield from vars(function).values()
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # an empty cell
            continue


def _within(value: Any) -> Iterator[Any]:
    if isinstance(value, torch.Tensor | nn.Module | int):
        return
    if isinstance(value, torch.optim.Optimizer):
        yield from attributes(value).values()
    elif isinstance(value, weakref.ref):
        yield value()
    elif isinstance(value, MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from (key, item)
    elif isinstance(value, list | tuple | deque | AbstractSet):
        yield from value
    else:
        for attribute in ("func", "args", "keywords"):  # of `functools.partial`
            yield getattr(value, attribute, None) if callable(value) else None
    if not isinstance(value, torch.optim.Optimizer):
        yield from getattr(value, "__dict__", {}).values()
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            if not slot.startswith("__"):
                yield getattr(value, slot, None)


def check_zero_grad(optimizer: torch.optim.Optimizer, template: Template) -> None:
    """Check that an optimizer's `zero_grad`, which is never called, has the same effect as PyTorch's.

    Raises:
        UnsupportedError: if its effect is different.
    """
    name = name_of(optimizer)
    unsupported = UnsupportedError(
        f"{name} overrides zero_grad() with different behavior from PyTorch's, but offloaded optimizers do not call "
        "it; move the additional work into the training loop"
    )
    if "zero_grad" in vars(optimizer):
        raise unsupported
    if type(optimizer).zero_grad is torch.optim.Optimizer.zero_grad:
        return
    try:
        same = _zeroed(optimizer, template, own=True) == _zeroed(optimizer, template, own=False)
    except Exception as error:
        raise unsupported from error
    if not same:
        raise unsupported


def _zeroed(optimizer: torch.optim.Optimizer, template: Template, *, own: bool) -> list[Any]:
    """Return the results of several calls of `zero_grad`, either the optimizer's own or PyTorch's."""
    groups = []
    for group in optimizer.param_groups:
        params = [nn.Parameter(torch.ones(2, dtype=param.dtype)) for param in group["params"][:2]]
        groups.append({**settings_of(group), "params": params})
    made = template.over(groups)
    left: list[Any] = []
    zero_grad = made.zero_grad if own else torch.optim.Optimizer.zero_grad.__get__(made)
    params = [param for group in groups for param in group["params"]]
    for set_to_none in _ZERO_GRADS:
        for param in params:
            param.grad = torch.ones_like(param)
        zero_grad() if set_to_none else zero_grad(set_to_none=False)
        left.append([bits(param.detach()).tolist() for param in params])
        left.append([None if param.grad is None else bits(param.grad).tolist() for param in params])
        left.append(content([[settings_of(group) for group in made.param_groups], attributes(made)]))
        left.append(len(made.state))
    return left


class WatchedNames(Sequence[str]):
    """Replacement for the `param_names` of a param group that detects whether they are read."""

    read = False

    def __getitem__(self, index: Any) -> Any:
        self.read = True
        raise IndexError(index)

    def __len__(self) -> int:
        self.read = True
        return 0

    def __deepcopy__(self, memo: dict[int, Any]) -> WatchedNames:
        return self


class WatchedParameter(nn.Parameter):
    """Parameter that records the names of all attributes that are read from it."""

    names_read: ClassVar[set[str]] = set()

    def __getattribute__(self, name: str) -> Any:
        WatchedParameter.names_read.add(name)
        return super().__getattribute__(name)
