"""The model of a run, sharded and on the meta device."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

import infinity
from infinity.errors import ConfigError
from infinity.formats.quantized import QuantizedLinear
from infinity.models.building import attention_of, one_line
from infinity.optional_dependencies import needs
from infinity.ranks import Ranks
from infinity_tools.presets import CAUSAL, ModelSource, check_causal, check_language_model, find_model
from infinity_tools.train import recipe as recipes
from infinity_tools.train.recipe import Recipe

_LORA = {"task_type": "CAUSAL_LM", "target_modules": "all-linear"}
"""Fields of `LoraConfig` whose defaults differ from peft's."""


def find_source(recipe: Recipe, ranks: Ranks) -> ModelSource:
    """Return the model. Rank 0 downloads a model on the Hub before the other ranks look for it.

    Raises:
        ConfigError: if it is not a language model, or the recipe requires weights or data and there are none.
    """
    find = partial(find_model, recipe["model"], download=True)
    if ranks.world_size > 1:
        ranks.on_first("loading the model's configuration", lambda: find().name)
    source = ranks.together("loading the model's configuration", find)
    check_language_model(source)
    if source.weights is not None and not recipe.get("data"):
        raise ConfigError(f"--model {source.name} is pretrained, so --data is required: a dataset to fine-tune on")
    if source.weights is None and recipe.get("quantize"):
        raise ConfigError(
            f"--quantize {recipe['quantize']} requires a pretrained model; --model {source.name} has none"
        )
    return source


def build_model(recipe: Recipe, source: ModelSource, mesh: Any, *, bf16: bool) -> Any:
    """Return the sharded model on the meta device. With adapters, the base model keeps the dtype of its weights.

    Raises:
        ConfigError: if the model cannot be built, or adapters or quantization do not suit it.
        MissingPackageError: if torchao is not installed, but the recipe contains `quantize`.
    """
    adapters = recipes.peft_of(recipe)
    quantize = recipe.get("quantize")
    values = {
        "auto_class": CAUSAL,
        "adapters": _adapters(adapters) if adapters else None,
        "quantization": _quantization(quantize) if quantize else None,
        "dtype": "auto" if adapters else torch.float32,
        "mp_policy": MixedPrecisionPolicy(torch.bfloat16 if bf16 else torch.float32, torch.float32),
        "mesh": mesh,
        "attn_implementation": attention_of(source.config, CAUSAL),
    }
    try:
        if source.weights is None:
            model = infinity.from_config(source.config, **values)
        else:
            model = infinity.from_pretrained(source.weights, **values)
    except ConfigError as error:
        text = str(error)
        if quantize and "cannot quantize" in text:
            other = "omit --quantize" if quantize == "int8" else "pass --quantize int8, or omit it"
            text = f"{text.partition('; ')[0]}; {other}"
        raise ConfigError(f"--model {source.name}: {text}") from error
    check_causal(model.config, source.name)
    if adapters:
        model.peft_config["default"].base_model_name_or_path = recipe["model"]
    return model


def count(model: Any) -> tuple[int, int]:
    """Return the number of parameters and of trained parameters.

    A quantized weight counts as the parameters of the original weight.
    """
    shapes = [parameter.numel() for parameter in model.parameters()]
    for layer in model.modules():
        if isinstance(layer, QuantizedLinear):
            shapes.append(layer.in_features * layer.out_features - sum(part.numel() for part in layer.stored.values()))
    return sum(shapes), sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def _adapters(fields: Mapping[str, Any]) -> Any:
    with needs("train", "--peft"):
        import peft
    try:
        return peft.LoraConfig(**{**_LORA, **fields})
    except (TypeError, ValueError) as error:
        raise ConfigError(f"--peft: {one_line(error)}") from error


def _quantization(name: str) -> Any:
    """Return torchao's configuration for a value of the key `quantize`."""
    with needs("qlora", f"--quantize {name}"):
        if name == "int8":
            from torchao.quantization import Int8WeightOnlyConfig

            return Int8WeightOnlyConfig()
        from torchao.prototype._nf4tensor_api import NF4WeightOnlyConfig

        return NF4WeightOnlyConfig()
