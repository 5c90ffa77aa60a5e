"""Build transformers models on the meta device, and choose the model class for a configuration."""

from __future__ import annotations

from typing import Any

import torch

from infinity.errors import ConfigError
from infinity.formats.weight_files import check_not_quantized
from infinity.optional_dependencies import needs
from infinity.schema import did_you_mean

Dtype = torch.dtype | str
"""Dtype of parameters: a torch dtype, its name, or ``"auto"`` for the dtype in the configuration (fp32 if it specifies
no dtype).
"""


def build(
    config: Any,
    auto_class: type | str | None = None,
    *,
    dtype: Dtype = torch.float32,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
) -> Any:
    """Return the model for a configuration in training mode, with all tensors on the meta device.

    Args:
        config: See `infinity.from_config`.
        auto_class: See `infinity.from_config`.
        dtype: See `infinity.from_config`.
        attn_implementation: See `infinity.from_config`.
        trust_remote_code: See `infinity.from_config`.

    Raises:
        ConfigError: If the class does not exist, the model cannot be built from the configuration, or the model is
            quantized.
        MissingPackageError: If transformers is not installed.
    """
    with needs("hf", "a transformers model"):
        import transformers

    if not isinstance(config, transformers.PreTrainedConfig):
        raise ConfigError(
            f"{config!r:.80} must be a transformers configuration, but is of type {type(config).__name__}; create one "
            "with AutoConfig.from_pretrained, or call infinity.from_pretrained with a name or a folder"
        )
    check_not_quantized(config.to_dict(), getattr(config, "_name_or_path", "") or type(config).__name__)
    cls, config = _class_for(config, auto_class, trust_remote_code)
    values: dict[str, Any] = {"dtype": _dtype(dtype, config)}
    if attn_implementation is not None:
        values["attn_implementation"] = attn_implementation
    if is_auto(cls):
        values["trust_remote_code"] = trust_remote_code
    try:
        with torch.device("meta"):
            model = (cls.from_config if is_auto(cls) else cls._from_config)(config, **values)
    except Exception as error:  # inconsistent numbers may raise an exception of any type
        raise ConfigError(f"{cls.__name__} cannot be built from this configuration: {one_line(error)}") from error
    if any(not parameter.is_meta for parameter in model.parameters()):
        model.to("meta")  # some classes ignore the default device for some parameters
    return model.train()


def is_auto(cls: Any) -> bool:
    """Return whether a transformers class is an auto class, which selects a model class based on a configuration."""
    return hasattr(cls, "_model_mapping")


def attention_of(config: Any, auto_class: str) -> str:
    """Return the attention implementation for training: ``"sdpa"``, or ``"eager"`` if the model does not support it."""
    import transformers

    models: Any = getattr(transformers, auto_class)._model_mapping
    cls = models.get(type(config), None)
    return "sdpa" if getattr(cls, "_supports_sdpa", True) else "eager"


def one_line(error: Exception) -> str:
    """Return the message of an exception from transformers as one line."""
    text = " ".join(str(error).split())
    return text if isinstance(error, OSError | ValueError) and text else f"{type(error).__name__}: {text}"


def _dtype(wanted: Dtype, config: Any) -> torch.dtype:
    named = getattr(config, "dtype", None) or torch.float32 if wanted == "auto" else wanted
    found = getattr(torch, named, None) if isinstance(named, str) else named
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ConfigError(f"dtype={wanted!r} is not supported; pass a floating-point torch dtype or 'auto'")
    return found


def _class_for(config: Any, wanted: type | str | None, trust: bool) -> tuple[Any, Any]:
    """Return the class to build with, and the part of the configuration that it uses."""
    import transformers

    cls: Any = wanted
    if wanted is None:
        cls = _own_class(config, trust)
    elif isinstance(wanted, str):
        cls = getattr(transformers, wanted, None)
        if cls is None:
            hint = did_you_mean(wanted, [name for name in dir(transformers) if name.startswith("Auto")])
            raise ConfigError(f"auto_class={wanted!r} is not a transformers class{hint}")
    if is_auto(cls):
        remote = trust and cls.__name__ in (getattr(config, "auto_map", None) or {})
        if not remote and type(config) not in cls._model_mapping:
            raise ConfigError(f"{cls.__name__} does not support models of type {config.model_type}; {_choices(config)}")
        return cls, config
    if not (isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)):
        raise ConfigError(f"auto_class={wanted!r} must be an AutoModel class or a transformers model class")
    kind: Any = cls.config_class
    for part in (config, config.get_text_config()):  # the language model of a multimodal configuration
        if kind is None or isinstance(part, kind):
            return cls, part
    raise ConfigError(f"{cls.__name__} requires a {kind.__name__}, but the configuration is a {type(config).__name__}")


def _own_class(config: Any, trust: bool) -> Any:
    """Return the class that the configuration specifies as its architecture."""
    import transformers

    architecture = next(iter(getattr(config, "architectures", None) or ()), None)
    if architecture is None:
        raise ConfigError(
            f"the configuration specifies no architecture; choose a class with auto_class ({_choices(config)})"
        )
    remote = getattr(config, "auto_map", None) or {}
    if trust:
        for name, reference in remote.items():
            if str(reference).rpartition(".")[2] == architecture and hasattr(transformers, name):
                return getattr(transformers, name)
    if (cls := getattr(transformers, architecture, None)) is not None:
        return cls
    if remote and not trust:
        raise ConfigError(
            f"{architecture} is not part of transformers, and the model's own code ({config._name_or_path}) is not "
            "trusted; review the code, and pass trust_remote_code=True to run it"
        )
    raise ConfigError(
        f"the configuration's architecture {architecture} is not part of transformers {transformers.__version__}; "
        f"choose a different class with auto_class ({_choices(config)}), or install a release that contains it"
    )


def _choices(config: Any) -> str:
    import transformers

    autos = [name for name in dir(transformers) if name.startswith("AutoModel")]
    fitting = [name for name in autos if type(config) in getattr(getattr(transformers, name), "_model_mapping", ())]
    return f"supported by: {', '.join(fitting)}" if fitting else f"no AutoModel class supports {config.model_type}"
