"""`--lora`: what its text says, and the adapters that it puts beside a model's matrices."""

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
    """What `--lora` asks for."""

    r: int
    """Rank of an adapter."""
    alpha: float
    """An adapter counts alpha / r times."""
    dropout: float
    """Share of an adapter's inputs that is dropped."""
    targets: tuple[str, ...]
    """Ends of names of modules that get an adapter; none: every linear layer but the head."""

    @classmethod
    def of(cls, text: str) -> Lora:
        """Return what a text says: pairs, or the rank alone. Raises `ConfigError`."""
        pairs = [part.partition("=") for part in (f"r={text}" if text.strip().isdecimal() else text).split(",")]
        values = {name.strip(): value.strip() for name, _, value in pairs}
        if len(values) < len(pairs) or not all(values.values()) or not values.keys() <= {*cls.__dataclass_fields__}:
            raise ConfigError(f"--lora {text!r} is not understood; say {_FORM}")
        try:
            rank = int(values.get("r", ""))
            alpha, dropout = float(values.get("alpha", 2 * rank)), float(values.get("dropout", 0))
        except ValueError as error:
            raise ConfigError(f"--lora {text!r} is not understood; say {_FORM}") from error
        if rank < 1 or not 0 < alpha < math.inf or not 0 <= dropout < 1:
            raise ConfigError(f"--lora {text!r}: r must be 1 or more, alpha above 0, dropout from 0 to below 1")
        return cls(rank, alpha, dropout, tuple(filter(None, values.get("targets", "").split("+"))))

    def __str__(self) -> str:
        """Return the text that says this."""
        targets = f",targets={'+'.join(self.targets)}" if self.targets else ""
        return f"r={self.r},alpha={self.alpha:g},dropout={self.dropout:g}{targets}"


def check_lora(text: str) -> str:
    """Return `--lora` as it is kept. Raises `ConfigError`, and `MissingPackageError` where peft is not installed."""
    with needs("peft", f"--lora {text}"):
        import peft  # noqa: F401
    return str(Lora.of(text))


def named(model: str) -> str:
    """Return how an adapter names the model that it belongs to, as `--model` has it: a folder by its whole path."""
    return os.path.abspath(model) if os.path.exists(model) else model


def add_lora(model: nn.Module, text: str, name: str) -> nn.Module:
    """Return a model whose own parameters are frozen, with the adapters that `--lora` asks for.

    Args:
        model: of transformers, on the meta device, not sharded yet.
        text: see `Lora`.
        name: of the model, for messages and for what `infinity export` writes.

    Raises:
        ConfigError: the model has no such modules.
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
