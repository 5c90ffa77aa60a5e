"""Tests of random sequences of gradient operations: after each of them, the bits equal those in memory."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from support import models
from support.loop_pattern import same
from support.train import Paging, Recipe, batch, build, make_optimizer, offloaded, state_in_memory, state_on_nvme

RECIPE = Recipe(model="toy")
PARTS = ("all", "even", "matrices", "first")


def chosen(model: nn.Module, part: str) -> list[nn.Parameter]:
    """Return the selected parameters."""
    params = list(model.parameters())
    return {"all": params, "even": params[::2], "matrices": [p for p in params if p.ndim == 2], "first": params[:1]}[
        part
    ]


def grads(model: nn.Module, part: str) -> list[torch.Tensor]:
    """Return the gradients of the selected parameters that have one."""
    return [param.grad for param in chosen(model, part) if param.grad is not None]


def backward(model: nn.Module, number: int, _: str) -> None:
    """Run another backward."""
    models.loss_of(model, batch(model, number)).backward()


def read(model: nn.Module, _: int, part: str) -> list[torch.Tensor]:
    return [grad.full_tensor().clone() for grad in grads(model, part)]


def norms(model: nn.Module, number: int, part: str) -> list[torch.Tensor]:
    order = (2.0, 1.0, float("inf"))[number % 3]
    return [norm.full_tensor() for norm in torch._foreach_norm(grads(model, part), order)] if grads(model, part) else []


def clip(model: nn.Module, number: int, part: str) -> list[torch.Tensor]:
    norm: Any = torch.nn.utils.clip_grad_norm_(chosen(model, part), 0.1, (2.0, float("inf"))[number % 2])
    return [norm.full_tensor() if hasattr(norm, "full_tensor") else norm]


def scale(model: nn.Module, number: int, part: str) -> None:
    for grad in grads(model, part):
        grad.mul_(0.7 + number)


def add(model: nn.Module, number: int, part: str) -> None:
    """Add values that bf16 cannot represent."""
    for grad in grads(model, part):
        grad.add_(torch.ones_like(grad), alpha=1e-3 * number)


def write(model: nn.Module, number: int, part: str) -> None:
    """Write to a part through a view."""
    for grad in grads(model, part):
        grad.to_local()[number % 7 :: 2] *= -1.5


def zero(model: nn.Module, _: int, part: str) -> None:
    for param in chosen(model, part):
        if param.grad is not None:
            param.grad.zero_()


def assign(model: nn.Module, number: int, part: str) -> None:
    """Assign new gradients."""
    for param in chosen(model, part):
        if param.grad is not None:
            param.grad = param.grad * 0.5 + number


def drop(model: nn.Module, _: int, part: str) -> None:
    for param in chosen(model, part):
        param.grad = None


OPERATIONS: dict[str, Callable[[nn.Module, int, str], Any]] = {
    function.__name__: function for function in (backward, read, norms, clip, scale, add, write, zero, assign, drop)
}
sequences = st.lists(
    st.tuples(
        st.sampled_from(["step", "zero_grad", "evaluate", *OPERATIONS]), st.integers(0, 5), st.sampled_from(PARTS)
    ),
    max_size=12,
)


def run(model: nn.Module, optimizer: torch.optim.Optimizer, sequence: list[tuple[str, int, str]]) -> list[Any]:
    """Run a backward and then the given operations; return the observed values."""
    seen: list[Any] = []
    backward(model, 0, "")
    for name, number, part in sequence:
        if name == "step":
            optimizer.step()
            optimizer.zero_grad(set_to_none=number > 1)
        elif name == "zero_grad":
            (model if number % 2 else optimizer).zero_grad()
        elif name == "evaluate":
            with torch.no_grad():
                seen.append(models.loss_of(model, batch(model, number)))
                model.reshard()
        elif name == "backward":
            backward(model, number, part)
        else:
            with torch.no_grad():
                seen.append(OPERATIONS[name](model, number, part))
    optimizer.step()
    return seen


@settings(max_examples=12)
@given(sequence=sequences, update_schedule=st.sampled_from(["after_backward", "in_forward"]), least=st.booleans())
def test_gradient_operations_match_memory(
    sequence: list[tuple[str, int, str]], update_schedule: str, least: bool
) -> None:
    """Compares the values read between operations and the final state."""
    model = build(RECIPE)
    optimizer = make_optimizer(RECIPE, model)
    expected = run(model, optimizer, sequence), state_in_memory(model, optimizer)
    paging = Paging(host_cache="least" if least else "all", update_schedule=update_schedule)
    with tempfile.TemporaryDirectory() as folder, offloaded(RECIPE, paging, Path(folder)) as (paged, paged_optimizer):
        found = run(paged, paged_optimizer, sequence), state_on_nvme(paged, paged_optimizer)
    assert same(expected[0], found[0])
    for name, states in expected[1].items():
        for kind, value in states.items():
            assert same(value.reshape(-1), found[1][name][kind].reshape(-1)), f"{name}/{kind}"
