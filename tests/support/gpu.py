"""A plugin of pytest, for `make gpu-test`: without a GPU nothing passes as skipped."""

from __future__ import annotations

import pytest
import torch


def pytest_configure() -> None:
    """Refuse to begin without a GPU."""
    if not torch.cuda.is_available():
        raise pytest.UsageError(f"torch {torch.__version__} sees no GPU: nothing was tested")
