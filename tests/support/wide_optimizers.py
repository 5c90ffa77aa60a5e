"""The table of optimizers: every class either keeps the bits of plain FSDP2 in memory, or is refused.

`make` builds a row's optimizer from two param groups, matrices and all else; it imports the package, this module does
not. The model is that of `support.optimizers`: matrices, vectors and a weight of four dimensions, fp32 masters computed
in bf16, pages that parameters span.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch

from support.rows import EQUAL, UNSUPPORTED, Row

WHOLE = "updates whole parameters"
OTHER_PARAMETERS = "depends on gradients, values or settings of other"
STATE = "keeps state"
GROUPS = "of its param groups"
STEP = "failed in a trial step"


@dataclass(frozen=True, kw_only=True)
class OptimizerRow(Row):
    """A class of a package under its name there, and what its constructor is given.

    Rows that are `counting` keep a step count, or other values that change, in the param groups or on the optimizer:
    they are trained with updates in both passes too, and resumed from a checkpoint. With `groups` false there is one
    group,
    of parameters alone.
    """

    package: str
    kind: str
    settings: tuple[tuple[str, Any], ...] = ()
    counting: bool = False
    groups: bool = True
    page: int = 64 << 10
    train_mode: bool = False

    def make(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Return the optimizer."""
        made = getattr(importlib.import_module(self.package), self.kind)
        params: Any = groups if self.groups else [param for group in groups for param in group["params"]]
        optimizer: torch.optim.Optimizer = made(params, **dict(self.settings))
        if self.train_mode:
            optimizer.train()  # type: ignore[attr-defined]
        return optimizer


def _row(package: str, kind: str, words: str = "", note: str = "", *, name: str = "", **given: Any) -> OptimizerRow:
    flags = {key: given.pop(key) for key in ("counting", "groups", "page", "train_mode") if key in given}
    return OptimizerRow(
        name=f"{package} {name or kind}",
        outcome=UNSUPPORTED if words else EQUAL,
        words=words,
        note=note,
        slow=True,
        package=package,
        kind=kind,
        settings=tuple(given.items()),
        **flags,
    )


def _torch() -> list[OptimizerRow]:
    name = "torch.optim"
    return [
        _row(name, "AdamW", lr=3e-3),
        _row(name, "AdamW", name="AdamW, fused", lr=3e-3, fused=True),
        _row(name, "AdamW", name="AdamW, foreach", lr=3e-3, foreach=True),
        _row(name, "AdamW", name="AdamW, tensor as lr", lr=torch.tensor(3e-3)),
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
_WHOLE = (
    "A2Grad", "AdaNorm", "AdaTAM", "AdamP", "Aida", "Amos", "ApolloDQN", "FAdam", "Fromage", "LARS", "Lamb", "MARS",
    "NovoGrad", "SCION", "SGDP", "SWATS", "StableAdamW", "TAM",
)  # fmt: skip
_REFUSED: dict[str, str] = {
    "ASGD": GROUPS,
    "AdaFactor": STATE,
    "AdaGC": OTHER_PARAMETERS,
    "AdaHessian": STEP,
    "AdaShift": STATE,
    "Adai": GROUPS,
    "Adalite": STATE,
    "AdamS": GROUPS,
    "AggMo": STATE,
    "AliG": "closure",
    "AvaGrad": GROUPS,
    "CAME": STATE,
    "Conda": STATE,
    "DAdaptAdam": GROUPS,
    "DAdaptSGD": GROUPS,
    "EmoLynx": "keeps state that belongs to no parameter",
    "EmoNavi": "keeps state that belongs to no parameter",
    "FlashAdamW": STATE,
    "Gravity": "random numbers",
    "MADGRAD": "keeps state that belongs to no parameter",
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
        _row(name, "Ranger", note="pages end where rows do", counting=True, page=128 << 10),
        *(_row(name, kind, note=WHOLE) for kind in _WHOLE),
        *(_row(name, kind, words) for kind, words in _REFUSED.items()),
    ]


def _others() -> list[OptimizerRow]:
    free = {"counting": True, "train_mode": True, "note": "`eval()` and `train()` go through all pages"}
    return [
        _row("lion_pytorch", "Lion", lr=1e-3),
        _row("prodigyopt", "Prodigy", STATE, groups=False),
        _row("schedulefree", "AdamWScheduleFree", lr=1e-2, warmup_steps=3, **free),
        _row("schedulefree", "AdamWScheduleFree", name="AdamWScheduleFree, no foreach", foreach=False, **free),
        _row("schedulefree", "SGDScheduleFree", lr=1e-1, **free),
        _row("schedulefree", "RAdamScheduleFree", lr=1e-2, **free),
        _row("bitsandbytes.optim", "AdamW", lr=1e-3, counting=True),
        _row("bitsandbytes.optim", "Lion", lr=1e-3, counting=True),
        _row("bitsandbytes.optim", "SGD", lr=1e-2, momentum=0.9, counting=True),
        _row("bitsandbytes.optim", "RMSprop", lr=1e-3, counting=True),
        _row("bitsandbytes.optim", "Adagrad", lr=1e-2, counting=True),
        _row("bitsandbytes.optim", "AdamW8bit", STATE, note='`state.format = "8bit"` has 8-bit moments'),
        _row("bitsandbytes.optim", "Adam8bit", STATE, note='`state.format = "8bit"` has 8-bit moments'),
        _row("bitsandbytes.optim", "LAMB", note=WHOLE),
    ]


ROWS: tuple[OptimizerRow, ...] = (*_torch(), *_pytorch_optimizer(), *_others())
