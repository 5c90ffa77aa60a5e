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
    """Parameters and their defaults in DeepSpeed, as code. ``""`` marks a required parameter."""
    names: Mapping[str, str]
    """Names of numeric parameters in the code."""
    body: str
    """Definition of `rate_at`. Lines that begin with ``?name`` are used if the parameter is on, ``?!name`` if off."""


_WARM = """\
def rate_at(step: int) -> float:
    step = max(0, step - 1)  # as in DeepSpeed, whose first two steps have the same rate
    if step < WARMUP:
?log        return LOW + (HIGH - LOW) * math.log(step + 1) / math.log(WARMUP)
?!log        return LOW + (HIGH - LOW) * step / WARMUP
"""
_WARM_NAMES = {"warmup_min_lr": "LOW", "warmup_max_lr": "HIGH", "warmup_num_steps": "WARMUP"}
_WARM_DEFAULTS = {"warmup_min_lr": "0.0", "warmup_num_steps": "1000", "warmup_type": "log"}
_CYCLE = {
    "cycle_min_lr": "LOW", "cycle_max_lr": "HIGH", "cycle_first_step_size": "RISE", "cycle_second_step_size": "FALL",
    "cycle_first_stair_count": "RISE_STAIRS", "cycle_second_stair_count": "FALL_STAIRS",
}  # fmt: skip

SCHEDULERS = {
    "WarmupLR": Scheduler(
        defaults={**_WARM_DEFAULTS, "warmup_max_lr": "RATE"},
        names=_WARM_NAMES,
        body=_WARM + "    return HIGH\n",
    ),
    "WarmupDecayLR": Scheduler(
        defaults={**_WARM_DEFAULTS, "warmup_max_lr": "0.001", "total_num_steps": ""},
        names={**_WARM_NAMES, "total_num_steps": "TOTAL"},
        body=_WARM + "    return LOW + (HIGH - LOW) * max(0.0, (TOTAL - step) / max(1, TOTAL - WARMUP))\n",
    ),
    "WarmupCosineLR": Scheduler(
        defaults={"warmup_min_ratio": "0.0", "cos_min_ratio": "0.0001", "warmup_num_steps": "1000",
                  "warmup_type": "log", "total_num_steps": ""},
        names={"warmup_min_ratio": "LOW", "cos_min_ratio": "END", "warmup_num_steps": "WARMUP",
               "total_num_steps": "TOTAL"},
        body="""\
def rate_at(step: int) -> float:
    step -= 1
    if step < 0:
        return 0.0  # the rate of DeepSpeed's first step is 0
    if step < WARMUP:
?log        return RATE * (LOW + (1 - LOW) * math.log(step + 1) / math.log(WARMUP))
?!log        return RATE * (LOW + (1 - LOW) * step / WARMUP)
    done = min(1.0, (step - WARMUP + 1) / max(1, TOTAL - WARMUP))
    return RATE * max(0.0, END + (1 - END) * (1 + math.cos(math.pi * done)) / 2)
""",
    ),
    "OneCycle": Scheduler(
        defaults={"cycle_min_lr": "", "cycle_max_lr": "", "cycle_first_step_size": "2000",
                  "cycle_second_step_size": "RISE", "cycle_first_stair_count": "0",
                  "cycle_second_stair_count": "RISE_STAIRS", "decay_step_size": "0", "decay_lr_rate": "0.0",
                  "cycle_momentum": "True", "cycle_min_mom": "0.8", "cycle_max_mom": "0.9", "decay_mom_rate": "0.0"},
        names={**_CYCLE, "decay_step_size": "DECAY", "decay_lr_rate": "DECAY_RATE", "cycle_min_mom": "LOW_BETA",
               "cycle_max_mom": "HIGH_BETA", "decay_mom_rate": "DECAY_BETA"},
        body="""\
def height_at(step: int) -> float:
    place = step % (RISE + FALL)
    height, stairs = (place / RISE, RISE_STAIRS) if place <= RISE else ((RISE + FALL - place) / FALL, FALL_STAIRS)
    return math.floor(height * stairs + 1e-9) / stairs if stairs else height


def rate_at(step: int) -> float:
    if step <= RISE + FALL:
        return LOW + (HIGH - LOW) * height_at(step)
    return LOW / (1 + DECAY_RATE * (step - RISE - FALL) / DECAY) if DECAY else LOW
?cycle_momentum
?cycle_momentum
?cycle_momentumdef beta_at(step: int) -> float:
?cycle_momentum    if step == 0:
?cycle_momentum        return LOW_BETA
?cycle_momentum    if step <= RISE + FALL:
?cycle_momentum        return HIGH_BETA - (HIGH_BETA - LOW_BETA) * height_at(step)
?cycle_momentum    return HIGH_BETA * (1 + DECAY_BETA * (step - RISE - FALL) / DECAY) if DECAY else HIGH_BETA
""",
    ),
    "LRRangeTest": Scheduler(
        defaults={"lr_range_test_min_lr": "0.001", "lr_range_test_step_size": "2000", "lr_range_test_step_rate": "1.0",
                  "lr_range_test_staircase": "False"},
        names={"lr_range_test_min_lr": "LOW", "lr_range_test_step_size": "EACH", "lr_range_test_step_rate": "RISE"},
        body="""\
def rate_at(step: int) -> float:
?lr_range_test_staircase    return LOW * (1 + RISE * math.floor(step / EACH))
?!lr_range_test_staircase    return LOW * (1 + RISE * step / EACH)
""",
    ),
}  # fmt: skip
"""Schedulers by DeepSpeed's name."""

OF_TORCH = (
    "LinearLR", "ConstantLR", "StepLR", "MultiStepLR", "ExponentialLR", "PolynomialLR", "CosineAnnealingLR",
    "CosineAnnealingWarmRestarts", "CyclicLR", "OneCycleLR",
)  # fmt: skip
"""Classes of torch.optim.lr_scheduler that DeepSpeed accepts by name, with the parameters of the class."""


def body_of(scheduler: Scheduler, on: Mapping[str, bool]) -> list[str]:
    """Return the code of a scheduler for the parameters that are `on`."""
    lines = []
    for line in scheduler.body.splitlines():
        if line.startswith("?"):
            word = next(name for name in on if line.removeprefix("?").removeprefix("!").startswith(name))
            wanted = not line.startswith("?!")
            if on[word] != wanted:
                continue
            line = line.removeprefix("?").removeprefix("!").removeprefix(word)
        lines.append(line)
    return lines
