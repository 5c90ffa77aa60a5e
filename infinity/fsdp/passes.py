"""Forward and backward passes of a sharded model, and recovery from interrupted ones."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from infinity import interrupts, torch_private
from infinity.errors import InfinityError
from infinity.fsdp.unattached_trainer import check_trainer

RESUME = 'offload a new model with run.resume = "latest" to resume from the last checkpoint'
"""Advice for errors after which this run cannot continue."""


class ModelListener(Protocol):
    """Listener for the forward passes and gradients of a model's training steps."""

    def forward(self, grad_enabled: bool) -> None:
        """Called when an outermost forward begins, that is, one outside of any other FSDP module's forward."""

    def backward_interrupted(self) -> None:
        """Called instead of `forward` if the last backward was interrupted and not dropped. Raises an error."""

    def gradient_arrived(self, shard: int, param: nn.Parameter) -> None:
        """Take over the gradient in `p.grad` after FSDP2 has reduced it and the user's hooks have run."""


class Passes:
    """Passes of a model: report outermost forwards, and recover FSDP2 after an exception in forward or backward.

    After an exception in backward, FSDP2 would ignore the gradients of all further steps. Therefore, forwards and steps
    raise an error until `drop` has reset FSDP2.
    """

    def __init__(self, model: nn.Module, listener: ModelListener, *, alone: bool) -> None:
        """Create the passes of a model.

        Args:
            alone: Whether there is only one rank. With several ranks, a backward is not repeated, because the ranks may
                have been interrupted at different collectives.
        """
        self._model, self._listener, self._alone = model, listener, alone
        self._states = torch_private.fsdp_states(model)
        self._running: list[nn.Module] = []  # FSDP modules whose forward is running, outermost first
        # torch.compile must not trace these functions
        self._recover = torch.compiler.disable(self._reset)  # type: ignore[no-untyped-call]
        self._prepare = torch.compiler.disable(self._begin_outermost)  # type: ignore[no-untyped-call]

    def observe(self, undo: ExitStack) -> None:
        """Register hooks on the model, which `undo` removes."""
        for module in self._model.modules():
            if torch_private.is_sharded_module(module):
                undo.callback(module.register_forward_pre_hook(self._begin, prepend=True).remove)
                undo.callback(module.register_forward_hook(self._end, always_call=True).remove)
                undo.callback(torch_private.before_forward_methods(module, partial(self._enter, module)))

    # Only the outermost FSDP module is reported, because activation checkpointing runs inner modules under no_grad and
    # recomputes them in backward.
    def _enter(self, module: nn.Module) -> None:
        again = module is self._model or module in self._running
        if again and self._running and not torch_private.in_backward():
            self._recover(gradients=False)  # an interrupted forward: torch calls `_end` only after an `Exception`
        if not self._running:
            self._prepare(module)
            self._listener.forward(torch.is_grad_enabled())

    def _begin(self, module: nn.Module, args: Any) -> None:
        self._enter(module)
        self._running.append(module)

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._running and self._running[-1] is module:  # `_begin` did not run if an earlier hook failed
            self._running.pop()

    def _begin_outermost(self, module: nn.Module) -> None:
        self.check()
        if torch.is_grad_enabled():
            check_trainer(self._model)
        with interrupts.held():
            torch_private.initialize_state(module)

    @property
    def interrupted(self) -> bool:
        """``True`` if the last backward ended with an exception, and FSDP2 has not been reset."""
        return not torch_private.in_backward() and torch_private.backward_is_unfinished(self._states)

    def check(self) -> None:
        """Check that no interrupted backward must be repeated.

        Raises:
            InfinityError: If the last backward ended with an exception.
        """
        if self.interrupted:
            self._listener.backward_interrupted()

    def drop(self) -> bool:
        """Reset FSDP2 after an interrupted pass, so that the step can be repeated. Its gradients are dropped.

        Returns:
            Whether a pass was interrupted.

        Raises:
            InfinityError: If the last backward was interrupted and cannot be repeated.
        """
        if torch_private.in_backward():
            return False
        unfinished = torch_private.backward_is_unfinished(self._states)
        if unfinished and not (self._alone and torch_private.can_reset_states(self._states)):
            why = "ranks may differ in how far they got"
            if self._alone:
                why = f"torch {torch.__version__} cannot repeat it"
            raise InfinityError(f"the last backward was interrupted, and {why}; {RESUME}")
        if not unfinished and not self._running:
            return False
        self._recover(gradients=True)
        return True

    def _reset(self, *, gradients: bool) -> None:
        with interrupts.held():
            self._running.clear()
            if torch_private.can_reset_states(self._states):
                torch_private.reset_states(self._states, gradients=gradients)
