"""Tests of `make gpu-test` that need no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]


def test_gpu_tests_fail_without_a_gpu() -> None:
    """The tests are not silently skipped: one line explains the failure."""
    done = subprocess.run(
        ["make", "gpu-test", f"GPU_PYTHON={sys.executable}"],
        cwd=ROOT, capture_output=True, text=True, check=False, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode != 0
    assert f"torch {torch.__version__} does not detect a GPU" in done.stderr
    assert "skipped" not in done.stdout + done.stderr
    (command,) = [line for line in done.stdout.replace("\\\n", "").splitlines() if "pytest" in line]
    assert "TORCH_CUDA_SANITIZER=1 CUBLAS_WORKSPACE_CONFIG=:4096:8" in command
    assert "tests/fsdp/test_parity_gpu.py" in command
