"""Detect a transformers Trainer that trains an offloaded model without a call of `attach`.

Such a Trainer trains correctly, but it cannot save checkpoints, because it writes weights from their memory addresses.
Without this check, it would raise an error only after the steps before its first checkpoint.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from infinity.errors import UnsupportedError

ADVICE = "call infinity.integrations.transformers.attach(trainer, settings) instead of infinity.offload"
_MODULE = "transformers.trainer"


def running_trainer() -> Any:
    """Return the Trainer that has called this function, possibly indirectly, unless `attach` was called on it."""
    frame = sys._getframe(1) if _MODULE in sys.modules else None
    while frame is not None:
        if frame.f_globals.get("__name__") == _MODULE:
            trainer = frame.f_locals.get("self")
            if isinstance(trainer, sys.modules[_MODULE].Trainer):
                return None if hasattr(trainer, "_infinity") else trainer
        frame = frame.f_back
    return None


def check_trainer(model: nn.Module) -> None:
    """Check that the Trainer that has called this function, if any, does not save checkpoints of a model.

    Raises:
        UnsupportedError: if it saves checkpoints.
    """
    trainer = running_trainer()
    if trainer is None or trainer.args.save_strategy == "no":
        return
    if any(module is model for module in trainer.model.modules()):  # otherwise, it is a teacher, for example
        raise UnsupportedError(
            f"save_strategy = {trainer.args.save_strategy.value!r}, but a Trainer cannot save weights on NVMe. "
            f"To save checkpoints, {ADVICE}; to train without, set save_strategy='no'."
        )
