"""Tests of the default batch of `infinity train` for a pretrained model, which `infinity plan` recommends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from infinity.units import GIB
from infinity_tools.plan import plan_drives, recommended_batch
from infinity_tools.plan.inputs import Asked, plan_of
from infinity_tools.train import batch
from support.command import run_here
from support.fine_tuning import make_model, texts, write_jsonl

CASES: dict[str, tuple[dict[str, Any], str, str]] = {
    "drives limit small batches": ({"gpu": "l4", "gpu_memory": "6GiB"}, "256MiB", "hidden"),
    "device memory limits large batches": ({"gpu": "h100", "gpu_memory": "4GiB"}, "256MiB", "memory"),
    "host memory": ({"tflops": 20.0}, "256MiB", "hidden"),
    "slow processor": ({"tflops": 0.05}, "256MiB", "least"),
    "state fits in the host cache": ({"tflops": 500.0}, "16GiB", "least"),
}
"""Hardware, host cache, and what determines the batch."""


@pytest.mark.parametrize("case", CASES)
def test_recommended_batch_hides_storage_and_fits_memory(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hardware, host_bytes, limit = CASES[case]
    monkeypatch.setattr(recommended_batch, "available_memory", lambda: 32 * GIB)
    settings = {"memory.host_bytes": host_bytes}
    asked = Asked(
        model="llama-354m", sequence=512, batch_tokens=4096, nvme_bandwidth="3e9/2e9", settings=settings, **hardware
    )
    found, _ = plan_of(asked)
    size, parts = recommended_batch.recommended_batch(found)
    least, hidden = recommended_batch.LEAST, found.hidden_from_tokens
    assert hidden is not None
    if limit == "least":
        assert (size, parts) == (least, 1)
    elif limit == "hidden":
        assert hidden <= size * parts * 512 < 2 * hidden
    else:
        assert least <= size * parts < hidden // 512
        assert parts > 1


def test_pretrained_model_is_trained_with_recommended_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An epoch keeps 16 steps. The drives are measured only if slow ones would limit the smallest batch."""
    monkeypatch.setattr(batch, "_hardware", lambda dtype: {"tflops": 1000.0})
    slow = plan_drives.typed_drives("5e7/5e7", 1, 0, 0)
    monkeypatch.setattr(plan_drives, "drives_at", lambda paths, endurance, runtime: (slow, "typed"))
    make_model(tmp_path / "model")
    write_jsonl(tmp_path / "text.jsonl", texts(512))
    command = ["train", "--model", "model", "--data", "text.jsonl", "--packing", "false", "--host-memory", "1MiB"]
    ended = run_here(*command, "--max_steps", "1", "--max_length", "16", "--out", "o")
    assert "batch per rank: --per_device_train_batch_size 32" in ended.errors
    assert "per_device_train_batch_size: 32" in (tmp_path / "o/recipe.yaml").read_text()
