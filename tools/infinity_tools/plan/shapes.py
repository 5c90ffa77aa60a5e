"""Shapes of transformers models, read from the model on the meta device."""

from __future__ import annotations

from typing import Any

from torch import nn

from infinity.content.views import dtype_name
from infinity.estimate.model import FSDPModuleShape, ModelShape, ParameterShape
from infinity.models.sharding import layers_of
from infinity_tools.presets import ModelSource, on_meta


def shape_of(source: ModelSource) -> ModelShape:
    """Return the shape of a model, divided into FSDP modules as in `infinity train`.

    Raises:
        ConfigError: If transformers cannot build the model.
    """
    return shape_of_module(on_meta(source), source.config, source.name)


def shape_of_module(model: nn.Module, config: Any, name: str) -> ModelShape:
    """Return the shape of a transformers model that was built from `config`."""
    text = config.get_text_config()
    layers = layers_of(model)
    names = {module: module_name for module_name, module in model.named_modules()}
    inside = {id(parameter) for layer in layers for parameter in layer.parameters()}
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    multiplied = {
        id(parameter)
        for module in model.modules()
        if not isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
    }
    active = _active_experts(text)

    def fsdp_module(module: nn.Module, prefix: str) -> FSDPModuleShape:
        return FSDPModuleShape(
            name=prefix or "root",
            parameters=tuple(
                ParameterShape(
                    name=f"{prefix}.{own}" if prefix else own,
                    shape=tuple(parameter.shape),
                    dtype=dtype_name(parameter.dtype),
                    trainable=parameter.requires_grad,
                    used=0.0 if id(parameter) not in multiplied else active if parameter.dim() > 2 else 1.0,
                    looked_up=id(parameter) in tables,
                )
                for own, parameter in module.named_parameters()
                if prefix or id(parameter) not in inside
            ),
        )

    return ModelShape(
        name=name,
        root=fsdp_module(model, ""),
        layers=tuple(fsdp_module(layer, names[layer]) for layer in layers),
        hidden=text.hidden_size,
        vocabulary=text.vocab_size,
    )


def _active_experts(config: Any) -> float:
    """Return the fraction of experts that process a token, or 1 for a model without experts."""
    for count in ("num_local_experts", "num_experts", "n_routed_experts"):
        if experts := getattr(config, count, None):
            return min(1.0, float(getattr(config, "num_experts_per_tok", experts)) / float(experts))
    return 1.0
