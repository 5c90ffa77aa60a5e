"""Tests of the private PyTorch APIs in `infinity.torch_private`. A release that changes an API fails its test."""

from __future__ import annotations

import importlib.util
import platform
import re
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

import infinity
from infinity import heap, torch_private
from infinity.errors import UnsupportedError
from support import models
from support.train import batch

UNSUPPORTED = rf"^torch {re.escape(torch.__version__)} is not supported: .*{{}}.*; install torch 2\.11 to 2\.\d+,"


@pytest.fixture
def model() -> nn.Module:
    """A sharded model with one root and three layers."""
    return models.build("toy")


def params(model: nn.Module) -> list[tuple[object, object]]:
    """Return (group, parameter) for every parameter of a model."""
    return [
        (group, param)
        for _, group in torch_private.parameter_groups(model)
        for param in torch_private.fsdp_params(group)
    ]


def hide(found: object, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove an attribute from an object or its class."""
    if name in vars(found):
        del vars(found)[name]
    else:
        monkeypatch.delattr(type(found), name)


def test_missing_private_attribute_raises() -> None:
    """The one-line message states the torch version, the attribute and the supported range."""
    for cls, names in ((cls, each) for cls, listed in torch_private.names._NAMES.items() for each in listed):
        model = models.build("toy")
        with pytest.MonkeyPatch.context() as patch:
            for found in (model._get_fsdp_state(), *params(model)[0]):
                for name in names.split("|") if type(found).__name__ == cls else ():
                    if hasattr(type(found), name) or name in vars(found):
                        hide(found, name, patch)
            message = "has no .*" + re.escape(names.replace("|", " or "))
            with pytest.raises(UnsupportedError, match=UNSUPPORTED.format(message)) as caught:
                torch_private.require_names(model)
        assert "\n" not in str(caught.value)


def test_offload_checks_private_attributes_before_creating_files(
    model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide(params(model)[0][1], "mp_policy", monkeypatch)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(UnsupportedError, match=UNSUPPORTED.format("mp_policy")):
        infinity.offload(model, optimizer, {"storage": {"paths": [str(tmp_path)]}, "memory": {"host_bytes": 1 << 26}})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch._C", "_current_graph_task_id"),
        ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "CheckpointWrapper"),
        ("torch.distributed.fsdp._fully_shard._fsdp_collectives", "DefaultAllGather"),
        ("torch.nn.init", "_no_grad_trunc_normal_"),
    ],
)
def test_missing_private_name_raises_at_import(module: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The module is imported again under a different name."""
    monkeypatch.delattr(importlib.import_module(module), name)
    spec = importlib.util.spec_from_file_location("private_again", torch_private.imports.__file__)
    with pytest.raises(UnsupportedError, match=UNSUPPORTED.format(name)) as caught:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert "\n" not in str(caught.value)


def test_private_names_are_only_used_in_torch_private() -> None:
    """Exceptions are guides for tensor classes and the type names of stores."""
    allowed = r"_|foreach_|make_wrapper_subclass|pytree|python_dispatch|(?:C\._)?distributed_c10d"
    others = re.compile(rf"torch(?:\.\w+)*\._(?!{allowed})\w+")
    for file in Path(infinity.__file__).parent.rglob("*.py"):
        found = set(others.findall(file.read_text()))
        assert file.parent == Path(torch_private.__file__).parent or not found, f"{file}: {found}"


def test_parameter_groups_are_the_sharded_modules(model: nn.Module) -> None:
    """`_get_fsdp_state()._fsdp_param_groups` has one group per `fully_shard` call, with the root first."""
    assert isinstance(model, FSDPModule)
    assert [name for name, _ in torch_private.parameter_groups(model)] == ["root", "blocks.0", "blocks.1", "blocks.2"]
    found = {id(param.sharded_param) for _, param in params(model)}
    assert found == {id(param) for param in model.parameters()}
    assert len(params(model)) == len(list(model.parameters()))


@pytest.mark.skipif(not torch_private.has_parameter_groups(), reason="this release of torch supports only one group")
def test_parameter_groups_of_one_module_are_gathered_together() -> None:
    """Each group has its own dtypes, and the gradients of all groups are reduced."""
    layer = nn.Linear(4, 4)
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(layer, mesh=infinity.mesh("cpu"), mp_policy=bf16, ignored_params={layer.bias})
    torch_private.add_parameter_group(layer, [layer.bias], MixedPrecisionPolicy())
    groups = dict(torch_private.parameter_groups(layer))
    assert list(groups) == ["root", "root#1"]
    seen = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        seen.append((layer.weight.dtype, layer.bias.dtype))
        return x @ layer.weight.T + layer.bias

    layer.forward = forward
    layer(torch.ones(2, 4)).sum().backward()
    assert seen == [(torch.bfloat16, torch.float32)]
    assert torch.equal(layer.bias.grad.full_tensor(), torch.full((4,), 2.0))
    assert torch.equal(layer.weight.grad.full_tensor(), torch.full((4, 4), 2.0))


def test_tied_parameter_occurs_once() -> None:
    """FSDP2 stores a shared parameter once, with all modules that use it."""
    tied = models.build("tied")
    heads = [p for _, p in params(tied) if p.sharded_param is tied.lm_head.weight]
    assert len(heads) == 1
    assert tied.lm_head.weight is tied.model.embed_tokens.weight


def test_parameters_have_the_order_of_the_all_gather(model: nn.Module) -> None:
    """`fsdp_params` of a layer follow the order of `named_parameters`."""
    groups = dict(torch_private.parameter_groups(model))
    names = {id(param): name for name, param in model.blocks[0].named_parameters()}
    found = [names[id(param.sharded_param)] for param in torch_private.fsdp_params(groups["blocks.0"])]
    assert found == list(names.values())


def test_owner_is_module_and_attribute_name(model: nn.Module) -> None:
    """`_module_info`."""
    for _, param in params(model):
        module, name = torch_private.owner(param)
        assert getattr(module, name) is param.sharded_param


def test_reduce_buffers_are_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    """`allocate` of `_reduce_scatter_comm` reuses memory only if no tensor refers to it."""
    groups = [group for _, group in torch_private.parameter_groups(models.build("toy"))]
    for group in groups:
        monkeypatch.setattr(group.mesh_info, "shard_mesh_size", 2)
    torch_private.reuse_reduce_buffers(groups)
    (comm,) = {group._reduce_scatter_comm for group in groups}
    cpu = torch.device("cpu")
    first = comm.allocate((1000,), dtype=torch.float32, device=cpu)
    part, second = first[10:20], comm.allocate((500,), dtype=torch.float32, device=cpu)
    places = {first.data_ptr(), second.data_ptr()}
    assert len(places) == 2
    del first, second
    third = comm.allocate((1000,), dtype=torch.float32, device=cpu)
    assert third.data_ptr() != part.data_ptr() - 40, "a view of the first buffer is alive"
    del part, third
    again = [comm.allocate((250, 4), dtype=torch.float32, device=cpu) for _ in range(2)]
    assert places & {tensor.data_ptr() for tensor in again}
    assert len(comm._buffers) == 2
    large = comm.allocate((1 << 24,), dtype=torch.float32, device=cpu).fill_(1)
    assert len(comm._buffers) == 2, f"{large.numel()} elements are more than most FSDP modules have"
    before = heap.resident_bytes()
    del large
    assert before - heap.resident_bytes() > 4 * ((1 << 24) - (1 << 20)), (
        "the memory was returned to the operating system"
    )


@pytest.mark.parametrize("few", [True, False])
def test_memory_is_not_returned_in_every_layer(few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """If norms or experts are FSDP modules of their own, every layer exceeds the median FSDP module."""
    returned: list[str] = []
    monkeypatch.setattr(heap, "give_back", lambda: returned.append("returned"))
    groups = [group for _, group in torch_private.parameter_groups(models.build("toy"))]
    assert len(groups) == 4
    if not few:
        # As if most FSDP modules were smaller than these.
        monkeypatch.setattr(torch_private.collectives, "median_high", lambda _: 1)
    torch_private.reuse_reduce_buffers(groups)
    reduced = groups[0]._reduce_scatter_comm.allocate((1 << 22,), dtype=torch.float32, device=torch.device("cpu"))
    assert len(reduced.fill_(1.0)) == 1 << 22
    assert returned == ["returned"] * few


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc supports malloc_trim")
def test_free_memory_is_returned_before_a_large_reduction() -> None:
    """After the backward of a root with a large vocabulary, the heap contains several free blocks of its size."""
    groups = [group for _, group in torch_private.parameter_groups(models.build("toy"))]
    torch_private.reuse_reduce_buffers(groups)
    heap.FreedMemory()
    held = [torch.ones(1 << 22) for _ in range(8)]
    last = torch.ones(1)  # keeps the blocks away from the end of the heap, which would be trimmed anyway
    before = heap.resident_bytes()
    del held
    assert heap.resident_bytes() > before - (8 << 22), "the blocks are kept for the next FSDP module"
    reduced = groups[0]._reduce_scatter_comm.allocate((1 << 24,), dtype=torch.float32, device=torch.device("cpu"))
    assert heap.resident_bytes() < before - (7 << 24)
    assert len(reduced.fill_(last.item())) == 1 << 24


def test_one_rank_reduces_in_place() -> None:
    """`foreach_reduce` allocates the input and then the output of a reduction, which one rank only copies."""
    groups = [group for _, group in torch_private.parameter_groups(models.build("toy"))]
    torch_private.reuse_reduce_buffers(groups)
    (comm,) = {group._reduce_scatter_comm for group in groups}

    def place(number: int, dtype: torch.dtype = torch.float32) -> int:
        allocated.append(comm.allocate((number,), dtype=dtype, device=torch.device("cpu")))
        return allocated[-1].data_ptr()

    allocated: list[torch.Tensor] = []
    first = place(100)
    assert place(100) == first, "the output of the first reduction"
    second = place(100)
    assert second != first, "the input of the next reduction, while the first is alive"
    assert place(50) not in (first, second), "not the output of that reduction, which was interrupted"
    assert place(50, torch.bfloat16) not in {tensor.data_ptr() for tensor in allocated[:-1]}


def test_collectives_run_inside_the_given_context() -> None:
    """`_all_gather_comm` and `_reduce_scatter_comm`; a collective that the user has replaced is kept."""
    open_now, seen = [], []

    class Comm(DefaultAllGather):
        def __call__(self, *args: Any, **settings: Any) -> None:
            seen.append(list(open_now))

    @contextmanager
    def during() -> Iterator[None]:
        open_now.append("collective")
        yield
        open_now.pop()

    groups = [group for _, group in torch_private.parameter_groups(models.build("toy"))]
    groups[0]._all_gather_comm = own = Comm()
    torch_private.reuse_reduce_buffers(groups)
    reused = groups[0]._reduce_scatter_comm
    torch_private.watch_collectives(groups, during)
    assert groups[0]._all_gather_comm is own
    for comm in (groups[1]._all_gather_comm, groups[1]._reduce_scatter_comm):
        comm._comm = Comm()
        comm()
    assert seen == [["collective"], ["collective"]]
    assert not open_now
    assert groups[0]._reduce_scatter_comm.allocate == reused.allocate
    assert isinstance(groups[1]._all_gather_comm, DefaultAllGather), "set_symm_mem_for_comm requires this class"


def test_offload_policy_is_returned() -> None:
    """`group.offload_policy`. FSDP2 treats a policy that it does not know like the default one."""
    for policy in (OffloadPolicy(), CPUOffloadPolicy(pin_memory=False), infinity.NVMeOffloadPolicy()):
        made = fully_shard(nn.Linear(4, 4), mesh=infinity.mesh("cpu"), offload_policy=policy)
        assert [torch_private.offload_policy(group) for _, group in torch_private.parameter_groups(made)] == [policy]
        made(torch.ones(1, 4)).sum().backward()


def test_materialized_parameter_keeps_its_identity_and_is_gathered() -> None:
    """`reset_sharded_param` pads the local tensor, as after `to_empty`."""
    made = fully_shard(nn.Linear(4, 4, device="meta"), mesh=infinity.mesh("cpu"))
    before = list(made.parameters())
    for _, param in params(made):
        torch_private.materialize(param, torch.device("cpu"))
        torch_private.local_tensor(param).fill_(1.0)
    assert all(one is other for one, other in zip(made.parameters(), before, strict=True))
    assert made(torch.ones(1, 4)).tolist() == [[5.0] * 4]


def test_compute_dtype_follows_the_policy() -> None:
    """`mp_policy.param_dtype` of a floating-point parameter."""
    for dtype in (torch.bfloat16, None):
        made = fully_shard(nn.Linear(4, 4), mesh=infinity.mesh("cpu"), mp_policy=MixedPrecisionPolicy(dtype))
        for _, param in params(made):
            assert torch_private.compute_dtype(param) == (dtype or torch.float32)


def test_wrappers_are_removed_from_names_and_modules() -> None:
    """`_orig_mod` and `_checkpoint_wrapped_module`; the names equal those of `get_state_dict`."""
    first = nn.Linear(4, 4)
    wrapped = torch.compile(nn.Sequential(checkpoint_wrapper(first), torch.compile(nn.LayerNorm(4))))
    names = [name for name, _ in wrapped.named_parameters()]
    assert "_orig_mod.0._checkpoint_wrapped_module.weight" in names
    assert [torch_private.unwrapped_name(name) for name in names] == list(get_model_state_dict(wrapped))
    assert torch_private.unwrapped_module(torch.compile(checkpoint_wrapper(first))) is first
    assert torch_private.unwrapped_module(first) is first


def test_composite_operations_are_decomposed() -> None:
    """`_op_dk` and `_dispatch_has_kernel_for_dispatch_key`; results and random numbers equal PyTorch's."""
    aten = torch.ops.aten
    for func in (
        aten.mul.Tensor,
        aten.view.default,
        aten.detach_.default,
        aten.copy_.default,
        torch.ops.c10d.send.default,
    ):
        assert torch_private.decomposition(func) is None
    value = torch.linspace(-1, 1, 12).view(3, 4)
    torch.manual_seed(0)
    expected = torch.nn.functional.dropout(value, 0.5)
    torch.manual_seed(0)
    assert torch.equal(torch_private.decomposition(aten.dropout.default)(value, 0.5, True), expected)
    assert torch.equal(torch_private.decomposition(aten.matmul.default)(value, value.T), value @ value.T)
    assert torch_private.decomposition(aten.to.dtype)(value, torch.float32) is value


def test_local_tensor_and_shapes(model: nn.Module) -> None:
    """`_sharded_local_tensor`, `padded_sharded_param_size`, `_orig_size`, `fsdp_placement`, `mesh_info`."""
    shapes = {id(p): tuple(p.shape) for p in model.parameters()}
    for _, param in params(model):
        local = torch_private.local_tensor(param)
        assert local.data_ptr() == param.sharded_param._local_tensor.data_ptr()
        assert torch_private.padded_shape(param).numel() >= local.numel()
        assert tuple(torch_private.gathered_shape(param)) == shapes[id(param.sharded_param)]
        assert torch_private.shard_dim(param) == 0
        assert torch_private.shard_rank_and_size(param) == (0, 1)
        assert not torch_private.is_tensor_parallel(param)


def test_local_tensor_may_be_replaced_before_the_first_forward(model: nn.Module) -> None:
    """Lazy initialization reads the local tensors again."""
    expected = models.loss_of(models.build("toy", seed=8), batch(model, 0)).item()
    twin = models.build("toy", seed=8)
    before = list(model.parameters())
    for (_, param), (_, other) in zip(params(model), params(twin), strict=True):
        torch_private.replace_local_tensor(param, torch_private.local_tensor(other).clone())
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
    assert models.loss_of(model, batch(model, 0)).item() == expected


def test_local_tensor_may_be_replaced_after_a_forward(model: nn.Module) -> None:
    """`_init_extensions` lets FSDP2 use the all-gather extension of the new local tensor."""
    models.loss_of(model, batch(model, 0))
    model.reshard()
    _, param = params(model)[0]
    assert not hasattr(param, "_extensions_data")
    shard = torch_private.local_tensor(param).clone()
    shard.fsdp_pre_all_gather = shard.fsdp_post_all_gather = lambda *_: None  # type: ignore[attr-defined]
    torch_private.replace_local_tensor(param, shard)
    assert hasattr(param, "_extensions_data")


def test_gather_input_is_supplied_from_the_second_gather_on(model: nn.Module) -> None:
    """`all_gather_inputs`, `init_unsharded_param` and `sharded_state` of `FSDPParam`, whose class can be replaced."""
    block = model.blocks[0]
    (group,) = torch_private.names._groups_of(block)
    supplied: list[int] = []

    def supply(number: int, param: Any) -> torch.Tensor:
        supplied.append(number)
        return torch.full((torch_private.padded_shape(param).numel(),), float(number), dtype=torch.bfloat16)

    params_of_block = torch_private.fsdp_params(group)
    for number, param in enumerate(params_of_block):
        torch_private.supply_gather_input(param, partial(supply, number, param))
    expected = models.loss_of(models.build("toy"), batch(model, 0)).item()
    assert models.loss_of(model, batch(model, 0)).item() == expected
    assert not supplied, "the first gather uses FSDP2's own input"
    block.unshard()
    assert supplied == list(range(len(params_of_block)))
    for number, param in enumerate(params_of_block):
        gathered = getattr(*torch_private.owner(param))
        assert gathered.shape == torch_private.full_shape(param)
        assert (gathered == number).all()
    block.reshard()
    torch_private.supply_gather_input(param, lambda: torch.zeros_like(supply(-1, param)))
    assert not param.all_gather_inputs[0].any(), "a later function replaces an earlier one"
    assert all(each.untyped_storage().size() == 0 for param in params_of_block for each in param.all_gather_outputs)


def test_replacing_a_meta_local_tensor_keeps_the_parameter() -> None:
    """`to_sharded_dtensor` and `swap_tensors`; modules and the user's lists refer to the same parameter object."""
    tied = models.build("tied", meta=True)
    before = dict(tied.named_parameters())
    called: list[nn.Parameter] = []
    for param in before.values():
        param.register_post_accumulate_grad_hook(called.append)
    for _, param in params(tied):
        torch_private.replace_local_tensor(param, torch.zeros(torch_private.local_tensor(param).shape))
    assert all(param is before[name] for name, param in tied.named_parameters())
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert all(isinstance(param.data, DTensor) and not param.is_meta for param in before.values())
    assert all((param.to_local() == 0).all() for param in before.values())
    for param in before.values():
        for hook in (param._post_accumulate_grad_hooks or {}).values():
            hook(param)
    assert called == list(before.values()), "hooks are kept"


def test_replacing_a_weakly_referenced_meta_parameter_raises() -> None:
    """`swap_tensors` raises before it changes anything."""
    model = models.build("toy", meta=True)
    _, param = params(model)[0]
    reference = weakref.ref(param.sharded_param)
    with pytest.raises(RuntimeError, match="weakref"):
        torch_private.replace_local_tensor(param, torch.zeros(torch_private.local_tensor(param).shape))
    assert reference().is_meta


def test_reset_sharded_param_reports_replaced_tensors(model: nn.Module) -> None:
    """`reset_sharded_param` is called before the first forward and after each `load_state_dict`."""
    reported: list[tuple[str, bool]] = []
    for _, param in params(model):
        _, name = torch_private.owner(param)
        torch_private.watch_local_tensor(param, lambda exchanged, name=name: reported.append((name, exchanged)))
    models.loss_of(model, batch(model, 0))
    assert len(reported) == len(params(model))
    model.reshard()
    reported.clear()
    up, before = model.blocks[0].up, dict(model.blocks[0].up.named_parameters())
    up.load_state_dict(up.state_dict())
    assert reported == [("weight", False), ("bias", False)]
    reported.clear()
    up.load_state_dict({name: value.clone() for name, value in up.state_dict().items()}, assign=True)
    assert reported == [("weight", True), ("bias", True)]
    assert all(getattr(up, name) is param for name, param in before.items()), "the parameter is restored"


def test_conversions_call_apply(model: nn.Module) -> None:
    """`Module._apply(fn, recurse)`, also of modules whose class FSDP2 has replaced."""
    called: list[nn.Module] = []
    for module in model.modules():
        torch_private.replace_apply(
            module, lambda function, recurse=True, module=module: called.append(module) or module
        )
    conversions = ("float", "double", "half", "bfloat16", "cpu", "share_memory")
    for name in conversions:
        getattr(model, name)()
    model.to(torch.float64)
    model.to_empty(device="cpu")
    model.blocks[0].up.type(torch.float64)
    assert called == [model] * (len(conversions) + 2) + [model.blocks[0].up]
    for module in model.modules():
        torch_private.restore_apply(module)
    converted = torch_private.original_apply(model)(model, lambda tensor: tensor.double(), recurse=True)
    assert converted is model
    assert {param.dtype for param in model.parameters()} == {torch.float64}


def test_reshard_restores_sharded_parameters(model: nn.Module) -> None:
    """The root remains gathered after forward until `reshard`."""
    models.loss_of(model, batch(model, 0))
    assert not isinstance(model.head.weight, DTensor)
    model.reshard()
    assert torch_private.local_part(model.head.weight) is model.head.weight._local_tensor
    plain = torch.zeros(3)
    assert torch_private.local_part(plain) is plain


def test_registered_forward_methods_are_announced_before_their_gather(model: nn.Module) -> None:
    """`register_fsdp_forward_method` calls `_pre_forward` of the FSDP state, and forward hooks do not run."""
    type(model).head_weight = lambda self: self.head.weight
    register_fsdp_forward_method(model, "head_weight")
    gathered = []
    stop = torch_private.before_forward_methods(
        model, lambda: gathered.append(not isinstance(model.head.weight, DTensor))
    )
    assert not isinstance(model.head_weight(), DTensor)
    assert gathered == [False]
    models.loss_of(model, batch(model, 0))  # `forward` is announced by its hooks
    assert gathered == [False]
    stop()
    model.head_weight()
    assert gathered == [False]
    del type(model).head_weight


def test_partial_reshard_after_forward_is_detected(model: nn.Module) -> None:
    """`post_forward_mesh_info` is the group's mesh for True, None for False, and a different mesh for a number."""
    for reshard in (True, False):
        made = fully_shard(nn.Linear(4, 4), mesh=infinity.mesh("cpu"), reshard_after_forward=reshard)
        ((_, group),) = torch_private.parameter_groups(made)
        assert not torch_private.reshards_to_fewer_ranks(group)
        assert (group.post_forward_mesh_info is group.mesh_info) is reshard
    group.post_forward_mesh_info = object()
    assert torch_private.reshards_to_fewer_ranks(group)


def test_original_class_ignores_sharding_and_parametrization() -> None:
    """Both replace the class of a module with a subclass."""
    model = nn.Sequential(nn.Linear(4, 4), torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)))
    for module in (*model, model):
        fully_shard(module, mesh=infinity.mesh("cpu"))
    assert [torch_private.original_class(module) for module in (model, *model)] == [nn.Sequential, nn.Linear, nn.Linear]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_storage_key_identifies_the_storage(device: str) -> None:
    """`UntypedStorage._cdata`, also on the meta device."""
    tensor, other = torch.empty(3, 4, device=device), torch.empty(3, 4, device=device)
    keys = {torch_private.storage_key(view) for view in (tensor, tensor[1:], tensor.t(), tensor.detach(), tensor.data)}
    assert keys == {torch_private.storage_key(tensor)} != {torch_private.storage_key(other)}


INITS = {
    "trunc_normal_": {"std": 0.5, "a": -0.6, "b": 0.7},
    "orthogonal_": {},
    "sparse_": {"sparsity": 0.5},
    "eye_": {},
    "kaiming_uniform_": {},
}


class Written(TorchDispatchMode):
    """Dispatch mode that records the operations that write to a tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.key, self.found = torch_private.storage_key(tensor), []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable and torch_private.storage_key(kwargs.get("out", args[0])) == self.key:
            self.found.append(func.overloadpacket.__name__)
        return func(*args, **kwargs)


@pytest.mark.parametrize("name", INITS)
def test_init_functions_write_to_tensors_without_storage(name: str) -> None:
    """`Tensor.is_meta`, `torch.nn.init._no_grad_trunc_normal_`: PyTorch's functions do not skip such tensors."""
    tensor = torch.empty(6, 6, device="meta")
    written = Written(tensor)
    with torch.no_grad(), torch_private.init_without_storage(draw=False), written:
        getattr(torch.nn.init, name)(tensor, **INITS[name])
    assert written.found
    assert torch.empty(2, device="meta").is_meta


def test_truncated_normal_draws_as_often_as_for_real_tensors() -> None:
    """The number of draws depends on the drawn values."""
    after = []
    for device in ("cpu", "meta"):
        torch.manual_seed(3)
        with torch_private.init_without_storage(draw=True):
            torch.nn.init.trunc_normal_(torch.empty(50, 3, device=device), a=-0.5, b=0.5)
        after.append(torch.rand(4))
    assert torch.equal(*after)


def test_each_backward_is_detected_and_has_a_unique_number() -> None:
    """`torch._C._current_graph_task_id`. The number is -1 outside of backward."""
    seen: list[tuple[bool, int]] = []
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda grad: seen.append((torch_private.in_backward(), torch_private.backward_number())))
    for _ in range(2):
        (2 * x).backward()
        assert (torch_private.in_backward(), torch_private.backward_number()) == (False, -1)
    (first, one), (second, other) = seen
    assert first
    assert second
    assert len({one, other, -1}) == 3


def test_gradient_hook_runs_once_per_backward(model: nn.Module) -> None:
    """The hook runs after the reduction with `.grad` set, and may clear it."""
    arrived: dict[str, int] = {}
    expected = models.build("toy")
    models.loss_of(expected, batch(model, 0)).backward()
    wanted = {name: param.grad.to_local() for name, param in expected.named_parameters()}
    equal = []

    def hook(name: str, param: nn.Parameter) -> None:
        arrived[name] = arrived.get(name, 0) + 1
        (local,) = torch_private.local_gradients([param])
        equal.append(torch.equal(local, wanted[name]))
        param.grad = None

    for name, param in model.named_parameters():
        torch_private.on_gradient(param, lambda p, name=name: hook(name, p))
    models.loss_of(model, batch(model, 0)).backward()
    assert arrived == dict.fromkeys(wanted, 1)
    assert all(equal)
    assert all(param.grad is None for param in model.parameters())


def test_gradients_are_accumulated_in_the_reduce_dtype(model: nn.Module) -> None:
    """`_unsharded_param` and its accumulation hook; see `_add_up`. torch 2.15 defers casts when a backward begins."""
    models.loss_of(model, batch(model, 0))  # lazy init
    block = model.blocks[0]
    block.unshard()
    torch_private.add_up_gradients(block)
    torch_private.add_up_gradients(block)  # only once
    (group,) = torch_private.names._groups_of(block)
    for param in torch_private.fsdp_params(group):
        gathered = param._unsharded_param
        assert len(gathered._post_accumulate_grad_hooks) == 1
        if hasattr(group, "_set_unsharded_grad_dtypes"):
            group._set_unsharded_grad_dtypes(defer_upcast=True)
        for value in (1.0, 2.0**-10):  # bf16 cannot represent their sum
            gathered.backward(torch.full_like(gathered, value))
        assert gathered.dtype == torch.bfloat16
        assert param.unsharded_accumulated_grad.dtype == torch.float32
        assert (param.unsharded_accumulated_grad == 1 + 2.0**-10).all()


def test_original_classes_are_restored_temporarily(model: nn.Module) -> None:
    """`_orig_cls_mro_index` is the position of the original class."""
    sharded = [model, *model.blocks]
    before = list(map(type, sharded))
    with torch_private.classes_of_before(model):
        assert list(map(type, sharded)) == [models.Toy] + 3 * [models.Block]
    assert list(map(type, sharded)) == before
    assert all(issubclass(cls, FSDPModule) for cls in before)


def test_recomputing_modules_are_detected() -> None:
    """`CheckpointWrapper` of torch and `gradient_checkpointing` of transformers."""
    assert torch_private.recomputes(checkpoint_wrapper(nn.Linear(2, 2)))
    assert not torch_private.recomputes(nn.Linear(2, 2))
    for on in (True, False):
        found = models.build("llama", checkpointing=on)
        assert all(torch_private.recomputes(layer) is on for layer in models.layers_of(found))


def test_gradient_hook_runs_after_user_hooks(model: nn.Module) -> None:
    """FSDP2 iterates over `_post_accumulate_grad_hooks.values()`, so hooks that are registered later also run first."""
    param = nn.Parameter(torch.zeros(1))
    called: list[str] = []
    first, second = [
        param.register_post_accumulate_grad_hook(lambda _, name=name: called.append(name)) for name in ("one", "two")
    ]
    remove = torch_private.on_gradient(param, lambda _: called.append("last"))
    param.register_post_accumulate_grad_hook(lambda _: called.append("three"))

    def call() -> list[str]:
        called.clear()
        for hook in (param._post_accumulate_grad_hooks or {}).values():
            hook(param)
        return list(called)

    assert call() == ["one", "two", "three", "last"]
    first.remove()
    assert call() == ["two", "three", "last"]
    once = param.register_post_accumulate_grad_hook(lambda _: once.remove())
    assert call() == call() == ["two", "three", "last"]
    remove()
    second.remove()
    assert call() == ["three"]


def test_gradients_are_sharded_like_the_parameter(model: nn.Module) -> None:
    """`DTensor.__new__` and `DTensor.from_local`; FSDP2 adds to `grad._local_tensor` in place."""
    models.loss_of(model, batch(model, 0)).backward()
    params_of_model = list(model.parameters())
    wanted = [local.clone() for local in torch_private.local_gradients(params_of_model)]
    for param, local in zip(params_of_model, wanted, strict=True):
        like = torch_private.sharded_like(param, local.reshape(-1))
        assert torch.equal(like.full_tensor(), param.grad.full_tensor())
        torch_private.replace_local_gradient(param, local)
        assert torch.equal(param.grad.full_tensor(), like.full_tensor())
        assert param.grad.placements == param.placements
    models.loss_of(model, batch(model, 0)).backward()
    assert all(
        local is before and local.count_nonzero()
        for local, before in zip(torch_private.local_gradients(params_of_model), wanted, strict=True)
    )
    param.grad = None
    assert torch_private.local_gradients([param]) == [None]


def test_bookkeeping_attributes_of_optimizers_are_known() -> None:
    """Attributes that PyTorch and its schedulers add do not affect updates; hooks are ignored as well."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    own = {name for name, value in vars(optimizer).items() if not torch_private.is_bookkeeping(name, value)}
    assert {"param_groups", "state", "defaults"} <= own
    assert not own & {"step", "_opt_called", "_zero_grad_profile_name"}
    assert not any("hook" in name for name in own)
    optimizer.note = "mine"
    assert not torch_private.is_bookkeeping("note", optimizer.note)


def test_schedulers_mark_their_optimizer() -> None:
    """The first scheduler wraps `step`."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    assert not torch_private.has_scheduler(optimizer)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert torch_private.has_scheduler(optimizer)


def test_modules_with_extra_state_are_found() -> None:
    """The keys are those of `state_dict`, and sharding does not change the result."""

    class Layer(nn.Linear):
        def get_extra_state(self) -> Any:
            return 1

    class Both(Layer):
        def set_extra_state(self, state: Any) -> None: ...

    model: Any = Both(2, 2)
    model.inner = nn.Sequential(nn.Linear(2, 2), Layer(2, 2))
    fully_shard(model, mesh=infinity.mesh("cpu"))
    found = dict(torch_private.modules_with_extra_state(model))
    assert found == {"_extra_state": model, "inner.1._extra_state": model.inner[1]}
    assert found.keys() == {key for key in model.state_dict() if "extra" in key}
    assert [torch_private.restores_extra_state(module) for module in found.values()] == [True, False]


def test_ignored_parameters_are_found_while_others_are_gathered() -> None:
    """The type of a parameter does not tell, because gathered parameters are plain tensors as well."""
    model = nn.Sequential(nn.Linear(2, 2))
    model.register_parameter("scale", nn.Parameter(torch.tensor(1.0)))
    assert dict(torch_private.ignored_parameters(model)) == {}
    fully_shard(model, mesh=infinity.mesh("cpu"), ignored_params={model.scale})
    assert dict(torch_private.ignored_parameters(model)) == {"scale": model.scale}
    model.unshard()
    assert not isinstance(model[0].weight, DTensor)
    assert dict(torch_private.ignored_parameters(model)) == {"scale": model.scale}
    assert torch_private.persistent_buffers(model) == ("scale",)


def test_parameter_on_the_meta_device_keeps_its_identity_and_hooks() -> None:
    param, called = nn.Parameter(torch.empty((), device="meta")), []
    param.mark = "kept"
    param.register_post_accumulate_grad_hook(called.append)
    torch_private.set_value(param, torch.tensor(3.0))
    (param * 2).backward()
    assert (float(param.detach()), param.mark, called) == (3.0, "kept", [param])


def test_step_hooks_are_excluded_and_shared() -> None:
    """Covers hooks of one optimizer and global hooks."""
    param = nn.Parameter(torch.zeros(1))
    param.grad = torch.ones(1)
    optimizer, other = (torch.optim.SGD([param], lr=1.0) for _ in range(2))
    calls: list[object] = []
    handle = register_optimizer_step_pre_hook(lambda *_: calls.append("all"))
    optimizer.register_step_post_hook(lambda *_: calls.append("own"))
    try:
        torch_private.unhooked_step(optimizer)()
        assert (calls, float(param)) == ([], -1.0)
        torch_private.share_step_hooks(other, optimizer)
        other.step()
        assert (calls, float(param)) == (["all", "own"], -2.0)
    finally:
        handle.remove()


def test_sharded_parameters_have_only_known_attributes(model: nn.Module) -> None:
    """All attributes other than `PARAMETER_MARKS` were set by users."""
    assert {name for param in model.parameters() for name in vars(param)} == torch_private.PARAMETER_MARKS


def _fail(*_: object) -> None:
    raise MemoryError


def test_interrupted_backward_is_detected_and_reset(model: nn.Module) -> None:
    """Gradients that were not reduced yet are dropped on request, and the next backward is complete."""
    states = torch_private.fsdp_states(model)
    models.loss_of(model, batch(model, 0)).backward()
    expected = [param.grad.to_local().clone() for param in model.parameters()]
    assert len(states) == 4
    if not torch_private.can_reset_states(states):
        assert torch.__version__ < "2.13"
        pytest.skip("needs a torch release in which FSDP2 can forget an interrupted pass")
    for gradients in (True, False):
        model.zero_grad()
        failing = next(iter(model.blocks[1].parameters())).register_post_accumulate_grad_hook(_fail)
        loss = models.loss_of(model, batch(model, 0))
        assert not torch_private.backward_is_unfinished(states)
        with pytest.raises(MemoryError):
            loss.backward()
        failing.remove()
        assert torch_private.backward_is_unfinished(states)
        torch_private.reset_states(states, gradients=gradients)
        assert not torch_private.backward_is_unfinished(states)
        assert all(isinstance(param, DTensor) for param in model.parameters())
        model.zero_grad()
        models.loss_of(model, batch(model, 0)).backward()
        found = [param.grad.to_local() for param in model.parameters()]
        assert all(map(torch.equal, expected, found)) == gradients


def test_state_is_initialized_before_the_first_forward(model: nn.Module) -> None:
    states = torch_private.fsdp_states(model)
    assert {state._is_root for state in states} == {None}
    torch_private.initialize_state(model)
    assert [state._is_root for state in states] == [True, False, False, False]


def test_hooks_of_load_state_dict_are_found() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    assert torch_private.load_state_dict_hooks(optimizer) == ([], [])
    optimizer.register_load_state_dict_pre_hook(print)
    optimizer.register_load_state_dict_post_hook(repr)
    assert torch_private.load_state_dict_hooks(optimizer) == ([print], [repr])
