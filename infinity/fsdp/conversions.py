"""Reject conversions that would replace the paged weights of an offloaded module.

`Module.to`, `.half()`, `.cuda()`, `.to_empty()`, `.share_memory()` and similar methods call `Module._apply`, which
replaces each parameter with the result of a function. For a model in memory, the result becomes the trained weight. For
an offloaded model, the weights on NVMe would not be converted. A function that would leave the parameters unchanged is
therefore applied to buffers only, and any other function raises `UnsupportedError`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from infinity import torch_private
from infinity.errors import UnsupportedError
from infinity.fsdp.paged_tensor import PagedTensor
from infinity.fsdp.unattached_trainer import ADVICE, running_trainer

Function = Callable[[torch.Tensor], torch.Tensor]


def check_conversions(model: nn.Module) -> Callable[[], None]:
    """Start rejecting conversions of an offloaded model. Return a function that allows them again."""
    guarded = list(model.modules())
    fsdp_modules = [module for module in guarded if isinstance(module, FSDPModule)]
    for module in guarded:
        torch_private.replace_apply(module, _Apply(module, fsdp_modules))

    def end() -> None:
        for module in guarded:
            torch_private.restore_apply(module)

    return end


class _Apply:
    """Replacement for the `_apply` method of one module.

    Args:
        fsdp_modules: FSDP modules of the model to which `module` belongs.
    """

    def __init__(self, module: nn.Module, fsdp_modules: Sequence[FSDPModule]) -> None:
        self._module, self._fsdp_modules = module, fsdp_modules

    def __call__(self, function: Function, recurse: bool = True) -> nn.Module:
        """Apply a conversion to the tensors that are not paged.

        Raises:
            UnsupportedError: If the function would change a paged parameter. In that case, no tensor is changed.
        """
        modules = list(self._module.modules()) if recurse else [self._module]
        if not all(map(_is_paged, _parameters(modules))):  # some may still be gathered
            for fsdp_module in self._fsdp_modules:
                fsdp_module.reshard()
        for param in _parameters(modules):
            if _is_paged(param) and (change := _change(function, param)):
                advice = (
                    "convert the model before infinity.offload, set the compute dtype with MixedPrecisionPolicy, or "
                    "export a checkpoint and convert it"
                    if running_trainer() is None
                    else f"to train it with a transformers Trainer, {ADVICE}"
                )
                raise UnsupportedError(
                    f"the weights of this {type(self._module).__name__} are on NVMe, and this call would {change}; "
                    f"{advice}"
                )
        for module in modules:
            if any(map(_is_paged, _parameters([module]))):
                for name, buffer in module._buffers.items():
                    module._buffers[name] = None if buffer is None else function(buffer)
            else:
                torch_private.original_apply(module)(module, function, recurse=False)
        return self._module

    def __reduce__(self) -> tuple[Any, ...]:
        """Omit the FSDP modules, because the parameters of a copied module are in memory."""
        return _Apply, (self._module, ())


def _parameters(modules: Sequence[nn.Module]) -> list[torch.Tensor]:
    return [param for module in modules for param in module._parameters.values() if param is not None]


def _is_paged(tensor: torch.Tensor) -> bool:
    return isinstance(torch_private.local_part(tensor), PagedTensor)


def _change(function: Function, param: torch.Tensor) -> str:
    """Describe how a function would change a parameter. Return "" if it would not, judging by a one-element tensor."""
    probe = torch.ones(1, dtype=param.dtype, device=param.device)
    with torch.no_grad():
        made = function(probe)
    if made.dtype != param.dtype:
        return f"convert {str(param.dtype).removeprefix('torch.')} to {str(made.dtype).removeprefix('torch.')}"
    if made.device != param.device:
        return f"move them from {param.device} to {made.device}"
    if made.device.type == "cpu" and made.untyped_storage().is_shared():
        return "share their memory"
    return "" if made is probe and bool((probe == 1).all()) else "replace their values"
