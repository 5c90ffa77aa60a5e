"""Updates of the parameters that FSDP2 does not shard: the `ignored_params` of `fully_shard`.

Such a parameter, for example the logit scale of CLIP, is an ordinary tensor that is the same on every rank. It stays in
memory, and so does its optimizer state. A copy of the base optimizer that has only these parameters updates them. As
in any FSDP2 run, their gradients are not reduced.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from infinity import torch_private
from infinity.optim.kernel import UpdateKernel
from infinity.optim.optimizer_clone import copied, in_place_of
from infinity.optim.update import snapshot

_STATE_BYTES = 4096
"""Size of a state in a file, in addition to its elements."""


class IgnoredParameters:
    """The ignored parameters of a model, and the optimizer that updates them.

    Args:
        parameters: ignored parameters, by name.
        optimizer: base optimizer, whose param groups may contain them.
        kernel: update kernel created from the optimizer.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, kernel: UpdateKernel
    ) -> None:
        self._base, self._kernel = optimizer, kernel
        self._numbers: dict[int, int] = {}  # number of the param group, by id of the parameter
        self.trained: dict[str, nn.Parameter] = {}
        """Ignored parameters that are in the optimizer, by name."""
        name_of = {id(param): name for name, param in parameters.items()}
        groups = []
        self._bases: list[int] = []  # numbers of the base optimizer's groups, for each group of the copy
        for number, group in enumerate(optimizer.param_groups):
            if params := [param for param in group["params"] if id(param) in name_of]:
                groups.append({**snapshot(group), "params": params})
                self._bases.append(number)
                self._numbers.update((id(param), number) for param in params)
                self.trained.update((name_of[id(param)], param) for param in params)
        self._optimizer = kernel.template.over(groups)
        self._step = torch_private.unhooked_step(self._optimizer)

    def __contains__(self, param: object) -> bool:
        """Return whether a parameter is an ignored parameter in the optimizer."""
        return id(param) in self._numbers

    def prepare(self) -> None:
        """Copy the current settings of the base optimizer, which its step will change."""
        if not self.trained:
            return
        vars(self._optimizer).update({name: copied(value) for name, value in self._kernel.own().items()})
        for group, number in zip(self._optimizer.param_groups, self._bases, strict=True):
            base = self._base.param_groups[number]
            group.update(snapshot(base))
            # By default, PyTorch loops over the parameters of a group that also contains DTensors.
            mixed = any(isinstance(param, DTensor) for param in base["params"])
            if mixed and not group.get("fused") and group.get("foreach", False) is None:
                group["foreach"] = False

    def step(self) -> None:
        """Update the parameters that have gradients, with the settings at the time of `prepare`."""
        if not self.trained:
            return
        if self._kernel.builds:
            for param in self.trained.values():
                if param not in self._optimizer.state:
                    self._optimizer.state[param] = self._initial(param, param)
        self._step()

    def switch(self, method: str) -> None:
        """Call a method that changes the mode of the optimizer, such as ``train``."""
        if self.trained:
            getattr(self._optimizer, method)()

    # State #

    def state_of(self, param: nn.Parameter, *, initial: bool = False) -> dict[str, Any]:
        """Return the state of a parameter. If it has none, return the initial state or an empty dict."""
        if param in self._optimizer.state or not initial:
            return dict(self._optimizer.state.get(param, {}))
        return self._initial(param, param.detach())

    def _initial(self, param: nn.Parameter, value: torch.Tensor) -> dict[str, Any]:
        settings = snapshot(self._base.param_groups[self._numbers[id(param)]])
        own = dict(self._kernel.own())
        if self._kernel.modes:
            self._kernel.switch_values([settings], own, "train")
        return self._kernel.initial_state(value.detach(), settings, own)

    def check_state(self, param: nn.Parameter, values: Mapping[str, Any]) -> None:
        """Check that `values` can replace the state of a parameter.

        Raises:
            ValueError: if the optimizer keeps a different state.
        """
        initial = self._initial(param, param) if values else {}
        expected, found = (
            {key: tuple(value.shape) if isinstance(value, torch.Tensor) else () for key, value in state.items()}
            for state in (initial, values)
        )
        if expected != found:
            (name,) = (name for name, trained in self.trained.items() if trained is param)
            raise ValueError(
                f"the state dict has {found} for {name}, but this optimizer keeps {expected or 'no state'} for it. "
                "Load the state of the same optimizer."
            )

    def replace_state(self, param: nn.Parameter, values: Mapping[str, Any]) -> None:
        """Replace the state of a parameter with copies of `values`, which `check_state` has accepted."""
        if not values:
            self._optimizer.state.pop(param, None)
            return
        initial = self._initial(param, param)
        self._optimizer.state[param] = {key: in_place_of(initial[key], value) for key, value in values.items()}

    def state_bytes(self) -> int:
        """Return the maximum size of the result of `get_extra_state` in a file, in bytes."""
        states = [
            value
            for param in self.trained.values()
            for value in self._initial(param, torch.ones(param.shape, dtype=param.dtype)).values()
        ]
        return sum(_STATE_BYTES + (value.nbytes if isinstance(value, torch.Tensor) else 0) for value in states)

    def clear_state(self) -> None:
        """Discard the state of all parameters."""
        self._optimizer.state.clear()

    def get_extra_state(self) -> dict[str, tuple[int, dict[str, Any]]] | None:
        """Return the param group and the state of each parameter, by name; None if there are no such parameters."""
        return {name: (self._numbers[id(param)], self.state_of(param)) for name, param in self.trained.items()} or None

    def set_extra_state(self, saved: Mapping[str, tuple[int, Mapping[str, Any]]]) -> None:
        """Restore the result of `get_extra_state`.

        Raises:
            ValueError: if it has other parameters, or they are in other param groups.
        """
        here = {name: self._numbers[id(param)] for name, param in self.trained.items()}
        if different := sorted(here.items() ^ {(name, number) for name, (number, _) in saved.items()}):
            raise ValueError(
                f"{different[0][0]} is missing or in a different param group. Create the optimizer as it was then."
            )
        self._optimizer.state.clear()
        self._optimizer.state.update({self.trained[name]: dict(state) for name, (_, state) in saved.items() if state})
