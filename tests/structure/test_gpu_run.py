"""Tests of `make gpu-test` that need no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.cuda._sanitizer import EventHandler

from support.gpu import BlockAccesses

ROOT = Path(__file__).parents[2]


def test_the_sanitizer_drops_accesses_within_a_freed_block(subtests: pytest.Subtests) -> None:
    """Otherwise accesses to a view would count against the next tensor at its address; a race within a block is
    reported.
    """
    for freed in [True, False]:
        with subtests.test(freed=freed):
            handler = EventHandler()
            handler.tensors_accessed = BlockAccesses()
            handler._handle_memory_allocation(1000)
            handler._handle_memory_allocation(2000)
            assert not handler._handle_kernel_launch(7, {1500}, set(), set(), "reads a view", {1500: []})
            if freed:
                handler._handle_memory_deallocation(1000)
                handler._handle_memory_allocation(1000)
            raced = handler._handle_kernel_launch(8, set(), {1500}, {1500}, "writes to the new tensor", {1500: []})
            assert len(raced) == (not freed)
            assert 2000 in handler.tensors_accessed.accesses


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
