"""Tests of torchtitan's Trainer with its state on NVMe: results are bitwise equal to training in memory."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.wide,
    pytest.mark.skipif(find_spec("torchtitan") is None, reason="torchtitan is not installed; run make test-wide"),
]


def train(folder: Path, config: str, result: str, *arguments: str, first: str = "", ranks: int = 1) -> list[Any]:
    """Run `support.titan` under torchrun; return the result of each rank."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *launch, "-m", "support.titan", config, first, result, *arguments],
        env=os.environ | {"TITAN": str(folder), "OMP_NUM_THREADS": "1", "PYTHONPATH": ":".join(filter(None, sys.path))},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "by a scheduler" not in done.stderr, "a resumed run starts with the learning rate of its checkpoint"
    return [torch.load(folder / f"{result}-{rank}.pt") for rank in range(ranks)]


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.equal(other)
    return bool(one == other)


@pytest.mark.parametrize("ranks", [1, 2])
def test_training_is_bitwise_equal_to_memory(ranks: int, tmp_path: Path) -> None:
    """The run uses clipping, accumulation and a schedule, and resumes from the last checkpoint and from a given one.

    torchtitan's own state dict of the optimizers is equal, and can be loaded into pages.
    """
    (tmp_path / "nvme").mkdir()
    one = train(tmp_path, "paged", "one", "--training.steps", "4", ranks=ranks)
    memory = train(tmp_path, "in_memory", "memory", first="one", ranks=ranks)
    two = train(tmp_path, "paged", "two", ranks=ranks)
    assert sorted(path.name for path in (tmp_path / "checkpoint").iterdir()) == ["step-4", "step-6"]
    again = train(tmp_path, "paged", "again", "--checkpoint.load_step", "4", "--training.steps", "5", ranks=ranks)
    for rank in range(ranks):
        steps = memory[rank]["steps"]
        assert [step for step, *_ in steps] == [1, 2, 3, 4, 5, 6]
        assert one[rank]["steps"] + two[rank]["steps"] == steps
        assert again[rank]["steps"] == steps[4:5]
        assert two[rank]["loads"][0] == "True"
        assert "belongs to step 4 " in two[rank]["loads"][1]  # weights are only restored when a run starts
        for key, value in memory[rank]["after"].items():
            assert value.equal(two[rank]["after"][key]), key
            assert not value.equal(one[rank]["before"][key]), key
        state = memory[rank]["optimizer"]
        assert any(key.startswith("state.") for key in state)
        for found in (two[rank]["optimizer"], again[rank]["loaded"]):
            assert [key for key in state | found if not equal(state.get(key), found.get(key))] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--training.enable-cpu-offload"], "training.enable_cpu_offload"),
        (["--checkpoint.load_step", "7"], "step-7"),
        (["--optimizer.implementation", "fused_opt_states_bf16"], 'set state.format = "bf16-moments"'),
        (["--checkpoint.initial_load_path", "/somewhere"], "checkpoint.initial_load_path"),
    ],
    ids=["offload", "missing", "states", "path"],
)
def test_unsupported_arguments_are_rejected(arguments: list[str], message: str, tmp_path: Path) -> None:
    """The error is raised before training."""
    (tmp_path / "nvme").mkdir()
    (result,) = train(tmp_path, "paged", "result", *arguments)
    assert message in result["error"]
    assert list((tmp_path / "nvme").iterdir()) == []
