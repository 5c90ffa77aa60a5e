"""Test of `infinity.mesh`."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.distributed_c10d import _world

import infinity


def test_cpu_mesh_creates_no_group_on_a_gpu_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook may create a mesh in every cell."""
    first = infinity.mesh("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    there = len(_world.pg_map)
    for _ in range(3):
        assert infinity.mesh("cpu") == first
    assert len(_world.pg_map) == there
