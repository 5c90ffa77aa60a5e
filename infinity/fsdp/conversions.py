"""Conversions of a whole offloaded module: what would take its weights off their pages is refused before it begins.

`Module.to`, `.half()`, `.cuda()`, `.to_empty()`, `.share_memory()` and their like come down to `Module._apply`, which
puts what a function makes of a parameter in its place. In memory that becomes the weight that is trained; what is on
NVMe is converted nowhere. So a function that leaves parameters as they are runs on the buffers only, any other is
refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from infinity import torch_private
from infinity.errors import UnsupportedError
from infinity.fsdp.paged_tensor import PagedTensor

Function = Callable[[torch.Tensor], torch.Tensor]


def refuse_conversions(model: nn.Module) -> Callable[[], None]:
    """Let no module of an offloaded model be converted; return what ends that."""
    guarded = list(model.modules())
    fsdp_modules = [module for module in guarded if torch_private.is_sharded_module(module)]
    for module in guarded:
        torch_private.replace_apply(module, _Apply(module, fsdp_modules))

    def end() -> None:
        for module in guarded:
            torch_private.restore_apply(module)

    return end


class _Apply:
    """Stands in for `Module._apply` of one module;

    `fsdp_modules` are the sharded modules of the model that it belongs to.
    """

    def __init__(self, module: nn.Module, fsdp_modules: Sequence[nn.Module]) -> None:
        self._module, self._fsdp_modules = module, fsdp_modules

    def __call__(self, function: Function, recurse: bool = True) -> nn.Module:
        """Convert what is not paged.

        Raises:
            UnsupportedError: the function would change a paged parameter; nothing has been changed.
        """
        modules = list(self._module.modules()) if recurse else [self._module]
        if not all(map(_is_paged, _parameters(modules))):  # some may be gathered
            for fsdp_module in self._fsdp_modules:
                torch_private.reshard(fsdp_module)
        for param in _parameters(modules):
            if _is_paged(param) and (change := _change(function, param)):
                raise UnsupportedError(
                    f"the weights of this {type(self._module).__name__} are on NVMe, and that would {change}; "
                    "convert the model before infinity.offload (compute dtypes are MixedPrecisionPolicy's), or export "
                    "a checkpoint and convert that"
                )
        for module in modules:
            if any(map(_is_paged, _parameters([module]))):
                for name, buffer in module._buffers.items():
                    module._buffers[name] = None if buffer is None else function(buffer)
            else:
                torch_private.original_apply(module)(module, function, recurse=False)
        return self._module

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies of a module belong to no FSDP module: copies of its parameters are in memory."""
        return _Apply, (self._module, ())


def _parameters(modules: Sequence[nn.Module]) -> list[torch.Tensor]:
    return [param for module in modules for param in module._parameters.values() if param is not None]


def _is_paged(tensor: torch.Tensor) -> bool:
    return isinstance(torch_private.local_part(tensor), PagedTensor)


def _change(function: Function, param: torch.Tensor) -> str:
    """Say what a function would do to a parameter, tried on one element; "" if nothing."""
    probe = torch.ones(1, dtype=param.dtype, device=param.device)
    with torch.no_grad():
        made = function(probe)
    if made.dtype != param.dtype:
        return f"make {str(made.dtype).removeprefix('torch.')} of {str(param.dtype).removeprefix('torch.')}"
    if made.device != param.device:
        return f"move them from {param.device} to {made.device}"
    if made.device.type == "cpu" and made.untyped_storage().is_shared():
        return "share their memory"
    return "" if made is probe and bool((probe == 1).all()) else "replace their values"
