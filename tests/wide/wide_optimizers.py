"""Table of optimizers: each class is bitwise equal to plain FSDP2 in memory, or not supported.

`OptimizerRow.make` imports the package of a row and creates its optimizer with two param groups, for matrices and for
other parameters. The model is `support.optimizers.build()`: matrices, vectors and a 4-dimensional weight, with fp32
parameters, bf16 computation, and pages that contain parts of parameters.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch

from support.rows import EQUAL, UNSUPPORTED, Row

FULL_PARAMETERS = "updates full parameters"
PACKAGE_8BIT = 'use `state.format = "8bit"` for 8-bit moments'
OTHER_PARAMETERS = "depends on gradients, values or settings of other"
STATE = "keeps state"
STATE_WITHOUT_PARAMETER = "keeps state that belongs to no parameter"
GROUPS = "of its param groups"
NO_GRADIENTS = "fails if there are no gradients"
STEP = "failed in a trial step"
NOTES = {
    OTHER_PARAMETERS: "not element-wise: an update depends on other parameters",
    STATE: "keeps state that pages cannot store",
    STATE_WITHOUT_PARAMETER: "keeps state that belongs to no parameter",
    GROUPS: "changes settings of its param groups in a way that cannot be paged",
    NO_GRADIENTS: "changes settings of its param groups, but fails without gradients",
    STEP: "fails in a trial step with dense gradients and without a closure",
    "closure": "requires a closure",
    "dense": "requires sparse gradients",
    "random numbers": "draws random numbers in its updates",
}
"""Notes by the words that the error contains."""


@dataclass(frozen=True, kw_only=True)
class OptimizerRow(Row):
    """An optimizer class, named by its package and class name, and the arguments of its constructor.

    Rows that are `counting` keep a step count or other changing values in the param groups or in attributes of the
    optimizer. They are also trained with the other update schedules and resumed from a checkpoint. If `groups` is
    ``False``, the optimizer gets a list of parameters instead of two param groups.
    """

    package: str
    kind: str
    settings: tuple[tuple[str, Any], ...] = ()
    counting: bool = False
    groups: bool = True
    page: int = 64 << 10
    train_mode: bool = False

    def make(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        made = getattr(importlib.import_module(self.package), self.kind)
        params: Any = groups if self.groups else [param for group in groups for param in group["params"]]
        optimizer: torch.optim.Optimizer = made(params, **dict(self.settings))
        if self.train_mode:
            optimizer.train()  # type: ignore[attr-defined]
        return optimizer


def _row(package: str, kind: str, words: str = "", note: str = "", *, name: str = "", **settings: Any) -> OptimizerRow:
    flags = {key: settings.pop(key) for key in ("counting", "groups", "page", "train_mode") if key in settings}
    return OptimizerRow(
        name=f"{package} {name or kind}",
        outcome=UNSUPPORTED if words else EQUAL,
        words=words,
        note=note or NOTES.get(words, ""),
        package=package,
        kind=kind,
        settings=tuple(settings.items()),
        **flags,
    )


def _torch() -> list[OptimizerRow]:
    name = "torch.optim"
    return [
        _row(name, "AdamW", lr=3e-3),
        _row(name, "AdamW", name="AdamW, fused", lr=3e-3, fused=True),
        _row(name, "AdamW", name="AdamW, foreach", lr=3e-3, foreach=True),
        _row(name, "AdamW", name="AdamW, tensor lr", lr=torch.tensor(3e-3)),
        _row(name, "Adam", lr=3e-3, amsgrad=True),
        _row(name, "SGD", lr=0.1),
        _row(name, "SGD", name="SGD, Nesterov", lr=0.1, momentum=0.9, nesterov=True),
        _row(name, "Adagrad", lr=1e-2, initial_accumulator_value=0.1),
        _row(name, "RMSprop", lr=1e-3, centered=True, momentum=0.5),
        _row(name, "NAdam", lr=3e-3),
        _row(name, "RAdam", lr=3e-3),
        _row(name, "Adamax", lr=3e-3),
        _row(name, "Adadelta", lr=1.0),
        _row(name, "ASGD", lr=1e-2),
        _row(name, "Rprop", lr=1e-3, groups=False),
        _row(name, "Adafactor", STATE),
        _row(name, "LBFGS", "closure", groups=False),
        _row(name, "SparseAdam", "dense", groups=False),
    ]


_ELEMENT_WISE = (
    "ADOPT", "APOLLO", "AccSGD", "AdEMAMix", "AdaBelief", "AdaBound", "AdaDelta", "AdaMax", "AdaMod", "AdaPNM",
    "AdaSmooth", "AdamC", "AdamG", "AdamWSN", "Adan", "BCOS", "Ano", "DiffGrad", "DualAdam", "EXAdam", "FOCUS", "FTRL",
    "Fira", "GaLore", "Grams", "GrokFastAdamW", "Kate", "LaProp", "Lion", "MSVAG", "PAdam", "PID", "PNM", "QHAdam",
    "QHM", "RAdam", "SGDW", "SRMM", "ScheduleFreeAdamW", "ScheduleFreeRAdam", "ScheduleFreeSGD", "SignSGD",
    "SimplifiedAdEMAMix", "Tiger", "VSGD", "Yogi",
)  # fmt: skip
_FULL_PARAMETERS = (
    "A2Grad", "AdaNorm", "AdaTAM", "AdamP", "Aida", "Amos", "ApolloDQN", "FAdam", "Fromage", "LARS", "Lamb", "MARS",
    "NovoGrad", "SCION", "SGDP", "SWATS", "StableAdamW", "TAM",
)  # fmt: skip
_UNSUPPORTED: dict[str, str] = {
    "ASGD": GROUPS,
    "AdaFactor": STATE,
    "AdaGC": OTHER_PARAMETERS,
    "AdaHessian": STEP,
    "AdaShift": STATE,
    "Adai": NO_GRADIENTS,
    "Adalite": STATE,
    "AdamS": NO_GRADIENTS,
    "AggMo": STATE,
    "AliG": "closure",
    "AvaGrad": GROUPS,
    "CAME": STATE,
    "Conda": STATE,
    "DAdaptAdam": GROUPS,
    "DAdaptSGD": GROUPS,
    "EmoLynx": STATE_WITHOUT_PARAMETER,
    "EmoNavi": STATE_WITHOUT_PARAMETER,
    "FlashAdamW": STATE,
    "Gravity": "random numbers",
    "MADGRAD": STATE_WITHOUT_PARAMETER,
    "Nero": STATE,
    "Prodigy": GROUPS,
    "RACS": STATE,
    "SM3": STATE,
    "SOAP": STATE,
    "SPlus": STATE,
    "ScalableShampoo": STATE,
    "Shampoo": STATE,
    "SophiaH": STEP,
}


def _pytorch_optimizer() -> list[OptimizerRow]:
    name = "pytorch_optimizer"
    return [
        *(_row(name, kind, counting=True) for kind in _ELEMENT_WISE),
        _row(name, "Ranger", note="pages end at row boundaries", counting=True, page=128 << 10),
        *(_row(name, kind, note=FULL_PARAMETERS) for kind in _FULL_PARAMETERS),
        *(_row(name, kind, words) for kind, words in _UNSUPPORTED.items()),
    ]


def _others() -> list[OptimizerRow]:
    schedule_free = {"counting": True, "train_mode": True, "note": "`eval()` and `train()` update all pages"}
    return [
        _row("lion_pytorch", "Lion", lr=1e-3),
        _row("prodigyopt", "Prodigy", STATE, groups=False),
        _row("schedulefree", "AdamWScheduleFree", lr=1e-2, warmup_steps=3, **schedule_free),
        _row(
            "schedulefree", "AdamWScheduleFree", name="AdamWScheduleFree, foreach=False", foreach=False, **schedule_free
        ),
        _row("schedulefree", "SGDScheduleFree", lr=1e-1, **schedule_free),
        _row("schedulefree", "RAdamScheduleFree", lr=1e-2, **schedule_free),
        _row("bitsandbytes.optim", "AdamW", lr=1e-3, counting=True),
        _row("bitsandbytes.optim", "Lion", lr=1e-3, counting=True),
        _row("bitsandbytes.optim", "SGD", lr=1e-2, momentum=0.9, counting=True),
        _row("bitsandbytes.optim", "RMSprop", lr=1e-3, counting=True),
        _row("bitsandbytes.optim", "Adagrad", lr=1e-2, counting=True),
        _row("bitsandbytes.optim", "AdamW8bit", STATE, note=PACKAGE_8BIT),
        _row("bitsandbytes.optim", "Adam8bit", STATE, note=PACKAGE_8BIT),
        _row("bitsandbytes.optim", "LAMB", note=FULL_PARAMETERS),
    ]


ROWS: tuple[OptimizerRow, ...] = (*_torch(), *_pytorch_optimizer(), *_others())
