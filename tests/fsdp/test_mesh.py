"""Meshes that `infinity.mesh` makes."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.distributed_c10d import _world

import infinity


def test_a_mesh_of_processors_makes_no_group_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook makes one per cell."""
    first = infinity.mesh("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    there = len(_world.pg_map)
    for _ in range(3):
        assert infinity.mesh("cpu") == first
    assert len(_world.pg_map) == there
