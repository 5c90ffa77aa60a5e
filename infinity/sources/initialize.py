"""Initialize a model on the meta device with its own initialization code, one FSDP module at a time.

Peak memory is one full FSDP module, regardless of the model size. Each initialization call uses a seed derived from the
run's seed and the module's name, so that the values do not depend on the world size, the paths, or the division into
FSDP modules.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import keystr, tree_flatten_with_path

from infinity import torch_private
from infinity.content.format import MASTER
from infinity.content.layout import Layout
from infinity.errors import UnsupportedError
from infinity.fsdp.sharded_model import Member, local_slice
from infinity.sources.first_values import FirstValues, ValueOf
from infinity.sources.init_plan import InitPlan
from infinity.sources.init_steps import InitFunction

__all__ = ["InitFunction", "ModuleInitializer"]

REMEDY = (
    "add `_init_weights` to the model or `reset_parameters` to its modules, or pass init=function to infinity.offload "
    "(the function is called with every module, and must set the remaining tensors)"
)


class ModuleInitializer(FirstValues):
    """Runs a model's own initialization for one FSDP module at a time."""

    def __init__(self, model: nn.Module, seed: int, function: InitFunction | None) -> None:
        self._model, self._seed, self._function = model, seed, function
        self._plan_made: InitPlan | None = None  # created on first use, because a resumed run does not need it

    @property
    def _plan(self) -> InitPlan:
        if self._plan_made is None:
            self._plan_made = InitPlan(self._model, self._seed, self._function)
        return self._plan_made

    def check(
        self, model: nn.Module, members: Sequence[Member], layout: Layout, optimizer: torch.optim.Optimizer
    ) -> None:
        """Check that every parameter on the meta device is initialized by some call.

        Raises:
            UnsupportedError: if a parameter is not, or if it is unknown whether a parameter on a real device has been
                initialized. The message lists the parameters.
        """
        if names := [m.names[0] for m in members if id(m.param.sharded_param) in self._plan.left_out]:
            raise UnsupportedError(
                f"{', '.join(names)} may be uninitialized: transformers skips initialization when a model is built on "
                "the meta device, but they are on a real device; call model.to('meta') before fully_shard"
            )
        members = [member for member in members if member.param.sharded_param.is_meta]
        for member in members:
            if torch_private.is_tensor_parallel(member.param):
                raise UnsupportedError(
                    f"{member.names[0]} is tensor-parallel and on the meta device; build the model on a real device"
                )
            if classes := self._plan.rivals(member.param.sharded_param):
                raise UnsupportedError(
                    f"{' and '.join(member.names)} are tied, but {' and '.join(classes)} initialize them differently; "
                    "pass init=function to infinity.offload"
                )
        if not members:
            return  # all values come from other sources, so constructors do not matter
        if unset := [m.names[0] for m in members if not self._plan.sets(m.param.sharded_param)]:
            raise UnsupportedError(_unset(unset))
        if classes := self._plan.not_repeated:
            raise UnsupportedError(
                f"the constructor of {', '.join(classes)} sets tensors itself, which has no effect on the meta "
                "device; pass init=function to infinity.offload to set them again (the function is called with every "
                "module, and may do nothing), or build the model on a real device"
            )

    def values(self, fsdp_module: str, members: Sequence[Member]) -> ValueOf:
        """Run the model's own code for an FSDP module, and return a function that returns its values.

        Parameters on a real device keep their values.

        Args:
            fsdp_module: name of the FSDP module.
            members: all parameters of the FSDP module, or some of them.

        Raises:
            UnsupportedError: if the model's code fails or, when a value is requested, if the parameter is not set
                completely.
        """
        wanted = {id(m.param.sharded_param): m.param.sharded_param for m in members if m.param.sharded_param.is_meta}
        whole = self._plan.run(wanted)
        found: list[torch.Tensor | None] = []
        for member in members:
            key = id(member.param.sharded_param)
            if key not in wanted:
                found.append(torch_private.local_tensor(member.param).detach().reshape(-1).cpu())
            elif (value := whole.pop(key)) is None:
                found.append(None)
            else:
                found.append(local_slice(member.param, value).clone())

        def value_of(position: int, section: str) -> torch.Tensor | None:
            if section != MASTER:
                return None
            if found[position] is None:
                raise UnsupportedError(_unset([members[position].names[0]]))
            return found[position]

        return value_of

    def set_buffers(self, device: torch.device, known: Mapping[str, torch.Tensor]) -> None:
        """Initialize every buffer that is still on the meta device, and check that no other tensor remains there.

        Args:
            device: device of the buffers.
            known: values of buffers that do not need initialization because they come from a different source, by
                name.

            Raises:
                UnsupportedError: if a buffer cannot be initialized, or an attribute is a tensor without a value. The
                    message includes the name.
        """
        attributes = list(_meta_attributes(self._model))
        before = {id(buffer): (m, key) for m in self._model.modules() for key, buffer in m._buffers.items()}
        self._set_buffers(device, known)
        for module, key, path, tensor in attributes:
            if path == key and id(tensor) in before:  # a second name of a buffer
                owner, name = before[id(tensor)]
                setattr(module, key, owner._buffers[name])
        if attributes and self._function is not None:
            _ = self._plan  # the function has now been called with every module and may have set them
        names = {id(module): name for name, module in self._model.named_modules()}
        left = [".".join(filter(None, (names[id(m)], path))) for m, _, path, _ in _meta_attributes(self._model)]
        if left:
            raise UnsupportedError(
                f"{', '.join(left)} cannot be initialized: on the meta device, but neither parameters nor buffers; use "
                "register_buffer(name, tensor, persistent=False), set them in init=function, or build the model on a "
                "real device"
            )

    def _set_buffers(self, device: torch.device, known: Mapping[str, torch.Tensor]) -> None:
        for name, value in known.items():
            owner, _, key = name.rpartition(".")
            module = self._model.get_submodule(owner)
            before: Any = module._buffers.get(key, module._parameters.get(key))
            _replace_buffers(self._model, {id(before): value.to(device, before.dtype)})
        names = {id(tensor): name for name, tensor in torch_private.tensors_in_memory(self._model).items()}
        tensors = torch_private.tensors_in_memory(self._model).values()
        wanted = {id(tensor): tensor for tensor in tensors if tensor.is_meta}
        if not wanted:
            return
        found = self._plan.run(wanted)
        if unset := [names[key] for key, value in found.items() if value is None]:
            raise UnsupportedError(
                f"{', '.join(unset)} cannot be initialized: on the meta device, and not sharded; {REMEDY}, or create "
                "them outside of torch.device('meta')"
            )
        _replace_buffers(self._model, {key: value.to(device) for key, value in found.items() if value is not None})


def _meta_attributes(model: nn.Module) -> Iterator[tuple[nn.Module, str, str, torch.Tensor]]:
    """Yield tensors on the meta device in plain attributes of modules, including lists, tuples and dicts.

    Yields:
        Module, attribute name, attribute name with the position in a container, and tensor.
    """
    for module in model.modules():
        for key, value in vars(module).items():
            if key in ("_parameters", "_buffers", "_modules"):
                continue
            for place, leaf in tree_flatten_with_path(value)[0]:
                if isinstance(leaf, torch.Tensor) and leaf.is_meta and not isinstance(leaf, nn.Parameter):
                    yield module, key, key + keystr(place), leaf


def _unset(names: Iterable[str]) -> str:
    return f"no code initializes {', '.join(names)}; {REMEDY}"


def _replace_buffers(model: nn.Module, new: Mapping[int, torch.Tensor]) -> None:
    """Replace buffers and ignored parameters by id, so that one that several modules share stays shared."""
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and id(buffer) in new:
                vars(new[id(buffer)]).update(vars(buffer))  # the user's attributes
                module._buffers[key] = new[id(buffer)]
    for param in dict(torch_private.ignored_parameters(model)).values():
        if (value := new.get(id(param))) is not None:
            torch_private.set_value(param, value)
