"""Tests of PyTorch's optimizers: element-wise optimizers are bitwise equal to memory, and others raise an error."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import infinity
from infinity.errors import UnsupportedError
from support import models
from support.tables import one_of
from support.train import OPTIMIZERS, Paging, Recipe, compare, settings

OTHERS = sorted(set(OPTIMIZERS) - {"adamw"})


@pytest.mark.parametrize("optimizer", one_of(2, OTHERS))
def test_element_wise_optimizer_matches_memory(optimizer: str, tmp_path: Path) -> None:
    """The state is discovered by running the optimizer, and the optimizer's own kernel updates slices."""
    recipe = Recipe(model="toy", optimizer=optimizer, clip=1.0 if optimizer == "sgd" else None)
    assert compare(recipe, Paging(host_cache="least"), str(tmp_path)) == []


@pytest.mark.parametrize("optimizer", ["sgd", "sgd_nesterov", "nadam"])
def test_optimizer_without_master_weights_matches_memory(optimizer: str, tmp_path: Path) -> None:
    """In pure fp32, the gathered weights are also the trained ones, and plain SGD has no update pages."""
    recipe = Recipe(model="gpt2", optimizer=optimizer, policy="fp32")
    assert compare(recipe, Paging(host_cache="least"), str(tmp_path)) == []


UNSUPPORTED = {
    "Adafactor": (lambda p: torch.optim.Adafactor(p), "element-wise|slice"),
    "LBFGS": (lambda p: torch.optim.LBFGS(p), "element-wise|slice|closure"),
    "SparseAdam": (lambda p: torch.optim.SparseAdam(p), "dense|element-wise"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_other_optimizers_raise(name: str, tmp_path: Path) -> None:
    """The error names the optimizer, and no files remain."""
    if not hasattr(torch.optim, name):
        pytest.skip(f"this torch release has no {name}")
    make, reason = UNSUPPORTED[name]
    model = models.build("toy")
    for param in model.parameters():
        param.requires_grad_(param.ndim == 2)
    optimizer = make([param for param in model.parameters() if param.requires_grad])
    with pytest.raises(UnsupportedError, match=f"(?s){name}.*({reason})"):
        infinity.offload(model, optimizer, settings(tmp_path, Paging(), 64 << 20))
    assert list((tmp_path / "nvme0").iterdir()) == []
