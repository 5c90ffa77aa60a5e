"""Parameters that stay in memory together with their optimizer state.

They are the parameters of FSDP modules without `NVMeOffloadPolicy` if other FSDP modules have it, and the
`ignored_params` of `fully_shard`. An ignored parameter, for example the logit scale of CLIP, is an ordinary tensor that
is the same on every rank. As in any FSDP2 run, its gradients are not reduced. A copy of the base optimizer that has
only the parameters in memory updates them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from infinity import torch_private
from infinity.content.views import torch_dtype
from infinity.optim.kernel import UpdateKernel
from infinity.optim.optimizer_clone import copied, in_place_of, settings_of

_STATE_BYTES = 4096
"""Size of a state in a file, in addition to its elements."""


class ParametersInMemory:
    """The parameters of a model that are not paged, and the optimizer that updates them.

    Args:
        ignored: ignored parameters, by name.
        sharded: parameters of FSDP modules that stay in memory, by shard.
        optimizer: base optimizer, whose param groups may contain them.
    """

    def __init__(
        self,
        ignored: Mapping[str, nn.Parameter],
        sharded: Mapping[int, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        kernel: UpdateKernel,
    ) -> None:
        self._base, self._kernel = optimizer, kernel
        self._numbers: dict[int, int] = {}  # number of the param group, by id of the parameter
        self.ignored: dict[str, nn.Parameter] = {}
        """Ignored parameters that are in the optimizer, by name."""
        self.sharded = dict(sharded)
        """Parameters of FSDP modules that stay in memory, by shard."""
        name_of = {id(param): name for name, param in ignored.items()}
        trained = {id(param) for param in sharded.values() if param.requires_grad}
        groups = []
        self._bases: list[int] = []  # numbers of the base optimizer's groups, for each group of the copy
        for number, group in enumerate(optimizer.param_groups):
            # In groups of their own, because PyTorch's foreach kernels do not accept both kinds together
            for known in (name_of, trained):
                if params := [param for param in group["params"] if id(param) in known]:
                    groups.append({**settings_of(group), "params": params})
                    self._bases.append(number)
                    self._numbers.update((id(param), number) for param in params)
            self.ignored.update((name_of[id(p)], p) for p in group["params"] if id(p) in name_of)
        self._optimizer = kernel.template.over(groups)
        self._step = torch_private.unhooked_step(self._optimizer)

    def __contains__(self, param: object) -> bool:
        """Return whether a parameter is an ignored parameter in the optimizer."""
        return any(param is other for other in self.ignored.values())

    @property
    def have_gradients(self) -> bool:
        """``True`` if one of the parameters has a gradient."""
        return any(param.grad is not None for group in self._optimizer.param_groups for param in group["params"])

    @property
    def absent_state_bytes(self) -> int:
        """Size in bytes of the states of sharded parameters that the first update will create."""
        absent = [p for p in self.sharded.values() if id(p) in self._numbers and p not in self._optimizer.state]
        return sum(
            torch_private.local_part(param).numel() * torch_dtype(dtype_name).itemsize
            for param in absent
            for _, dtype_name in self._kernel.discover(param).kinds
        )

    def prepare(self) -> None:
        """Copy the current settings of the base optimizer, which its step will change."""
        if not self._bases:
            return
        vars(self._optimizer).update({name: copied(value) for name, value in self._kernel.own().items()})
        for group, number in zip(self._optimizer.param_groups, self._bases, strict=True):
            base = self._base.param_groups[number]
            group.update(settings_of(base))
            # PyTorch's foreach kernels do not accept a group that contains both kinds.
            mixed = len({isinstance(param, DTensor) for param in base["params"]}) > 1
            if mixed and not group.get("fused") and group.get("foreach", False) is None:
                group["foreach"] = False

    def step(self) -> None:
        """Update the parameters that have gradients, with the settings at the time of `prepare`."""
        if not self._bases:
            return
        if self._kernel.builds:
            for param in (param for group in self._optimizer.param_groups for param in group["params"]):
                self._create_state(param)
        self._step()

    def _create_state(self, param: nn.Parameter) -> None:
        if param not in self._optimizer.state:
            self._optimizer.state[param] = self._initial(param, param)

    def switch(self, method: str) -> None:
        """Call a method that changes the mode of the optimizer, such as ``train``."""
        if self._bases:
            getattr(self._optimizer, method)()

    def state_of_shard(self, shard: int) -> dict[str, Any]:
        """Return the state of a parameter of an FSDP module that stays in memory; empty if it was never updated."""
        param = self.sharded[shard]
        if self._kernel.builds and id(param) in self._numbers:
            self._create_state(param)
        return dict(self._optimizer.state.get(param, {}))

    def replace_state_of_shard(self, shard: int, values: Mapping[str, Any]) -> None:
        """Replace the state of a parameter of an FSDP module that stays in memory by `values`, which are not copied."""
        self._optimizer.state.pop(self.sharded[shard], None)
        if values:
            self._optimizer.state[self.sharded[shard]] = dict(values)

    # State of ignored parameters #

    def state_of(self, param: nn.Parameter, *, initial: bool = False) -> dict[str, Any]:
        """Return the state of a parameter. If it has none, return the initial state or an empty dict."""
        if param in self._optimizer.state or not initial:
            return dict(self._optimizer.state.get(param, {}))
        return self._initial(param, param.detach())

    def _initial(self, param: nn.Parameter, value: torch.Tensor) -> dict[str, Any]:
        settings = settings_of(self._base.param_groups[self._numbers[id(param)]])
        own = dict(self._kernel.own())
        if self._kernel.modes:
            self._kernel.advance_values([settings], own, "train")
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
            (name,) = (name for name, trained in self.ignored.items() if trained is param)
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
            for param in self.ignored.values()
            for value in self._initial(param, torch.ones(param.shape, dtype=param.dtype)).values()
        ]
        return sum(_STATE_BYTES + (value.nbytes if isinstance(value, torch.Tensor) else 0) for value in states)

    def clear_state(self) -> None:
        """Discard the state of all ignored parameters."""
        for param in self.ignored.values():
            self._optimizer.state.pop(param, None)

    def get_extra_state(self) -> dict[str, tuple[int, dict[str, Any]]] | None:
        """Return the param group and the state of each parameter, by name; None if there are no such parameters."""
        return {name: (self._numbers[id(param)], self.state_of(param)) for name, param in self.ignored.items()} or None

    def set_extra_state(self, saved: Mapping[str, tuple[int, Mapping[str, Any]]]) -> None:
        """Restore the result of `get_extra_state`.

        Raises:
            ValueError: if it has other parameters, or they are in other param groups.
        """
        here = {name: self._numbers[id(param)] for name, param in self.ignored.items()}
        if different := sorted(here.items() ^ {(name, number) for name, (number, _) in saved.items()}):
            raise ValueError(
                f"{different[0][0]} is missing or in a different param group. Create the optimizer as it was then."
            )
        self.clear_state()
        self._optimizer.state.update({self.ignored[name]: dict(state) for name, (_, state) in saved.items() if state})
