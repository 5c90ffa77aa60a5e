"""Every element-wise optimizer of torch.optim: the same bits as in memory; the others are refused with a reason."""

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
def test_an_element_wise_optimizer_keeps_its_bits(optimizer: str, tmp_path: Path) -> None:
    """State discovered by running the optimizer, and updated in slices by its own kernel."""
    recipe = Recipe(model="toy", optimizer=optimizer, clip=1.0 if optimizer == "sgd" else None)
    assert compare(recipe, Paging(host_cache="least"), str(tmp_path)) == []


@pytest.mark.parametrize("optimizer", ["sgd", "sgd_nesterov", "nadam"])
def test_an_optimizer_without_master_weights_keeps_its_bits(optimizer: str, tmp_path: Path) -> None:
    """Pure fp32: what is gathered is what is trained; plain SGD has no update pages at all."""
    recipe = Recipe(model="gpt2", optimizer=optimizer, policy="fp32")
    assert compare(recipe, Paging(host_cache="least"), str(tmp_path)) == []


UNSUPPORTED = {
    "Adafactor": (lambda p: torch.optim.Adafactor(p), "element-wise|slice"),
    "LBFGS": (lambda p: torch.optim.LBFGS(p), "element-wise|slice|closure"),
    "SparseAdam": (lambda p: torch.optim.SparseAdam(p), "dense|element-wise"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_other_optimizers_are_refused_with_a_reason(name: str, tmp_path: Path) -> None:
    """The error names the optimizer, and nothing is left on disk."""
    if not hasattr(torch.optim, name):
        pytest.skip(f"this torch has no {name}")
    make, reason = UNSUPPORTED[name]
    model = models.build("toy")
    for param in model.parameters():
        param.requires_grad_(param.ndim == 2)
    optimizer = make([param for param in model.parameters() if param.requires_grad])
    with pytest.raises(UnsupportedError, match=f"(?s){name}.*({reason})"):
        infinity.offload(model, optimizer, settings(tmp_path, Paging(), 64 << 20))
    assert list((tmp_path / "nvme0").iterdir()) == []
