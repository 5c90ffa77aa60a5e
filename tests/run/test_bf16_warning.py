"""Tests of the warning before training in bf16 on a processor without fast bf16 arithmetic."""

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
def test_bf16_support_is_read_from_cpuinfo(flags: str, native: bool, crawls: bool, tmp_path: Path) -> None:
    """If the operating system reports no CPU flags, no warning is given."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(f"flags : {flags}\n" if flags else "")
    assert (multiplies_bf16(tmp_path), crawls_in_bf16(tmp_path)) == (native, crawls)


@pytest.mark.parametrize(("crawls", "bf16"), [(True, True), (True, False), (False, True)])
def test_warning_requires_bf16_on_a_slow_processor(
    crawls: bool, bf16: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("infinity.run.inspection.crawls_in_bf16", lambda: crawls)
    model = nn.Linear(4, 4)
    fully_shard(
        model, mesh=infinity.mesh(), mp_policy=MixedPrecisionPolicy(torch.bfloat16 if bf16 else None, torch.float32)
    )
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with infinity.offload(model, optimizer, {"storage": {"paths": [str(tmp_path)]}, "memory": {"host_bytes": "1MiB"}}):
        pass
    assert ("MixedPrecisionPolicy" in caplog.text) is (crawls and bf16)
