"""Test of random number generators: initialization and the slicing check do not change their states."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

import infinity
from support import models

DEVICES = ("cuda", "mps", "mtia", "xpu")


def test_offload_preserves_all_generator_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Users seed device generators per rank; a common seed would make dropout equal on all ranks."""
    seeded: list[str] = []
    for device in DEVICES:
        for name in ("manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state"):
            module = getattr(torch, device)
            if hasattr(module, name):
                monkeypatch.setattr(module, name, lambda *_, call=f"torch.{device}.{name}": seeded.append(call))
    torch.manual_seed(1)
    assert {call.split(".")[1] for call in seeded} == set(DEVICES)  # all device generators are patched
    seeded.clear()
    random.seed(1)
    np.random.seed(1)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    model = models.llama(layers=2)
    model.to("meta")
    models.shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    between = torch.get_rng_state()
    config = {"storage": {"paths": [str(tmp_path)]}, "run": {"seed": 7}}
    with infinity.offload(model, optimizer, config) as paged:
        master = paged.read_state("model.layers.0.mlp.up_proj.weight")["master"]
        assert master.std() > 0  # values were drawn
        assert seeded == []
        assert torch.equal(torch.get_rng_state(), between)
        assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]
