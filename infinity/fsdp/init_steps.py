"""Which code of a model gives its tensors their first values, and in which order.

The order is that in which the values come about when a model is built in memory: constructors, children before parents;
then transformers' `_init_weights`, run by the submodel that transformers runs it by, on those modules only that the
model's class itself builds; then what peft does with its adapters; then the function that the user gave.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from infinity.errors import UnsupportedError
from infinity.fsdp import private

InitFunction = Callable[[nn.Module], None]
Holder = tuple[nn.Module, str]
"""A module and the name of one of its parameters."""


@dataclass(frozen=True)
class Step:
    """One call that sets tensors of a module, or of modules inside of it."""

    kind: str  # "construct", "init", "adapter" or "given": draws of one kind do not repeat those of another
    name: str  # of the module, without what was wrapped around it: with `kind` and the run's seed, the seed of the call
    module: nn.Module
    call: Callable[[], Any]


def init_steps(model: nn.Module, function: InitFunction | None) -> list[Step]:
    """Return all calls that may set first values, in order.

    Args:
        function: the user's own, run on every module after everything else.
    """
    modules = [(_logical(name), module) for name, module in _post_order(model)]
    roots = _init_roots(model)
    foreign = {id(module) for root in roots for module in root.doubtful}
    steps: list[Step] = []
    for name, module in modules:
        if id(module) in foreign:
            continue
        if (construct := _constructor(module)) is not None:
            steps.append(Step("construct", name, module, construct))
    for name, module in modules:
        init = next((root.init_of[id(module)] for root in roots if id(module) in root.init_of), None)
        if init is not None:
            steps.append(Step("init", name, module, partial(init, module)))
    for name, module in modules:
        if is_adapter(module) and hasattr(module, "reset_lora_parameters"):
            steps.append(Step("adapter", name, module, partial(_reset_lora, model, module)))
    if function is not None:
        steps += [Step("given", name, module, partial(function, module)) for name, module in modules]
    return steps


def tie_targets(model: nn.Module) -> list[Holder]:
    """Return the places whose own first values transformers throws away, since it ties them to others."""
    found: list[Holder] = []
    for root in _transformers_models(model):
        by_name = {
            _logical(name): (module, key)
            for prefix, module in root.named_modules(remove_duplicate=False)
            for key in module._parameters
            for name in (f"{prefix}.{key}" if prefix else key,)
        }
        for target in getattr(root, "all_tied_weights_keys", None) or {}:
            if target in by_name:
                found.append(by_name[target])
    return found


def is_adapter(module: nn.Module) -> bool:
    """Whether a module is one of peft's, around a layer of the model."""
    return hasattr(type(module), "adapter_layer_names") and hasattr(type(module), "get_base_layer")


def _post_order(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield every module once, children before parents, as `nn.Module.apply` does."""

    def visit(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
        if id(module) in seen:
            return
        seen.add(id(module))
        for name, child in module._modules.items():
            if child is not None:
                yield from visit(child, f"{prefix}.{name}" if prefix else name)
        yield prefix, module

    seen: set[int] = set()
    yield from visit(module, "")


def _logical(name: str) -> str:
    """Return a module's name without what wraps it: compilation, checkpointing, adapters.

    A copy that peft trains in place of a module has that module's name, and so its first values.
    """
    parts: list[str] = []
    skip = False
    for part in name.split("."):
        if skip:
            skip = False
        elif part == "modules_to_save":
            skip = True
        elif part not in ("_orig_mod", "_checkpoint_wrapped_module", "base_layer", "original_module"):
            parts.append(part)
    return ".".join(parts)


def _constructor(module: nn.Module) -> Callable[[], Any] | None:
    """Return what gives a module the values that its constructor gives."""
    for name in ("reset_parameters", "_reset_parameters"):
        if callable(getattr(type(module), name, None)):
            return partial(getattr(type(module), name), module)
    if any(buffer is not None for buffer in module._buffers.values()) and _takes_config(module):
        return partial(_copy_buffers_of_new, module)
    return None


def _takes_config(module: nn.Module) -> bool:
    return "config" in vars(module) and not any(module.children()) and not any(module.parameters(recurse=False))


def _copy_buffers_of_new(module: nn.Module) -> None:
    """Build a module of buffers alone again and take the new one's; one that takes more than a config stays unset."""
    try:
        with torch.device("cpu"):
            new = private.original_class(module)(vars(module)["config"])
    except TypeError:
        return
    for key, buffer in module._buffers.items():
        value = new._buffers.get(key)
        if buffer is not None and value is not None and value.shape == buffer.shape:
            buffer.copy_(value)


# --- `_init_weights` -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Root:
    """An outermost model with `_init_weights`."""

    init_of: dict[int, InitFunction]
    """What initialises a module, by the module's identity: those only that the root's class has built."""
    doubtful: list[nn.Module]
    """Modules that may have been built by the root's class or later: nothing initialises them."""


def _init_roots(model: nn.Module) -> list[_Root]:
    """Return the outermost models with `_init_weights`, and what they initialise."""
    found: list[_Root] = []
    covered: set[int] = set()
    for module in model.modules():
        if id(module) in covered or not callable(getattr(type(module), "_init_weights", None)):
            continue
        covered.update(map(id, module.modules()))
        found.append(_transformers_root(module) if _is_transformers(module) else _other_root(module))
    return found


def _is_transformers(module: nn.Module) -> bool:
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(module, modeling.PreTrainedModel)


def _transformers_models(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost models of transformers."""
    covered: set[int] = set()
    for module in model.modules():
        if id(module) not in covered and _is_transformers(module):
            covered.update(map(id, module.modules()))
            yield module


def _other_root(root: nn.Module) -> _Root:
    """Every module is initialised by `_init_weights` of the nearest module around it that has one."""
    init_of: dict[int, InitFunction] = {}

    def visit(module: nn.Module, init: InitFunction) -> None:
        if callable(getattr(type(module), "_init_weights", None)):
            init = partial(type(module)._init_weights, module)  # type: ignore[operator]
        init_of.setdefault(id(module), init)
        for child in module.children():
            visit(child, init)

    visit(root, partial(type(root)._init_weights, root))  # type: ignore[operator]
    return _Root(init_of, [])


def _transformers_root(root: nn.Module) -> _Root:
    """Every module that the class has built is initialised by the nearest `PreTrainedModel` around it."""
    built = _built_modules(root)
    init_of: dict[int, InitFunction] = {}
    doubtful: list[nn.Module] = []

    def visit(name: str, module: nn.Module, init: InitFunction, replaced: frozenset[Any], inside: bool) -> None:
        if _is_transformers(module):
            init = partial(type(module)._init_weights, module)  # type: ignore[operator]
        logical = _logical(name)
        shape = _outline(module)
        if built.get(logical) == shape:
            init_of.setdefault(id(module), init)
        else:
            if shape in replaced or (inside and module._parameters):
                doubtful.append(module)
            if logical in built and not is_adapter(module):
                replaced = replaced | {built[logical]}
        known_adapter = is_adapter(module) and hasattr(module, "reset_lora_parameters")
        for key, child in module._modules.items():
            if child is not None:
                adapted = is_adapter(module) and key not in ("base_layer", "original_module", "modules_to_save")
                path = f"{name}.{key}" if name else key
                visit(path, child, init, replaced, (inside or adapted) and not known_adapter)

    visit("", root, partial(type(root)._init_weights, root), frozenset(), False)  # type: ignore[operator]
    return _Root(init_of, doubtful)


def _outline(module: nn.Module) -> tuple[Any, ...]:
    """Return what tells a module that the model's class has built from one that was put in its place."""
    own = tuple((key, tuple(param.shape)) for key, param in sorted(module._parameters.items()) if param is not None)
    return (private.original_class(module), own)


def _built_modules(root: nn.Module) -> dict[str, tuple[Any, ...]]:
    """Return the outlines of the modules that a model's class builds from the model's config, by name.

    Raises:
        UnsupportedError: it cannot be built again.
    """
    cls = private.original_class(root)
    try:
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            twin = cls(copy.deepcopy(root.config))
    except Exception as error:  # a constructor of somebody else's
        raise UnsupportedError(
            f"{cls.__name__} cannot be built again from its config ({type(error).__name__}: {error}), so that it cannot "
            "be known which modules its `_init_weights` is for; build the model on a real device"
        ) from error
    return {name: _outline(module) for name, module in twin.named_modules(remove_duplicate=False)}


def _reset_lora(model: nn.Module, layer: Any) -> None:
    """Initialise the adapters of one layer as peft does when it adds them."""
    configs = next((vars(m)["peft_config"] for m in model.modules() if "peft_config" in vars(m)), {})
    for adapter in layer.r:
        how = getattr(configs.get(adapter), "init_lora_weights", True)
        if how not in (True, False, "gaussian"):
            raise UnsupportedError(
                f"adapter {adapter} has init_lora_weights={how!r}, which is computed from the weights of the base model; "
                "use True, False or 'gaussian', or build the model on a real device"
            )
        layer.reset_lora_parameters(adapter, how)
