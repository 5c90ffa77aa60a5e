"""`make gpu-test` as far as it goes without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from support.ranks import RankPool

ROOT = Path(__file__).parents[2]


def test_without_a_gpu_it_fails_and_says_so() -> None:
    """Nothing is skipped silently: one line, and a status that is not 0."""
    done = subprocess.run(
        ["make", "gpu-test", f"GPU_PYTHON={sys.executable}"],
        cwd=ROOT, capture_output=True, text=True, check=False, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode != 0
    assert "sees no GPU: nothing was tested" in done.stderr
    assert "skipped" not in done.stdout + done.stderr
    (command,) = [line for line in done.stdout.replace("\\\n", "").splitlines() if "pytest" in line]
    assert "TORCH_CUDA_SANITIZER=1 CUBLAS_WORKSPACE_CONFIG=:4096:8" in command
    assert "tests/fsdp/test_parity_gpu.py" in command


def test_ranks_are_as_deterministic_as_the_process_that_starts_them() -> None:
    """The plugin sets it in one process."""
    pool = RankPool(1)
    torch.use_deterministic_algorithms(True)
    try:
        assert pool.run(torch.are_deterministic_algorithms_enabled) == [True]
    finally:
        torch.use_deterministic_algorithms(False)
        pool.close()
