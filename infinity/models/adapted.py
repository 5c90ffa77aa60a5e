"""Adapters of peft on a model that is not sharded yet:

afterwards `fully_shard` would not have them in its FSDP modules.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from infinity.errors import ConfigError
from infinity.models.building import one_line
from infinity.optional_dependencies import needs


def with_adapters(model: nn.Module, config: Any) -> Any:
    """Return the `PeftModel` of a model on the meta device, with the adapters of a configuration.

    Args:
        model: of transformers, not sharded. What is frozen in it and what is put into it is up to peft.
        config: a `PeftConfig`, such as `peft.LoraConfig`.

    Raises:
        ConfigError: it is none, or peft cannot add it to this model, with the reason and the linear layers there are.
        MissingPackageError: peft is not installed.
    """
    with needs("peft", "adapters="):
        import peft

    if not isinstance(config, peft.PeftConfig):
        raise ConfigError(
            f"adapters={config!r:.80} is no configuration of peft, but of type {type(config).__name__}; pass one, such "
            'as peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")'
        )
    linear = sorted({name.rpartition(".")[2] for name, one in model.named_modules() if isinstance(one, nn.Linear)})
    try:
        with torch.device("meta"):
            return peft.get_peft_model(model, config)  # type: ignore[arg-type]
    except Exception as error:  # whatever peft says to values that do not fit
        reason = one_line(error).rstrip(".")
        raise ConfigError(
            f"{type(config).__name__} cannot be added to this model: {reason}; its linear layers: "
            f"{', '.join(linear) or 'none'}"
        ) from error
