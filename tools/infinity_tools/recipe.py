"""What the optimizer of `infinity train` is told, and what of it holds when a run goes on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

_FINAL_LR = 0.1


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Options of AdamW and of its rate. Checkpoints have them, and a run that is resumed goes on with them."""

    lr: float = 3e-4
    """The highest rate."""
    weight_decay: float = 0.1
    """AdamW's."""
    warmup_steps: int = 4
    """Steps in which the rate rises."""
    lr_steps: int = 0
    """Step at which the rate's cosine reaches its end."""
    max_grad_norm: float | None = None
    """Gradients are clipped to this norm; None: they are not."""

    def factor(self, step: int) -> float:
        """Return the factor on the rate by step: a linear warm-up, then half a cosine down to a tenth."""
        warmup = min(self.warmup_steps, self.lr_steps)
        if step < warmup:
            return (step + 1) / (warmup + 1)
        progress = min(1.0, (step - warmup) / max(1, self.lr_steps - warmup))
        return _FINAL_LR + (1 - _FINAL_LR) * 0.5 * (1 + math.cos(math.pi * progress))


def begun(given: Mapping[str, Any], steps: int) -> Recipe:
    """Return the recipe of a new run of so many steps: what was `given`, else the defaults."""
    recipe = replace(Recipe(), **given)
    return recipe if recipe.lr_steps else replace(recipe, lr_steps=steps)


def resumed(
    given: Mapping[str, Any], held: Mapping[str, Any] | None, steps: int, *, override: bool
) -> tuple[Recipe, list[str]]:
    """Return the recipe of a run that goes on up to step `steps`, and what is to be said of it.

    Args:
        given: by the command line, by name.
        held: by the checkpoint; None for one that `infinity train` did not make.
        override: what was given holds, not the checkpoint's.
    """
    asked = begun(given, steps)
    if held is None:
        return asked, [
            "the checkpoint was not made by infinity train: rate, weight decay and clipping are the options'"
        ]
    names = {field.name for field in fields(Recipe)}
    own = replace(asked, **{name: value for name, value in held.items() if name in names})
    other = {name: value for name in given if (value := getattr(asked, name)) != getattr(own, name)}
    says = []
    if other and override:
        listed = ", ".join(
            f"{_option(name, value)} (was {_value(getattr(own, name))})" for name, value in other.items()
        )
        says.append(f"the command line holds, not the checkpoint: {listed}")
    elif other:
        listed = ", ".join(
            f"{_option(name, getattr(own, name))} (not {_value(value)})" for name, value in other.items()
        )
        says.append(f"the checkpoint holds, not the command line: {listed}; --override takes the command line's")
    if override:
        own = replace(own, **other)
    if own.lr_steps < steps and "lr_steps" not in given:
        says.append(
            f"from step {own.lr_steps} on, where its cosine ends, the rate stays at {_FINAL_LR * own.lr:.3g}; "
            f"--override --lr-steps {steps} stretches the cosine"
        )
    return own, says


def kept(recipe: Recipe) -> dict[str, Any]:
    """Return what a checkpoint keeps of a recipe."""
    return asdict(recipe)


def _option(name: str, value: Any) -> str:
    return f"--{name.replace('_', '-')} {_value(value)}"


def _value(value: Any) -> str:
    return "off" if value is None else f"{value:g}"
