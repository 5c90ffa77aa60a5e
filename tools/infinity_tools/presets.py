"""Models that `--model` accepts: a preset, a transformers config file, or a folder with pretrained weights."""

from __future__ import annotations

import json as json_format
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from infinity.errors import ConfigError
from infinity.models import hub, sharding
from infinity.models.building import attention_of, build, one_line
from infinity.processor import multiplies_bf16
from infinity.schema import did_you_mean
from infinity.units import MIB, format_size

_CONFIG_LIMIT = 16 * MIB
CAUSAL = "AutoModelForCausalLM"
"""Class of the models."""


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A named model: its transformers configuration class, and the values that differ from the class defaults."""

    config: str
    """Name of the transformers configuration class."""
    values: Mapping[str, Any]
    """Arguments of the configuration class."""
    doc: str
    """One-line description for `--model list`."""


def _llama(doc: str, hidden: int, inner: int, layers: int, heads: int, **values: Any) -> Preset:
    shape = {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "vocab_size": 256,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return Preset(config="LlamaConfig", values={**shape, **values}, doc=doc)


PRESETS: Mapping[str, Preset] = {
    "tiny": _llama("Llama with 4 layers, for a first try and for tests", 64, 128, 4, 4),
    "llama-100m": _llama("Llama with 16 layers, the default of infinity train", 768, 2048, 16, 12),
    "llama-354m": _llama("Llama with 28 layers", 1024, 2752, 28, 16),
    "llama-1b": _llama("Llama with 20 layers", 2048, 5632, 20, 16),
    "gpt2-354m": Preset(
        config="GPT2Config",
        values={
            "n_layer": 24,
            "n_embd": 1024,
            "n_head": 16,
            "vocab_size": 50257,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
        doc="GPT-2 medium, head tied to the embedding",
    ),
}


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """Model that can be built: its configuration, and the folder with its weights if it is pretrained."""

    name: str
    """Name of the model."""
    config: Any
    """Transformers configuration."""
    weights: Path | None = None
    """Folder of the weights. None: random initialization."""


def find_model(name: str, *, download: bool = False) -> ModelSource:
    """Return the model with this name.

    Args:
        name: Preset, config.json, folder, or id of a model on the Hub.
        download: Whether to download the model if it is on the Hub. Default: only use the local cache.

    Raises:
        ConfigError: If no preset, file, folder or model on the Hub has this name, or transformers cannot read it.
    """
    import transformers

    if preset := PRESETS.get(name):
        return ModelSource(name=name, config=getattr(transformers, preset.config)(**preset.values))
    path = Path(name)
    if not (os.path.isfile(path) or os.path.isdir(path)):
        cached = _from_hub(name) if download else _in_cache(name)
        if cached is None:
            raise ConfigError(
                f"--model {name!r} is not a preset ({', '.join(PRESETS)}), a file, a folder or a model "
                f"{'on the Hub' if download else 'in the Hub cache'}{did_you_mean(name, PRESETS, 0.4)}"
            )
        path = cached
    if path.is_file() and path.stat().st_size > _CONFIG_LIMIT:
        raise ConfigError(f"--model {name!r} is not a config.json: it is larger than {format_size(_CONFIG_LIMIT)}")
    try:
        config = transformers.AutoConfig.from_pretrained(path)
    except Exception as error:  # transformers raises many types for malformed files
        raise ConfigError(f"--model {name!r} cannot be read as a config.json: {one_line(error)}") from error
    known = name if path != Path(name) else path.resolve().name
    return ModelSource(name=known, config=config, weights=path if path.is_dir() else None)


def _from_hub(name: str) -> Path | None:
    """Return the folder of a model in the local Hub cache, after downloading it, or None if the Hub has no such model.

    Raises:
        ConfigError: If the model has no safetensors files.
    """
    try:
        config = hub.find_config(name, {}, trust_remote_code=False, values={})
    except ConfigError:
        return None
    return hub.find_weights(name, config, {})


def _in_cache(name: str) -> Path | None:
    """Return the folder of a model in the local Hub cache by its id, or None. Nothing is downloaded."""
    from transformers.utils.hub import cached_file

    try:
        found = cached_file(name, "config.json", local_files_only=True)
    except (OSError, ValueError):  # not cached, or not a valid model id
        return None
    return Path(found).parent if found else None


def on_meta(source: ModelSource) -> nn.Module:
    """Return the model with all tensors on the meta device, in fp32, the dtype of the trained parameters.

    Raises:
        ConfigError: If transformers has no causal language model for this configuration, or cannot build it.
    """
    try:
        model = build(source.config, CAUSAL, attn_implementation=attention_of(source.config, CAUSAL))
    except ConfigError as error:
        raise ConfigError(f"--model {source.name}: {error}") from error
    check_causal(model.config, source.name)
    model.config.use_cache = False
    return model  # type: ignore[no-any-return]


def check_causal(config: Any, name: str) -> None:
    """Check that a model does not see the tokens that it predicts.

    Raises:
        ConfigError: If its type supports masked language modeling and it is not configured as a causal decoder.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    if config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and getattr(config, "is_decoder", None) is False:
        raise ConfigError(
            f"--model {name}: {config.model_type} is not causal, so it would see the tokens that it "
            "predicts; set is_decoder to true in its config.json"
        )


def check_language_model(source: ModelSource) -> None:
    """Check that a model has a vocabulary and layers. Raises `ConfigError`."""
    vocabulary = getattr(source.config, "vocab_size", None)
    if not isinstance(vocabulary, int):
        raise ConfigError(f"--model {source.name} is not a language model: its configuration has no vocab_size")
    if vocabulary < 1:
        raise ConfigError(f"--model {source.name} has vocab_size = {vocabulary}; at least 1 is required")
    if (layers := getattr(source.config, "num_hidden_layers", 1)) < 1:
        raise ConfigError(f"--model {source.name} has num_hidden_layers = {layers}; at least 1 is required")


def best_dtype() -> str:
    """Return ``bf16`` if the device supports it natively, otherwise ``fp32``, because emulation is several times
    slower.
    """
    return "bf16" if torch.cuda.is_available() or multiplies_bf16() else "fp32"


def count_parameters(model: nn.Module) -> int:
    """Return the number of parameters. Tied parameters count once, and sharded parameters count in full."""
    return sum(parameter.numel() for parameter in model.parameters())


def shard(model: nn.Module, mesh: DeviceMesh, *, bf16: bool, checkpointing: bool) -> None:
    """Call `fully_shard` on every layer and on the model, with activation checkpointing if requested.

    Raises:
        ConfigError: If the model does not support activation checkpointing.
    """
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy()
    if checkpointing and not getattr(model, "supports_gradient_checkpointing", False):
        raise ConfigError("this model does not support activation checkpointing; omit --activation-checkpointing")
    sharding.shard(model, mesh=mesh, mp_policy=policy, activation_checkpointing=checkpointing)


def list_presets(*, json: bool) -> None:
    """Print the presets, for `--model list`."""
    import typer
    from rich.console import Console
    from rich.table import Table

    table = Table("preset", "parameters", "vocabulary", "description", box=None, header_style="bold")
    table.columns[1].justify = table.columns[2].justify = "right"
    listed = []
    for name, preset in PRESETS.items():
        source = find_model(name)
        parameters, vocabulary = count_parameters(on_meta(source)), source.config.vocab_size
        listed.append({"name": name, "parameters": parameters, "vocabulary": vocabulary, "description": preset.doc})
        table.add_row(name, f"{parameters / 1e6:.4g} M", str(vocabulary), preset.doc)
    if json:
        typer.echo(json_format.dumps(listed))
    else:
        Console().print(table)
