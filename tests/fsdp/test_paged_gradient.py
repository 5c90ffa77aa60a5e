"""Tests of uses of `p.grad` in training loops: they match memory bit for bit, or raise an error with the reason."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm

from infinity.errors import InfinityError, UnsupportedError
from infinity.fsdp.gradient import PagedGradient
from support import models
from support.loop_pattern import same
from support.ranks import RankPool
from support.tables import WIDE, all_but
from support.train import (
    Outcome,
    Paging,
    Recipe,
    batch,
    build,
    differences,
    local,
    make_optimizer,
    offloaded,
    state_in_memory,
    state_on_nvme,
)

Use = Callable[[nn.Module, torch.optim.Optimizer], Any]
RECIPE = Recipe(model="toy")


def plain(value: Any) -> Any:
    """Return values observed in a step in a comparable form, on this rank."""
    if isinstance(value, DTensor):
        return value.full_tensor().clone()
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    return value.clone() if isinstance(value, torch.Tensor) else value


def backward(model: nn.Module, number: int = 0, scale: Any = 1.0) -> None:
    """Run one forward and backward."""
    (scale * models.loss_of(model, batch(model, number))).backward()


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, use: Use, number: int = 3) -> list[Any]:
    """Take steps that use gradients, and return the observed values."""
    seen = []
    for step in range(number):
        backward(model, step)
        with torch.no_grad():
            seen.append(plain(use(model, optimizer)))
        optimizer.step()
        optimizer.zero_grad()
    return seen


Loop = Callable[[nn.Module, torch.optim.Optimizer], list[Any]]


def compare(
    loop: Loop, update_schedule: str, folder: str | Path, recipe: Recipe = RECIPE, host_cache: str = "all"
) -> list[str]:
    """Run a loop in memory and on NVMe; return the differences."""
    model = build(recipe)
    optimizer = make_optimizer(recipe, model)
    expected = loop(model, optimizer)
    expected_state = Outcome(state=state_in_memory(sharded(model), optimizer))
    with offloaded(recipe, Paging(host_cache=host_cache, update_schedule=update_schedule), Path(folder)) as (
        paged,
        paged_optimizer,
    ):
        found = loop(paged, paged_optimizer)
        found_state = Outcome(state=state_on_nvme(sharded(paged), paged_optimizer))
    listed = [] if same(expected, found) else [f"seen: {expected} != {found}"]
    return listed + differences(expected_state, found_state)


def sharded(model: nn.Module) -> nn.Module:
    """Return a model after resharding it, which a forward without a backward requires."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return model


def gradients(model: nn.Module) -> list[torch.Tensor]:
    """Return all existing gradients."""
    return [param.grad for param in model.parameters() if param.grad is not None]


def norm_of(order: float, foreach: bool | None) -> Use:
    """Clip with PyTorch's function."""
    return lambda model, _: clip_grad_norm_(model.parameters(), 0.5, order, foreach=foreach)


def each(change: Callable[[torch.Tensor], Any]) -> Use:
    """Apply a change to every gradient."""

    def use(model: nn.Module, _: Any) -> None:
        for gradient in gradients(model):
            change(gradient)

    return use


def in_two_calls(model: nn.Module, _: Any) -> Any:
    """Compute the norm and scale the gradients in separate calls."""
    total = get_total_norm(gradients(model))
    clip_grads_with_norm_(model.parameters(), 0.5, total)
    return total


def scaled_then_clipped(model: nn.Module, _: Any) -> Any:
    """Scale by several numbers, then clip twice."""
    torch._foreach_mul_(gradients(model), 3.0)
    torch._foreach_div_(gradients(model), 7.0)
    for gradient in gradients(model):
        gradient *= torch.tensor(0.3)
    return clip_grad_norm_(model.parameters(), 0.5), clip_grad_norm_(model.parameters(), 0.1)


def clipped_by_the_optimizer(model: nn.Module, optimizer: Any) -> Any:
    """Clip twice with the optimizer's method if it has one."""
    if hasattr(optimizer, "clip_grad_norm_"):
        return [optimizer.clip_grad_norm_(most) for most in (0.5, 0.1)]
    return [clip_grad_norm_(model.parameters(), most) for most in (0.5, 0.1)]


def noise(model: nn.Module, _: Any) -> None:
    """Add scaled values whose memory is reused for every gradient."""
    for number, gradient in enumerate(gradients(model)):
        part = gradient.to_local()
        part.add_(torch.full(part.shape, 0.01), alpha=number)
        part += torch.linspace(-1, 1, part.numel()).view(part.shape)


def assigned(model: nn.Module, _: Any) -> None:
    """Assign new tensors and None to `p.grad`."""
    params = [param for param in model.parameters() if param.grad is not None]
    params[0].grad = params[0].grad * 2
    params[1].grad = params[1].grad.detach()
    params[2].grad = None
    first, second, *_ = [param for param in params[3:] if param.shape == (models.WIDTH,)]
    first.grad, second.grad = second.grad, first.grad


def parts(model: nn.Module, _: Any) -> Any:
    """Write to parts of gradients through views."""
    seen = []
    for gradient in gradients(model):
        part = gradient.to_local()
        part[3] = 0
        part.view(-1)[5:9].mul_(2.0)
        first, *_ = part.split(2)
        first.fill_(0.25)
        part.t()[0] += 1 if part.ndim == 2 else 0
        seen.append(part[1:7].sum())
    return seen


def logged(model: nn.Module, _: Any) -> Any:
    """Read values that are commonly logged."""
    return [
        [g.norm(), g.abs().max(), g.mean(), torch.isfinite(g).all(), g.full_tensor().std(), g.to_local().tolist()[0],
         torch.histc(g.to_local(), 5), g.to_local().float().numpy().sum().item(), g.clone(), (g * 2).sum()]
        for g in gradients(model)
    ]  # fmt: skip


def foreach_of_lists(model: nn.Module, _: Any) -> Any:
    """Change lists of gradients in place with lists of tensors."""
    locals_ = [gradient.to_local() for gradient in gradients(model)]
    torch._foreach_add_(locals_, [torch.ones(part.shape) for part in locals_], alpha=0.1)
    torch._foreach_mul_(locals_, [0.5 + number for number in range(len(locals_))])
    torch._foreach_lerp_(locals_, [part.clone() for part in reversed(locals_[::-1])], 0.5)
    return torch._foreach_norm(locals_), torch._foreach_norm(locals_, 1.0)


USES: dict[str, Use] = {
    **{f"norm_{order}": norm_of(order, None) for order in (2.0, 1.0, 3.0, float("inf"), -float("inf"), 0.0)},
    "norm_foreach": norm_of(2.0, True),
    "norm_not_foreach": norm_of(2.0, False),
    "norm_inf_not_foreach": norm_of(float("inf"), False),
    "clip_in_two_calls": in_two_calls,
    "scaled_then_clipped": scaled_then_clipped,
    "clipped_by_the_optimizer": clipped_by_the_optimizer,
    "value": lambda model, _: clip_grad_value_(model.parameters(), 1e-3),
    "value_not_foreach": lambda model, _: clip_grad_value_(model.parameters(), 1e-3, foreach=False),
    "negated": each(lambda gradient: gradient.neg_()),
    "noise": noise,
    "sign": each(lambda gradient: gradient.copy_(gradient.sign())),
    "signed_in_place": each(lambda gradient: gradient.to_local().sign_()),
    "every_second_zeroed": lambda model, _: torch._foreach_zero_(gradients(model)[::2]),
    "assigned": assigned,
    "parts": parts,
    "logged": logged,
    "lists": foreach_of_lists,
    "many": each(lambda gradient: [gradient.mul_(1.1) for _ in range(40)]),
}


def all_uses(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Take a step with each use."""
    return [steps(model, optimizer, use, 1) for use in USES.values()]


@pytest.mark.parametrize(
    ("update_schedule", "host_cache"), [pytest.param("in_forward", "all", marks=WIDE), ("after_backward", "least")]
)
def test_uses_of_gradients_match_memory(update_schedule: str, host_cache: str, tmp_path: Path) -> None:
    """Compares the values that each use observes, and finally weights, moments and step counts."""
    assert compare(all_uses, update_schedule, tmp_path, host_cache=host_cache) == []


def uses_on_two_ranks(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Take a step with each use that combines both ranks."""
    names = ("norm_2.0", "norm_inf", "norm_0.0", "norm_not_foreach", "clip_in_two_calls", "scaled_then_clipped",
             "clipped_by_the_optimizer", "logged")  # fmt: skip
    return [steps(model, optimizer, USES[name], 1) for name in names]


def test_uses_of_gradients_match_memory_on_two_ranks(tmp_path: Path, pair: RankPool) -> None:
    assert pair.run(compare, uses_on_two_ranks, "in_forward", str(tmp_path)) == [[], []]


# Loops #


def between(use: Use, micro: int = 1) -> Loop:
    """Train, and run `use` after each backward."""

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
        seen = []
        for number in range(4):
            for part in range(micro):
                backward(model, 10 * number + part)
                seen.append(plain(use(model, optimizer)))
            optimizer.step()
            optimizer.zero_grad()
        return seen

    return loop


def hooked(edit: Callable[[nn.Parameter], None], micro: int = 1) -> Loop:
    """Train with user hooks that are registered before the second step; some are removed later."""

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
        handles: list[Any] = []
        for number in range(4):
            if number == 1:
                trained = [param for param in model.parameters() if param.requires_grad]
                handles += [param.register_post_accumulate_grad_hook(edit) for param in trained]
            if number == 3:
                for handle in handles[::2]:
                    handle.remove()
            for part in range(micro):
                backward(model, 10 * number + part)
            optimizer.step()
            optimizer.zero_grad()
        return []

    return loop


def halved(param: nn.Parameter) -> None:
    """Change a gradient in a hook."""
    with torch.no_grad():
        param.grad.mul_(0.5)
        param.grad.clamp_(-1e-2, 1e-2)


def added_noise(model: nn.Module, optimizer: Any) -> None:
    """Change gradients to which the next backward adds."""
    with torch.no_grad():
        torch._foreach_mul_(gradients(model), 0.3)
        for gradient in gradients(model)[::3]:
            gradient.to_local().add_(torch.ones(()))
        for gradient in gradients(model)[1::3]:
            gradient.zero_()


OTHERS = {
    "fp32": Recipe(model="toy", policy="fp32"),
    "pure_bf16": Recipe(model="toy", policy="pure_bf16"),
    "tied": Recipe(model="tied"),
    "frozen": Recipe(model="frozen"),
    "spare": Recipe(model="spare"),
    "repeated": Recipe(model="repeated"),
    "sliced": Recipe(model="llama", slices=2),
    "nesterov": Recipe(model="toy", optimizer="sgd_nesterov", groups=True),
}


@pytest.mark.parametrize("recipe", all_but(OTHERS, *OTHERS.keys() - {"fp32"}))
def test_other_models_and_dtypes_match_memory(recipe: str, tmp_path: Path) -> None:
    """Covers tied, frozen and unused parameters, and gradients stored in fp32, in halves or in bf16."""

    def loop(model: nn.Module, optimizer: Any) -> list[Any]:
        seen = [steps(model, optimizer, use, 2) for use in (scaled_then_clipped, noise, logged)]
        return [*seen, hooked(halved, 2)(model, optimizer), between(added_noise, 2)(model, optimizer)]

    assert compare(loop, "in_forward", tmp_path, OTHERS[recipe], host_cache="least") == []


# Unavailable gradients #


def test_using_consumed_gradients_raises(tmp_path: Path) -> None:
    """The error names the setting that keeps them."""
    with offloaded(RECIPE, Paging(host_cache="all", update_schedule="in_backward"), tmp_path) as (model, optimizer):
        steps(model, optimizer, lambda *_: None, 2)
        backward(model, 2)
        for use in ("norm_2.0", "norm_not_foreach", "clipped_by_the_optimizer", "value", "logged", "noise", "parts",
                    "every_second_zeroed", "negated"):  # fmt: skip
            with pytest.raises(InfinityError, match=r"update\.schedule"), torch.no_grad():
                USES[use](model, optimizer)


def test_replacing_consumed_gradients_raises(tmp_path: Path) -> None:
    """The next `step` or forward raises the error."""
    for number, change in enumerate((
        lambda model: model.zero_grad(),
        lambda model: setattr(next(model.parameters()), "grad", None),
        lambda model: setattr(p := next(model.parameters()), "grad", torch.zeros_like(p.grad)),
    )):  # fmt: skip
        for after in ("step", "forward"):
            folder = tmp_path / f"{number}{after}"
            folder.mkdir()
            with offloaded(RECIPE, Paging(host_cache="all", update_schedule="in_backward"), folder) as (
                model,
                optimizer,
            ):
                steps(model, optimizer, lambda *_: None, 2)
                backward(model, 2)
                change(model)
                with pytest.raises(InfinityError, match=r"update\.schedule"):
                    optimizer.step() if after == "step" else backward(model, 3)


def written_before_backward(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Train with retained gradients to which values are written before backward."""
    for number in range(4):
        if number > 1:
            with torch.no_grad():
                for param in list(model.parameters())[:3]:
                    if param.grad is not None:
                        param.grad.copy_(torch.full_like(param, 0.01 * number))
        backward(model, number)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return [local(param) for param in model.parameters()]


@pytest.mark.parametrize("update_schedule", ["in_forward", "in_backward"])
def test_backward_adds_to_user_written_gradients(update_schedule: str, tmp_path: Path) -> None:
    """All update schedules update once, with the sum."""
    assert compare(written_before_backward, update_schedule, tmp_path) == []


@pytest.mark.parametrize("update_schedule", ["after_backward", "in_backward"])
def test_gradients_are_unavailable_after_the_step(update_schedule: str, tmp_path: Path) -> None:
    """Reading them or adding to them raises, even if the caller kept a reference."""
    with offloaded(RECIPE, Paging(host_cache="all", update_schedule=update_schedule), tmp_path) as (model, optimizer):
        for number in range(2):
            backward(model, number)
            kept = next(model.parameters()).grad
            assert isinstance(kept.to_local(), PagedGradient)
            optimizer.step()
            with pytest.raises(InfinityError, match=r"step\(\).*zero_grad\(\)"):
                kept.norm()
            if number:
                with pytest.raises(InfinityError, match=r"zero_grad\(\) before the next backward"):
                    backward(model, number)
                return
            optimizer.zero_grad()
            with pytest.raises(InfinityError, match="dropped"):
                kept.clone()


def test_gradient_of_a_closed_run_raises(tmp_path: Path) -> None:
    with offloaded(RECIPE, Paging(host_cache="all", update_schedule="after_backward"), tmp_path) as (model, _):
        backward(model)
        kept = next(model.parameters()).grad
    with pytest.raises(InfinityError, match="closed"):
        kept.clone()


def test_reading_a_gradient_reads_only_its_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clipping and scaling read no pages."""
    with offloaded(RECIPE, Paging(host_cache="all", update_schedule="in_forward"), tmp_path) as (model, optimizer):
        backward(model)
        pager, touched = optimizer.run.pager, list[int]()
        access = pager.access

        def watched(uses: Any, **settings: Any) -> Any:
            touched.extend(use.page for use in uses)
            return access(uses, **settings)

        monkeypatch.setattr(pager, "access", watched)
        clip_grad_norm_(model.parameters(), 0.5)
        torch._foreach_mul_(gradients(model), 0.5)
        assert touched == []
        model.blocks[1].up.weight.grad.full_tensor().sum()
        placed = next(at for at in optimizer.run.layout.shards if at.spec.name == "blocks.1.up.weight")
        pages = optimizer.run.layout.segments[placed.segment].grad_pages[0]
        assert set(touched) == {
            page.index for page in pages if page.start < placed.start + placed.spec.numel and placed.start < page.stop
        }


@pytest.mark.parametrize("how", ["scaled", "unscaled"])
def test_scale_factor_is_copied_once_on_first_read(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls do not wait for numbers on a device, which the meta device represents here."""
    with offloaded(RECIPE, Paging(host_cache="all", update_schedule="after_backward"), tmp_path) as (model, _):
        backward(model)
        parts = [gradient.to_local().detach() for gradient in gradients(model)]
        wanted = [0.5 * part.clone() for part in parts]
        factor = torch.empty((), device="meta")
        if how == "scaled":
            torch._foreach_mul_(parts, factor)
        else:
            torch._amp_foreach_non_finite_check_and_unscale_(parts, torch.zeros(()), factor)
        to, moved = torch.Tensor.to, list[torch.Tensor]()

        def arriving(value: torch.Tensor, *args: Any, **settings: Any) -> torch.Tensor:
            if not value.is_meta:
                return to(value, *args, **settings)
            moved.append(value)
            return torch.tensor(0.5)

        monkeypatch.setattr(torch.Tensor, "to", arriving)
        assert all(torch.equal(part, value) for part, value in zip(parts, wanted, strict=True))
        assert len(parts) > 5
        assert len(moved) == 1


def test_assigned_gradient_must_be_a_dtensor(tmp_path: Path) -> None:
    """The optimizer in memory cannot use it either."""
    with offloaded(RECIPE, Paging(host_cache="all", update_schedule="in_forward"), tmp_path) as (model, optimizer):
        backward(model)
        param = model.blocks[0].norm.weight
        param.grad = torch.zeros(param.shape)
        with pytest.raises(UnsupportedError, match=r"assigned to blocks\.0\.norm\.weight is not a DTensor"):
            optimizer.step()


# Access without a PyTorch operation #

COPIES: dict[str, Callable[[torch.Tensor], Any]] = {
    "array": lambda part: part.numpy(),
    "asarray": lambda part: np.asarray(part),
    "asarray_of_doubles": lambda part: np.asarray(part, dtype=np.float64),
    "list": lambda part: part.tolist(),
    "deepcopy": copy.deepcopy,
    "pickle": lambda part: pickle.loads(pickle.dumps(part)),
    "save": lambda part: saved(part),
    "data": lambda part: part.data,
}
MEMORY: dict[str, Callable[[torch.Tensor], Any]] = {
    "dlpack": torch.from_dlpack,
    "address": lambda part: part.data_ptr(),
    "untyped_storage": lambda part: part.untyped_storage().data_ptr(),
    "storage": lambda part: part.storage(),
    "is_shared": lambda part: part.is_shared(),
    "shared": lambda part: part.share_memory_(),
    "pinned": lambda part: part.pin_memory(),
    "data": lambda part: setattr(part, "data", torch.zeros(part.shape)),
    "set": lambda part: part.set_(torch.zeros(part.shape)),
    "resized": lambda part: part.resize_(3),
    "transposed": lambda part: part.t_(),
    "flattened": lambda part: part.unsqueeze_(0),
    "vector": lambda part: nn.utils.vector_to_parameters(torch.zeros(part.numel()), [part]),
}


def saved(value: torch.Tensor) -> Any:
    """Return a value after `torch.save` and `torch.load`."""
    with io.BytesIO() as file:
        torch.save(value, file)
        file.seek(0)
        return torch.load(file, weights_only=False)


@pytest.mark.parametrize("how", ["slice", "view"])
def test_copies_match_memory_and_memory_access_raises(how: str, tmp_path: Path) -> None:
    """The gradient is unchanged."""
    with offloaded(RECIPE, Paging(host_cache="all", update_schedule="after_backward"), tmp_path) as (model, _):
        backward(model)
        full = model.blocks[0].up.weight.grad.to_local().detach()
        part, wanted = (full, full.clone()) if how == "slice" else (full[1:4], full.clone()[1:4])
        assert isinstance(part, PagedGradient)
        for name, copied in COPIES.items():
            found, expected = copied(part), copied(wanted)
            assert np.array_equal(found, expected) if name != "list" else found == expected, name
            assert type(found) is type(expected) or name == "data", name
        for name, access in MEMORY.items():
            with pytest.raises(UnsupportedError, match=r"gradient of blocks\.0\.up\.weight .*copy_\(values\)"):
                access(part)
            assert torch.equal(part, wanted), name
        for array in (part.numpy(), np.asarray(part)):
            with pytest.raises(ValueError, match="read-only"):
                array[:] = 0
        part.data.mul_(2.0)
        assert torch.equal(part, 2.0 * wanted)


def test_copies_of_gradients_remain_valid_after_the_step(tmp_path: Path) -> None:
    """They are DTensors in memory."""
    with offloaded(RECIPE, Paging(host_cache="all", update_schedule="after_backward"), tmp_path) as (model, optimizer):
        backward(model)
        wanted = model.head.weight.grad.full_tensor().clone()
        found = [COPIES[name](model.head.weight.grad) for name in ("deepcopy", "pickle", "save")]
        optimizer.step()
        assert all(isinstance(copied, DTensor) and torch.equal(copied.full_tensor(), wanted) for copied in found)
