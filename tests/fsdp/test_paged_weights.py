"""Tests of offloaded weights as tensors: operations match memory bit for bit, or raise an error."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.cuda._sanitizer import ArgumentHandler
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import infinity
from infinity.errors import UnsupportedError
from infinity.fsdp.paged_tensor import PagedTensor
from infinity.fsdp.shard import PagedShard
from support import models
from support.ranks import RankPool
from support.tables import all_but
from support.train import Outcome, Paging, Recipe, batch, local, make_optimizer, offloaded, settings, train

RECIPE = Recipe(model="toy", steps=2)
LEAST = Paging(host_cache="least")


def weight(model: nn.Module) -> nn.Parameter:
    """Return a weight with 131 rows, which are sharded unevenly across two ranks."""
    return model.head.weight


def rows(model: nn.Module) -> torch.Tensor:
    """Return this rank's rows of that weight."""
    return weight(model).to_local()


def all_parameters(model: nn.Module) -> list[torch.Tensor]:
    return list(model.parameters())


def assign(target: torch.Tensor, index: Any, value: Any) -> None:
    target[index] = value


def other_state(model: nn.Module) -> dict[str, Any]:
    """Return a state dict with different values."""
    return models.build("toy", seed=5).state_dict()


def full_state() -> dict[str, torch.Tensor]:
    """Return a state dict with full tensors."""
    return {name: value.full_tensor() for name, value in models.build("toy", seed=6).state_dict().items()}


def init(function: Callable[..., Any], **settings: Any) -> Callable[[nn.Module], None]:
    """Return a function that initializes a weight after seeding."""

    def run(model: nn.Module) -> None:
        torch.manual_seed(3)
        function(weight(model), **settings)

    return run


EDITS: dict[str, Callable[[nn.Module], Any]] = {
    "mul_": lambda m: weight(m).mul_(1.5),
    "add_ of a tensor": lambda m: weight(m).add_(weight(m), alpha=0.5),
    "fill_": lambda m: weight(m).fill_(0.25),
    "zero_": lambda m: weight(m).zero_(),
    "clamp_": lambda m: weight(m).clamp_(-0.05, 0.05),
    "lerp_": lambda m: weight(m).lerp_(torch.zeros_like(weight(m)), 0.1),
    "row norms": lambda m: weight(m).div_(weight(m).norm(dim=1, keepdim=True)),
    "out=": lambda m: torch.mul(rows(m), 3.0, out=rows(m)),
    "data.mul_": lambda m: weight(m).data.mul_(0.5),
    "detach().add_": lambda m: weight(m).detach().add_(1.0),
    "copy_": lambda m: weight(m).copy_(2 * weight(m)),
    "data.copy_": lambda m: weight(m).data.copy_(weight(m).detach().exp()),
    "copy_ of bf16": lambda m: rows(m).copy_(rows(m).to(torch.bfloat16) * 3),
    "copy_ broadcasts": lambda m: rows(m).copy_(torch.arange(67.0)),
    "row = 0": lambda m: assign(rows(m), 3, 0.0),
    "rows[2:5] = tensor": lambda m: assign(rows(m), slice(2, 5), torch.ones(3, 67)),
    "columns": lambda m: assign(rows(m), (slice(None), slice(None, None, 3)), 7.0),
    "mask": lambda m: assign(rows(m), rows(m) > 0, 0.0),
    "index_put_": lambda m: rows(m).index_put_((torch.tensor([1, 1, 4]),), torch.ones(67), accumulate=True),
    "index_fill_": lambda m: rows(m).index_fill_(0, torch.tensor([0, 7]), 2.0),
    "scatter_": lambda m: rows(m).scatter_(0, torch.zeros(1, 67, dtype=torch.long), 5.0),
    "[3].zero_()": lambda m: rows(m)[3].zero_(),
    "view of a view": lambda m: rows(m).t()[5][2:9].add_(1.0),
    "flat, strided": lambda m: rows(m).view(-1)[::7].neg_(),
    "unbind": lambda m: rows(m).unbind(0)[2].mul_(3.0),
    "split": lambda m: rows(m).split(20)[1].fill_(0.5),
    "diagonal": lambda m: rows(m).diagonal().add_(1.0),
    "unfold": lambda m: rows(m).unfold(0, 2, 2)[1].mul_(2.0),
    "bits": lambda m: rows(m).view(torch.int32).bitwise_xor_(1),
    "flipped": lambda m: rows(m).copy_(rows(m).flip(0)),
    "shifted within itself": lambda m: rows(m)[1:].copy_(rows(m)[:-1].clone()),
    "a bias": lambda m: m.blocks[1].up.bias.to_local()[4:].fill_(9.0),
    "normal_": init(nn.init.normal_, std=0.02),
    "uniform_": init(nn.init.uniform_),
    "trunc_normal_": init(nn.init.trunc_normal_, std=0.02),
    "kaiming_uniform_": init(nn.init.kaiming_uniform_),
    "constant_": init(nn.init.constant_, val=0.1),
    "reset_parameters": lambda m: (torch.manual_seed(4), m.blocks[0].up.reset_parameters()),
    "_foreach_mul_": lambda m: torch._foreach_mul_(all_parameters(m), 0.9),
    "_foreach_add_ of each other": lambda m: torch._foreach_add_(
        all_parameters(m), [p.detach() for p in m.parameters()]
    ),
    "_foreach_lerp_": lambda m: torch._foreach_lerp_(
        all_parameters(m), [torch.zeros_like(p) for p in m.parameters()], 0.3
    ),
    "_foreach_copy_": lambda m: torch._foreach_copy_(
        [p.to_local() for p in m.parameters()], [p.to_local() + 1 for p in m.parameters()]
    ),
    "load_state_dict": lambda m: m.load_state_dict(other_state(m)),
    "load_state_dict of a layer": lambda m: m.blocks[0].load_state_dict(m.blocks[1].state_dict()),
    "set_model_state_dict": lambda m: set_model_state_dict(m, other_state(m)),
    "set_model_state_dict, full": lambda m: set_model_state_dict(
        m, full_state(), options=StateDictOptions(full_state_dict=True)
    ),
    "full_tensor().zero_()": lambda m: m.blocks[0].up.weight.full_tensor().zero_(),
    "data = does nothing to a DTensor": lambda m: setattr(weight(m), "data", weight(m).detach() * 2),
    "vector_to_parameters": lambda m: nn.utils.vector_to_parameters(
        2 * nn.utils.parameters_to_vector(p.to_local() for p in m.parameters()), [p.to_local() for p in m.parameters()]
    ),
    "float() changes nothing": lambda m: m.float(),
    "cpu() changes nothing": lambda m: m.blocks[0].cpu(),
    "apply": lambda m: m.apply(lambda x: x.weight.mul_(0.5) if isinstance(x, nn.LayerNorm) else None),
}
"""Edits that users make under no_grad between steps."""


def train_and_edit(model: nn.Module, optimizer: Any, names: Sequence[str]) -> dict[str, Any]:
    """Train a step after each edit; return the weights after each edit, and finally the losses and the weights."""
    outcome, found = Outcome(), {}
    train(RECIPE, model, optimizer, outcome)
    for name in names:
        with torch.no_grad():
            EDITS[name](model)
        found |= {f"{name}: {param}": value for param, value in locals_of(model).items()}
        train(replace(RECIPE, steps=1), model, optimizer, outcome)
    return {"losses": outcome.losses} | found | locals_of(model)


def differing(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Return the names of values that are not bitwise equal."""
    return [
        name
        for name, value in expected.items()
        if not (torch.equal(value, found[name]) if isinstance(value, torch.Tensor) else value == found[name])
    ]


def compare_edits(names: Sequence[str], paging: Paging, folder: str) -> list[str]:
    """Return the differences from memory after edits, one after the other."""
    model = models.build("toy")
    expected = train_and_edit(model, make_optimizer(RECIPE, model), names)
    with offloaded(RECIPE, paging, Path(folder)) as (model, optimizer):
        return differing(expected, train_and_edit(model, optimizer, names))


@pytest.mark.parametrize("update_schedule", all_but(["auto", "in_forward", "after_backward"], "auto", "after_backward"))
def test_edits_match_memory(update_schedule: str, tmp_path: Path) -> None:
    """This holds even if updates wait for the next forward."""
    fmt = "fp32" if update_schedule == "auto" else "split"
    paging = Paging(host_cache="least", update_schedule=update_schedule, format=fmt)
    assert compare_edits([*EDITS], paging, str(tmp_path)) == []


def test_edits_on_two_ranks_match_memory(tmp_path: Path, pair: RankPool) -> None:
    """The shards have different sizes."""
    names = (
        "mul_",
        "[3].zero_()",
        "bits",
        "_foreach_lerp_",
        "normal_",
        "load_state_dict",
        "set_model_state_dict, full",
    )
    assert pair.run(compare_edits, names, LEAST, str(tmp_path)) == [[], []]


def averaged(model: nn.Module) -> Callable[..., Any]:
    """Compute averages of the weights in memory and copy them into the model."""
    averages = [copy.deepcopy(param).detach() for param in model.parameters()]
    for _ in range(2):
        torch._foreach_lerp_(averages, [param.detach() * 2 for param in model.parameters()], 0.1)
    with torch.no_grad():
        for param, average in zip(model.parameters(), averages, strict=True):
            param.copy_(average)
    return model


def compiled_blocks(model: nn.Module) -> nn.Module:
    """Compile each layer."""
    for block in model.blocks:
        block.compile(backend="eager")
    return model


CHANGES: dict[str, Callable[[nn.Module], Callable[..., Any]]] = {
    "torch.compile": lambda m: torch.compile(m, backend="eager"),
    "compile of layers": compiled_blocks,
    "eval and train": lambda m: m.eval().train(),
    "float": lambda m: m.float(),
    "averages": averaged,
}


@pytest.mark.parametrize("name", CHANGES)
def test_models_changed_after_offload_match_memory(name: str, tmp_path: Path) -> None:
    """Compares losses and weights of the following steps."""

    def after(model: nn.Module, optimizer: Any) -> dict[str, Any]:
        train(RECIPE, model, optimizer, Outcome())
        changed, losses = CHANGES[name](model), []
        for step in range(3):
            loss = changed(batch(model, step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return {"losses": losses} | locals_of(model)

    model = models.build("toy")
    expected = after(model, make_optimizer(RECIPE, model))
    with offloaded(RECIPE, LEAST, tmp_path) as (model, optimizer):
        assert differing(expected, after(model, optimizer)) == []


def compare_after_early_use(folder: str) -> list[str]:
    """Return the differences from memory if the model has run a forward and a backward before `offload`."""

    def after(model: nn.Module, optimizer: Any) -> dict[str, Any]:
        outcome = Outcome()
        train(RECIPE, model, optimizer, outcome)
        return {"losses": outcome.losses} | locals_of(model)

    def used() -> nn.Module:
        model = models.build("toy")
        model(batch(model, 0)).backward()
        model.zero_grad()
        return model

    model = used()
    expected = after(model, make_optimizer(RECIPE, model))
    model = used()
    config = settings(Path(folder), LEAST, 4 << 20)
    with infinity.offload(model, make_optimizer(RECIPE, model), config) as optimizer:
        return differing(expected, after(model, optimizer))


def test_model_used_before_offload_on_two_ranks_matches_memory(tmp_path: Path, pair: RankPool) -> None:
    assert pair.run(compare_after_early_use, str(tmp_path)) == [[], []]


# Copying and saving #


@contextmanager
def both(folder: Path, **settings: Any) -> Iterator[tuple[nn.Module, nn.Module, infinity.PagedOptimizer]]:
    """Yield a model in memory, its offloaded copy and the optimizer of the copy, after a few steps."""
    model = models.build("toy")
    train(RECIPE, model, make_optimizer(RECIPE, model), Outcome())
    with offloaded(RECIPE, LEAST, folder) as (paged, optimizer):
        train(RECIPE, paged, optimizer, Outcome())
        yield model, paged, optimizer


def unpickled(value: Any) -> Any:
    """Return a value after `torch.save` and `torch.load`."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES: dict[str, Callable[[nn.Module], Any]] = {
    "state_dict": lambda m: dict(m.state_dict()),
    "torch.save(state_dict)": lambda m: unpickled(m.state_dict()),
    "torch.save(parameter)": lambda m: unpickled(weight(m)),
    "torch.save(local tensor)": lambda m: unpickled(rows(m)),
    "pickle": lambda m: pickle.loads(pickle.dumps(weight(m))),
    "pickle of a view": lambda m: pickle.loads(pickle.dumps(rows(m).detach()[2:5])),
    "deepcopy": lambda m: copy.deepcopy(weight(m)),
    "deepcopy of a layer": lambda m: copy.deepcopy(m.blocks[0].up).weight,
    "deepcopy of state_dict": lambda m: copy.deepcopy(m.state_dict()),
    "a converted copy of a layer": lambda m: copy.deepcopy(m.blocks[0].up).double().weight,
    "clone": lambda m: weight(m).clone(),
    "detach": lambda m: weight(m).detach(),
    "cast": lambda m: weight(m).double(),
    "tolist": lambda m: rows(m).tolist(),
    "numpy": lambda m: torch.from_numpy(rows(m).detach().numpy().copy()),
    "item": lambda m: rows(m)[1, 2].item(),
    "get_model_state_dict": lambda m: get_model_state_dict(m),
    "get_model_state_dict, full": lambda m: get_model_state_dict(
        m, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    ),
    "get_model_state_dict, cpu_offload": lambda m: get_model_state_dict(m, options=StateDictOptions(cpu_offload=True)),
    "norm": lambda m: nn.utils.get_total_norm(list(m.parameters())),
    "parameters_to_vector": lambda m: nn.utils.parameters_to_vector(m.parameters()),
    "names": lambda m: [(name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in m.named_parameters()],
    "a view that is read later": lambda m: rows(m).t()[2:4],
}
"""Values that users read from a model."""


def plain(value: Any) -> Any:
    """Return the visible properties of tensors in a structure: dtype, shape, strides, DTensor type, and values."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, DTensor):
        return ("DTensor", value.requires_grad, str(value.placements), plain(value.to_local()))
    if isinstance(value, torch.Tensor):
        return (value.dtype, value.shape, value.stride(), value.detach().flatten().view(torch.uint8).tolist())
    return value


def test_copies_match_memory(tmp_path: Path) -> None:
    with both(tmp_path) as (model, paged, _):
        differ = [name for name, copied in COPIES.items() if plain(copied(paged)) != plain(copied(model))]
    assert differ == []


def test_saved_states_load_without_infinity(tmp_path: Path) -> None:
    """Files written by `torch.save` and safetensors do not depend on the run."""
    from safetensors.torch import load_file, save_file

    with both(tmp_path) as (model, paged, _):
        torch.save(paged.state_dict(), tmp_path / "state.pt")
        save_file({n: v.full_tensor().clone() for n, v in paged.state_dict().items()}, tmp_path / "state.safetensors")
        expected = {name: value.full_tensor() for name, value in model.state_dict().items()}
        with pytest.raises(UnsupportedError, match=r"tensor\.clone\(\).*optimizer\.save_pretrained"):
            save_file({name: value.to_local() for name, value in paged.state_dict().items()}, tmp_path / "no")
    pickled = torch.load(tmp_path / "state.pt", weights_only=False)
    assert all(torch.equal(pickled[name].full_tensor(), value) for name, value in expected.items())
    assert not any(isinstance(value.to_local(), PagedShard) for value in pickled.values())
    assert all(torch.equal(value, expected[name]) for name, value in load_file(tmp_path / "state.safetensors").items())


def locals_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return this rank's part of each parameter."""
    return {name: local(param) for name, param in model.named_parameters()}


def test_model_save_pretrained_requires_a_copy(tmp_path: Path) -> None:
    """On one rank, a full tensor is the weight itself, as in memory; a copy can be saved."""
    with offloaded(Recipe(model="llama"), LEAST, tmp_path) as (model, _):
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        with pytest.raises(UnsupportedError, match=r"tensor\.clone\(\).*optimizer\.save_pretrained"):
            model.save_pretrained(tmp_path / "saved", state_dict=full)
        expected = {name: value.clone() for name, value in full.items()}
        model.save_pretrained(tmp_path / "saved", state_dict=expected)
    found = models.llama().from_pretrained(tmp_path / "saved").state_dict()
    assert differing(expected, found) == []


def test_loading_all_shards_beyond_the_limit_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The total counts even if each shard is below the limit. Released shards no longer count."""
    with both(tmp_path) as (_, paged, optimizer):
        monkeypatch.setattr(optimizer._reader._shards, "_load_limit", 100_000)
        for name, param in paged.named_parameters():
            assert local(param).numel(), name
        for save in (lambda: unpickled(paged.state_dict()), lambda: copy.deepcopy(paged.state_dict())):
            with pytest.raises(UnsupportedError, match=r"already loaded.*limit.*optimizer\.save_pretrained"):
                save()
        for name, param in paged.named_parameters():
            assert local(param).numel(), name
        with pytest.raises(UnsupportedError, match="limit"), torch.no_grad():
            torch._foreach_mul_(list(paged.parameters()), 0.0)
        assert all(param.to_local().any() for param in paged.parameters()), (
            "the error is raised before anything is written"
        )


# Operations that require memory #

CONVERSIONS: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "to(bfloat16)": (lambda m: m.to(torch.bfloat16), "float32 to bfloat16"),
    "half": (lambda m: m.half(), "float32 to float16"),
    "double": (lambda m: m.double(), "float32 to float64"),
    "double of a layer": (lambda m: m.blocks[0].double(), "float32 to float64"),
    "bfloat16 of a linear layer": (lambda m: m.blocks[1].up.bfloat16(), "float32 to bfloat16"),
    "to(meta)": (lambda m: m.to("meta"), "move them from cpu to meta"),
    "to_empty": (lambda m: m.to_empty(device="cpu"), "replace their values"),
    "share_memory": (lambda m: m.share_memory(), "share their memory"),
    "load_state_dict(assign=True)": (
        lambda m: m.load_state_dict(models.build("toy", seed=5).state_dict(), assign=True),
        r"load_state_dict\(assign=True\)",
    ),
    "share_memory_": (lambda m: rows(m).share_memory_(), "no memory of its own"),
    "data_ptr": (lambda m: rows(m).data_ptr(), "no memory of its own"),
    "storage": (lambda m: rows(m).storage(), "no memory of its own"),
    "resize_": (lambda m: rows(m).detach().resize_(3), r"would change the shape.*tensor\.copy_"),
    "set_": (lambda m: rows(m).detach().set_(torch.zeros(3)), r"would change the shape.*tensor\.copy_"),
    "t_": (lambda m: rows(m).detach().t_(), r"would change the shape.*tensor\.copy_"),
    "fully_shard again": (lambda m: fully_shard(m.blocks[0].up, mesh=infinity.mesh("cpu")), ""),
}


def test_conversions_of_offloaded_weights_raise(tmp_path: Path) -> None:
    """They raise before any change, so that training continues normally."""
    with both(tmp_path) as (model, paged, _):
        for name, (convert, words) in CONVERSIONS.items():
            with pytest.raises(UnsupportedError if words else Exception, match=words), torch.no_grad():
                convert(paged)
            assert differing(locals_of(model), locals_of(paged)) == [], name
        assert models.loss_of(paged, batch(paged, 3)).item() == models.loss_of(model, batch(model, 3)).item()


class _UnusedHandle:
    """Storage handle that must not be used."""

    name = "weight"

    def load(self) -> torch.Tensor:
        raise AssertionError("unexpected load")

    def save(self, content: torch.Tensor) -> None:
        raise AssertionError("unexpected save")


def test_cuda_sanitizer_accepts_tensors_without_memory() -> None:
    """`TORCH_CUDA_SANITIZER=1` requests the address of every argument of an operator."""
    weight = PagedTensor.stored(_UnusedHandle(), (2, 3), torch.float32, torch.device("cuda", 0))
    handler = ArgumentHandler()
    handler._handle_argument(weight, is_write=True, metadata_only=False)
    assert handler.dataptrs_written == {id(weight)}, "the sanitizer identifies tensors without elements by id"
    with pytest.raises(UnsupportedError, match="has no memory of its own"):
        weight.data_ptr()


def test_numpy_array_of_a_weight_is_read_only(tmp_path: Path) -> None:
    """It is a copy, so writes would be lost."""
    with both(tmp_path) as (_, paged, _), torch.no_grad(), pytest.raises(ValueError, match="read-only"):
        rows(paged).numpy()[3] = 0


def test_replaced_local_tensor_raises(tmp_path: Path) -> None:
    """The next forward and the next checkpoint raise the error."""
    with both(tmp_path) as (_, paged, optimizer):
        paged.blocks[0].up.weight._local_tensor = torch.zeros_like(paged.blocks[0].up.weight.to_local().clone())
        with pytest.raises(UnsupportedError, match=r"blocks\.0\.up\.weight.*load_state_dict\(assign=False\)"):
            models.loss_of(paged, batch(paged, 0))
        with pytest.raises(UnsupportedError, match=r"blocks\.0\.up\.weight.*load_state_dict\(assign=False\)"):
            optimizer.save_checkpoint()


def test_conversion_that_keeps_parameters_converts_buffers(tmp_path: Path) -> None:
    recipe = Recipe(model="buffered")
    with offloaded(recipe, LEAST, tmp_path) as (model, _):
        model.scale = model.scale.double()
        model.float()
        assert model.scale.dtype == torch.float32


def test_closing_a_run_removes_conversion_guards(tmp_path: Path) -> None:
    with offloaded(RECIPE, LEAST, tmp_path) as (model, _):
        assert all("_apply" in vars(module) for module in model.modules())
    assert not any("_apply" in vars(module) for module in model.modules())
