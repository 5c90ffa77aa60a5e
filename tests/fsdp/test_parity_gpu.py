"""On a GPU: bitwise equal to FSDP2 with CPUOffloadPolicy, which updates with the same kernel on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

import infinity
from support import models

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
]


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    """Return the losses of some steps on fixed batches."""
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        tokens = torch.randint(0, model.config.vocab_size, (2, 64), device="cuda")
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def sharded(*, offload: bool) -> torch.nn.Module:
    """Return a small Llama on the GPU (its shards on the CPU where FSDP2 offloads)."""
    torch.manual_seed(0)
    model = models.llama().to("cuda")
    mesh, policy = infinity.mesh("cuda"), MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    extra = {"offload_policy": CPUOffloadPolicy()} if offload else {}
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=policy, **extra)
    return model


@pytest.mark.parametrize("placement", ["auto", "in_forward", "after_backward"])
@pytest.mark.parametrize("host_bytes", ["1MiB", "64MiB"])
def test_paging_changes_no_bit_on_a_gpu(placement: str, host_bytes: str, tmp_path: Path) -> None:
    """Same losses over ten steps, streaming and resident."""
    reference = sharded(offload=True)
    expected = train(reference, torch.optim.AdamW(reference.parameters(), lr=1e-3, fused=True), 10)
    model = sharded(offload=False)
    config = {
        "storage": {"paths": [str(tmp_path)]},
        "memory": {"host_bytes": host_bytes, "page_bytes": "64KiB"},
        "update": {"placement": placement},
    }
    with infinity.offload(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), config) as optimizer:
        assert train(model, optimizer, 10) == expected
