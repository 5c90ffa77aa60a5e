"""Accessors for private APIs of FSDP2, DTensor, autograd and optimizers.

`tests/fsdp/test_private.py` tests the behavior expected of each API, so that a torch release that changes one fails a
specific test instead of computing wrong gradients. `make test-torch` runs these tests with other torch releases than
the pinned one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.multiprocessing.reductions import StorageWeakRef

from infinity.errors import UnsupportedError
from infinity.torch_private.imports import (
    FSDPParam,
    FSDPState,
    ShardedState,
    _current_graph_task_id,
    _disabled_torch_function_impl,
    lacking,
)

ROOT = "root"
"""Name of the root FSDP module, which exists if some parameters belong to no other FSDP module."""


NO_TORCH_FUNCTION = _disabled_torch_function_impl
"""Value of `__torch_function__` for a tensor class that only implements `__torch_dispatch__`."""


_NO_RANGE = nullcontext()


# Attributes of FSDP2 objects that this module reads, by class. "a|b" means one of the two, depending on the release.
_NAMES = {
    "FSDPState": (
        "_fsdp_param_groups|_fsdp_param_group",  # 2.11 has at most one group per state
        "_is_root",
        "_lazy_init",
        "_pre_forward",
        "_state_ctx",
        "_training_state",
    ),
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
        "all_gather_inputs",
        "init_unsharded_param",
        "sharded_param",
        "sharded_size",
        "sharded_state",
        "padded_sharded_param_size",
        "fsdp_placement",
        "is_dtensor",
        "mesh_info",
        "mp_policy",
        "reset_sharded_param",
        "to_sharded",
        "to_sharded_dtensor",
        "_init_extensions",
        "_module_info",
        "_orig_size",
        "_setattr_on_modules",
        "_sharded_local_tensor",
        "_sharded_param_data",
        "unsharded_grad_dtype|accumulate_unsharded_grad_if_needed",  # since 2.15, autograd sums in the reduce dtype
    ),
}


def require_names(model: nn.Module) -> None:
    """Check that the FSDP2 objects of a model have all attributes that this module reads.

    Raises:
        UnsupportedError: if this torch release lacks one of them.
    """
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        _require("FSDPState", module._get_fsdp_state())
        for group in _groups_of(module):
            _require("FSDPParamGroup", group)
            for param in group.fsdp_params:
                _require("FSDPParam", param)
                return  # all objects belong to the same classes


def _require(cls: str, found: Any) -> None:
    has = set(dir(found))
    missing = [name for name in _NAMES[cls] if has.isdisjoint(name.split("|"))]
    if missing:
        raise lacking(f"its FSDP2 class {cls} has no {', '.join(missing).replace('|', ' or ')}")


def parameter_groups(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (name, group) for every FSDP2 parameter group, starting with the root's."""
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


def has_parameter_groups() -> bool:
    """Return whether an FSDP module can have several parameter groups. The FSDP2 of torch 2.11 supports only one."""
    return hasattr(FSDPState(), "_fsdp_param_groups")


def add_parameter_group(module: Any, params: list[nn.Parameter], policy: MixedPrecisionPolicy) -> None:
    """Add a parameter group with its own mixed precision policy to an FSDP module.

    FSDP2 computes with one dtype per group. It gathers and reduces all groups of an FSDP module together.

    Args:
        module: Module on which `fully_shard` was called, whose first group has the same mesh.
        params: Parameters of the group, which were passed to `fully_shard` as `ignored_params`.
        policy: Mixed precision policy of the group.
    """
    groups = _groups_of(module)
    first = groups[0]
    groups.append(
        type(first)(
            params, first.modules, first.mesh_info, first.post_forward_mesh_info, first.device, None, policy,
            first.offload_policy,
        )
    )  # fmt: skip


def storage_key(tensor: torch.Tensor) -> int:
    """Return a number that identifies a tensor's storage while the storage exists, even on the meta device."""
    return int(tensor.untyped_storage()._cdata)


def saved_tensors_are_hooked() -> bool:
    """Return whether saved-tensor hooks are active (`torch.autograd.graph.saved_tensors_hooks`)."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def weak_memory(tensor: torch.Tensor) -> Any:
    """Return a weak reference to a tensor's storage.

    Its `cdata` is a number that identifies the storage while the storage exists, and `expired()` returns whether the
    storage has been freed.
    """
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def is_sharded_module(module: nn.Module) -> bool:
    """Return whether `fully_shard` was called on a module."""
    return isinstance(module, FSDPModule)


class _Hooks(OrderedDict[int, Callable[[nn.Parameter], None]]):
    """Hooks to call when a gradient has arrived. The one with the key `LAST` stays the last one."""

    LAST = -1

    def __setitem__(self, key: int, hook: Callable[[nn.Parameter], None]) -> None:
        super().__setitem__(key, hook)
        if self.LAST in self:
            self.move_to_end(self.LAST)

    def values(self) -> Any:
        return [*super().values()]  # a copy, because a hook may remove itself while FSDP2 iterates


def on_gradient(param: nn.Parameter, hook: Callable[[nn.Parameter], None]) -> Callable[[], object]:
    """Call `hook(param)` after a gradient has been reduced and all of the user's hooks have run.

    Hooks that the user registers later also run before `hook`.

    Returns:
        A function that removes the hook.
    """
    hooks: Any = param
    before, found = hooks._post_accumulate_grad_hooks, _Hooks()
    if before:
        # Not copied, because the user's handles remove hooks from this dictionary

        def run_before(param: nn.Parameter) -> None:
            for each in [*before.values()]:
                each(param)

        found[_Hooks.LAST - 1] = run_before
    found[_Hooks.LAST] = hook
    hooks._post_accumulate_grad_hooks = found
    return partial(found.pop, _Hooks.LAST, None)


def sharded_like(param: nn.Parameter, values: torch.Tensor) -> torch.Tensor:
    """Return a tensor that is sharded like `param` and has the flat local elements `values`."""
    if not isinstance(param, DTensor):
        return values.view(param.shape)
    local = values.view(param._local_tensor.shape).to(param.device)
    return DTensor.from_local(
        local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )


def offload_policy(group: Any) -> OffloadPolicy:
    """Return the `offload_policy` with which a group was sharded."""
    policy: OffloadPolicy = group.offload_policy
    return policy


def reshards_to_fewer_ranks(group: Any) -> bool:
    """Return whether weights are resharded to a subset of the ranks after forward (integer `reshard_after_forward`)."""
    return group.post_forward_mesh_info is not None and group.post_forward_mesh_info is not group.mesh_info


def fsdp_params(group: Any) -> list[Any]:
    """Return the parameters of a group in all-gather order."""
    return list(group.fsdp_params)


def owner(param: Any) -> tuple[nn.Module, str]:
    """Return the module and attribute name that hold a parameter."""
    return param._module_info.module, param._module_info.param_name


def take_over_replaced(groups: Iterable[Any]) -> None:
    """Let FSDP2 take over sharded parameters that were replaced after `fully_shard`, as its first forward does.

    For example, transformers replaces them when it loads a model that it has sharded itself. A parameter that already
    is part of an FSDP module is not taken over a second time.
    """
    params = [param for group in groups for param in group.fsdp_params]
    sharded = {id(param.sharded_param) for param in params}
    for param in params:
        module, name = owner(param)
        replaced = getattr(module, name)
        if isinstance(replaced, DTensor) and id(replaced) not in sharded:
            param.reset_sharded_param()


def ignored_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of a sharded model that belong to no FSDP module, under each of their names.

    These parameters were passed to `fully_shard` as `ignored_params`. Nothing is yielded for a model that is not
    sharded. The type of a parameter does not identify them, because gathered parameters are not DTensors either.
    """
    sharded: set[tuple[int, str]] = set()
    for _, group in parameter_groups(model):
        for param in group.fsdp_params:
            info = param._module_info
            sharded.add((id(info.module), info.param_name))
            sharded.update(zip(map(id, info.shared_modules), info.shared_param_names, strict=True))
    for prefix, module in model.named_modules(remove_duplicate=False) if sharded else ():
        for key, own in module._parameters.items():
            if own is not None and (id(module), key) not in sharded and not isinstance(own, DTensor):
                yield f"{prefix}.{key}" if prefix else key, own


def set_value(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace the value of a parameter, which may be on the meta device, without changing its identity."""
    if not param.is_meta:
        with torch.no_grad():
            param.copy_(value)
        return
    new = nn.Parameter(value, requires_grad=param.requires_grad)
    vars(new).update(vars(param))
    changed: Any = param
    hooks = changed._post_accumulate_grad_hooks
    torch.utils.swap_tensors(param, new)  # type: ignore[no-untyped-call]
    if hooks:
        changed._post_accumulate_grad_hooks = hooks  # autograd would not call them on the new tensor


def compute_dtype(param: Any) -> torch.dtype:
    """Return the dtype in which a parameter is gathered."""
    dtype: torch.dtype = param.sharded_param.dtype
    wanted = param.mp_policy.param_dtype
    return wanted if wanted is not None and dtype.is_floating_point else dtype


def local_tensor(param: Any) -> torch.Tensor:
    """Return this rank's slice of a parameter, of shape `sharded_size`."""
    local: torch.Tensor = param._sharded_local_tensor
    return local


def padded_shape(param: Any) -> torch.Size:
    """Return the shape of this rank's contribution to the all-gather."""
    size: torch.Size = param.padded_sharded_param_size
    return size


def gathered_shape(param: Any) -> torch.Size:
    """Return the shape of the gathered parameter. With tensor parallelism, this is the shape of its local part."""
    size: torch.Size = param._orig_size
    return size


def full_shape(param: Any) -> torch.Size:
    """Return the shape of the full parameter, also with tensor or expert parallelism."""
    size: torch.Size = param.sharded_param.shape
    return size


def parallel_chunks(param: Any) -> Iterator[tuple[int, int, int, int]]:
    """Yield how tensor or expert parallelism divides a parameter before FSDP2 does, in order.

    Yields:
        Dimension, index of this rank's chunk, number of chunks, and number of parts of a fused weight.
    """
    if not param.is_dtensor:
        return
    spec = getattr(param, "_unsharded_dtensor_spec", None) or param._tp_spec  # the latter in torch 2.11
    for mesh_dim, placement in enumerate(spec.placements):
        if isinstance(placement, Shard | _StridedShard):
            size, rank = spec.mesh.size(mesh_dim), spec.mesh.get_local_rank(mesh_dim)
            yield placement.dim % len(spec.shape), rank, size, getattr(placement, "split_factor", 1)


def shard_dim(param: Any) -> int:
    """Return the dimension along which a parameter is sharded."""
    return int(param.fsdp_placement.dim)


def shard_rank_and_size(param: Any) -> tuple[int, int]:
    """Return this rank's index among the ranks that a parameter is sharded across, and the number of these ranks."""
    info = param.mesh_info
    return getattr(info, "shard_mesh_rank", 0), getattr(info, "shard_mesh_size", 1)


def shard_ranks(param: Any) -> tuple[int, ...]:
    """Return the ranks that a parameter is sharded across, in the order of their slices."""
    group = getattr(param.mesh_info, "shard_process_group", None)
    return tuple(dist.get_process_group_ranks(group)) if group is not None else (dist.get_rank(),)


def has_gradient_dtype(param: nn.Parameter) -> bool:
    """Return whether a parameter and its gradients differ in dtype. FSDP2 supports this since torch 2.15."""
    return param.requires_grad and param.grad_dtype != param.dtype


def all_have_local_tensors(params: Iterable[Any], kind: type) -> bool:
    """Return whether every parameter has a local tensor of the given type, and gradients of its own dtype.

    The loop calls no other function, because every forward runs it.
    """
    for param in params:
        sharded = param.sharded_param
        if type(sharded._local_tensor) is not kind or (sharded.requires_grad and sharded.grad_dtype != sharded.dtype):
            return False
    return True


def reduces(param: Any) -> bool:
    """Return whether gradients of a parameter are reduced across several ranks."""
    return bool(param.mesh_info.mesh.size() > 1)


def is_tensor_parallel(param: Any) -> bool:
    """Return whether the parameter was a DTensor before `fully_shard`."""
    return bool(param.is_dtensor)


def replace_local_tensor(param: Any, shard: torch.Tensor) -> None:
    """Make `shard` the local tensor of a sharded parameter, without changing the identity of the parameter.

    Raises:
        RuntimeError: if the parameter is on the meta device and a weak reference to it exists.
    """
    param._sharded_param_data = shard.view(-1)
    current = param.sharded_param
    if current.device.type != "meta":
        current._local_tensor = shard
    else:
        # A parameter cannot be moved to another device in place. Swapping its contents with a new parameter keeps its
        # identity, so that existing references, such as the optimizer's param groups, refer to the trained parameter.
        new = nn.Parameter(param.to_sharded_dtensor(shard), requires_grad=current.requires_grad)
        vars(new).update(vars(current))  # the user's attributes, which the swap would replace
        torch.utils.swap_tensors(current, new)  # type: ignore[no-untyped-call]
    param._init_extensions()  # FSDP2 does this before the first forward only


class _SuppliedParam(FSDPParam):
    """Parameter whose all-gather input comes from a function."""

    gather_input: Callable[[], torch.Tensor]

    @property
    def all_gather_inputs(self) -> list[torch.Tensor]:
        if self.sharded_state is ShardedState.SHARDED and hasattr(self, "_unsharded_param"):
            return [self.gather_input()]
        return super().all_gather_inputs

    def init_unsharded_param(self) -> None:
        if not hasattr(self, "_unsharded_param"):
            super().init_unsharded_param()  # type: ignore[no-untyped-call]


def supply_gather_input(param: Any, gather_input: Callable[[], torch.Tensor]) -> None:
    """Make FSDP2 call a function for the all-gather input of a parameter, from the second gather on.

    The first gather calls `fsdp_pre_all_gather` and `fsdp_post_all_gather`. Each later one would look both up again and
    inspect their signature, which takes more Python calls than the gather of a parameter without the extension. Both
    must return their tensor unchanged.

    Args:
        param: FSDP2's `FSDPParam` object. If it is an instance of another subclass, it is not changed.
        gather_input: function that returns the flat, padded input in the compute dtype.
    """
    if type(param) in (FSDPParam, _SuppliedParam):
        param.__class__ = _SuppliedParam
        vars(param)["gather_input"] = gather_input


def materialize(param: Any, device: torch.device) -> None:
    """Allocate a sharded parameter that is on the meta device, without changing its identity.

    Args:
        param: FSDP2's `FSDPParam` object.
        device: Device of the parameter. Its elements become zero.
    """
    current = param.sharded_param
    if current.is_meta:
        local = torch.zeros(param.sharded_size, dtype=current.dtype, device=device)
        set_value(current, param.to_sharded_dtensor(local))
        param.reset_sharded_param()  # pads the local tensor


def watch_local_tensor(param: Any, check: Callable[[bool], None]) -> None:
    """Call `check` whenever FSDP2 would pad or replace the local tensor of a sharded parameter.

    FSDP2 does so before the first forward and after `load_state_dict`, which may have registered a different parameter
    on the module. In that case, the sharded parameter is restored first.

    Args:
        param: FSDP2's `FSDPParam` object.
        check: function that is called with ``True`` if the sharded parameter had to be restored.
    """

    def reset_sharded_param() -> None:
        module, name = owner(param)
        exchanged = getattr(module, name) is not param.sharded_param
        if exchanged:
            param._setattr_on_modules(param.sharded_param)
        check(exchanged)

    param.reset_sharded_param = reset_sharded_param


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of a DTensor. Any other tensor is returned unchanged."""
    local: torch.Tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local


def before_forward_methods(module: Any, call: Callable[[], None]) -> Callable[[], None]:
    """Call a function before each method that `register_fsdp_forward_method` registered, and before its gather.

    Forward hooks do not run before such a method.

    Args:
        module: module on which `fully_shard` was called.

    Returns:
        Function that stops the calls.
    """
    state = module._get_fsdp_state()
    pre_forward = state._pre_forward  # `fully_shard` has registered it as the hook of `forward`, which stays unchanged

    def notified(*args: Any, **named: Any) -> Any:
        call()
        return pre_forward(*args, **named)

    state._pre_forward = notified
    return lambda: vars(state).pop("_pre_forward", None)


def in_backward() -> bool:
    """Return whether the autograd engine is running on this thread."""
    return bool(_current_graph_task_id() != -1)


backward_number: Callable[[], int] = _current_graph_task_id
"""Function that returns the id of the backward pass that is running on this thread, or -1 if none is running."""


SANITIZER = "torch.cuda._sanitizer"
"""Name of the module that reads tensor addresses if `TORCH_CUDA_SANITIZER=1`."""


def profiled(name: str) -> AbstractContextManager[Any]:
    """Return the profiler range `name`, or a context without effect if no PyTorch profiler is recording.

    Entering a profiler range takes as long as all other work for a small weight.
    """
    return torch.autograd.profiler.record_function(name) if torch.autograd.profiler._is_profiler_enabled else _NO_RANGE


def local_gradients(params: Iterable[nn.Parameter]) -> list[torch.Tensor | None]:
    """Return the local part of each parameter's gradient; ``None`` if there is no gradient.

    Raises:
        UnsupportedError: if a gradient and its parameter have different placements, so that their local parts do not
            match.
    """
    found: list[torch.Tensor | None] = []
    for param in params:
        grad = param.grad
        if isinstance(grad, DTensor):
            if isinstance(param, DTensor) and grad._spec.placements != param._spec.placements:
                raise UnsupportedError(
                    f"a gradient was assigned with placements {grad.placements}, but its parameter has "
                    f"{param.placements}; assign grad.redistribute(param.device_mesh, param.placements)"
                )
            grad = grad._local_tensor
        found.append(grad)
    return found


def replace_local_gradient(param: nn.Parameter, local: torch.Tensor) -> None:
    """Replace the gradient of a parameter with one whose local part is `local`.

    The gradient is a new DTensor, because the existing one refers to the memory of its former local part. `__init__` of
    DTensor only calls further Python functions, so it is skipped.
    """
    if isinstance(param.grad, DTensor):
        param.grad = DTensor.__new__(DTensor, local, param.grad._spec, requires_grad=False)
    else:
        param.grad = sharded_like(param, local)


def add_up_gradients(module: Any) -> None:
    """Accumulate the gradients of a module in the reduce dtype as they arrive, until they are reduced.

    FSDP2 itself does this only across backward passes without reduction. Here, it happens after each `AccumulateGrad`.

    Args:
        module: gathered module on which `fully_shard` was called.
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
        # FSDP2 leaves the first gradient in the dtype of the computation. After this cast, autograd adds in place.
        gathered.grad = gathered.grad.to(param.unsharded_grad_dtype)


PARAMETER_MARKS = frozenset({"_is_param"})
"""Attributes that PyTorch sets on parameters of tensor subclasses such as DTensor."""


def is_hooks(name: str) -> bool:
    """Return whether the optimizer attribute with this name is a dictionary of hooks."""
    return name.startswith("_optimizer_") and name.endswith("_hooks")


def is_bookkeeping(name: str, value: Any) -> bool:
    """Return whether an optimizer attribute has no effect on updates: hooks, and attributes set by schedulers."""
    return (
        name in ("_zero_grad_profile_name", "_opt_called", "_step_count")
        or is_hooks(name)
        or (name == "step" and hasattr(value, "_wrapped_by_lr_sched"))
    )


def load_state_dict_hooks(optimizer: torch.optim.Optimizer) -> tuple[list[Any], list[Any]]:
    """Return the hooks that run before and after `load_state_dict` of an optimizer."""
    before, after = optimizer._optimizer_load_state_dict_pre_hooks, optimizer._optimizer_load_state_dict_post_hooks
    return list(before.values()), list(after.values())


def has_scheduler(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a learning rate scheduler was created for an optimizer."""
    return hasattr(vars(optimizer).get("step"), "_wrapped_by_lr_sched")


def unhooked_step(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """Return the `step` method of an optimizer without the hooks that PyTorch runs around it."""
    step = type(optimizer).step
    plain = getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step
    bound: Callable[..., Any] = plain.__get__(optimizer)
    return bound


def share_step_hooks(optimizer: torch.optim.Optimizer, other: torch.optim.Optimizer) -> None:
    """Make `optimizer` run the `step` hooks of `other`, including hooks registered later."""
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        vars(optimizer)[name] = vars(other)[name]
