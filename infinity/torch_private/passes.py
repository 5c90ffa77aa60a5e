"""State that FSDP2 keeps between the hooks of a forward and a backward pass.

An exception leaves this state as it is. FSDP2 then takes the next forward for a recomputation inside of the interrupted
backward: it registers no hooks, and the step ends without gradients and without an error.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from infinity.torch_private.imports import TrainingState


def fsdp_states(model: nn.Module) -> list[Any]:
    """Return the state objects of all modules on which `fully_shard` was called."""
    states = {id(state): state for module in model.modules() if isinstance(module, FSDPModule)
              for state in [module._get_fsdp_state()]}  # fmt: skip
    return list(states.values())


def initialize_state(module: Any) -> None:
    """Do what FSDP2 does before the first forward: choose the root, and prepare the parameters.

    FSDP2 calls this itself, but if it is interrupted there, it takes the rest as done.

    Args:
        module: module on which `fully_shard` was called, and whose forward is about to run.
    """
    module._get_fsdp_state()._lazy_init()


def backward_is_unfinished(states: Iterable[Any]) -> bool:
    """Return whether a backward pass has begun and its final callback has not run to the end."""
    for state in states:  # a loop without calls, because every forward runs it
        if state._state_ctx.post_backward_final_callback_queued or state._training_state is TrainingState.PRE_BACKWARD:
            return True
    return False


def can_reset_states(states: Iterable[Any]) -> bool:
    """Return whether this torch release supports `reset_states`."""
    return all(hasattr(state, "_reset_iter_state") for state in states)


def reset_states(states: Iterable[Any], *, gradients: bool) -> None:
    """Reshard all modules and make FSDP2 forget the current pass.

    Args:
        states: result of `fsdp_states`.
        gradients: whether to also drop the gradients that have not been reduced yet.
    """
    for state in states:
        for group in state._fsdp_param_groups:
            for param in group.fsdp_params:
                param.to_sharded()  # an interrupted transition may have ended between two parameters
                if gradients and hasattr(param, "_unsharded_param"):
                    param._unsharded_param.grad = None
                if gradients and hasattr(param, "unsharded_accumulated_grad"):
                    param.unsharded_accumulated_grad = None
        if state._is_root:
            state._reset_iter_state()
