"""Test of frozen parameters: their values do not change."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.train import Paging, Recipe, in_memory, offloaded, state_on_nvme


@pytest.mark.parametrize(
    "policy",
    [
        "bf16",
        "fp32",
    ],
)
def test_frozen_parameters_keep_their_bits(policy: str, tmp_path: Path) -> None:
    """They keep their dtypes as well."""
    recipe = Recipe(model="frozen", policy=policy, steps=1)
    with offloaded(recipe, Paging(), tmp_path) as (model, optimizer):
        found = state_on_nvme(model, optimizer)
    expected = {name: state for name, state in in_memory(recipe).state.items() if "frozen" in state}
    assert len(expected) > 3
    for name, state in expected.items():
        assert found[name]["frozen"].dtype == state["frozen"].dtype, name
        assert torch.equal(found[name]["frozen"], state["frozen"]), name
