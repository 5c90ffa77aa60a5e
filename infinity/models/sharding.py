"""Which modules of a model of transformers become FSDP modules, and `fully_shard` on them:

the one place that decides it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterator

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from infinity.errors import UnsupportedError

_log = logging.getLogger("infinity")


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the modules that become FSDP modules of their own, in the order of the model; the rest belongs to the
    root.

    They are the members of the outermost lists of modules: the layers of a decoder, of an encoder, of each part of a
    model for several kinds of input. Where `_no_split_modules` names members of lists further inside, it is those
    (the layers of a stage, not the stage). Members without modules of their own stay with the root (a list of heads),
    and so do those that have a parameter in common with something outside of them: an FSDP module owns its parameters.
    """
    return [layer for layer, shares in _candidates(model) if not shares]


def shard(
    model: nn.Module,
    *,
    mesh: DeviceMesh,
    mp_policy: MixedPrecisionPolicy,
    reshard_after_forward: bool | None = None,
    activation_checkpointing: bool = False,
) -> None:
    """Call `fully_shard` on every layer of a model of transformers and on itself.

    Args:
        reshard_after_forward: of FSDP2. By default layers are gathered again in backward, and the root is not.
        activation_checkpointing: whether layers compute their activations again in backward.

    Raises:
        UnsupportedError: the model has no activation checkpointing, or a parameter that `fully_shard` does not take.
    """
    # Before fully_shard: it makes another class of the model's.
    name = type(model).__name__
    scalars = [key for key, parameter in model.named_parameters() if parameter.dim() == 0]
    if scalars:
        raise UnsupportedError(
            f"{', '.join(scalars)} of {name} has no dimension, and fully_shard takes no such parameter: train a part "
            "of the model that does without it (auto_class), or a class of yours whose parameter has the shape (1,)"
        )
    if activation_checkpointing:
        _checkpoint_layers(model)
    candidates = _candidates(model)
    if shared := [layer for layer, shares in candidates if shares]:
        _log.warning(
            "%d layers of %s share parameters with other modules, and are gathered with the rest: %s",
            len(shared), name, ", ".join(sorted({type(layer).__name__ for layer in shared})),
        )  # fmt: skip
    elif not candidates:
        _log.warning("%s has no lists of layers, so all of it is one FSDP module, gathered at once", name)
    for layer, shares in candidates:
        if not shares:
            fully_shard(layer, mesh=mesh, mp_policy=mp_policy, reshard_after_forward=reshard_after_forward)
    fully_shard(model, mesh=mesh, mp_policy=mp_policy, reshard_after_forward=reshard_after_forward)


def _candidates(model: nn.Module) -> list[tuple[nn.Module, bool]]:
    """Return members of lists, and whether each has a parameter that something else has too."""
    named = frozenset(getattr(model, "_no_split_modules", None) or ())
    members = list(dict.fromkeys(_members(model, named)))
    owners = Counter(id(parameter) for layer in members for parameter in layer.parameters())
    owners.update({id(parameter) for parameter in _outside(model, set(members), set())})
    return [
        (layer, any(owners[id(parameter)] > 1 for parameter in layer.parameters()))
        for layer in members
        if any(True for _ in layer.parameters())
    ]


def _members(module: nn.Module, named: Collection[str]) -> Iterator[nn.Module]:
    """Yield what may be an FSDP module below a module; `named` are the classes that transformers does not split."""
    for child in module.children():
        yield from _in_list(child, named) if isinstance(child, nn.ModuleList) else _members(child, named)


def _in_list(layers: nn.ModuleList, named: Collection[str]) -> Iterator[nn.Module]:
    for member in layers:
        if isinstance(member, nn.ModuleList):
            yield from _in_list(member, named)
        elif type(member).forward is nn.Module.forward or (  # never called itself
            type(member).__name__ not in named and _has_inside(member, named)
        ):
            yield from _members(member, named)
        elif any(True for _ in member.children()):
            yield member


def _has_inside(module: nn.Module, named: Collection[str]) -> bool:
    lists = (inner for inner in module.modules() if isinstance(inner, nn.ModuleList))
    return any(type(member).__name__ in named for inner in lists for member in inner)


def _outside(module: nn.Module, layers: Collection[nn.Module], seen: set[nn.Module]) -> Iterator[nn.Parameter]:
    """Yield the parameters that can be reached without passing a layer."""
    if module in layers or module in seen:
        return
    seen.add(module)
    yield from module.parameters(recurse=False)
    for child in module.children():
        yield from _outside(child, layers, seen)


def _checkpoint_layers(model: nn.Module) -> None:
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise UnsupportedError(
            f"{type(model).__name__} has no activation checkpointing; leave activation_checkpointing out"
        )
    values = {"use_reentrant": False}
    if enable := getattr(model, "activation_checkpointing_enable", None):
        enable(activation_checkpointing_kwargs=values)
    else:  # its name in earlier versions of transformers 5
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=values)  # type: ignore[operator]
