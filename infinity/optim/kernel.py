"""Torch's own optimizers as kernels on page views.

Nothing here knows what Adam is. The state layout of an optimizer is found by running it on a tiny tensor; a page is
updated by running it on views of the page. Same class, same settings, same kernel: same bits.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from infinity.errors import UnsupportedError
from infinity.fsdp.content import dtype_name

Scalars = dict[str, Any]
_PROBE = 256


@dataclass(frozen=True)
class StateLayout:
    """State of one parameter: element-wise kinds as (name, dtype name), and names of the scalars."""

    kinds: tuple[tuple[str, str], ...]
    scalars: tuple[str, ...]


@dataclass
class Piece:
    """A slice of one shard in an update: its elements, gradient and state views, all of shape (n,)."""

    shard: int
    master: torch.Tensor
    grad: torch.Tensor
    states: dict[str, torch.Tensor]


class UpdateKernel:
    """Runs one optimizer class on slices of parameters."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._class = type(optimizer)
        self._accepted = set(inspect.signature(self._class.__init__).parameters) - {"self", "params"}
        try:
            self._runner = self._make([nn.Parameter(torch.zeros(1))], optimizer.param_groups[0])
        except Exception as error:
            raise UnsupportedError(
                f"{self._class.__name__} is not element-wise: it refuses a slice of a parameter ({error}); "
                "use an element-wise optimizer such as AdamW"
            ) from error
        self._first_scalars = _scalars_of(self._runner)

    def has_progress(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer has taken steps: whether its state is more than what its constructor made."""
        scalars = _scalars_of(optimizer)
        return bool(optimizer.state) if not self._first_scalars else any(s not in self._first_scalars for s in scalars)

    def _make(self, params: Sequence[torch.Tensor], settings: Mapping[str, Any]) -> torch.optim.Optimizer:
        chosen = {key: value for key, value in settings.items() if key in self._accepted}
        return self._class(params, **chosen)

    def discover(self, dtype: torch.dtype, settings: Mapping[str, Any]) -> StateLayout:
        """Return the state layout of a parameter of `dtype` under a group's settings.

        Raises:
            UnsupportedError: the optimizer is not element-wise (an element's update depends on others), or needs
                what a page cannot give; the message gives the reason.
        """
        name = self._class.__name__
        generator = torch.Generator().manual_seed(0)
        values = torch.randn(_PROBE, generator=generator).to(dtype)
        grads = [torch.randn(_PROBE, generator=generator).to(dtype) * scale for scale in (1.0, 0.1, 3.0)]
        try:
            whole, state = self._probe(values, grads, settings)
            parts = [
                self._probe(values[part], [grad[part] for grad in grads], settings)[0]
                for part in (slice(0, _PROBE // 2), slice(_PROBE // 2, None))
            ]
        except Exception as error:
            raise UnsupportedError(f"{name} cannot update a slice of a parameter: {error}") from error
        if not torch.equal(whole, torch.cat(parts)):
            raise UnsupportedError(
                f"{name} is not element-wise: an element's update depends on other elements of its parameter, so "
                "pages cannot be updated one by one; use an element-wise optimizer such as AdamW"
            )
        kinds, scalars = [], []
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == values.shape:
                kinds.append((key, dtype_name(value.dtype)))
            elif not isinstance(value, torch.Tensor) or value.numel() == 1:
                scalars.append(key)
            else:
                raise UnsupportedError(f"{name} keeps state {key!r} of shape {tuple(value.shape)}: not element-wise")
        return StateLayout(tuple(kinds), tuple(scalars))

    def _probe(
        self, values: torch.Tensor, grads: Sequence[torch.Tensor], settings: Mapping[str, Any]
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        param = nn.Parameter(values.clone())
        optimizer = self._make([param], settings)
        for grad in grads:
            param.grad = grad.clone()
            optimizer.step()
        return param.detach(), {k: v for k, v in optimizer.state[param].items() if v is not None}

    def update(
        self, pieces: Sequence[Piece], settings: Mapping[str, Any], before: Mapping[int, Scalars]
    ) -> dict[int, Scalars]:
        """Update slices in place: master and states.

        Args:
            pieces: slices that share a param group.
            settings: the group's current settings, as in `param_groups`.
            before: scalars of each shard at the start of the step; a shard that is missing has never been updated.

        Returns:
            The scalars of each shard after the step.
        """
        params = [nn.Parameter(piece.master) for piece in pieces]
        if all(piece.shard in before for piece in pieces):
            runner = self._runner
            runner.state.clear()
        else:
            runner = self._make(params, settings)  # some optimizers set up their state when they are made
        for param, piece in zip(params, pieces, strict=True):
            param.grad = piece.grad
            if piece.shard in before:
                scalars = {key: _copy(value) for key, value in before[piece.shard].items()}
                runner.state[param] = {**scalars, **piece.states}
        runner.param_groups[:] = [{**settings, "params": params}]
        runner.step()
        after: dict[int, Scalars] = {}
        for param, piece in zip(params, pieces, strict=True):
            state = runner.state[param]
            for key, view in piece.states.items():
                value = state.get(key)
                if value is not None and value is not view and value.data_ptr() != view.data_ptr():
                    view.copy_(value)  # first step, or an optimizer that replaces its state
            after[piece.shard] = {k: v for k, v in state.items() if k not in piece.states and v is not None}
        runner.state.clear()
        runner.param_groups[0]["params"] = []
        return after


def _scalars_of(optimizer: torch.optim.Optimizer) -> set[tuple[str, float]]:
    return {
        (key, float(value))
        for state in optimizer.state.values()
        for key, value in state.items()
        if not isinstance(value, torch.Tensor) or (value.ndim == 0 and not value.is_meta)
    }


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
