"""Tests of models without trainable parameters, which need no optimizer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import infinity
from infinity.content.format import Role
from infinity.errors import UnsupportedError
from support import models
from support.train import MIB, Paging, batch, full_copy, settings


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
