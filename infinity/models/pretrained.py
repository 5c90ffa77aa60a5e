"""Public functions that return a sharded transformers model on the meta device."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from infinity.errors import ConfigError
from infinity.formats.adapters import base_model
from infinity.formats.quantized import quantize_
from infinity.fsdp.mesh import mesh as default_mesh
from infinity.models.adapted import with_adapters
from infinity.models.building import Dtype, build
from infinity.models.hub import find_config, find_generation_config, find_weights
from infinity.models.sharding import shard, shard_with_transformers
from infinity.models.weight_source import note_weights

_DEFAULT_POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def from_config(
    config: Any,
    *,
    auto_class: type | str | None = None,
    adapters: Any = None,
    quantization: Any = None,
    dtype: Dtype = torch.float32,
    mp_policy: MixedPrecisionPolicy | None = None,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | None = None,
    distributed_config: Any = None,
    activation_checkpointing: bool = False,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
) -> Any:
    """Build a sharded transformers model on the meta device from a configuration.

    The model's tensors take no memory. `infinity.offload` initializes them one FSDP module at a time, in the same way
    as the model's own code. `fully_shard` is called on the layers, which are identified from the model's structure, and
    on the model itself. This works for decoders, encoders, encoder-decoders, vision models, multimodal models and
    mixtures of experts. Embeddings and heads belong to the root FSDP module. The model is in training mode.

    Args:
        config: transformers configuration. As in transformers, `dtype` and `attn_implementation` are stored in it.
        auto_class: An AutoModel class or a model class, or the name of one (``"AutoModelForSequenceClassification"``).
            Default: the architecture that the configuration specifies.
        adapters: A `PeftConfig`, such as `peft.LoraConfig`. The model is passed to `get_peft_model` before it is
            sharded, and the resulting `PeftModel`, whose base model is frozen, is returned.
        quantization: Weight-only configuration of torchao, such as ``torchao.quantization.Int8WeightOnlyConfig()``. The
            weights of all linear layers except the head are frozen and quantized (see `quantize_`) when `offload` reads
            them from pretrained weights.
        dtype: Dtype in which the parameters are trained. ``"auto"``: the dtype in the configuration.
        mp_policy: FSDP2 mixed precision policy. Default: bf16 for gathered weights and computation, fp32 for
            reductions. With ``MixedPrecisionPolicy()``, the model computes in `dtype`.
        mesh: Device mesh. Default: `infinity.mesh()`.
        reshard_after_forward: See `fully_shard`; an ``int`` is not supported. Default: layers are resharded after
            forward, and the root is not.
        distributed_config: A transformers `DistributedConfig`. transformers then shards the model itself, with FSDP,
            HSDP, tensor and expert parallelism, and `adapters`, `quantization`, `mp_policy`, `mesh` and
            `reshard_after_forward` cannot be set. The model computes in `dtype`, unless ``fsdp_mixed_precision=True``.
        activation_checkpointing: Whether layers recompute their activations in backward. Leave it off when you use
            `infinity.micro_batches`, which always recomputes them.
        attn_implementation: Attention implementation that transformers uses, such as ``"sdpa"``.
        trust_remote_code: Whether code that comes with the configuration may run.

    Returns:
        The model, ready for `infinity.offload`.

    Raises:
        ConfigError: If the class does not exist, the model cannot be built from the configuration, the model is
            quantized already or requires remote code that is not trusted, peft cannot add the adapters, or torchao
            cannot quantize a layer.
        UnsupportedError: If `fully_shard` does not support a parameter, or the model does not support activation
            checkpointing.
        MissingPackageError: If transformers, or a package that `adapters` or `quantization` needs, is not installed.

    Example::

        >>> config = transformers.AutoConfig.from_pretrained("Qwen/Qwen3-8B")
        >>> model = infinity.from_config(config, auto_class="AutoModelForCausalLM")
    """
    other = {
        "adapters": adapters, "quantization": quantization, "mp_policy": mp_policy, "mesh": mesh,
        "reshard_after_forward": reshard_after_forward,
    }  # fmt: skip
    if distributed_config is not None and (named := [name for name, value in other.items() if value is not None]):
        raise ConfigError(
            f"{' and '.join(named)} cannot be combined with distributed_config; leave out one of them (the sizes, "
            "fsdp_plan and fsdp_mixed_precision of distributed_config set the mesh, resharding and mixed precision)"
        )
    if reshard_after_forward is not None and not isinstance(reshard_after_forward, bool):
        raise ConfigError(
            f"reshard_after_forward={reshard_after_forward!r} is not supported: with an integer, part of all gathered "
            "weights stays in memory until backward; pass True, False or None"
        )
    model = build(
        config, auto_class, dtype=dtype, attn_implementation=attn_implementation, trust_remote_code=trust_remote_code
    )
    if quantization is not None:
        quantize_(model, quantization)
    if adapters is not None:
        model = with_adapters(model, adapters)
    if distributed_config is not None:
        return shard_with_transformers(model, distributed_config, activation_checkpointing=activation_checkpointing)
    chosen = default_mesh() if mesh is None else mesh
    shard(
        model,
        mesh=chosen,
        mp_policy=_DEFAULT_POLICY if mp_policy is None else mp_policy,
        reshard_after_forward=reshard_after_forward,
        activation_checkpointing=activation_checkpointing,
    )
    model.hf_device_map = {"": chosen.device_type}  # keeps transformers' Trainer from moving the model
    return model


def from_pretrained(
    name_or_folder: str | os.PathLike[str],
    *,
    auto_class: type | str | None = None,
    adapters: Any = None,
    quantization: Any = None,
    dtype: Dtype = torch.float32,
    mp_policy: MixedPrecisionPolicy | None = None,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | None = None,
    distributed_config: Any = None,
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
    """Return a sharded pretrained transformers model on the meta device.

    The function works like transformers' `from_pretrained`, except that no weights are loaded. It reads only
    config.json and the headers of the safetensors files, and records the location of the files with the model.
    `infinity.offload` then streams the weights to NVMe, one FSDP module at a time, and applies its rules for missing
    and unexpected tensors (`strict`). If `offload` is called with `weights=`, it reads from that folder instead, and a
    run that resumes from a checkpoint reads neither. With `adapters`, the weights are loaded into the base model.

    Args:
        name_or_folder: A folder written by `save_pretrained`, or the id of a model on the Hub. Given an id,
            transformers downloads the model into its cache and honors its environment variables, such as
            `HF_HUB_OFFLINE`. Pickle files are not supported.
        auto_class: See `infinity.from_config`.
        adapters: See `infinity.from_config`.
        quantization: See `infinity.from_config`.
        dtype: See `infinity.from_config`.
        mp_policy: See `infinity.from_config`.
        mesh: See `infinity.from_config`.
        reshard_after_forward: See `infinity.from_config`.
        distributed_config: See `infinity.from_config`.
        activation_checkpointing: See `infinity.from_config`.
        attn_implementation: See `infinity.from_config`.
        trust_remote_code: Whether code that comes with the model may run.
        revision: Branch, tag or commit of a model on the Hub. Default: the main branch.
        subfolder: Subfolder of the model's folder that contains the files.
        cache_dir: Cache for downloaded files. Default: transformers' cache.
        token: Token for models with restricted access. Default: the token stored by `hf auth login`.
        local_files_only: Whether to use only files that are already in the cache.
        **config_values: Values that override entries of the configuration, such as ``num_labels=3``. A larger
            `vocab_size` adds tokens, whose rows are initialized as in `resize_token_embeddings`.

    Returns:
        The model, ready for `infinity.offload`.

    Raises:
        ConfigError: If the model does not exist or has no safetensors files, if a value is not part of its
            configuration, or for a reason listed in `infinity.from_config`.
        UnsupportedError: See `infinity.from_config`.
        MissingPackageError: See `infinity.from_config`.

    Example::

        >>> model = infinity.from_pretrained("Qwen/Qwen3-8B")
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        >>> optimizer = infinity.offload(model, optimizer, {"storage": {"paths": ["/nvme0/run"]}})
    """
    options = {
        "revision": revision, "subfolder": subfolder, "cache_dir": cache_dir, "token": token,
        "local_files_only": local_files_only,
    }  # fmt: skip
    config = find_config(name_or_folder, options, trust_remote_code=trust_remote_code, values=config_values)
    weights = find_weights(name_or_folder, config, options)
    model = from_config(
        config,
        auto_class=auto_class,
        adapters=adapters,
        quantization=quantization,
        dtype=dtype,
        mp_policy=mp_policy,
        mesh=mesh,
        reshard_after_forward=reshard_after_forward,
        distributed_config=distributed_config,
        activation_checkpointing=activation_checkpointing,
        attn_implementation=attn_implementation,
        trust_remote_code=trust_remote_code,
    )
    base: Any = base_model(model)
    if base.can_generate() and (generation := find_generation_config(weights)) is not None:
        base.generation_config = generation
    note_weights(model, weights)
    return model
