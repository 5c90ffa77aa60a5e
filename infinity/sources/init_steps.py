"""Find the calls that set the initial values of a model's tensors, in the order in which they run.

The order is the same as when the model is built in memory: constructors, children before parents; transformers'
`_init_weights`, called by the same submodel as in transformers, and only on modules that the model's class itself
builds; PEFT's initialization of adapters; and finally the user's function.
"""

from __future__ import annotations

import copy
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from infinity import torch_private
from infinity.errors import UnsupportedError
from infinity.formats.adapters import is_adapter

InitFunction = Callable[[nn.Module], None]
Holder = tuple[nn.Module, str]
"""A module and the name of one of its parameters."""
SMALL = 4096
"""Maximum number of elements of a parameter whose value is taken from a rebuilt model."""


@dataclass(frozen=True)
class Step:
    """Call that sets tensors of a module or of its submodules."""

    # "construct", "init", "adapter" or "given". It is part of the seed, so that calls of different kinds draw different
    # random numbers.
    kind: str
    name: str  # name of the module without wrappers; the run's seed, `kind` and `name` determine the seed of the call
    module: nn.Module
    call: Callable[[], Any]


def init_steps(model: nn.Module, twins: Twins, function: InitFunction | None) -> list[Step]:
    """Return all calls that may set initial values, in order.

    Args:
        model: sharded model.
        twins: result of `build_again`.
        function: the user's function, if any, which is called last, with every module.
    """
    modules = [(_logical(name), module) for name, module in _post_order(model)]
    roots = _init_roots(model, twins)
    foreign = {id(module) for root in roots for module in root.doubtful}
    steps: list[Step] = []
    for name, module in modules:
        if id(module) in foreign:
            continue
        if (twin := twins.of(module)) is not None:
            steps.append(Step("construct", name, module, partial(_take_from, twin, module)))
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
    """Return the slots whose own initial values transformers discards because it ties them to other slots."""
    found: list[Holder] = []
    for root in _outermost(model, _is_transformers):
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


def left_out(model: nn.Module, twins: Twins) -> Iterator[Holder]:
    """Yield parameters on a real device that may never have been initialized.

    transformers skips initialization while it builds a model on the meta device. Parameters that the model's class
    nevertheless creates on a real device (``torch.FloatTensor(n)``) then have arbitrary content.
    """
    for modules in _by_transformers_model(model, twins).values():
        own = [(m, key, p) for m in modules for key, p in m._parameters.items() if p is not None]
        if any(param.is_meta for _, _, param in own):
            yield from ((module, key) for module, key, param in own if not param.is_meta)


def not_repeated(model: nn.Module, twins: Twins) -> list[str]:
    """Return the sorted names of classes whose constructors set tensors themselves but are not run again.

    On the meta device, the values that a constructor sets are lost. PyTorch's own modules can set them again with
    `reset_parameters`, a model that is rebuilt from its config runs its constructors again, and PEFT has a separate
    function for its adapters. For other classes, this function inspects the bytecode: it looks for in-place tensor
    operations in the constructor, and in functions of the same class or module that the constructor calls.
    """
    return sorted(
        {
            cls.__name__
            for module in model.modules()
            if id(module) not in twins.counterparts and any(param.is_meta for param in module.parameters())
            for cls in torch_private.original_class(module).__mro__
            if cls.__module__.partition(".")[0] not in _KNOWN and _sets_tensors(vars(cls).get("__init__"), cls, set())
        }
    )


_KNOWN = frozenset(("torch", "transformers", "peft", "builtins"))
_REPEATED = frozenset(("_init_weights", "reset_parameters", "_reset_parameters"))
_SETTERS = frozenset(name for name in dir(nn.init) if name.endswith("_") and not name.startswith("_")) | {
    "normal_", "uniform_", "zero_", "fill_", "copy_", "mul_", "div_", "add_", "sub_", "clamp_", "fill_diagonal_",
}  # fmt: skip


def _sets_tensors(function: Any, cls: type, seen: set[Any]) -> bool:
    """Return whether a function, or one that it calls in its class or module, refers to an in-place operation."""
    code = getattr(function, "__code__", None)
    if code is None or code in seen:
        return False
    seen.add(code)
    codes, names = [code], set[str]()
    for part in codes:  # the loop appends nested functions
        names.update(part.co_names)
        codes += [const for const in part.co_consts if isinstance(const, types.CodeType)]
    if names & _SETTERS:
        return True
    called = [getattr(cls, name, None) or function.__globals__.get(name) for name in names - _REPEATED - {"__init__"}]
    own = [f for f in called if getattr(f, "__module__", "").partition(".")[0] not in _KNOWN]
    return any(_sets_tensors(f, cls, seen) for f in own if isinstance(f, types.FunctionType))


def _by_transformers_model(model: nn.Module, twins: Twins) -> dict[nn.Module, list[nn.Module]]:
    """Return the modules of each transformers model, except modules of nested transformers models."""
    found: dict[nn.Module, list[nn.Module]] = {}

    def visit(module: nn.Module, around: nn.Module | None) -> None:
        around = module if _is_transformers(module) else around
        if around is not None and id(module) in twins.counterparts:
            found.setdefault(around, []).append(module)
        for child in module.children():
            visit(child, around)

    visit(model, None)
    return found


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
    """Return the name of a module without wrappers for compilation, checkpointing and adapters.

    A copy that PEFT trains in place of a module has the name of that module, and therefore its initial values.
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
    """Return a function that sets the values of a module as its constructor does, or None if there is none."""
    if parametrize.is_parametrized(module):
        return partial(_construct_parametrized, module)
    for name in ("reset_parameters", "_reset_parameters"):
        if callable(getattr(type(module), name, None)):
            return partial(getattr(type(module), name), module)
    return None


def _construct_parametrized(module: Any) -> None:
    """Construct a module that computes some of its weights from others, for example from a norm and a direction."""
    plain = object.__new__(torch_private.original_class(module))
    plain.__dict__.update(vars(module), _parameters=dict(module._parameters), _modules={})
    for key in module.parametrizations:
        plain._parameters[key] = nn.Parameter(torch.empty_like(getattr(module, key)))
    if (construct := _constructor(plain)) is not None:
        construct()
        for key in module.parametrizations:
            setattr(module, key, plain._parameters[key].detach())  # type: ignore[union-attr]  # sets its original parameters


# --- rebuilt models ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Twins:
    """Models rebuilt from their configs. They show which modules a class builds and which values only constructors set.

    Large parameters of the rebuilt models have no storage.
    """

    built: dict[int, dict[str, nn.Module]]
    """For the id of each original model, the modules of the rebuilt model by name."""
    counterparts: dict[int, nn.Module]
    """For the id of each original module, the rebuilt module with the same name, class and parameters."""

    def of(self, module: nn.Module) -> nn.Module | None:
        """Return the counterpart of a module if it contains any values."""
        twin = self.counterparts.get(id(module))
        tensors = [] if twin is None else [*twin._parameters.values(), *twin._buffers.values()]
        return twin if any(tensor is not None and not tensor.is_meta for tensor in tensors) else None


def build_again(model: nn.Module) -> Twins:
    """Rebuild a model from its config, or only the parts of the model that have a config."""
    twins = Twins({}, {})
    covered: set[int] = set()
    for root in model.modules():
        if id(root) in covered or "config" not in vars(root):
            continue
        twin = _built_again(root)
        if twin is None:
            continue
        covered.update(map(id, root.modules()))
        modules = dict(twin.named_modules(remove_duplicate=False))
        twins.built[id(root)] = modules
        for name, module in root.named_modules(remove_duplicate=False):
            counterpart = modules.get(_logical(name))
            if counterpart is not None and outline(counterpart) == outline(module):
                twins.counterparts.setdefault(id(module), counterpart)
    return twins


def _built_again(root: nn.Module) -> nn.Module | None:
    """Rebuild a model from its config, with values for small parameters and buffers. Return None if this fails.

    Values that only a constructor sets are small, such as scales, gates and masks. Large parameters have no storage,
    so that peak memory stays bounded by one FSDP module.
    """
    cls = torch_private.original_class(root)
    register = nn.Module.register_parameter

    def register_small(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param)
        if param is not None and param.numel() > SMALL:
            module._parameters[name] = nn.Parameter(param.detach().to("meta"), param.requires_grad)

    try:
        nn.Module.register_parameter = register_small  # type: ignore[method-assign, assignment]
        with torch.device("cpu"):
            return cls(copy.deepcopy(vars(root)["config"]))
    except Exception:  # the constructor may need more than a config
        return None
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def outline(module: nn.Module) -> tuple[Any, ...]:
    """Return a key that differs between a module that the model's class has built and a module that replaced it."""
    own = tuple((key, tuple(param.shape)) for key, param in sorted(module._parameters.items()) if param is not None)
    return (torch_private.original_class(module), own)


def _take_from(twin: nn.Module, module: nn.Module) -> None:
    """Copy the values of a counterpart to a module that has the same tensors."""
    for here, there in ((module._parameters, twin._parameters), (module._buffers, twin._buffers)):
        for key, tensor in here.items():
            value = there.get(key)
            if tensor is not None and value is not None and value.device.type != "meta" and value.shape == tensor.shape:
                tensor.copy_(value)


# --- `_init_weights` --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Root:
    """Outermost module that has `_init_weights`."""

    init_of: dict[int, InitFunction]
    """Initialization functions of the modules that the root's class has built, by module id."""
    doubtful: list[nn.Module]
    """Modules that the root's class may or may not have built. They are not initialized."""


def _init_roots(model: nn.Module, twins: Twins) -> list[_Root]:
    """Return the outermost modules that have `_init_weights`, with the modules that they initialize."""
    roots = _outermost(model, lambda module: callable(getattr(type(module), "_init_weights", None)))
    return [_transformers_root(root, twins) if _is_transformers(root) else _other_root(root) for root in roots]


def _outermost(model: nn.Module, wanted: Callable[[nn.Module], bool]) -> Iterator[nn.Module]:
    """Yield the modules for which `wanted` returns ``True``, except modules inside of them."""
    covered: set[int] = set()
    for module in model.modules():
        if id(module) not in covered and wanted(module):
            covered.update(map(id, module.modules()))
            yield module


def _is_transformers(module: nn.Module) -> bool:
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(module, modeling.PreTrainedModel)


def _other_root(root: nn.Module) -> _Root:
    """Initialize each module with `_init_weights` of the nearest enclosing module that has it."""
    init_of: dict[int, InitFunction] = {}

    def visit(module: nn.Module, init: InitFunction) -> None:
        if callable(getattr(type(module), "_init_weights", None)):
            init = partial(type(module)._init_weights, module)  # type: ignore[attr-defined]
        init_of.setdefault(id(module), init)
        for child in module.children():
            visit(child, init)

    visit(root, partial(type(root)._init_weights, root))  # type: ignore[attr-defined]
    return _Root(init_of, [])


def _transformers_root(root: nn.Module, twins: Twins) -> _Root:
    """Initialize each module that the model's class has built with the nearest enclosing `PreTrainedModel`.

    A module that was replaced with a module of a different class may be nested in its replacement. Similar modules in
    the replacement are therefore ambiguous.
    """
    built = twins.built.get(id(root))
    init_of: dict[int, InitFunction] = {}
    doubtful: list[nn.Module] = []

    def visit(name: str, module: nn.Module, init: InitFunction, replaced: frozenset[Any], doubt: bool) -> None:
        if _is_transformers(module):
            init = partial(type(module)._init_weights, module)  # type: ignore[attr-defined]
        if id(module) in twins.counterparts if built is not None else _is_of_package(module, root):
            doubt = False
            init_of.setdefault(id(module), init)
        else:
            doubt = doubt or outline(module) in replaced or (built is None and not is_adapter(module))
            if doubt:
                doubtful.append(module)
            if built is not None and _logical(name) in built and not is_adapter(module):
                replaced = replaced | {outline(built[_logical(name)])}
        for key, child in module._modules.items():
            if child is not None:
                visit(f"{name}.{key}" if name else key, child, init, replaced, doubt or _is_unknown(module, key))

    visit("", root, partial(type(root)._init_weights, root), frozenset(), False)  # type: ignore[attr-defined]
    return _Root(init_of, doubtful)


def _is_of_package(module: nn.Module, root: nn.Module) -> bool:
    packages = {torch_private.original_class(m).__module__.partition(".")[0] for m in (module, root)}
    return packages <= {"torch", "transformers", torch_private.original_class(root).__module__.partition(".")[0]}


def _is_unknown(module: nn.Module, child: str) -> bool:
    """Return whether a child contains adapter parameters whose initialization is unknown."""
    around = ("base_layer", "original_module", "modules_to_save")
    return is_adapter(module) and child not in around and not hasattr(module, "reset_lora_parameters")


def _reset_lora(model: nn.Module, layer: Any) -> None:
    configs: Any = next((vars(m)["peft_config"] for m in model.modules() if "peft_config" in vars(m)), {})
    for adapter in layer.r:
        how = getattr(configs.get(adapter), "init_lora_weights", True)
        if how not in (True, False, "gaussian"):
            raise UnsupportedError(
                f"adapter {adapter} has init_lora_weights={how!r}, which is computed from the base model's weights; "
                "use True, False or 'gaussian', or build the model on a real device"
            )
        layer.reset_lora_parameters(adapter, how)
