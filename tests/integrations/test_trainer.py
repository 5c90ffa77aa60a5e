"""transformers' Trainer with its state on NVMe gives the bits of the same loop in memory."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from support import trainers
from support.tables import WIDE
from support.trainers import build, by_hand, make, outcome_of

CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "clipped": ({}, {}, "fp32"),
    "not clipped": ({"max_grad_norm": 0.0}, {"clip": 0.0}, "fp32"),
    "weights in bf16": ({}, {}, "bf16"),
    "autocast": ({"bf16": True}, {"step_context": partial(torch.autocast, "cpu", torch.bfloat16)}, "fp32"),
    "gradient checkpointing": ({"gradient_checkpointing": True}, {}, "fp32"),
}
"""By name: TrainingArguments, the same for the loop, the policy of fully_shard."""


@pytest.mark.parametrize("where", ["cpu", pytest.param("meta", marks=WIDE)])
@pytest.mark.parametrize("case", CASES)
def test_the_loop_written_by_hand(case: str, where: str, tmp_path: Path) -> None:
    """Losses, norms and weights of every step are those of FSDP2 in memory, without any Trainer."""
    given, by, policy = CASES[case]
    expected = by_hand(build(policy=policy), **by)
    trainer = make(tmp_path / "out", build(policy=policy), nvme=tmp_path / "nvme", **given)
    trainer.train()
    outcome_of(trainer).equals(expected)
    trainer.end()
