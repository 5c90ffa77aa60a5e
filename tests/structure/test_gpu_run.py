"""`make gpu-test` as far as it goes without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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
