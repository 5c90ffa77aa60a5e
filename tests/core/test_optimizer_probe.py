"""The user's own optimizer, with all that it keeps on itself: the same bits as in memory, or refused with a reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import core_optimizers as own
import pytest
import torch
from core_optimizers import build, compare, groups_of, train
from core_train import Outcome, Paging, settings
from torch import nn

import infinity
from infinity.errors import UnsupportedError
from infinity.optim.probe import make_kernel

EQUAL: dict[str, own.Make] = {
    "counter_in_group": lambda p: own.CounterInGroup(p, weight_decay=0.1),
    "counter_on_self": lambda p: own.CounterOnSelf(p, lr=0.1, momentum=0.9),
    "decay_of_matrices": lambda p: own.DecayOfMatrices(p, lr=0.1, momentum=0.9),
    "keywords": lambda p: own.Keywords(p, lr=0.1, momentum=0.9),
    "setting_on_self": lambda p: own.SettingOnSelf(p, lr=0.1, factor=0.3),
    "replacing": lambda p: own.Replacing(p),
    "centralised": lambda p: own.Centralised(p, lr=0.1, momentum=0.9),
}
COUNTING = ["counter_in_group", "counter_on_self"]
PLACEMENTS = ["in_backward", "in_both", "in_forward", "after_backward"]
REFUSED: dict[str, tuple[own.Make, str]] = {
    "trust_ratio": (lambda p: own.TrustRatio(p, lr=0.1), "TrustRatio.*other elements of its parameter"),
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


@pytest.mark.parametrize("name", COUNTING)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_counters_advance_once_per_step(name: str, placement: str, tmp_path: Path) -> None:
    """Wherever updates run: also where they run after `step` has returned."""
    assert compare(EQUAL[name], tmp_path, placement=placement) == []


@pytest.mark.parametrize("name", COUNTING)
@pytest.mark.parametrize("placement", ["in_backward", "in_forward"])
def test_counters_are_resumed_from_a_commit(name: str, placement: str, tmp_path: Path) -> None:
    """In another process's stead: another model, another optimizer."""
    assert compare(EQUAL[name], tmp_path, placement=placement, commit=4) == []


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused(name: str, tmp_path: Path) -> None:
    """The error says what depends on what, and nothing is left on disk."""
    make, words = REFUSED[name]
    model = build()
    with pytest.raises(UnsupportedError, match=f"(?s){words}.*use an element-wise optimizer"):
        infinity.offload(model, make(groups_of(model)), settings(tmp_path, Paging(), 64 << 20))
    assert list((tmp_path / "nvme0").iterdir()) == []


def small(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    """Return parameters."""
    return [nn.Parameter(torch.ones(shape)) for shape in shapes]


def test_the_shape_of_slices_is_the_least_that_suffices() -> None:
    """Flat where that is enough, the parameter's rank for rules on dimensions, whole rows for means of rows."""

    def slices(optimizer: torch.optim.Optimizer) -> list[str]:
        (group,) = optimizer.param_groups
        kernel = make_kernel(optimizer)
        return [kernel.discover(param, group).slices for param in group["params"]]

    params = small((3,), (2, 3), (2, 3, 2, 2))
    assert slices(torch.optim.AdamW(params, weight_decay=0.1)) == ["flat"] * 3
    assert slices(own.DecayOfMatrices(params, lr=0.1)) == ["flat", "rank", "rank"]
    assert slices(own.Centralised(params, lr=0.1)) == ["flat", "rows", "rows"]


def test_a_learning_rate_of_zero_hides_nothing() -> None:
    """Warm-up begins with it; so does a weight decay that is switched on later."""
    with pytest.raises(UnsupportedError, match="other elements"):
        make_kernel(own.TrustRatio(small((2, 3)), lr=0.0))


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
