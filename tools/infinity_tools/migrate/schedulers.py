"""DeepSpeed's schedulers as code: a function from the number of steps to the learning rate, for torch's LambdaLR.

The rates equal DeepSpeed's at every step, including its peculiarities: the warm-up schedules have the same rate in the
first two steps, and `warmup_type` is `log` by default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Scheduler:
    """A DeepSpeed scheduler."""

    defaults: Mapping[str, str]
    """Parameters and their defaults in DeepSpeed, as code."""
    names: Mapping[str, str]
    """Names of numeric parameters in the code."""
    body: str
    """Definition of `rate_at`. ``PROGRESS`` stands for the completed fraction of the warm-up."""

    def code(self, warmup_type: str) -> str:
        """Return the definition of `rate_at` for a value of `warmup_type`, as code."""
        linear = warmup_type == "'linear'"
        return self.body.replace("PROGRESS", "step / WARMUP" if linear else "math.log(step + 1) / math.log(WARMUP)")


_WARM = """\
def rate_at(step: int) -> float:
    step = max(0, step - 1)  # as in DeepSpeed, whose first two steps have the same rate
    if step < WARMUP:
        return LOW + (HIGH - LOW) * PROGRESS
"""
_WARM_NAMES = {"warmup_min_lr": "LOW", "warmup_max_lr": "HIGH", "warmup_num_steps": "WARMUP"}
_WARM_DEFAULTS = {"warmup_min_lr": "0.0", "warmup_num_steps": "1000", "warmup_type": "log"}

SCHEDULERS = {
    "WarmupLR": Scheduler(
        defaults={**_WARM_DEFAULTS, "warmup_max_lr": "RATE"},
        names=_WARM_NAMES,
        body=_WARM + "    return HIGH\n",
    ),
    "WarmupDecayLR": Scheduler(
        defaults={**_WARM_DEFAULTS, "warmup_max_lr": "0.001", "total_num_steps": "total_steps"},
        names={**_WARM_NAMES, "total_num_steps": "TOTAL"},
        body=_WARM + "    return LOW + (HIGH - LOW) * max(0.0, (TOTAL - step) / max(1, TOTAL - WARMUP))\n",
    ),
    "WarmupCosineLR": Scheduler(
        defaults={"warmup_min_ratio": "0.0", "cos_min_ratio": "0.0001", "warmup_num_steps": "1000",
                  "warmup_type": "log", "total_num_steps": "total_steps"},
        names={"warmup_min_ratio": "LOW", "cos_min_ratio": "END", "warmup_num_steps": "WARMUP",
               "total_num_steps": "TOTAL"},
        body="""\
def rate_at(step: int) -> float:
    step -= 1
    if step < 0:
        return 0.0  # the rate of DeepSpeed's first step is 0
    if step < WARMUP:
        return RATE * (LOW + (1 - LOW) * PROGRESS)
    done = min(1.0, (step - WARMUP + 1) / max(1, TOTAL - WARMUP))
    return RATE * max(0.0, END + (1 - END) * (1 + math.cos(math.pi * done)) / 2)
""",
    ),
}  # fmt: skip
"""Schedulers by DeepSpeed's name."""
BY_HAND = {"OneCycle": "torch.optim.lr_scheduler.OneCycleLR", "LRRangeTest": "torch.optim.lr_scheduler.LinearLR"}
"""Other schedulers by DeepSpeed's name, with the class that is most similar."""

OF_TORCH = (
    "LinearLR", "ConstantLR", "StepLR", "MultiStepLR", "ExponentialLR", "PolynomialLR", "CosineAnnealingLR",
    "CosineAnnealingWarmRestarts", "CyclicLR", "OneCycleLR",
)  # fmt: skip
"""Classes of torch.optim.lr_scheduler that DeepSpeed accepts by name, with the parameters of the class."""
