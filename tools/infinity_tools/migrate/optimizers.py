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
    always: Mapping[str, str] = field(default_factory=dict)
    """Arguments that are given whatever the configuration says."""
    rate: str = "0.001"
    """DeepSpeed's default of `lr`."""
    imports: str = ""
    """Line that code needs for it."""


_ADAM = ("lr", "betas", "eps", "weight_decay", "amsgrad")
_FUSED = {"fused": "True"}  # the default is a loop of many passes on the CPU
ADAM = Optimizer(call="torch.optim.Adam", takes=_ADAM, always=_FUSED)
ADAMW = Optimizer(call="torch.optim.AdamW", takes=_ADAM, fills={"weight_decay": "0.0"}, always=_FUSED)
TAKEN = {
    "adam": ADAMW,  # as DeepSpeed's adam_w_mode, which is on by default
    "adamw": ADAMW,
    "adagrad": Optimizer(
        call="torch.optim.Adagrad", takes=("lr", "lr_decay", "eps", "weight_decay"), rate="0.01", always=_FUSED
    ),
    "lion": Optimizer(
        call="Lion", takes=("lr", "betas", "weight_decay"), fills={"lr": "0.001"},
        imports="from lion_pytorch import Lion  # pip install lion-pytorch",
    ),
    # Names that DeepSpeed hands on to torch.optim.
    "sgd": Optimizer(
        call="torch.optim.SGD", takes=("lr", "momentum", "dampening", "weight_decay", "nesterov"), always=_FUSED
    ),
    "rmsprop": Optimizer(
        call="torch.optim.RMSprop", takes=("lr", "alpha", "eps", "weight_decay", "momentum", "centered"), rate="0.01"
    ),
    "nadam": Optimizer(call="torch.optim.NAdam", takes=("lr", "betas", "eps", "weight_decay"), rate="0.002"),
    "radam": Optimizer(call="torch.optim.RAdam", takes=("lr", "betas", "eps", "weight_decay")),
    "adamax": Optimizer(call="torch.optim.Adamax", takes=("lr", "betas", "eps", "weight_decay"), rate="0.002"),
}  # fmt: skip
"""By DeepSpeed's name in lower case."""

_COMPRESSED = (
    "it compresses what ranks send to each other, which FSDP2 does not, and DeepSpeed itself refuses it with ZeRO"
)
_MUP = "its rates depend on attributes that the package mup puts on parameters; that was not tried"
BY_HAND = {
    "lamb": (
        "one of another package, such as Lamb of pytorch_optimizer",
        "torch has none, and its options differ; infinity updates whole parameters where an optimizer needs them",
    ),
    "muon": (
        "infinity.offload(model, [torch.optim.Muon(matrices, ...), torch.optim.AdamW(rest, ...)], ...)",
        "DeepSpeed gives it what has two dimensions and neither embed nor lm_head in its name, which is yours to write "
        '(examples/muon.py); adjust_lr_fn="original" is its scale, and torch has what is ns_method "standard" there',
    ),
}
"""What to write for those that are taken, but that nobody can write from the configuration alone, and why."""
REFUSED = {
    "onebitadam": _COMPRESSED,
    "zerooneadam": _COMPRESSED,
    "onebitlamb": _COMPRESSED,
    "muadam": _MUP,
    "muadamw": _MUP,
    "musgd": _MUP,
    "adafactor": "it keeps sums over rows and columns, which are no tensors of the parameter's shape",
    "lbfgs": "it evaluates the loss again and again within one step",
    "sparseadam": "gradients are dense",
}
"""Why those that are known otherwise are not taken, by the same names."""
