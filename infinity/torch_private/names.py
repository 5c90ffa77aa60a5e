"""Private names of torch: objects of FSDP2, DTensor, autograd and optimizers.

`tests/fsdp/test_private.py` states the behavior expected of each name, so that a torch release that changes one
fails a named test instead of computing a wrong gradient. `make test-torch` runs it on other releases than the pinned one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from infinity.errors import UnsupportedError
from infinity.torch_private.imports import _current_graph_task_id, _disabled_torch_function_impl, lacking

ROOT = "root"
"""The name of the first FSDP module, if the model has parameters that are in no other one."""


NO_TORCH_FUNCTION = _disabled_torch_function_impl
"""The `__torch_function__` of a tensor class that wants to be asked in `__torch_dispatch__` only."""


# What is read from the objects of FSDP2, by class; "a|b": one of them, as releases differ.
_NAMES = {
    "FSDPState": ("_fsdp_param_groups|_fsdp_param_group",),  # 2.11 has at most one group per state
    "FSDPParamGroup": (
        "fsdp_params",
        "device",
        "mesh_info",
        "post_forward_mesh_info",
        "offload_policy",
        "_all_gather_comm",
        "_reduce_scatter_comm",
    ),
    "FSDPParam": (
        "sharded_param",
        "sharded_size",
        "padded_sharded_param_size",
        "fsdp_placement",
        "is_dtensor",
        "mesh_info",
        "mp_policy",
        "reset_sharded_param",
        "to_sharded_dtensor",
        "_module_info",
        "_orig_size",
        "_setattr_on_modules",
        "_sharded_local_tensor",
        "_sharded_param_data",
        "unsharded_grad_dtype|accumulate_unsharded_grad_if_needed",  # since 2.15 autograd adds up in the reduce dtype
    ),
}


def require_names(model: nn.Module) -> None:
    """Check that the objects of FSDP2 have what is read from them below.

    Raises:
        UnsupportedError: an unknown release of torch lacks some of it.
    """
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        _require("FSDPState", module._get_fsdp_state())
        for group in _groups_of(module):
            _require("FSDPParamGroup", group)
            for param in group.fsdp_params:
                _require("FSDPParam", param)
                return  # all are made by the same classes


def _require(cls: str, found: Any) -> None:
    has = set(dir(found))
    missing = [name for name in _NAMES[cls] if has.isdisjoint(name.split("|"))]
    if missing:
        raise lacking(f"{cls} of its FSDP2 has no {', '.join(missing).replace('|', ' or ')}")


def parameter_groups(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (module name, group) for every group of parameters that FSDP2 gathers together, root first."""
    seen: set[int] = set()
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        for position, group in enumerate(_groups_of(module)):
            if id(group) not in seen:
                seen.add(id(group))
                yield (name or ROOT) + (f"#{position}" if position else ""), group


def _groups_of(module: FSDPModule) -> list[Any]:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch 2.11
        single = state._fsdp_param_group
        groups = [single] if single is not None else []
    return groups


def storage_key(tensor: torch.Tensor) -> int:
    """Return what tells the memory of a tensor from that of others, as long as it lives; also on the meta device."""
    return int(tensor.untyped_storage()._cdata)


def saved_tensors_are_hooked() -> bool:
    """Whether hooks are set that have what autograd saves (`torch.autograd.graph.saved_tensors_hooks`)."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def weak_memory(tensor: torch.Tensor) -> Any:
    """Return a weak reference to the memory of a tensor: `cdata`, a number that no other memory has meanwhile, and
    `expired()`.
    """
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def is_sharded_module(module: nn.Module) -> bool:
    """Whether `fully_shard` was called on a module."""
    return isinstance(module, FSDPModule)


class _Hooks(OrderedDict[int, Callable[[nn.Parameter], None]]):
    """What is to be called when a gradient has come: hooks that were there, those registered since, and one at last."""

    def __init__(self, before: Any, last: Callable[[nn.Parameter], None]) -> None:
        super().__init__()
        self._before = before  # handles that the user holds remove hooks from this one
        self._last: list[Callable[[nn.Parameter], None]] = [last]

    def __bool__(self) -> bool:
        return True

    def values(self) -> Any:
        return [*self._before.values(), *super().values(), *self._last]

    def remove(self) -> None:
        """Call the last one no more."""
        self._last.clear()


def on_gradient(param: nn.Parameter, hook: Callable[[nn.Parameter], None]) -> Any:
    """Call `hook(param)` once a gradient has been reduced; return a handle whose `remove` ends it.

    It comes after all hooks of the user, whenever those are registered.
    """
    hooks: Any = param
    hooks._post_accumulate_grad_hooks = found = _Hooks(hooks._post_accumulate_grad_hooks or {}, hook)
    return found


def sharded_gradient(param: Any, local: torch.Tensor) -> DTensor:
    """Return what FSDP2 makes of the local part of a gradient."""
    gradient: DTensor = param.to_sharded_dtensor(local)
    return gradient


def sharded_like(param: nn.Parameter, values: torch.Tensor) -> torch.Tensor:
    """Return a tensor that is sharded like a parameter, of its local elements, flat."""
    if not isinstance(param, DTensor):
        return values.view(param.shape)
    local = values.view(param._local_tensor.shape).to(param.device)
    return DTensor.from_local(
        local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )


def uses_cpu_offload(group: Any) -> bool:
    """Whether the user already gave the group an offload policy of FSDP2."""
    return isinstance(group.offload_policy, CPUOffloadPolicy)


def reshards_to_fewer_ranks(group: Any) -> bool:
    """Whether weights stay gathered over some of the ranks after forward (`reshard_after_forward` as a number)."""
    return group.post_forward_mesh_info is not None and group.post_forward_mesh_info is not group.mesh_info


def fsdp_params(group: Any) -> list[Any]:
    """Return the parameters of a group in the order in which they are gathered."""
    return list(group.fsdp_params)


def owner(param: Any) -> tuple[nn.Module, str]:
    """Return the module and attribute name that hold a parameter."""
    return param._module_info.module, param._module_info.param_name


def compute_dtype(param: Any) -> torch.dtype:
    """Return the dtype in which a parameter is gathered."""
    dtype: torch.dtype = param.sharded_param.dtype
    wanted = param.mp_policy.param_dtype
    return wanted if wanted is not None and dtype.is_floating_point else dtype


def local_tensor(param: Any) -> torch.Tensor:
    """Return this rank's slice, shape `sharded_size`."""
    local: torch.Tensor = param._sharded_local_tensor
    return local


def padded_shape(param: Any) -> torch.Size:
    """Return the shape of what this rank contributes to the all-gather."""
    size: torch.Size = param.padded_sharded_param_size
    return size


def full_shape(param: Any) -> torch.Size:
    """Return the shape of the gathered parameter (of its local part, under tensor parallelism)."""
    size: torch.Size = param._orig_size
    return size


def shard_dim(param: Any) -> int:
    """Return the dimension along which a parameter is sharded."""
    return int(param.fsdp_placement.dim)


def shard_rank_and_size(param: Any) -> tuple[int, int]:
    """Return this rank's position among the ranks that share the parameter, and their number."""
    info = param.mesh_info
    return getattr(info, "shard_mesh_rank", 0), getattr(info, "shard_mesh_size", 1)


def shard_ranks(param: Any) -> tuple[int, ...]:
    """Return the ranks that share the parameter, in the order of their slices."""
    group = getattr(param.mesh_info, "shard_process_group", None)
    return tuple(dist.get_process_group_ranks(group)) if group is not None else (dist.get_rank(),)


def has_gradient_dtype(param: nn.Parameter) -> bool:
    """Whether the user wants gradients of a parameter in another dtype than its own, which FSDP2 does since 2.15."""
    return param.requires_grad and param.grad_dtype != param.dtype


def reduces(param: Any) -> bool:
    """Return whether the gradients of several ranks are added up."""
    return bool(param.mesh_info.mesh.size() > 1)


def is_tensor_parallel(param: Any) -> bool:
    """Whether the parameter was a DTensor before `fully_shard`."""
    return bool(param.is_dtensor)


def replace_local_tensor(param: Any, shard: torch.Tensor) -> None:
    """Make `shard` the local tensor of a sharded parameter, which stays the object that it is.

    Raises:
        RuntimeError: it was on the meta device, and something holds a weak reference to it.
    """
    param._sharded_param_data = shard.view(-1)
    current = param.sharded_param
    if current.device.type != "meta":
        current._local_tensor = shard
        return
    # Another device takes another tensor. Exchanged inside of the object, so that the lists of parameters that the
    # user made before, among them those of the optimizer, have what is trained.
    new = nn.Parameter(param.to_sharded_dtensor(shard), requires_grad=current.requires_grad)
    torch.utils.swap_tensors(current, new)  # type: ignore[no-untyped-call]


def watch_local_tensor(param: Any, check: Callable[[bool], None]) -> None:
    """Let FSDP2 neither pad the local tensor of a sharded parameter nor take over another one.

    It would do so before the first forward, and after `load_state_dict`, which may put another parameter onto the
    module: the sharded one is put back. In place of that, `check()` is called; it is told whether one was put back.
    """

    def reset_sharded_param() -> None:
        module, name = owner(param)
        exchanged = getattr(module, name) is not param.sharded_param
        if exchanged:
            param._setattr_on_modules(param.sharded_param)
        check(exchanged)

    param.reset_sharded_param = reset_sharded_param


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of a DTensor; any other tensor is its own."""
    local: torch.Tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local


def reshard(module: Any) -> None:
    """Put the sharded parameters of a module back in their places, if it is gathered.

    Args:
        module: `fully_shard` was called on it.
    """
    module.reshard()


def in_backward() -> bool:
    """Whether the autograd engine is running on this thread."""
    return bool(_current_graph_task_id() != -1)


def backward_number() -> int:
    """Return the number of the backward that runs on this thread; -1 if none does."""
    return int(_current_graph_task_id())


SANITIZER = "torch.cuda._sanitizer"
"""The module that asks for addresses of tensors where `TORCH_CUDA_SANITIZER=1`."""


def profiler_is_on() -> bool:
    """Whether a profiler of torch records: a range for it takes as long as all else that is done for a small weight."""
    return torch.autograd.profiler._is_profiler_enabled


def local_gradient(param: nn.Parameter) -> torch.Tensor:
    """Return the local part of a reduced gradient.

    Raises:
        UnsupportedError: it is distributed in another way than its parameter, so that this is a part of something else.
    """
    grad = param.grad
    if isinstance(grad, DTensor) and isinstance(param, DTensor) and grad.placements != param.placements:
        raise UnsupportedError(
            f"a gradient was assigned with placements {grad.placements}, but its parameter has {param.placements}; "
            "assign grad.redistribute(param.device_mesh, param.placements)"
        )
    return grad._local_tensor if isinstance(grad, DTensor) else grad  # type: ignore[return-value]


def add_up_gradients(module: Any) -> None:
    """Let the gradients of a module be added up in the reduce dtype as they come in, until they are reduced.

    What FSDP2 does over backwards without reduction, here after each `AccumulateGrad`.

    Args:
        module: `fully_shard` was called on it, and it is gathered.
    """
    for group in _groups_of(module):
        for param in group.fsdp_params:
            gathered = param._unsharded_param
            if gathered.requires_grad and not gathered._post_accumulate_grad_hooks:
                gathered.register_post_accumulate_grad_hook(partial(_add_up, param))


def _add_up(param: Any, gathered: torch.Tensor) -> None:
    if hasattr(param, "accumulate_unsharded_grad_if_needed"):  # before torch 2.15
        param.accumulate_unsharded_grad_if_needed()
        param.to_accumulated_grad_if_needed()
    elif gathered.grad is not None and param.unsharded_grad_dtype is not None:
        # FSDP2 leaves the first gradient as it was computed; to a wider one, autograd adds in place.
        gathered.grad = gathered.grad.to(param.unsharded_grad_dtype)


PARAMETER_MARKS = frozenset({"_is_param"})
"""Attributes that torch itself sets on parameters of other tensor types, such as DTensor."""


def is_hooks(name: str) -> bool:
    """Whether an attribute of an optimizer, by its name, is a dictionary of its hooks."""
    return name.startswith("_optimizer_") and name.endswith("_hooks")


def is_bookkeeping(name: str, value: Any) -> bool:
    """Whether an attribute of an optimizer says nothing about updates: its hooks, and what schedulers put there."""
    return (
        name in ("_zero_grad_profile_name", "_opt_called", "_step_count")
        or is_hooks(name)
        or (name == "step" and hasattr(value, "_wrapped_by_lr_sched"))
    )


def unhooked_step(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """Return the `step` of an optimizer without the hooks that torch runs around it."""
    step = type(optimizer).step
    plain = getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step
    bound: Callable[..., Any] = plain.__get__(optimizer)
    return bound


def share_step_hooks(optimizer: torch.optim.Optimizer, other: torch.optim.Optimizer) -> None:
    """Let an optimizer run the hooks around `step` that were, or will be, registered on another one."""
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        vars(optimizer)[name] = vars(other)[name]
