"""Optimizer options of `infinity train`, and their precedence when a run is resumed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from infinity.units import format_number

_FINAL_LR = 0.1


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Options of AdamW and its learning-rate schedule. Checkpoints store them, and a resumed run reuses them."""

    lr: float = 3e-4
    """Peak learning rate."""
    weight_decay: float = 0.1
    """Weight decay of AdamW."""
    warmup_steps: int = 4
    """Steps of linear warmup."""
    lr_steps: int = 0
    """Step at which cosine decay ends."""
    max_grad_norm: float | None = None
    """Maximum gradient norm. None: no clipping."""

    def factor(self, step: int) -> float:
        """Return the learning-rate factor of a step: linear warmup, then cosine decay to a tenth."""
        warmup = min(self.warmup_steps, self.lr_steps)
        if step < warmup:
            return (step + 1) / (warmup + 1)
        progress = min(1.0, (step - warmup) / max(1, self.lr_steps - warmup))
        return _FINAL_LR + (1 - _FINAL_LR) * 0.5 * (1 + math.cos(math.pi * progress))


def begun(given: Mapping[str, Any], steps: int) -> Recipe:
    """Return the recipe of a new run: the `given` options, with defaults for the others."""
    recipe = replace(Recipe(), **given)
    return recipe if recipe.lr_steps else replace(recipe, lr_steps=steps)


def resumed(
    given: Mapping[str, Any], held: Mapping[str, Any] | None, steps: int, *, override: bool
) -> tuple[Recipe, list[str]]:
    """Return the recipe of a resumed run up to step `steps`, and messages about it.

    Args:
        given: Options from the command line, by name.
        held: Options stored in the checkpoint. None if `infinity train` did not write it.
        steps: Last step of the run.
        override: Whether `given` takes precedence over the checkpoint.
    """
    asked = begun(given, steps)
    if held is None:
        return asked, [
            "the checkpoint was not written by infinity train; learning rate, weight decay and clipping come from the "
            "command line"
        ]
    names = {field.name for field in fields(Recipe)}
    own = replace(asked, **{name: value for name, value in held.items() if name in names})
    other = {name: value for name in given if (value := getattr(asked, name)) != getattr(own, name)}
    says = []
    if other and override:
        listed = ", ".join(
            f"{_option(name, value)} (was {_value(getattr(own, name))})" for name, value in other.items()
        )
        says.append(f"these options replace the values in the checkpoint: {listed}")
    elif other:
        listed = ", ".join(
            f"{_option(name, getattr(own, name))} (not {_value(value)})" for name, value in other.items()
        )
        says.append(
            f"values from the checkpoint are used: {listed}; pass --override to use the values from the command line"
        )
    if override:
        own = replace(own, **other)
    if own.lr_steps < steps and "lr_steps" not in given:
        says.append(
            f"the learning rate stays at {format_number(_FINAL_LR * own.lr)} after step {own.lr_steps}, where cosine "
            f"decay ends; pass --override --lr-steps {steps} to extend the decay"
        )
    return own, says


def kept(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe as stored in a checkpoint."""
    return asdict(recipe)


def _option(name: str, value: Any) -> str:
    return f"--{name.replace('_', '-')} {_value(value)}"


def _value(value: Any) -> str:
    return "off" if value is None else f"{value:g}"
