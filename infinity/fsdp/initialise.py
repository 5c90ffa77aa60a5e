"""First values of a model on the meta device: its own initialisation, unit by unit.

Peak memory is one whole unit, whatever the size of the model. Every module is initialised under a seed of its
own, derived from the run's seed and the module's name; so the values depend on neither world size, nor paths,
nor the order of units.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from infinity.errors import UnsupportedError
from infinity.fsdp import private
from infinity.fsdp.first_values import FirstValues, Member, ValueOf, local_slice
from infinity.layout import MASTER

InitFunction = Callable[[nn.Module], None]


def module_seed(seed: int, name: str) -> int:
    """Return the seed of one module."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8]) >> 1


class ModuleInitialiser(FirstValues):
    """Runs a model's own initialisation for one unit at a time."""

    def __init__(self, model: nn.Module, seed: int, function: InitFunction | None) -> None:
        self._model, self._seed, self._function = model, seed, function
        # Children before parents, as `nn.Module.apply` does: a parent may overwrite what its children set.
        self._modules = [(name, module) for name, module in _post_order(model)]

    def values(self, unit: str, members: Sequence[Member]) -> ValueOf:
        """Return what the modules of a unit set.

        Raises:
            UnsupportedError: a module has parameters but no way to initialise them.
        """
        owners = {id(private.owner(member.param)[0]) for member in members}
        with _whole_parameters(members) as wholes:
            for name, module in self._modules:
                if id(module) in owners or self._reaches(module, owners):
                    self._initialise(name, module, id(module) in owners)
            missing = [m.names[0] for m, whole in zip(members, wholes, strict=True) if torch.isnan(whole).any()]
            if missing:
                raise UnsupportedError(
                    f"nothing initialised {', '.join(missing)} of unit {unit}: give the model `_init_weights` or its "
                    "modules `reset_parameters`, or pass init=function to infinity.offload"
                )
            found = [
                local_slice(member.param, whole.detach()).clone() for member, whole in zip(members, wholes, strict=True)
            ]
            return lambda position, section: found[position] if section == MASTER else None

    def _reaches(self, module: nn.Module, owners: set[int]) -> bool:
        """Whether a module without parameters of its own may set those of its direct children."""
        return any(id(child) in owners for child in module.children())

    def _initialise(self, name: str, module: nn.Module, required: bool) -> None:
        function = self._function or self._enclosing_init(name)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(module_seed(self._seed, name))
            if function is not None:
                function(module)
            elif required and callable(reset := getattr(module, "reset_parameters", None)):
                reset()

    def _enclosing_init(self, name: str) -> InitFunction | None:
        """Return `_init_weights` of the module or of the nearest module around it."""
        while True:
            function: InitFunction | None = getattr(self._model.get_submodule(name), "_init_weights", None)
            if callable(function) or not name:
                return function
            name = name.rpartition(".")[0]

    def set_buffers(self, device: torch.device, known: Mapping[str, torch.Tensor]) -> None:
        """Give every buffer that is still on the meta device its real value.

        Args:
            known: values that come from elsewhere, by the buffer's name in the model.

        Raises:
            UnsupportedError: a buffer cannot be computed.
        """
        for name, value in known.items():
            owner, _, key = name.rpartition(".")
            module = self._model.get_submodule(owner)
            module._buffers[key] = value.to(device)
        for name, module in self._modules:
            meta = {key: buffer for key, buffer in module._buffers.items() if buffer is not None and buffer.is_meta}
            if not meta:
                continue
            for key, buffer in meta.items():
                fill = (
                    torch.full(buffer.shape, float("nan")) if buffer.is_floating_point() else torch.zeros(buffer.shape)
                )
                module._buffers[key] = fill.to(buffer.dtype).to(device)
            parameters, module._parameters = module._parameters, {}  # only the buffers are to be set here
            try:
                rebuilt = _rebuilt(module)
                if rebuilt is not None:
                    for key in meta:
                        module._buffers[key] = rebuilt._buffers[key].to(device)  # type: ignore[union-attr]
                else:
                    self._initialise(name, module, True)
            finally:
                module._parameters = parameters
            unset = [key for key in meta if torch.isnan(module._buffers[key].float()).any()]  # type: ignore[union-attr]
            if unset:
                raise UnsupportedError(
                    f"buffers {', '.join(unset)} of module {name or 'root'} are on the meta device and nothing "
                    "computes them; build the model with torch.device('meta') around its parameters only, or pass "
                    "init=function"
                )


def _rebuilt(module: nn.Module) -> nn.Module | None:
    """Build a module without parameters again, off the meta device, when its class takes just a config."""
    config = getattr(module, "config", None)
    if config is None or any(True for _ in module.children()):
        return None
    try:
        with torch.device("cpu"):
            return type(module)(config)
    except TypeError:
        return None


def _post_order(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        yield from _post_order(child, f"{prefix}.{name}" if prefix else name)
    yield prefix, module


@contextmanager
def _whole_parameters(members: Sequence[Member]) -> Iterator[list[torch.Tensor]]:
    """Register whole, real parameters (NaN until set) on the modules of a unit."""
    wholes: list[torch.Tensor] = []
    for member in members:
        if private.is_tensor_parallel(member.param):
            raise UnsupportedError(
                f"{member.names[0]} is tensor-parallel and on the meta device; build the model on a real device"
            )
        dtype = member.param.sharded_param.dtype
        whole = nn.Parameter(
            torch.full(private.full_shape(member.param), float("nan"), dtype=dtype),
            requires_grad=member.param.sharded_param.requires_grad,
        )
        private.set_full_parameter(member.param, whole)
        wholes.append(whole)
    try:
        yield wholes
    finally:
        for member in members:
            private.set_sharded_parameter(member.param)
