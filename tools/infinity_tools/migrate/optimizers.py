"""Optimizers in DeepSpeed configurations: the class to use and its arguments, or the reason why it is not supported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """A class that `infinity.offload` supports."""

    call: str
    """Name of the class in code."""
    takes: tuple[str, ...]
    """Entries of `optimizer.params` that are passed to the class."""
    fills: Mapping[str, str] = field(default_factory=dict)
    """Arguments that are added if the configuration does not set them, because DeepSpeed's default differs from
    torch's.
    """
    always: Mapping[str, str] = field(default_factory=dict)
    """Arguments that are always added."""
    rate: str = "0.001"
    """DeepSpeed's default of `lr`."""
    imports: str = ""
    """Import statement of the class."""


_ADAM = ("lr", "betas", "eps", "weight_decay", "amsgrad")
_FUSED = {"fused": "True"}  # the default makes many passes over memory on the CPU
ADAM = Optimizer(call="torch.optim.Adam", takes=_ADAM, always=_FUSED)
ADAMW = Optimizer(call="torch.optim.AdamW", takes=_ADAM, fills={"weight_decay": "0.0"}, always=_FUSED)
TAKEN = {
    "adam": ADAMW,  # like DeepSpeed's adam_w_mode, which is on by default
    "adamw": ADAMW,
    "adagrad": Optimizer(
        call="torch.optim.Adagrad", takes=("lr", "lr_decay", "eps", "weight_decay"), rate="0.01", always=_FUSED
    ),
    "lion": Optimizer(
        call="Lion", takes=("lr", "betas", "weight_decay"), fills={"lr": "0.001"},
        imports="from lion_pytorch import Lion  # pip install lion-pytorch",
    ),
    # Names that DeepSpeed passes to torch.optim.
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
"""Supported optimizers by DeepSpeed's name in lower case."""

_COMPRESSED = "it compresses communication between ranks, which FSDP2 does not support, nor does DeepSpeed with ZeRO"
_MUP = "its learning rates depend on attributes that the mup package sets on parameters; this is untested"
BY_HAND = {
    "lamb": (
        "an implementation from another package, such as pytorch_optimizer's Lamb",
        "PyTorch has none, and the options differ by package; infinity passes full parameters to optimizers that need "
        "them",
    ),
    "muon": (
        "infinity.offload(model, [torch.optim.Muon(matrices, ...), torch.optim.AdamW(rest, ...)], ...)",
        "DeepSpeed uses Muon for matrices whose names contain neither embed nor lm_head; select them in your code "
        '(examples/muon.py). Pass adjust_lr_fn="original"; torch implements ns_method "standard"',
    ),
}
"""Supported optimizers that require code that cannot be derived from the configuration: the code and the reason."""
UNSUPPORTED = {
    "onebitadam": _COMPRESSED,
    "zerooneadam": _COMPRESSED,
    "onebitlamb": _COMPRESSED,
    "muadam": _MUP,
    "muadamw": _MUP,
    "musgd": _MUP,
    "adafactor": "it keeps sums over rows and columns, whose shapes differ from the parameter's",
    "lbfgs": "it evaluates the loss repeatedly within one step",
    "sparseadam": "gradients are dense",
}
"""Reasons why other known optimizers are not supported, by the same names."""
