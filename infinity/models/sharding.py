"""Choose the modules of a transformers model that become FSDP modules, and call `fully_shard` on them.

This choice is made only in this module.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from infinity import torch_private
from infinity.errors import ConfigError, UnsupportedError
from infinity.formats import transformers_names as names
from infinity.models.building import one_line

_log = logging.getLogger("infinity")

_PARAMETER_GROUPS_SINCE = "2.13"  # first tested release of torch with several parameter groups per FSDP module


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
    scalars = {parameter for parameter in model.parameters() if parameter.dim() == 0}  # cannot be sharded
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
    kept = _keep_in_fp32(model, mp_policy)
    layers = [layer for layer, shares in candidates if not shares]
    # fully_shard replaces parameters, so the parameters of all modules are listed first.
    parameters = [(layer, list(layer.parameters())) for layer in layers]
    parameters.append((model, list(dict.fromkeys(_outside(model, set(layers), set())))))
    for module, all_of_it in parameters:
        own = [param for param in all_of_it if param not in scalars]
        fp32 = [param for param in own if param in kept]
        apart = 0 < len(fp32) < len(own)
        fully_shard(
            module,
            mesh=mesh,
            mp_policy=_in_fp32(mp_policy) if fp32 and not apart else mp_policy,
            reshard_after_forward=reshard_after_forward,
            ignored_params=scalars.union(fp32 if apart else ()) or None,
        )
        if apart:
            torch_private.add_parameter_group(module, fp32, _in_fp32(mp_policy))
    for param in scalars:
        _replicate(param, mesh)
    register_generate(model)
    reject_resizing(model)


def shard_with_transformers(model: Any, config: Any, *, activation_checkpointing: bool = False) -> Any:
    """Return a transformers model on the meta device after transformers has sharded it.

    Args:
        model: Model to shard.
        config: `DistributedConfig`, or a dict of its values.
        activation_checkpointing: Whether layers recompute their activations in backward.

    Raises:
        ConfigError: If transformers cannot shard the model in this way.
        UnsupportedError: If the model has tied parameters, which transformers shards separately, or does not support
            activation checkpointing.
    """
    own = dict(model.named_parameters())
    if tied := [name for name, _ in model.named_parameters(remove_duplicate=False) if name not in own]:
        raise UnsupportedError(
            f"{tied[0]} is tied to another parameter, and transformers shards both separately; leave out "
            "distributed_config, so that infinity shards the model"
        )
    if activation_checkpointing:
        _checkpoint_layers(model)
    cls = type(model)
    try:
        config, _, meshes = cls.prepare_distribute_model(config)
        model = cls.maybe_distribute_model(model, config, meshes)
    except Exception as error:  # transformers raises various exceptions
        raise ConfigError(f"transformers cannot shard {cls.__name__}: {one_line(error)}") from error
    if not torch_private.is_sharded_module(model):
        raise ConfigError(
            f"transformers does not call fully_shard with fsdp_size={config.fsdp_size} and "
            f"dp_replicate_size={config.dp_replicate_size}; set one of them to more than 1"
        )
    register_generate(model)
    reject_resizing(model)
    return model


def _replicate(param: nn.Parameter, mesh: DeviceMesh) -> None:
    """Keep a parameter that FSDP2 ignores equal on all ranks, by averaging its gradients as FSDP2 averages others."""
    if not param.is_meta:
        param.data = param.data.to(mesh.device_type)
    if mesh.size() > 1 and param.requires_grad:
        param.register_post_accumulate_grad_hook(partial(_average, mesh))  # type: ignore[no-untyped-call]


def _average(mesh: DeviceMesh, param: torch.Tensor) -> None:
    gradient = param.grad
    if gradient is not None:
        for group in mesh.get_all_groups():
            dist.all_reduce(gradient, group=group)
        gradient.div_(mesh.size())


def reject_resizing(model: nn.Module) -> None:
    """Make `resize_token_embeddings` of a sharded transformers model raise an error, unless the size is unchanged."""
    inner = names.pretrained_model(model)
    for module in () if inner is None else inner.modules():
        if hasattr(module, "resize_token_embeddings"):
            module.resize_token_embeddings = partial(_resize, module)


def _resize(
    model: Any, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
) -> nn.Module:
    embeddings: Any = model.get_input_embeddings()
    size = embeddings.weight.shape[0]
    wanted, multiple = new_num_tokens or size, pad_to_multiple_of or 1
    wanted = -(-wanted // multiple) * multiple
    if wanted != size:
        raise UnsupportedError(
            f"the embeddings are sharded and cannot be resized from {size} to {wanted} tokens; pass "
            f"vocab_size={wanted} to infinity.from_pretrained, or resize before fully_shard"
        )
    return embeddings  # type: ignore[no-any-return]


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


def _keep_in_fp32(model: nn.Module, policy: MixedPrecisionPolicy) -> set[nn.Parameter]:
    """Convert the tensors that transformers keeps in fp32, such as routers, and return the parameters among them."""
    trained = {param.dtype for param in model.parameters() if param.is_floating_point()}
    dtype = policy.param_dtype or next(iter(trained - {torch.float32}), torch.float32)
    names_kept = names.kept_in_fp32(model, dtype)
    params = dict(model.named_parameters(remove_duplicate=False))
    kept = {params[name] for name in names_kept & params.keys()}
    supported = torch_private.has_parameter_groups()
    for param in kept:
        param.data = param.data.to(torch.float32 if supported or trained == {torch.float32} else dtype)
    for name in names_kept - params.keys():
        owner, _, key = name.rpartition(".")
        buffers = model.get_submodule(owner)._buffers
        if (buffer := buffers[key]) is not None:
            buffers[key] = buffer.float()
    if kept and not supported:
        _log.warning(
            "%s computes %s%s in %s, although transformers uses fp32, because FSDP2 of torch %s computes with one "
            "dtype per FSDP module; install torch %s or newer",
            torch_private.original_class(model).__name__, min(names_kept & params.keys()),
            f" and {len(kept) - 1} more" if len(kept) > 1 else "", dtype, torch.__version__, _PARAMETER_GROUPS_SINCE,
        )  # fmt: skip
    return kept if supported else set()


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
