"""Tests of frozen parameters: their values do not change, and a model without others needs no optimizer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import infinity
from infinity.content.format import Role
from infinity.errors import UnsupportedError
from support import models
from support.train import MIB, Paging, Recipe, batch, full_copy, in_memory, offloaded, settings, state_on_nvme


@pytest.mark.parametrize("policy", ["bf16", "fp32"])
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


@pytest.mark.parametrize("meta", [False, True])
def test_frozen_model_needs_no_optimizer(meta: bool, tmp_path: Path) -> None:
    """Its pages contain only weights, its output equals that of the model in memory, and it can be resumed."""
    config = settings(tmp_path, Paging(host_cache="all"), 64 * MIB)
    model = models.build("toy", meta=meta, policy="fp32").requires_grad_(False)
    tokens = batch(model, 0)
    with infinity.offload(model, None, config) as optimizer:
        weights = {name: full_copy(param) for name, param in model.named_parameters()}
        found = models.loss_of(model, tokens)
        assert {page.role for page in optimizer.run.layout.pages} == {Role.PARAM}
        optimizer.save_checkpoint()
    twin = models.build("toy", seed=99, policy="fp32").requires_grad_(False)
    for name, param in twin.named_parameters():
        param.to_local().copy_(weights[name])
    assert torch.equal(models.loss_of(twin, tokens), found)
    resumed = models.build("toy", seed=98, policy="fp32").requires_grad_(False)
    with infinity.offload(resumed, None, {**config, "run": {"resume": "latest"}}):
        assert torch.equal(models.loss_of(resumed, tokens), found)


def test_trained_model_needs_an_optimizer(tmp_path: Path) -> None:
    model = models.build("toy")
    with pytest.raises(UnsupportedError, match=r"the optimizer is None, but .*weight requires a gradient"):
        infinity.offload(model, None, settings(tmp_path, Paging(), 64 * MIB))
