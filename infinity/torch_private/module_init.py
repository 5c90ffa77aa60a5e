"""Module classes, names and initialization.

These functions look inside wrappers (`torch.compile`, checkpointing and `fully_shard`), replace `Module._apply`, and
run initializers on tensors without storage. `decomposition` returns the kernel of a composite operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from infinity.torch_private.imports import CheckpointWrapper, _no_grad_trunc_normal_
from infinity.torch_private.names import ignored_parameters


@cache
def decomposition(func: Any) -> Callable[..., Any] | None:
    """Return the kernel that decomposes a composite operation, or ``None`` if the operation is not composite.

    Outside inference mode, autograd decomposes such an operation with the same kernel before `__torch_dispatch__` is
    called. `func.decompose` would prefer PyTorch's Python decompositions if they are loaded, and the results of
    `dropout` and `matmul` might then differ in some bits.
    """
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return partial(func._op_dk, key) if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key) else None


def unwrapped_name(name: str) -> str:
    """Return a name without the prefixes that `torch.compile` and checkpointing insert, as `get_state_dict` does."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def original_class(module: nn.Module) -> type[nn.Module]:
    """Return the class that a module had before `fully_shard` and parametrizations replaced it."""
    cls = next(cls for cls in type(module).__mro__ if not issubclass(cls, FSDPModule))
    return cls.__bases__[0] if parametrize.is_parametrized(module) else cls


@contextmanager
def init_without_storage(*, draw: bool) -> Iterator[None]:
    """Make `torch.nn.init` initialize tensors without storage like any others. torch 2.13 would skip some of them.

    Args:
        draw: whether `trunc_normal_`, which resamples until all numbers are within its bounds, draws as many random
            numbers as it would for a tensor with storage.
    """
    original = _no_grad_trunc_normal_

    def trunc_normal(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if tensor.device.type != "meta":
            return original(tensor, *args, **kwargs)
        if draw:
            original(torch.empty(tensor.shape, dtype=tensor.dtype), *args, **kwargs)
        return tensor.zero_()

    torch.nn.init._no_grad_trunc_normal_ = trunc_normal
    try:
        with _NothingIsMeta():
            yield
    finally:
        torch.nn.init._no_grad_trunc_normal_ = original


class _NothingIsMeta(TorchFunctionMode):
    """Mode in which `Tensor.is_meta` is ``False``."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__self__", None) is torch.Tensor.is_meta:
            return False
        return func(*args, **(kwargs or {}))


@contextmanager
def classes_of_before(model: nn.Module) -> Iterator[None]:
    """Restore, inside the context, the classes that the modules of a model had before `fully_shard`."""
    sharded = [(module, type(module)) for module in model.modules() if isinstance(module, FSDPModule)]
    try:
        for module, cls in sharded:
            module.__class__ = cls.__mro__[getattr(cls, "_orig_cls_mro_index", 2)]
        yield
    finally:
        for module, cls in sharded:
            module.__class__ = cls


def unwrapped_module(module: nn.Module) -> nn.Module:
    """Return the module inside `torch.compile` and checkpointing wrappers."""
    inner = module._modules.get("_orig_mod") or module._modules.get("_checkpoint_wrapped_module")
    return module if inner is None else unwrapped_module(inner)


def recomputes(module: nn.Module) -> bool:
    """Return whether a module recomputes its activations in backward.

    Detects PyTorch's `CheckpointWrapper` and transformers' gradient checkpointing.
    """
    return isinstance(module, CheckpointWrapper) or bool(getattr(module, "gradient_checkpointing", False))


def tensors_in_memory(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of a sharded model that are not sharded, under each of their names.

    These are all buffers, and the `ignored_params` of `fully_shard`.
    """
    return {**dict(model.named_buffers(remove_duplicate=False)), **dict(ignored_parameters(model))}


def persistent_buffers(model: nn.Module) -> tuple[str, ...]:
    """Return the names in `tensors_in_memory` that are part of the model's `state_dict`."""
    return tuple(
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    ) + tuple(name for name, _ in ignored_parameters(model))


def modules_with_extra_state(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the key in `state_dict`, and the module, for every module that defines `get_extra_state`."""
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield f"{name}._extra_state" if name else "_extra_state", module


def restores_extra_state(module: nn.Module) -> bool:
    """Return whether a module defines `set_extra_state`."""
    return type(module).set_extra_state is not nn.Module.set_extra_state


def replace_apply(module: nn.Module, function: Callable[..., nn.Module]) -> None:
    """Make `Module.to` and similar methods of `module` call `function` instead of `_apply(fn, recurse=True)`."""
    module.__dict__["_apply"] = function


def restore_apply(module: nn.Module) -> None:
    """Undo `replace_apply`."""
    module.__dict__.pop("_apply", None)


def original_apply(module: nn.Module) -> Callable[..., nn.Module]:
    """Return the function `_apply(module, fn, recurse)` of a module's class."""
    function: Callable[..., nn.Module] = type(module)._apply
    return function
