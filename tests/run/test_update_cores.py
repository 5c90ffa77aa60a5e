"""Tests of the default number of cores for updates, in runs and plans, and of threads that verify pages."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
import torch

import infinity
from infinity.config import UpdateConfig
from infinity.processor import share_of_cores
from support import models
from support.command import run_here


@pytest.mark.parametrize(
    ("device", "cores", "expected"),
    [("cuda", 1, 1), ("cuda", 3, 1), ("cuda", 4, 1), ("cuda", 8, 5), ("cuda", 11, 8), ("cuda", 64, 8),
     ("cpu", 1, 0), ("cpu", 2, 0), ("cpu", 3, 1), ("cpu", 64, 1)],
)  # fmt: skip
def test_default_update_cores(device: str, cores: int, expected: int) -> None:
    """On a GPU, updates use all cores except three, at most eight; on a CPU, one core if two threads leave it idle."""
    assert UpdateConfig().thread_cores(device, cores=cores, computing=2) == expected
    assert UpdateConfig(cores=5).thread_cores(device, cores=cores, computing=2) == 5


@pytest.mark.parametrize(("cores", "expected", "hashers"), [(1, 0, 0), (2, 1, 0), (5, 1, 0), (6, 1, 2), (64, 1, 4)])
def test_run_uses_the_cores_of_its_rank(
    cores: int, expected: int, hashers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch computes on one core in this test."""
    assert torch.get_num_threads() == 1
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr("infinity.run.run.cores_of_groups", lambda: math.inf)
    model = models.build("even")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with infinity.offload(model, optimizer, {"storage": {"paths": [str(tmp_path)]}}) as paged:
        assert paged.run.update_cores == expected
        assert paged.run.worker.threaded is bool(expected)
        assert paged.run.hashers == hashers


@pytest.mark.parametrize(
    ("of_node", "limit", "expected"),
    [
        ([range(16)] * 2, math.inf, 8),  # torchrun sets no affinity
        ([range(8), range(8, 16)], math.inf, 8),  # each rank has its own cores, as with Slurm
        ([range(8), range(4, 8)], math.inf, 6),  # the ranks share four cores
        ([range(16)] * 2, 8.0, 4),  # the container is limited to eight cores
        ([range(3)] * 3, math.inf, 1),
    ],
)
def test_cores_are_divided_by_cpu_affinity(of_node: list[range], limit: float, expected: int) -> None:
    """The expected number is for the first rank."""
    sets = [set(cores) for cores in of_node]
    assert share_of_cores(sets[0], sets, limit) == expected


def test_plan_reserves_update_cores_from_the_cores_of_a_rank() -> None:
    line = "plan --parameters 3e8 --layers 8 --hidden 1536 --vocabulary 16000 --host-memory 512MiB --no-changes --json"
    for cores, expected in ((16, "on 8 reserved cores"), (8, "on 5 reserved cores"), (2, "on 1 reserved core")):
        given = f"--nvme-bandwidth 7e9/5e9 --gpu h100 --cores {cores} --batch-tokens 8192"
        found = json.loads(run_here(*line.split(), *given.split()).output)
        assert any(expected in assumed for assumed in found["assumptions"]), found["assumptions"]
