"""Add peft adapters to a model before it is sharded.

Adapters that are added after `fully_shard` do not belong to any FSDP module.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import nn

from infinity.errors import ConfigError, UnsupportedError
from infinity.models.building import one_line
from infinity.optional_dependencies import needs


def with_adapters(model: nn.Module, config: Any) -> Any:
    """Return a `PeftModel` that adds adapters to a model on the meta device.

    Args:
        model: transformers model that has not been sharded. peft decides which parameters are frozen and which modules
            are added.
        config: A `PeftConfig`, such as `peft.LoraConfig`.

    Raises:
        ConfigError: If `config` is not a `PeftConfig`, or peft cannot add the adapters. The message gives the reason
            and lists the model's linear layers.
        MissingPackageError: If peft is not installed.
    """
    with needs("peft", "adapters="):
        import peft

    if not isinstance(config, peft.PeftConfig):
        raise ConfigError(
            f"adapters={config!r:.80} must be a peft configuration, but is of type {type(config).__name__}; pass, for "
            'example, peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")'
        )
    linear = sorted({name.rpartition(".")[2] for name, one in model.named_modules() if isinstance(one, nn.Linear)})
    try:
        with torch.device("meta"):
            adapted: Any = peft.get_peft_model(model, config)  # type: ignore[arg-type]
    except Exception as error:  # peft raises many types for values that do not fit the model
        reason = one_line(error).rstrip(".")
        raise ConfigError(
            f"{type(config).__name__} adapters cannot be added to this model: {reason}; linear layers of the model: "
            f"{', '.join(linear) or 'none'}"
        ) from error
    adapted.add_adapter = _reject_another
    return adapted


def _reject_another(adapter_name: str, *_: Any, **__: Any) -> NoReturn:
    """Raise an error in place of `PeftModel.add_adapter`, whose parameters would belong to no FSDP module.

    Raises:
        UnsupportedError: always.
    """
    raise UnsupportedError(
        f"adapter {adapter_name!r} cannot be added, because the model is already sharded; for TRL's DPOTrainer, which "
        "adds a copy as its reference, pass ref_model=AutoModelForCausalLM.from_pretrained(…) with the base weights"
    )
