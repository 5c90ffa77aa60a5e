"""`infinity.from_pretrained` and `infinity.from_config`: a sharded model of transformers on the meta device."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from infinity.errors import ConfigError
from infinity.formats.adapters import base_model
from infinity.fsdp.mesh import mesh as default_mesh
from infinity.models.adapted import with_adapters
from infinity.models.building import Dtype, build
from infinity.models.hub import HubOptions, find_config, find_generation_config, find_weights
from infinity.models.sharding import shard
from infinity.models.weight_source import note_weights

_DEFAULT_POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def from_config(
    config: Any,
    *,
    auto_class: type | str | None = None,
    adapters: Any = None,
    dtype: Dtype = torch.float32,
    mp_policy: MixedPrecisionPolicy | None = None,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | None = None,
    activation_checkpointing: bool = False,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
) -> Any:
    """Return a model of transformers that was built of a configuration, sharded and on the meta device.

    It takes no memory; `infinity.offload` gives it first values as its own code sets them, FSDP module by FSDP module.
    `fully_shard`
    was called on its layers, found by their structure, and on itself: decoders, encoders, both, vision, several kinds
    of input, experts. Embeddings and heads are the root's. The model is in training mode.

    Args:
        config: of transformers; as there, `dtype` and `attn_implementation` are noted in it.
        auto_class: what the model is for: an AutoModel class or a model's own, or the name of one
            (``"AutoModelForSequenceClassification"``). By default the architecture that the configuration names.
        adapters: a `PeftConfig` such as `peft.LoraConfig`: `get_peft_model` is called with it before the model is
            sharded, and what comes back is its `PeftModel`, whose base is frozen.
        dtype: of parameters, which is what is trained. ``"auto"`` is that of the configuration.
        mp_policy: mixed precision of FSDP2; by default bf16 for gathered weights and computation, fp32 for reductions.
            `MixedPrecisionPolicy()` computes in `dtype`.
        mesh: of devices; by default `infinity.mesh()`.
        reshard_after_forward: of FSDP2. By default layers are gathered again in backward, and the root is not.
        activation_checkpointing: whether layers compute their activations again in backward. `micro_batches` does so by
            itself: leave it off then.
        attn_implementation: of transformers, such as ``"sdpa"``.
        trust_remote_code: whether code that comes with the configuration may run.

    Raises:
        ConfigError: there is no such class, or it cannot be built of this configuration; the model is quantised; it
            needs remote code; peft cannot add the adapters.
        UnsupportedError: `fully_shard` does not take a parameter, or the model has no activation checkpointing.
        MissingPackageError: transformers is not installed, or peft for `adapters`.
    """
    if reshard_after_forward is not None and not isinstance(reshard_after_forward, bool):
        raise ConfigError(
            f"reshard_after_forward={reshard_after_forward!r} must be True, False or None: a number of ranks keeps a "
            "part of all gathered weights in memory until backward"
        )
    model = build(
        config, auto_class, dtype=dtype, attn_implementation=attn_implementation, trust_remote_code=trust_remote_code
    )
    if adapters is not None:
        model = with_adapters(model, adapters)
    chosen = default_mesh() if mesh is None else mesh
    shard(
        model,
        mesh=chosen,
        mp_policy=_DEFAULT_POLICY if mp_policy is None else mp_policy,
        reshard_after_forward=reshard_after_forward,
        activation_checkpointing=activation_checkpointing,
    )
    model.hf_device_map = {"": chosen.device_type}  # it is placed: transformers' Trainer does not move it
    return model


def from_pretrained(
    name_or_folder: str | os.PathLike[str],
    *,
    auto_class: type | str | None = None,
    adapters: Any = None,
    dtype: Dtype = torch.float32,
    mp_policy: MixedPrecisionPolicy | None = None,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | None = None,
    activation_checkpointing: bool = False,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    revision: str | None = None,
    subfolder: str = "",
    cache_dir: str | os.PathLike[str] | None = None,
    token: str | bool | None = None,
    local_files_only: bool = False,
    **config_values: Any,
) -> Any:
    """Return a pretrained model of transformers, sharded and on the meta device; `infinity.offload` reads its weights.

    As `from_pretrained` of transformers, but nothing of the weights is in memory: only config.json and the headers of
    safetensors are read here, and the place is noted with the model. `offload(model, optimizer, config)` then streams
    the weights FSDP module by FSDP module, with its rules for what is missing and unexpected (`strict`); its
    `weights=`, if given, is
    read instead, and a run that resumes reads neither. With `adapters` they are those of the
    base. How the model is sharded: `infinity.from_config`.

    Args:
        name_or_folder: a folder that `save_pretrained` wrote, or the id of a model in the Hub, which is looked up and
            fetched into its cache by transformers, as its variables and `HF_HUB_OFFLINE` say. Pickles are not read.
        auto_class, adapters, dtype, mp_policy, mesh, reshard_after_forward, activation_checkpointing,
            attn_implementation, trust_remote_code: see `infinity.from_config`.
        revision, subfolder, cache_dir, token, local_files_only: of transformers, for an id.
        **config_values: values of the configuration that differ: ``num_labels=3``.

    Raises:
        ConfigError: there is no such model, or no safetensors of it; a value is not of its configuration; and what
            `infinity.from_config` refuses.
        UnsupportedError, MissingPackageError: see `infinity.from_config`.
    """
    options = HubOptions(
        revision=revision, subfolder=subfolder, cache_dir=cache_dir, token=token, local_files_only=local_files_only
    )
    config = find_config(name_or_folder, options, trust_remote_code=trust_remote_code, values=config_values)
    weights = find_weights(name_or_folder, config, options)
    model = from_config(
        config,
        auto_class=auto_class,
        adapters=adapters,
        dtype=dtype,
        mp_policy=mp_policy,
        mesh=mesh,
        reshard_after_forward=reshard_after_forward,
        activation_checkpointing=activation_checkpointing,
        attn_implementation=attn_implementation,
        trust_remote_code=trust_remote_code,
    )
    base: Any = base_model(model)
    if base.can_generate() and (generation := find_generation_config(weights)) is not None:
        base.generation_config = generation
    note_weights(model, weights)
    return model
