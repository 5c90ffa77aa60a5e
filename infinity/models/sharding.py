"""Choose the modules of a transformers model that become FSDP modules, and call `fully_shard` on them.

This choice is made only in this module.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from infinity import torch_private
from infinity.errors import UnsupportedError
from infinity.formats import transformers_names as names

_log = logging.getLogger("infinity")


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the modules that become FSDP modules of their own, in model order.

    All other modules belong to the root FSDP module. The layers are the members of the outermost module lists: the
    layers of a decoder or an encoder, and of each part of a multimodal model. If `_no_split_modules` contains the class
    of members of more deeply nested lists, those members are the layers instead (for example, the layers of a stage
    rather than the stage). Members without submodules, such as the heads in a list of heads, stay in the root. Members
    that share a parameter with a module outside themselves also stay in the root, because a parameter belongs to
    exactly one FSDP module.
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
    """Call `fully_shard` on every layer of a transformers model and on the model itself.

    Args:
        model: Model to shard.
        mesh: Device mesh.
        mp_policy: FSDP2 mixed precision policy.
        reshard_after_forward: See `fully_shard`. Default: layers are resharded after forward, and the root is not.
        activation_checkpointing: Whether layers recompute their activations in backward.

    Raises:
        UnsupportedError: If the model does not support activation checkpointing, or `fully_shard` does not support a
            parameter.
    """
    # Read the name before fully_shard, which replaces the class of the model.
    name = type(model).__name__
    scalars = [key for key, parameter in model.named_parameters() if parameter.dim() == 0]
    if scalars:
        raise UnsupportedError(
            f"{', '.join(scalars)} of {name} has shape (), which fully_shard does not support; choose an auto_class "
            "without such parameters, or a model class of your own in which they have shape (1,)"
        )
    if activation_checkpointing:
        _checkpoint_layers(model)
    candidates = _candidates(model)
    if shared := [layer for layer, shares in candidates if shares]:
        _log.warning(
            "%d of the layers of %s stay in the root FSDP module, because they share parameters with other modules: "
            "%s",
            len(shared), name, ", ".join(sorted({type(layer).__name__ for layer in shared})),
        )  # fmt: skip
    elif not candidates:
        _log.warning("%s has no list of layers, so the model is a single FSDP module and is gathered as a whole", name)
    for module in _keep_in_fp32(model, mp_policy):
        fully_shard(module, mesh=mesh, mp_policy=_in_fp32(mp_policy), reshard_after_forward=reshard_after_forward)
    for layer, shares in candidates:
        if not shares:
            fully_shard(layer, mesh=mesh, mp_policy=mp_policy, reshard_after_forward=reshard_after_forward)
    fully_shard(model, mesh=mesh, mp_policy=mp_policy, reshard_after_forward=reshard_after_forward)
    register_generate(model)


def register_generate(model: nn.Module) -> None:
    """Let FSDP2 gather the root FSDP module during `generate`, unless the model has no such method or it is registered.

    The `generate` method of an encoder-decoder calls the encoder on its own, whose embedding belongs to the root.
    """
    if "generate" not in vars(model) and hasattr(model, "generate"):
        register_fsdp_forward_method(model, "generate")
        # The gather is then part of an evaluation, as all other gathers of `generate` are.
        generate: Any = model.generate
        model.generate = torch.no_grad()(generate)


def _in_fp32(policy: MixedPrecisionPolicy) -> MixedPrecisionPolicy:
    # As in transformers, the model's code converts the input of modules that are kept in fp32.
    return replace(policy, param_dtype=torch.float32, reduce_dtype=torch.float32, cast_forward_inputs=False)


def _keep_in_fp32(model: nn.Module, policy: MixedPrecisionPolicy) -> list[nn.Module]:
    """Convert the tensors that transformers keeps in fp32, such as routers, and return their modules.

    FSDP2 computes with one dtype per FSDP module, so these modules become FSDP modules of their own. A parameter whose
    module also has other parameters, or that is shared with another module, is not converted. If the model is trained
    in fp32, FSDP2 casts all weights for computation, and layers are not divided, because `micro_batches` does not
    support nested FSDP modules.
    """
    trained = {param.dtype for param in model.parameters() if param.is_floating_point()}
    dtype = policy.param_dtype or next(iter(trained - {torch.float32}), torch.float32)
    kept = names.kept_in_fp32(model, dtype)
    if not kept:
        return []
    owners = Counter(id(param) for module in model.modules() for param in module.parameters(recurse=False))
    found: list[nn.Module] = []
    covered: set[str] = set()
    in_fp32 = trained == {torch.float32}
    for prefix, module in () if in_fp32 else model.named_modules():
        inside = {f"{prefix}.{name}": param for name, param in module.named_parameters()}
        alone = all(owners[id(param)] == 1 for param in inside.values())
        called = type(module).forward is not nn.Module.forward
        if inside and called and alone and inside.keys() <= kept and not inside.keys() & covered:
            found.append(module)
            covered |= inside.keys()
            for param in inside.values():
                param.data = param.data.float()
    for name in kept - dict(model.named_parameters(remove_duplicate=False)).keys():
        owner, _, key = name.rpartition(".")
        buffers = model.get_submodule(owner)._buffers
        if (buffer := buffers[key]) is not None:
            buffers[key] = buffer.float()
            covered.add(name)
    mixed = sorted(kept - covered)
    for name in () if in_fp32 else mixed:  # FSDP2 requires one dtype per FSDP module
        model.get_parameter(name).data = model.get_parameter(name).data.to(dtype)
    if mixed:
        _log.warning(
            "%s computes %s%s in %s, although transformers uses fp32, because FSDP2 computes with one dtype per FSDP "
            "module; for fp32, pass dtype=torch.float32 and mp_policy=MixedPrecisionPolicy()",
            torch_private.original_class(model).__name__, mixed[0],
            f" and {len(mixed) - 1} more" if mixed[1:] else "", dtype,
        )  # fmt: skip
    return found


def _candidates(model: nn.Module) -> list[tuple[nn.Module, bool]]:
    """Return the members of module lists, each paired with ``True`` if it shares a parameter with another module."""
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
    """Yield the candidates for FSDP modules inside a module.

    Args:
        module: Module to search.
        named: Class names in `_no_split_modules`.
    """
    for child in module.children():
        yield from _in_list(child, named) if isinstance(child, nn.ModuleList) else _members(child, named)


def _in_list(layers: nn.ModuleList, named: Collection[str]) -> Iterator[nn.Module]:
    for member in layers:
        if isinstance(member, nn.ModuleList):
            yield from _in_list(member, named)
        elif type(member).forward is nn.Module.forward or (  # not called directly
            type(member).__name__ not in named and _has_inside(member, named)
        ):
            yield from _members(member, named)
        elif any(True for _ in member.children()):
            yield member


def _has_inside(module: nn.Module, named: Collection[str]) -> bool:
    lists = (inner for inner in module.modules() if isinstance(inner, nn.ModuleList))
    return any(type(member).__name__ in named for inner in lists for member in inner)


def _outside(module: nn.Module, layers: Collection[nn.Module], seen: set[nn.Module]) -> Iterator[nn.Parameter]:
    """Yield the parameters that can be reached without passing through a layer."""
    if module in layers or module in seen:
        return
    seen.add(module)
    yield from module.parameters(recurse=False)
    for child in module.children():
        yield from _outside(child, layers, seen)


def _checkpoint_layers(model: nn.Module) -> None:
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise UnsupportedError(
            f"{type(model).__name__} does not support activation checkpointing; omit activation_checkpointing"
        )
    values = {"use_reentrant": False}
    if enable := getattr(model, "activation_checkpointing_enable", None):
        enable(activation_checkpointing_kwargs=values)
    else:  # the name of the method in earlier versions of transformers 5
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=values)  # type: ignore[operator]
