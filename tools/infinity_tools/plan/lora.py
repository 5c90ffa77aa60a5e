"""LoRA options of `infinity plan`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from infinity.errors import ConfigError

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

    @property
    def words(self) -> list[str]:
        """Return the options of `infinity train` with the same meaning."""
        words = ["--peft.r", str(self.r), "--peft.lora_alpha", f"{self.alpha:g}"]
        words += ["--peft.lora_dropout", f"{self.dropout:g}"] if self.dropout else []
        return words + (["--peft.target_modules", *self.targets] if self.targets else [])
