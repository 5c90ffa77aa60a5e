"""Tests of the default batch of `infinity train` for a pretrained model, which `infinity plan` recommends."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from infinity import Config
from infinity.errors import InfinityError
from infinity.ranks import Ranks
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
        model="llama-354m", seq=512, batch_tokens=4096, nvme_bandwidth="3e9/2e9", settings=settings, **hardware
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


@pytest.mark.parametrize(
    ("hardware", "ranks", "available", "expected"),
    [
        ({"tflops": 0.05}, 1, 6 * GIB, (8, 1)),
        ({"tflops": 0.05}, 4, int(2.8 * GIB), (2, 4)),
        ({"tflops": 0.05}, 1, GIB // 3, (1, 8)),
        ({"tflops": 0.05, "link": "25e9"}, 1, GIB // 3, (8, 1)),
    ],
    ids=["enough memory", "share of a rank", "not enough for one sequence", "device of unknown memory"],
)
def test_micro_batches_fit_memory_of_each_rank(
    hardware: dict[str, Any], ranks: int, available: int, expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recommended_batch, "available_memory", lambda: available)
    settings = {"memory.host_bytes": "256MiB"}
    asked = Asked(
        model="llama-354m", seq=512, batch_tokens=4096 * ranks, nvme_bandwidth="3e9/2e9", ranks=ranks,
        settings=settings, **hardware,
    )  # fmt: skip
    assert recommended_batch.recommended_batch(plan_of(asked)[0]) == expected


@pytest.mark.parametrize(
    ("answer", "size", "warning"),
    [
        (plan_drives.typed_drives("5e7/5e7", 1, 0, 0), 512, ""),
        (InfinityError("no space"), 64, "the drives cannot be measured: %s"),
        (KeyError("drive"), 8, "could not be planned"),
    ],
    ids=["measured", "cannot be measured", "fault"],
)
def test_batch_is_recommended_before_folders_exist(
    answer: Any, size: int, warning: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan that fails is reported, and does not end the run."""

    def drives(paths: list[Path], *_: Any) -> Any:
        assert paths == [tmp_path]
        if isinstance(answer, Exception):
            raise answer
        return answer, "typed"

    log = mock.Mock()
    monkeypatch.setattr(batch, "_log", log)
    monkeypatch.setattr(batch, "_hardware", lambda dtype: {"tflops": 0.01})
    monkeypatch.setattr(plan_drives, "drives_at", drives)
    make_model(tmp_path / "model")
    paths = [str(tmp_path / "new/a"), str(tmp_path / "new/b")]
    settings = Config().with_values(**{"storage.paths": paths, "memory.host_bytes": "1MiB"})
    args = SimpleNamespace(max_length=16, gradient_checkpointing=True, max_grad_norm=1.0, packing=False)
    recipe = {"model": str(tmp_path / "model"), "method": "sft"}
    found = batch.recommended(recipe, settings, args, "fp32", range(1 << 20), Ranks(0, 0, 1))
    assert found == {"per_device_train_batch_size": size}
    assert [warning in call.args[0] for call in log.warning.call_args_list] == [True] * bool(warning)


def test_pretrained_model_is_trained_with_recommended_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An epoch has at least 16 steps. The drives are measured only if slow ones would limit the smallest batch."""
    monkeypatch.setattr(batch, "_hardware", lambda dtype: {"tflops": 1000.0})
    slow = plan_drives.typed_drives("5e7/5e7", 1, 0, 0)
    monkeypatch.setattr(plan_drives, "drives_at", lambda paths, endurance, runtime: (slow, "typed"))
    make_model(tmp_path / "model")
    write_jsonl(tmp_path / "text.jsonl", texts(512))
    command = ["train", "--model", "model", "--data", "text.jsonl", "--packing", "false", "--host-memory", "1MiB"]
    ended = run_here(*command, "--max_steps", "1", "--max_length", "16", "--out", "o")
    assert "batch per rank: --per_device_train_batch_size 32" in ended.errors
    assert "per_device_train_batch_size: 32" in (tmp_path / "o/recipe.yaml").read_text()
