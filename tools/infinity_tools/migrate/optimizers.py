"""The optimizers that a DeepSpeed configuration names: which class it is here, with which arguments, or why none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """A class that `infinity.offload` takes."""

    call: str
    """Its name in code."""
    takes: tuple[str, ...]
    """Which of `optimizer.params` it has as arguments."""
    fills: Mapping[str, str] = field(default_factory=dict)
    """Arguments that are given where the configuration says nothing: DeepSpeed's default is not torch's."""
    rate: str = "0.001"
    """DeepSpeed's default of `lr`."""
    imports: str = ""
    """Line that code needs for it."""


_ADAM = ("lr", "betas", "eps", "weight_decay", "amsgrad")
ADAM = Optimizer(call="torch.optim.Adam", takes=_ADAM)
ADAMW = Optimizer(call="torch.optim.AdamW", takes=_ADAM, fills={"weight_decay": "0.0"})
TAKEN = {
    "adam": ADAMW,  # as DeepSpeed's adam_w_mode, which is on by default
    "adamw": ADAMW,
    "adagrad": Optimizer(
        call="torch.optim.Adagrad", takes=("lr", "lr_decay", "eps", "weight_decay"), rate="0.01"
    ),
    "lion": Optimizer(
        call="Lion", takes=("lr", "betas", "weight_decay"), fills={"lr": "0.001"},
        imports="from lion_pytorch import Lion  # pip install lion-pytorch",
    ),
    # Names that DeepSpeed hands on to torch.optim.
    "sgd": Optimizer(call="torch.optim.SGD", takes=("lr", "momentum", "dampening", "weight_decay", "nesterov")),
    "rmsprop": Optimizer(
        call="torch.optim.RMSprop", takes=("lr", "alpha", "eps", "weight_decay", "momentum", "centered"), rate="0.01"
    ),
    "nadam": Optimizer(call="torch.optim.NAdam", takes=("lr", "betas", "eps", "weight_decay"), rate="0.002"),
    "radam": Optimizer(call="torch.optim.RAdam", takes=("lr", "betas", "eps", "weight_decay")),
    "adamax": Optimizer(call="torch.optim.Adamax", takes=("lr", "betas", "eps", "weight_decay"), rate="0.002"),
}  # fmt: skip
"""By DeepSpeed's name in lower case."""

_PAGES = "an update here sees one page, a part of a parameter"
_COMPRESSED = (
    "it compresses what ranks send to each other, which FSDP2 does not, and DeepSpeed itself refuses it with ZeRO"
)
_MUP = "its rates depend on attributes that the package mup puts on parameters; that was not tried"
REFUSED = {
    "lamb": f"it needs norms of whole parameters; {_PAGES}",
    "onebitadam": _COMPRESSED,
    "zerooneadam": _COMPRESSED,
    "onebitlamb": _COMPRESSED,
    "muon": f"it needs whole matrices; {_PAGES}",
    "muadam": _MUP,
    "muadamw": _MUP,
    "musgd": _MUP,
    "adafactor": f"it keeps sums over rows and columns; {_PAGES}",
    "lbfgs": "it evaluates the loss again and again within one step",
    "sparseadam": "gradients are dense",
}
"""Why those that are known otherwise are not taken, by the same names."""
