"""A user is told before training where bf16 would take a hundred times as long: nothing else would say why."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import infinity
from infinity.processor import crawls_in_bf16, multiplies_bf16


@pytest.mark.parametrize(
    ("flags", "native", "crawls"),
    [
        ("amx_bf16 avx512bw avx512dq avx512vl", True, False),
        ("avx512bw avx512dq avx512vl", False, False),
        ("avx avx2 fma", False, True),
        ("asimd bf16", True, False),
        ("asimd", False, True),
        ("", False, False),
    ],
)
def test_processors(flags: str, native: bool, crawls: bool, tmp_path: Path) -> None:
    """What the kernel says of x86 and ARM; where it says nothing, nothing is known."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(f"flags : {flags}\n" if flags else "")
    assert (multiplies_bf16(tmp_path), crawls_in_bf16(tmp_path)) == (native, crawls)


@pytest.mark.parametrize(("crawls", "bf16"), [(True, True), (True, False), (False, True)])
def test_warning(
    crawls: bool, bf16: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Said where the model computes in bf16 on such a processor, and only there."""
    monkeypatch.setattr("infinity.run.inspection.crawls_in_bf16", lambda: crawls)
    model = nn.Linear(4, 4)
    fully_shard(
        model, mesh=infinity.mesh(), mp_policy=MixedPrecisionPolicy(torch.bfloat16 if bf16 else None, torch.float32)
    )
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with infinity.offload(model, optimizer, {"storage": {"paths": [str(tmp_path)]}, "memory": {"host_bytes": "1MiB"}}):
        pass
    assert ("MixedPrecisionPolicy" in caplog.text) is (crawls and bf16)
