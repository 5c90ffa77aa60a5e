"""Parsing of `--lora`, and creation of the adapters."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

from torch import nn

from infinity.errors import ConfigError
from infinity.models.adapted import with_adapters
from infinity.optional_dependencies import needs

_ALL = "all-linear"
_FORM = "16, r=16, or r=16,alpha=32,dropout=0.05,targets=q_proj+v_proj"


@dataclass(frozen=True)
class Lora:
    """Options of `--lora`."""

    r: int
    """Rank of the adapters."""
    alpha: float
    """Scale of the adapters, which are multiplied by alpha / r."""
    dropout: float
    """Dropout probability of the adapters' inputs."""
    targets: tuple[str, ...]
    """Suffixes of the names of adapted modules. Empty: all linear layers except the head."""

    @classmethod
    def of(cls, text: str) -> Lora:
        """Parse the value of `--lora`: key=value pairs, or only the rank. Raises `ConfigError`."""
        pairs = [part.partition("=") for part in (f"r={text}" if text.strip().isdecimal() else text).split(",")]
        values = {name.strip(): value.strip() for name, _, value in pairs}
        if len(values) < len(pairs) or not all(values.values()) or not values.keys() <= {*cls.__dataclass_fields__}:
            raise ConfigError(f"--lora {text!r} is not valid; write {_FORM}")
        try:
            rank = int(values.get("r", ""))
            alpha, dropout = float(values.get("alpha", 2 * rank)), float(values.get("dropout", 0))
        except ValueError as error:
            raise ConfigError(f"--lora {text!r} is not valid; write {_FORM}") from error
        if rank < 1 or not 0 < alpha < math.inf or not 0 <= dropout < 1:
            raise ConfigError(f"--lora {text!r}: r must be at least 1, alpha greater than 0, and dropout in [0, 1)")
        return cls(rank, alpha, dropout, tuple(filter(None, values.get("targets", "").split("+"))))

    def __str__(self) -> str:
        """Return the canonical form, which `of` parses."""
        targets = f",targets={'+'.join(self.targets)}" if self.targets else ""
        return f"r={self.r},alpha={self.alpha:g},dropout={self.dropout:g}{targets}"


def check_lora(text: str) -> str:
    """Return the value of `--lora` in canonical form. Raises `ConfigError`, and `MissingPackageError` if peft is not
    installed.
    """
    with needs("peft", f"--lora {text}"):
        import peft  # noqa: F401
    return str(Lora.of(text))


def named(model: str) -> str:
    """Return the name of the base model in an adapter: the value of `--model`, with folders as absolute paths."""
    return os.path.abspath(model) if os.path.exists(model) else model


def add_lora(model: nn.Module, text: str, name: str) -> nn.Module:
    """Return the model with its own parameters frozen and adapters added.

    Args:
        model: Transformers model on the meta device, before sharding.
        text: Value of `--lora`, see `Lora`.
        name: Name of the model, for messages and for `infinity export`.

    Raises:
        ConfigError: If the model has no matching modules.
    """
    import peft

    asked = Lora.of(text)
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=asked.r,
        lora_alpha=int(asked.alpha) if asked.alpha == int(asked.alpha) else asked.alpha,  # type: ignore[arg-type]
        lora_dropout=asked.dropout,
        target_modules=list(asked.targets) or _ALL,
    )
    try:
        found: Any = with_adapters(model, config)
    except ConfigError as error:
        raise ConfigError(f"--lora {text}: {error}") from error
    found.peft_config["default"].base_model_name_or_path = name
    return found  # type: ignore[no-any-return]
