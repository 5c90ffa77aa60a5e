"""The user's own optimizer, with all that it keeps on itself: the same bits as in memory, or refused with a reason."""

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
from support.train import Outcome, Paging, batch, local, settings
from support.whole import MuonByFlag

EQUAL: dict[str, own.Make] = {
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
COUNTING = ["counter_in_group", "counter_on_self"]
UNSUPPORTED: dict[str, tuple[own.Make, str]] = {
    "global_norm": (
        lambda p: own.GlobalNorm(p, lr=0.1),
        "GlobalNorm.*depends on gradients, values or settings of other groups",
    ),
    "rate_of_another_group": (lambda p: own.LargestRate(p, lr=0.1), "LargestRate.*of other groups"),
    "noise": (lambda p: own.Noisy(p, lr=0.1), "Noisy draws random numbers"),
    "factored": (lambda p: own.Factored(p, lr=0.1), r"Factored.*state 'rows' of shape \(12,\)"),
}


@pytest.mark.parametrize("name", EQUAL)
def test_what_can_be_served_keeps_its_bits(name: str, tmp_path: Path) -> None:
    """Weights, states and what is counted in the groups; parameters span pages, groups are two."""
    assert compare(EQUAL[name], tmp_path) == []


@pytest.mark.parametrize(
    ("name", "update_schedule"),
    [
        ("counter_in_group", "in_backward"),
        ("counter_on_self", "in_forward"),
        ("counter_in_group", "after_backward"),
    ],
)
def test_counters_advance_once_per_step(name: str, update_schedule: str, tmp_path: Path) -> None:
    """Wherever updates run: also where they run after `step` has returned."""
    assert compare(EQUAL[name], tmp_path, update_schedule=update_schedule) == []


@pytest.mark.parametrize("name", COUNTING)
def test_counters_are_resumed_from_a_checkpoint(name: str, tmp_path: Path) -> None:
    """By another model and another optimizer; updates run after `step` has returned."""
    assert compare(EQUAL[name], tmp_path, update_schedule="in_forward", checkpoint=4) == []


@pytest.mark.parametrize("name", ["counter_in_group", "centralised"])
def test_two_ranks_keep_their_bits(name: str, tmp_path: Path, pair: RankPool) -> None:
    """Counters are those of every rank; rows are those of its uneven shards."""
    assert pair.run(compare_by_name, name, str(tmp_path)) == [[], []]


def compare_by_name(name: str, folder: str) -> list[str]:
    """Runs on every rank."""
    return compare(EQUAL[name], Path(folder))


@pytest.mark.parametrize("update_schedule", ["in_forward", "after_backward"])
def test_a_step_that_is_skipped_counts_nothing_and_one_without_gradients_does(
    update_schedule: str, tmp_path: Path
) -> None:
    """A norm that is not finite is as no `step()`; a `step()` without gradients is as in memory."""

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
    tree = settings(tmp_path, Paging(update_schedule=update_schedule), 64 << 20)
    with infinity.offload(model, own.CounterInGroup(groups_of(model)), tree) as optimizer:
        paged_steps, paged_weights = run(model, optimizer, clips=True)
        assert paged_steps == steps
        assert [name for name in weights if not torch.equal(weights[name], paged_weights[name])] == []


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_cannot_be_served_is_refused(name: str, tmp_path: Path) -> None:
    """The error says what depends on what, and nothing is left on disk."""
    make, words = UNSUPPORTED[name]
    model = build()
    with pytest.raises(UnsupportedError, match=f"(?s){words}.*use an element-wise optimizer"):
        infinity.offload(model, make(groups_of(model)), settings(tmp_path, Paging(), 64 << 20))
    assert list((tmp_path / "nvme0").iterdir()) == []


def small(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    """Return parameters."""
    return [nn.Parameter(torch.ones(shape)) for shape in shapes]


def test_the_shape_of_slices_is_the_least_that_suffices() -> None:
    """Flat, the parameter's rank for rules on dimensions, rows for means of rows, all of it for its norm."""

    def slices(optimizer: torch.optim.Optimizer) -> list[str]:
        (group,) = optimizer.param_groups
        kernel = make_kernel(optimizer)
        return [kernel.discover(param, group).slices for param in group["params"]]

    params = small((3,), (2, 3), (2, 3, 2, 2))
    assert slices(torch.optim.AdamW(params, weight_decay=0.1)) == ["flat"] * 3
    assert slices(own.DecayOfMatrices(params, lr=0.1)) == ["flat", "rank", "rank"]
    assert slices(own.Centralised(params, lr=0.1)) == ["flat", "rows", "rows"]
    assert slices(own.TrustRatio(params, lr=0.1)) == ["whole"] * 3
    assert slices(torch.optim.Muon(params[1:2])) == ["whole"]
    stacks = [{"params": small((2, 3), (4, 2, 3)), "use_muon": True}]
    assert slices(MuonByFlag(stacks)) == ["whole", "rows"]  # each matrix of a stack by itself


def test_a_learning_rate_of_zero_hides_nothing() -> None:
    """Warm-up begins with it; so does a weight decay that is switched on later."""
    kernel = make_kernel(own.TrustRatio(small((2, 3)), lr=0.0))
    assert [spec.slices for spec in kernel.layouts.values()] == ["whole"]


def test_the_users_optimizer_and_random_numbers_are_left_alone() -> None:
    """The probe runs on copies."""
    params = small((2, 3), (3,))
    optimizer = own.CounterOnSelf(params, lr=0.1, momentum=0.9)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    make_kernel(optimizer)
    assert torch.equal(before, torch.get_rng_state())
    assert optimizer.count == 0
    assert not optimizer.state
    assert all((param == 1).all() for param in params)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1]


def test_a_setting_on_the_optimizer_may_be_changed(tmp_path: Path) -> None:
    """As a setting of a group may: it counts from the next step on, and not for updates that wait."""

    def run(model: nn.Module, given: Any, optimizer: Any) -> list[torch.Tensor]:
        for number in range(4):
            given.factor = 0.1 * (number + 1)
            train(model, optimizer, Outcome(), number, number + 1)
        return [local(param) for param in model.parameters()]

    plain = build()
    in_memory = own.SettingOnSelf(groups_of(plain), lr=0.1)
    expected = run(plain, in_memory, in_memory)
    model = build()
    optimizer = own.SettingOnSelf(groups_of(model), lr=0.1)
    with infinity.offload(
        model, optimizer, settings(tmp_path, Paging(update_schedule="in_forward"), 64 << 20)
    ) as paged:
        found = run(model, optimizer, paged)
    assert all(map(torch.equal, expected, found))


def test_rows_that_pages_cannot_hold_whole_are_refused(tmp_path: Path) -> None:
    """Encoded formats, and rows larger than a page; the parameter is named."""
    model = build()
    tree = settings(tmp_path, Paging(format="split"), 64 << 20)
    with pytest.raises(UnsupportedError, match=r"Centralised .*rows.*state\.format"):
        infinity.offload(model, own.Centralised(groups_of(model), lr=0.1), tree)
    spec = ShardSpec(name="wide", numel=80_000, padded=80_000, segment_key="plain", trainable=True, row=20_000)
    with pytest.raises(BudgetError, match=r"whole rows of wide.*memory\.page_bytes"):
        build_layout([FSDPModuleSpec(name="fsdp_module", shards=(spec,))], FORMATS, 64 << 10)


class Holding(torch.optim.SGD):
    """Keeps something on itself."""

    def __init__(self, params: Any, held: Any) -> None:
        super().__init__(params, lr=0.1)
        self.held = held


@pytest.mark.parametrize(
    ("held", "words"),
    [
        (torch.zeros(10_000), "a tensor of shape"),
        ([nn.Linear(2, 2)], "a module"),
        ((n for n in ()), "cannot be copied"),
    ],
)
def test_what_an_optimizer_keeps_is_not_copied_in_any_size(held: Any, words: str) -> None:
    """Nothing of the model's size, and nothing that cannot be copied."""
    with pytest.raises(UnsupportedError, match=words):
        make_kernel(Holding(small((2, 3)), held))


def test_methods_of_an_optimizer_are_refused_and_attributes_are_there(tmp_path: Path) -> None:
    """Nothing is silently nothing; hooks around `step` run once per step."""
    model = build()
    optimizer = own.LossDependent(groups_of(model), lr=0.1)
    calls: list[Any] = []
    optimizer.register_step_post_hook(lambda *given: calls.append(given[0]))
    optimizer.note = "mine"
    with infinity.offload(model, optimizer, settings(tmp_path, Paging(), 64 << 20)) as paged:
        assert paged.note == "mine"
        assert not hasattr(paged, "nothing")
        with pytest.raises(UnsupportedError, match="first_step"):
            paged.first_step()
        with pytest.raises(UnsupportedError, match="closure"):
            paged.step(lambda: 1.0)
        with pytest.raises(UnsupportedError, match="arguments"):
            paged.step(hessian=1)
        train(model, paged, Outcome(), last=2)
        assert calls == [paged, paged]


def matrices(groups: list[dict[str, Any]]) -> list[nn.Parameter]:
    """Return the parameters of the first group."""
    return list(groups[0]["params"])


APART: dict[str, tuple[own.Make, str]] = {
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


@pytest.mark.parametrize("name", APART)
def test_what_copies_over_slices_would_not_find_is_refused(name: str, tmp_path: Path) -> None:
    """Rules that know the model's parameters, functions that reach the original, a `zero_grad` of one's own."""
    make, words = APART[name]
    model = build()
    with pytest.raises(UnsupportedError, match=words):
        infinity.offload(model, make(groups_of(model)), settings(tmp_path, Paging(), 64 << 20))
    assert list((tmp_path / "nvme0").iterdir()) == []


def test_rules_by_names_and_attributes_of_parameters_are_refused() -> None:
    """Slices have neither; where no step reads them, they are nothing."""
    params = small((2, 3), (3,))
    named = [("first", params[0]), ("blocks.1", params[1])]
    with pytest.raises(UnsupportedError, match=r"ByName reads .*'param_names'.*param group"):
        make_kernel(own.ByName(named, lr=0.1))
    make_kernel(torch.optim.AdamW(named))
    make_kernel(own.ByAttribute(params, lr=0.1))
    params[1].small = True  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedError, match=r"ByAttribute reads .*\(small\).*param group"):
        make_kernel(own.ByAttribute(params, lr=0.1))
    make_kernel(torch.optim.AdamW(named))


def test_names_and_attributes_that_no_step_reads_change_nothing(tmp_path: Path) -> None:
    """torch puts `param_names` into the groups that it is given so; transformers marks what it has initialized."""

    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        given = [{**g, "params": [(f"{n}.{i}", p) for i, p in enumerate(g["params"])]} for n, g in enumerate(groups)]
        for group in groups:
            for param in group["params"]:
                param._is_hf_initialized = True
        return torch.optim.AdamW(given)

    assert compare(make, tmp_path) == []


@dataclass
class Factors:
    """Settings that an optimizer keeps as an object."""

    factors: list[float] = field(default_factory=lambda: [1.0])


class ByObject(own.Ruled):
    """Asks an object on itself."""

    def factor_of(self, param: torch.Tensor) -> float:
        """Return the factor."""
        return float(self.rule.factors[0])


@pytest.mark.parametrize("update_schedule", ["auto", "in_forward"])
def test_an_object_on_the_optimizer_may_be_changed(update_schedule: str, tmp_path: Path) -> None:
    """As a number may: it counts from the next step on, and not for updates that wait."""

    def run(model: nn.Module, given: Any, optimizer: Any) -> list[torch.Tensor]:
        for number in range(4):
            train(model, optimizer, Outcome(), number, number + 1)
            given.rule.factors[0] *= 0.5
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


def of(model: nn.Module, kind: type[torch.optim.Optimizer] = torch.optim.AdamW, **settings: Any) -> Any:
    """An optimizer of two param groups, of which one is given `settings`."""
    return kind([{"params": [model.weight], **settings}, {"params": [model.bias]}])


class Quiet(torch.optim.AdamW):
    """A class of somebody else, which may look at anything."""


def test_what_was_found_of_an_optimizer_of_torch_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one that is equal in all that updates depend on; of every other, and of other classes, it is tried anew."""
    tried, run = [], slicing_check._SlicingCheck.run
    monkeypatch.setattr(slicing_check, "_FOUND", {})
    monkeypatch.setattr(slicing_check._SlicingCheck, "run", lambda self: tried.append(1) or run(self))

    def tries(optimizer: torch.optim.Optimizer) -> int:
        tried.clear()
        make_kernel(optimizer)
        return len(tried)

    model = nn.Linear(3, 4)
    assert tries(of(model)) == 1
    assert tries(of(nn.Linear(5, 7))) == 0, "sizes are not tried"
    first, known = make_kernel(of(model, torch.optim.NAdam)), make_kernel(of(model, torch.optim.NAdam))
    assert len(tried) == 1
    for name in ("layouts", "advancing", "advancing_own", "uses_closure"):
        assert getattr(first, name) == getattr(known, name)
    others = {
        "rate": of(model, lr=0.5),
        "dtype": of(nn.Linear(3, 4).bfloat16()),
        "dimensions": of(nn.Conv1d(3, 4, 5)),
        "attribute": of(model),
    }
    others["attribute"].temperature = 2.0
    assert {name: tries(optimizer) for name, optimizer in others.items()} == dict.fromkeys(others, 1)
    assert {name: tries(optimizer) for name, optimizer in others.items()} == dict.fromkeys(others, 0)
    with_object = of(model)
    with_object.helper = own.TrustRatio
    assert [tries(with_object), tries(with_object)] == [1, 1], "nobody knows what a function does"
    assert [tries(of(model, Quiet)), tries(of(model, Quiet))] == [1, 1]
    reaching = of(model)
    reaching.param_groups[0]["first"] = id(model.weight)
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="the id of a parameter"):
            make_kernel(reaching)
