"""Tests of custom optimizers with additional state: bitwise equal to training in memory, or rejected with a reason."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.content.layout import FSDPModuleSpec, ShardSpec, build_layout
from infinity.errors import BudgetError, UnsupportedError
from infinity.optim import slicing_check
from infinity.optim.slicing_check import make_kernel
from support import models
from support import optimizers as own
from support.layouts import FORMATS
from support.optimizers import build, compare, groups_of, train
from support.ranks import RankPool
from support.tables import WIDE, all_but
from support.train import Outcome, Paging, batch, local, settings
from support.unsharded import MuonByFlag

SUPPORTED: dict[str, own.Make] = {
    "counter_in_group": lambda p: own.CounterInGroup(p, weight_decay=0.1),
    "counter_on_self": lambda p: own.CounterOnSelf(p, lr=0.1, momentum=0.9),
    "decay_of_matrices": lambda p: own.DecayOfMatrices(p, lr=0.1, momentum=0.9),
    "keywords": lambda p: own.Keywords(p, lr=0.1, momentum=0.9),
    "setting_on_self": lambda p: own.SettingOnSelf(p, lr=0.1, factor=0.3),
    "replacing": lambda p: own.Replacing(p),
    "centralised": lambda p: own.Centralised(p, lr=0.1, momentum=0.9),
    "trust_ratio": lambda p: own.TrustRatio(p, lr=0.1, momentum=0.9),
    "by_method": lambda p: own.ByFunction(p, method=True, lr=0.1),
    "own_zero_grad": lambda p: own.Dropping(p, lr=0.1),
}
UNSUPPORTED: dict[str, tuple[own.Make, str]] = {
    "global_norm": (
        lambda p: own.GlobalNorm(p, lr=0.1),
        "GlobalNorm.*depends on gradients, values or settings of other groups",
    ),
    "rate_of_another_group": (lambda p: own.LargestRate(p, lr=0.1), "LargestRate.*of other groups"),
    "noise": (lambda p: own.Noisy(p, lr=0.1), "Noisy draws random numbers"),
    "factored": (lambda p: own.Factored(p, lr=0.1), r"Factored.*state 'rows' of shape \(12,\)"),
}


@pytest.mark.parametrize("name", all_but(SUPPORTED, *set(SUPPORTED) - {"decay_of_matrices", "replacing", "by_method"}))
def test_supported_optimizers_match_training_in_memory(name: str, tmp_path: Path) -> None:
    """Weights, states and counters in two groups match; parameters span several pages."""
    assert compare(SUPPORTED[name], tmp_path) == []


@pytest.mark.parametrize(
    ("name", "update_schedule", "checkpoint"),
    [
        ("counter_in_group", "in_forward", 3),
        ("counter_on_self", "in_backward", 3),
        pytest.param("counter_on_self", "in_forward", 3, marks=WIDE),
        pytest.param("counter_in_group", "after_backward", 0, marks=WIDE),
    ],
)
def test_counters_advance_once_per_step(name: str, update_schedule: str, checkpoint: int, tmp_path: Path) -> None:
    """This holds even if updates run after `step` has returned. Another model and another optimizer resume them."""
    assert compare(SUPPORTED[name], tmp_path, update_schedule=update_schedule, checkpoint=checkpoint) == []


@pytest.mark.parametrize("name", ["counter_in_group", "centralised"])
def test_two_ranks_match_training_in_memory(name: str, tmp_path: Path, pair: RankPool) -> None:
    """Counters agree across ranks, and rows belong to uneven shards."""
    assert pair.run(compare_by_name, name, str(tmp_path)) == [[], []]


def compare_by_name(name: str, folder: str) -> list[str]:
    """Return the differences from training in memory. Runs on every rank."""
    return compare(SUPPORTED[name], Path(folder))


def test_skipped_steps_do_not_advance_counters(tmp_path: Path) -> None:
    """A step with a nonfinite norm counts as not taken; a step without gradients counts as in memory."""

    def run(model: nn.Module, optimizer: Any, *, clips: bool) -> list[Any]:
        found: list[Any] = []
        for number in range(6):
            if number != 3:
                scale = float("inf") if number == 1 else 1.0
                (models.loss_of(model, batch(model, number)) * scale).backward()
                if clips:
                    optimizer.clip_grad_norm_(1e6)
                else:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e6)
            if clips or number != 1:
                optimizer.step()
            optimizer.zero_grad()
            found.append([group["step"] for group in optimizer.param_groups])
        return [found, {name: local(param) for name, param in model.named_parameters()}]

    plain = build()
    steps, weights = run(plain, own.CounterInGroup(groups_of(plain)), clips=False)
    assert steps == [[1, 1], [1, 1], [2, 2], [3, 3], [4, 4], [5, 5]]
    model = build()
    tree = settings(tmp_path, Paging(update_schedule="after_backward"), 64 << 20)
    with infinity.offload(model, own.CounterInGroup(groups_of(model)), tree) as optimizer:
        paged_steps, paged_weights = run(model, optimizer, clips=True)
        assert paged_steps == steps
        assert [name for name in weights if not torch.equal(weights[name], paged_weights[name])] == []


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_optimizers_are_rejected_with_a_reason(name: str, tmp_path: Path) -> None:
    """The error names the dependency, and no file remains."""
    make, reason = UNSUPPORTED[name]
    model = build()
    with pytest.raises(UnsupportedError, match=f"(?s){reason}.*use an element-wise optimizer"):
        infinity.offload(model, make(groups_of(model)), settings(tmp_path, Paging(), 64 << 20))
    assert list((tmp_path / "nvme0").iterdir()) == []


def ones(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    """Return parameters filled with ones, with the given shapes."""
    return [nn.Parameter(torch.ones(shape)) for shape in shapes]


def test_smallest_sufficient_slice_shape_is_chosen() -> None:
    """Flat slices, slices with the parameter's rank, rows for row means, or the full parameter for its norm."""

    def slices(optimizer: torch.optim.Optimizer) -> list[str]:
        (group,) = optimizer.param_groups
        kernel = make_kernel(optimizer)
        return [kernel.discover(param).slices for param in group["params"]]

    params = ones((3,), (2, 3), (2, 3, 2, 2))
    assert slices(torch.optim.AdamW(params, weight_decay=0.1)) == ["flat"] * 3
    assert slices(own.DecayOfMatrices(params, lr=0.1)) == ["flat", "rank", "rank"]
    assert slices(own.Centralised(params, lr=0.1)) == ["flat", "rows", "rows"]
    assert slices(own.TrustRatio(params, lr=0.1)) == ["whole"] * 3
    assert slices(torch.optim.Muon(params[1:2], ns_steps=1)) == ["whole"]
    stacks = [{"params": ones((2, 3), (4, 2, 3)), "use_muon": True}]
    assert slices(MuonByFlag(stacks)) == ["whole", "rows"]  # each matrix of a stack by itself


def test_slicing_check_works_with_a_zero_learning_rate() -> None:
    """Warm-up starts with a zero learning rate, and weight decay may be enabled later."""
    kernel = make_kernel(own.TrustRatio(ones((2, 3)), lr=0.0))
    assert [spec.slices for spec in kernel.layouts.values()] == ["whole"]


def test_slicing_check_does_not_change_optimizer_or_random_state() -> None:
    params = ones((2, 3), (3,))
    optimizer = own.CounterOnSelf(params, lr=0.1, momentum=0.9)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    make_kernel(optimizer)
    assert torch.equal(before, torch.get_rng_state())
    assert optimizer.count == 0
    assert not optimizer.state
    assert all((param == 1).all() for param in params)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1]


def test_rows_that_do_not_fit_pages_are_unsupported(tmp_path: Path) -> None:
    """This concerns encoded formats and rows larger than a page; the error names the parameter."""
    model = build()
    tree = settings(tmp_path, Paging(format="split"), 64 << 20)
    with pytest.raises(UnsupportedError, match=r"Centralised .*rows.*state\.format"):
        infinity.offload(model, own.Centralised(groups_of(model), lr=0.1), tree)
    spec = ShardSpec(name="wide", numel=80_000, padded=80_000, segment_key="plain", trainable=True, row=20_000)
    with pytest.raises(BudgetError, match=r"whole rows of wide.*memory\.page_bytes"):
        build_layout([FSDPModuleSpec(name="fsdp_module", shards=(spec,))], FORMATS, 64 << 10)


class HoldingSGD(torch.optim.SGD):
    """SGD with an additional attribute."""

    def __init__(self, params: Any, held: Any) -> None:
        super().__init__(params, lr=0.1)
        self.held = held


@pytest.mark.parametrize(
    ("held", "reason"),
    [
        (torch.zeros(10_000), "a tensor of shape"),
        ([nn.Linear(2, 2)], "a module"),
        ((n for n in ()), "cannot be copied"),
    ],
)
def test_large_or_uncopyable_optimizer_attributes_are_unsupported(held: Any, reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        make_kernel(HoldingSGD(ones((2, 3)), held))


def test_optimizer_methods_are_unsupported_and_attributes_readable(tmp_path: Path) -> None:
    """Unsupported calls raise, and hooks on `step` run once per step."""
    model = build()
    optimizer = own.LossDependent(groups_of(model), lr=0.1)
    calls: list[Any] = []
    optimizer.register_step_post_hook(lambda *arguments: calls.append(arguments[0]))
    optimizer.note = "mine"
    with infinity.offload(model, optimizer, settings(tmp_path, Paging(), 64 << 20)) as paged:
        assert paged.note == "mine"
        assert not hasattr(paged, "nothing")
        with pytest.raises(UnsupportedError, match="first_step"):
            paged.first_step()
        with pytest.raises(UnsupportedError, match="closure"):
            paged.step(lambda: 1.0)
        with pytest.raises(UnsupportedError, match="argument other than a closure"):
            paged.step(hessian=1)
        train(model, paged, Outcome(), last=2)
        assert calls == [paged, paged]


def matrices(groups: list[dict[str, Any]]) -> list[nn.Parameter]:
    """Return the parameters of the first group."""
    return list(groups[0]["params"])


UNCOPYABLE_RULES: dict[str, tuple[own.Make, str]] = {
    "ids": (lambda p: own.ById(p, {id(one) for one in matrices(p)}, lr=0.1), "the id of a parameter in .*rule"),
    "list of ids": (lambda p: own.ById(p, [id(one) for one in matrices(p)], lr=0.1), "the id of a parameter in .*rule"),
    "keys": (lambda p: own.ById(p, {id(one): 0.1 for one in matrices(p)}, lr=0.1), "the id of a parameter in .*rule"),
    "parameters": (lambda p: own.ByParameter(p, dict.fromkeys(matrices(p), 0.1), lr=0.1), "a parameter in .*rule"),
    "setting": (
        lambda p: torch.optim.SGD([{**g, "apart": (frozenset(map(id, g["params"])),)} for g in p], lr=0.1),
        "the id of a parameter in 'apart' of its param groups",
    ),
    "function": (lambda p: own.ByFunction(p, lr=0.1), "a function in .*rule .*the optimizer"),
    "zero_grad": (lambda p: own.Halving(p, lr=0.1), r"Halving .*zero_grad\(\)"),
}


@pytest.mark.parametrize("name", UNCOPYABLE_RULES)
def test_rules_that_slice_copies_cannot_follow_are_unsupported(name: str, tmp_path: Path) -> None:
    """Rules by parameter or ID, functions bound to the optimizer, and custom `zero_grad` methods are rejected."""
    make, reason = UNCOPYABLE_RULES[name]
    model = build()
    with pytest.raises(UnsupportedError, match=reason):
        infinity.offload(model, make(groups_of(model)), settings(tmp_path, Paging(), 64 << 20))
    assert list((tmp_path / "nvme0").iterdir()) == []


def test_rules_by_parameter_name_or_attribute_are_unsupported() -> None:
    """Slices have neither; names and attributes that no step reads are permitted."""
    params = ones((2, 3), (3,))
    named = [("first", params[0]), ("blocks.1", params[1])]
    with pytest.raises(UnsupportedError, match=r"ByName reads .*'param_names'.*param group"):
        make_kernel(own.ByName(named, lr=0.1))
    make_kernel(torch.optim.AdamW(named))
    make_kernel(own.ByAttribute(params, lr=0.1))
    params[1].small = True  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedError, match=r"ByAttribute reads .*\(small\).*param group"):
        make_kernel(own.ByAttribute(params, lr=0.1))
    make_kernel(torch.optim.AdamW(named))


@dataclass
class Factors:
    """Settings that an optimizer holds as an object."""

    factors: list[float] = field(default_factory=lambda: [1.0])


class ByObject(own.Ruled):
    """Reads its factor from an object."""

    def factor_of(self, param: torch.Tensor) -> float:
        """Return the factor."""
        return float(self.rule.factors[0])


@pytest.mark.parametrize("update_schedule", all_but(["auto", "in_forward"], "auto"))
def test_object_attribute_can_be_changed_between_steps(update_schedule: str, tmp_path: Path) -> None:
    """Like a number, it applies from the next step on and not to pending updates."""

    def run(model: nn.Module, base_optimizer: Any, optimizer: Any) -> list[torch.Tensor]:
        for number in range(4):
            train(model, optimizer, Outcome(), number, number + 1)
            base_optimizer.rule.factors[0] *= 0.5
        return [local(param) for param in model.parameters()]

    plain = build()
    in_memory = ByObject(groups_of(plain), Factors(), lr=0.1)
    expected = run(plain, in_memory, in_memory)
    model = build()
    optimizer = ByObject(groups_of(model), Factors(), lr=0.1)
    with infinity.offload(
        model, optimizer, settings(tmp_path, Paging(update_schedule=update_schedule), 64 << 20)
    ) as paged:
        found = run(model, optimizer, paged)
    assert all(map(torch.equal, expected, found))


def two_group_optimizer(
    model: nn.Module, kind: type[torch.optim.Optimizer] = torch.optim.AdamW, **settings: Any
) -> Any:
    """Return an optimizer with two parameter groups, one of which has `settings`."""
    return kind([{"params": [model.weight], **settings}, {"params": [model.bias]}])


class CustomAdamW(torch.optim.AdamW):
    """User-defined optimizer class, whose steps may read anything."""


def test_slicing_results_of_torch_optimizers_are_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check runs again if anything differs that updates depend on, and for every custom class."""
    checks, run = [], slicing_check._SlicingCheck.run
    monkeypatch.setattr(slicing_check, "_FOUND", {})
    monkeypatch.setattr(slicing_check._SlicingCheck, "run", lambda self: checks.append(1) or run(self))

    def count_checks(optimizer: torch.optim.Optimizer) -> int:
        checks.clear()
        make_kernel(optimizer)
        return len(checks)

    model = nn.Linear(3, 4)
    assert count_checks(two_group_optimizer(model)) == 1
    assert count_checks(two_group_optimizer(nn.Linear(5, 7))) == 0, "the result must not depend on sizes"
    first, known = (
        make_kernel(two_group_optimizer(model, torch.optim.NAdam)),
        make_kernel(two_group_optimizer(model, torch.optim.NAdam)),
    )
    assert len(checks) == 1
    for name in ("layouts", "advancing", "advancing_own", "uses_closure"):
        assert getattr(first, name) == getattr(known, name)
    others = {
        "rate": two_group_optimizer(model, lr=0.5),
        "dtype": two_group_optimizer(nn.Linear(3, 4).bfloat16()),
        "dimensions": two_group_optimizer(nn.Conv1d(3, 4, 5)),
        "attribute": two_group_optimizer(model),
    }
    others["attribute"].temperature = 2.0
    assert {name: count_checks(optimizer) for name, optimizer in others.items()} == dict.fromkeys(others, 1)
    assert {name: count_checks(optimizer) for name, optimizer in others.items()} == dict.fromkeys(others, 0)
    with_object = two_group_optimizer(model)
    with_object.helper = own.TrustRatio
    assert [count_checks(with_object), count_checks(with_object)] == [1, 1], "the effect of a function is unknown"
    assert [
        count_checks(two_group_optimizer(model, CustomAdamW)),
        count_checks(two_group_optimizer(model, CustomAdamW)),
    ] == [1, 1]
    reaching = two_group_optimizer(model)
    reaching.param_groups[0]["first"] = id(model.weight)
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="the id of a parameter"):
            make_kernel(reaching)
