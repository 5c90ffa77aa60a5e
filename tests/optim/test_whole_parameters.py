"""Muon, and others that need a whole parameter: pages of a matrix leased together, slices of ranks put together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.budget import whole_bytes
from infinity.errors import BudgetError, ConfigError, InfinityError
from support import models
from support.optimizers import build
from support.ranks import RankPool
from support.train import Paging, batch, settings
from support.whole import MAKES, compare, compare_by_name, muon_and_adamw, paged

SINGLE: dict[str, tuple[str, dict[str, Any]]] = {
    "in backward, on a thread": ("muon and adamw", {}),
    "in forward": ("muon and adamw", {"placement": "in_forward"}),
    "after backward, at once": ("muon and adamw", {"placement": "after_backward", "cores": 0}),
    "resumed": ("muon and adamw", {"placement": "in_forward", "commit": 3}),
    "a matrix of four dimensions": ("muon by flag", {}),
    "a split master": ("muon and adamw", {"format": "split"}),
}
PAIR: dict[str, tuple[str, dict[str, Any]]] = {
    "in backward, on a thread": ("muon and adamw", {}),
    "after backward": ("muon and adamw", {"placement": "after_backward"}),
    "at once, resumed": ("muon by flag", {"cores": 0, "commit": 3}),
}


@pytest.mark.parametrize("case", SINGLE)
def test_bits_are_those_of_memory(case: str, tmp_path: Path) -> None:
    """Matrices span pages; the arena is the smallest that is let through."""
    name, given = SINGLE[case]
    assert compare(MAKES[name], tmp_path, **given) == []


@pytest.mark.parametrize("case", PAIR)
def test_two_ranks_have_the_bits_of_unsharded_matrices(case: str, tmp_path: Path, pair: RankPool) -> None:
    """Also where they share rows unevenly, as of the embedding."""
    name, given = PAIR[case]
    assert pair.run(compare_by_name, name, str(tmp_path), given) == [[], []]


def test_updates_run_in_backward(tmp_path: Path) -> None:
    """Where nothing is clipped, as those of element-wise optimizers."""
    assert paged(muon_and_adamw, tmp_path).placement == "in_backward"


def test_two_ranks_update_in_backward_or_in_step(tmp_path: Path, pair: RankPool) -> None:
    """In the next forward a rank could run ahead to an exchange; where one rank has looked at a gradient, all know."""
    assert pair.run(placements, str(tmp_path)) == [["in_backward", "after_backward", "refused"]] * 2


def placements(folder: str) -> list[str]:
    """Runs on every rank."""
    rank = torch.distributed.get_rank()
    return [
        _placement(Path(folder), looks=False),
        _placement(Path(folder), looks=rank == 1),
        _refused(Path(folder)),
    ]


def _refused(folder: Path) -> str:
    model = build()
    tree = settings(folder, Paging(placement="in_forward"), 64 << 20)
    with pytest.raises(ConfigError, match=r"update\.placement = .in_forward. .*run ahead"):
        infinity.offload(model, muon_and_adamw(list(model.parameters())), tree)
    return "refused"


def _placement(folder: Path, *, looks: bool) -> str:
    model = build()
    tree = settings(folder, Paging(), 64 << 20)
    with infinity.offload(model, muon_and_adamw(list(model.parameters())), tree) as optimizer:
        for step in range(2):
            models.loss_of(model, batch(model, step)).backward()
            if looks and step == 0:
                model.head.weight.grad.to_local().sum()
            optimizer.step()
            optimizer.zero_grad()
        return optimizer.update_placement


def test_ranks_that_update_other_parameters_are_told(tmp_path: Path, pair: RankPool) -> None:
    """One has dropped a gradient that the other has: no slices of different matrices are put together."""
    assert any("ranks update different parameters" in told for told in pair.run(drop_on_one, str(tmp_path)))


def drop_on_one(folder: str) -> str:
    """Runs on every rank."""
    model = build()
    tree = settings(Path(folder), Paging(placement="after_backward"), 64 << 20)
    optimizer = infinity.offload(model, muon_and_adamw(list(model.parameters())), tree)
    models.loss_of(model, batch(model, 0)).backward()
    if torch.distributed.get_rank():
        model.embedding.weight.grad = None
    try:
        with optimizer:
            optimizer.step()
            optimizer.commit()
    except InfinityError as error:
        return str(error)
    return ""


def test_the_largest_matrix_counts_in_the_budget(tmp_path: Path) -> None:
    """What is put together lies beside the arena; the error names the parameter, and what it asks for is enough."""
    model = build()
    given = muon_and_adamw(list(model.parameters()))
    with pytest.raises(BudgetError, match=r"to update \S+weight whole, as the optimizer needs it"):
        infinity.offload(model, given, settings(tmp_path, Paging(), 64 << 10))
    with infinity.offload(model, given, settings(tmp_path, Paging(), 64 << 20)) as optimizer:
        largest = max(param.numel() for group in given[0].param_groups for param in group["params"])
        assert whole_bytes(optimizer.run.layout) >= 2 * 12 * largest
