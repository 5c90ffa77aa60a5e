"""Tests of offloaded weights and gradients in `torch.inference_mode()`: views and copies match memory bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_

from infinity.fsdp.gradient import PagedGradient
from infinity.fsdp.paged_tensor import PagedTensor
from support import models
from support.ranks import RankPool
from support.train import Paging, Recipe, batch, make_optimizer, offloaded

RECIPE = Recipe(model="toy")

USES: dict[str, Callable[[torch.Tensor], Any]] = {
    "double": lambda t: t.double(),
    "float": lambda t: t.float(),
    "to(float64)": lambda t: t.to(torch.float64),
    "to(float32)": lambda t: t.to(torch.float32),
    "to(cpu)": lambda t: t.to("cpu"),
    "to(copy=True)": lambda t: t.to(torch.float32, copy=True),
    "bfloat16().float()": lambda t: t.bfloat16().float(),
    "type_as": lambda t: t.type_as(torch.zeros((), dtype=torch.float64)),
    "contiguous": lambda t: t.contiguous(),
    "clone": lambda t: t.clone(),
    "data": lambda t: t.data,
    "detach_": lambda t: t.detach_(),
    "norm": lambda t: torch.linalg.norm(t),
    "sum": lambda t: t.sum(),
    "t @ t": lambda t: t @ t.mT,
}
"""Operations on a DTensor and on a local tensor."""

USES_OF_ROWS: dict[str, Callable[[torch.Tensor], Any]] = {
    "t().contiguous()": lambda t: t.t().contiguous(),
    "reshape(-1)": lambda t: t.reshape(-1),
    "t().reshape(-1)": lambda t: t.t().reshape(-1),
    "flatten": lambda t: t.flatten(),
    "ravel of columns": lambda t: t[:, 1::2].ravel(),
    "unflatten": lambda t: t.unflatten(0, (1, -1)),
    "expand_as": lambda t: t.expand_as(torch.zeros(2, *t.shape)),
    "narrow": lambda t: t.narrow(0, 1, 2),
    "slice": lambda t: t[1:3, ::2],
    "row": lambda t: t[3],
    "chunk": lambda t: t.chunk(3)[1],
    "tensor_split": lambda t: t.tensor_split(3)[2],
    "movedim": lambda t: t.movedim(0, 1),
    "T": lambda t: t.T,
    "view_as": lambda t: t.view_as(t),
    "positive": lambda t: +t,
    "real": lambda t: t.real,
    "conj": lambda t: t.conj(),
    "atleast_3d": lambda t: torch.atleast_3d(t),
    "broadcast_tensors": lambda t: torch.broadcast_tensors(t, torch.zeros(2, 1, 1))[0],
    "conj_physical": lambda t: torch.conj_physical(t),
    "dropout in evaluation": lambda t: nn.functional.dropout(t, 0.5, training=False),
    "dropout": lambda t: seeded(lambda: nn.functional.dropout(t, 0.5)),
    "einsum": lambda t: torch.einsum("ij,ij->i", t, t),
    "linear": lambda t: nn.functional.linear(t, t),
    "numpy": lambda t: torch.from_numpy(t.numpy().copy()),
    "mask": lambda t: t[t > 0],
}
"""Operations on a local tensor."""


def seeded(draw: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Return the result of a function that draws random numbers, after seeding."""
    torch.manual_seed(5)
    return draw()


def unchanged(tensor: torch.Tensor) -> torch.Tensor:
    """Return the DTensor itself."""
    return tensor


def rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


TABLE = {
    **{f"{name} of a DTensor": (unchanged, use) for name, use in USES.items()},
    **{name: (rows, use) for name, use in (USES | USES_OF_ROWS).items()},
}


def weight(model: nn.Module) -> torch.Tensor:
    return model.blocks[0].up.weight


def gradient(model: nn.Module) -> torch.Tensor:
    return model.blocks[0].up.weight.grad


KINDS = {"weight": weight, "gradient": gradient}


def plain(value: torch.Tensor) -> torch.Tensor:
    """Return an in-memory copy of this rank's part."""
    return rows(value).detach().clone()


def seen(model: nn.Module, of: Callable[[nn.Module], torch.Tensor], name: str) -> dict[str, Any]:
    """Use a tensor in inference mode; return the result, also after writes to the tensor and to the result."""
    part, use = TABLE[name]
    model.reshard()
    start = plain(of(model))
    with torch.inference_mode():
        try:
            result = use(part(of(model)))
        except (NotImplementedError, RuntimeError) as error:
            return {"error": type(error), "message": str(error).partition("\n")[0]}
        found = {
            "looks": (type(result) is DTensor, result.dtype, result.shape, rows(result).stride()),
            "inference": rows(result).is_inference(),
            "values": plain(result),
        }
        of(model).mul_(2)
        found["after the tensor was written to"] = plain(result)
        if not any(step == 0 for step in rows(result).stride()):
            rows(result).add_(1)
            found["written to"] = plain(result)
            found["the tensor then"] = plain(of(model))
        rows(of(model)).copy_(start)
    return found


def differing_uses(folder: str) -> list[str]:
    """Return the operations whose results differ from memory."""
    found = []
    model = models.build("toy")
    models.loss_of(model, batch(model, 0)).backward()
    with offloaded(RECIPE, Paging(update_schedule="after_backward"), Path(folder)) as (paged, optimizer):
        models.loss_of(paged, batch(paged, 0)).backward()
        for kind, of in KINDS.items():
            for name in TABLE:
                expected, there = seen(model, of, name), seen(paged, of, name)
                if expected.keys() != there.keys():
                    found.append(f"{name}, {kind}: {there}, but in memory {expected}")
                    continue
                found += [f"{name}, {kind}: {key}" for key, value in expected.items() if not same(value, there[key])]
        optimizer.zero_grad()
    return found


def steps(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Train with writes to weights, gradients and states in inference mode; return norms and weights."""
    found: dict[str, Any] = {}
    for number in range(3):
        models.loss_of(model, batch(model, number)).backward()
        with torch.inference_mode():
            found[f"norm {number}"] = plain(clip_grad_norm_(model.parameters(), 0.5))
            for index, param in enumerate(model.parameters()):
                part = param.grad.to_local()
                WRITES[index % len(WRITES)](part)
                WRITES[(index + number) % len(WRITES)](param.to_local())
        optimizer.step()
        with torch.inference_mode():
            optimizer.state[weight(model)]["exp_avg"].mul_(0.5)
        optimizer.zero_grad()
    return found | {name: plain(param) for name, param in model.named_parameters()}


WRITES: tuple[Callable[[torch.Tensor], Any], ...] = (
    lambda t: t.mul_(1.5),
    lambda t: t.copy_(t.sign() * 0.01),
    lambda t: t.tanh_(),
    lambda t: t.clip_(-0.01, 0.01),
    lambda t: t[1:].zero_(),
    lambda t: t.flatten()[::3].neg_(),
    lambda t: t.detach_().add_(0.01),
    lambda t: t.multiply_(torch.tensor(0.5)),
)
"""Writes in inference mode."""


def differing_steps(folder: str) -> list[str]:
    """Return the names of values that differ from memory."""
    model = models.build("toy")
    expected = steps(model, make_optimizer(RECIPE, model))
    with offloaded(RECIPE, Paging(update_schedule="after_backward"), Path(folder)) as (paged, optimizer):
        found = steps(paged, optimizer)
    return [name for name, value in expected.items() if not same(value, found[name])]


def same(first: Any, second: Any) -> bool:
    """Return whether two values are bitwise equal."""
    return torch.equal(first, second) if isinstance(first, torch.Tensor) else bool(first == second)


def test_views_and_copies_match_memory(tmp_path: Path) -> None:
    """Copies are independent of the tensor, whereas views share its elements."""
    assert differing_uses(str(tmp_path)) == []


def test_views_and_copies_match_memory_on_two_ranks(tmp_path: Path, pair: RankPool) -> None:
    assert pair.run(differing_uses, str(tmp_path)) == [[], []]


def test_training_after_writes_matches_memory_on_two_ranks(tmp_path: Path, pair: RankPool) -> None:
    """Covers writes to weights, gradients and states in inference mode."""
    assert pair.run(differing_steps, str(tmp_path)) == [[], []]


def test_full_tensor_on_one_rank_is_a_view(tmp_path: Path) -> None:
    """Writes to the result of `full_tensor()` change the weight, as in memory."""
    with offloaded(RECIPE, Paging(), tmp_path) as (paged, _), torch.inference_mode():
        try:
            models.build("toy").head.weight.full_tensor()
        except NotImplementedError:  # torch 2.11
            pytest.skip("this torch release does not support full_tensor() in inference mode")
        paged.head.weight.full_tensor()[2] = 7.0
        assert paged.head.weight.to_local()[2].tolist() == [7.0] * 67


def test_copies_use_memory_and_views_do_not(tmp_path: Path) -> None:
    """Copies are loaded once, not at each use."""
    with offloaded(RECIPE, Paging(update_schedule="after_backward"), tmp_path) as (paged, optimizer):
        models.loss_of(paged, batch(paged, 0)).backward()
        with torch.inference_mode():
            for tensor, cls in ((weight(paged).to_local(), PagedTensor), (gradient(paged).to_local(), PagedGradient)):
                assert all(type(copy) is torch.Tensor for copy in (tensor.double(), tensor.t().reshape(-1)))
                assert all(isinstance(view, cls) for view in (tensor.float(), tensor.flatten(), tensor.chunk(2)[0]))
        optimizer.zero_grad()
