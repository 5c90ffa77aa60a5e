"""A Trainer with its state on NVMe, on two ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support import trainer_ranks, trainers
from support.ranks import RankPool
from support.tables import all_but

CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "clipped": ({}, {}, "fp32"),
    "not clipped": ({"max_grad_norm": 0.0}, {"clip": 0.0}, "fp32"),
    "weights in bf16": ({}, {}, "bf16"),
    "layer-major": ({"gradient_accumulation_steps": 2}, {"accumulation": 2, "joined": True}, "fp32"),
    "loop": ({"gradient_accumulation_steps": 2, "attached": {"layer_major": False}}, {"accumulation": 2}, "fp32"),
}


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Two ranks that live as long as the module."""
    ranks = RankPool(2)
    yield ranks
    ranks.close()


@pytest.mark.parametrize("case", all_but(CASES, "not clipped", "weights in bf16", "loop"))
def test_the_loop_written_by_hand(case: str, pool: RankPool, tmp_path: Path) -> None:
    """Every rank sees the losses, norms and weights of FSDP2 in memory, with labels counted over both."""
    given, by, policy = CASES[case]
    expected = pool.run(trainer_ranks.hand_written, policy, by)
    for (outcome, _), wanted in zip(pool.run(trainer_ranks.offloaded, tmp_path, policy, given), expected, strict=True):
        if outcome.losses:  # only rank 0 logs
            assert outcome.losses == wanted.losses
        assert {name: value.tolist() for name, value in outcome.weights.items()} == {
            name: value.tolist() for name, value in wanted.weights.items()
        }


def test_lengths_that_differ_on_one_rank(pool: RankPool, tmp_path: Path) -> None:
    """Rank 1 has micro-batches of two lengths in every second step: then both ranks run the loop, else layer-major.

    So weights are those of a training whose every second step is told to be a loop, on both ranks.
    """
    looped = pool.run(trainer_ranks.uneven, tmp_path / "uneven", True)
    told = pool.run(trainer_ranks.uneven, tmp_path / "told", False)
    for (losses, weights, joined), (expected, wanted, _) in zip(looped, told, strict=True):
        assert joined == [0, 2] * (trainers.STEPS // 2)
        assert losses == expected
        assert weights == wanted


def test_resumed_in_the_middle(pool: RankPool, tmp_path: Path) -> None:
    """Checkpoints of both ranks, the best one kept, resumed bit for bit."""
    saved = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 2}
    saved |= {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    (whole, left), _ = pool.run(trainer_ranks.offloaded, tmp_path, "fp32", saved)
    assert left == ["checkpoint-4", "checkpoint-6"]
    (tmp_path / "out" / "checkpoint-6" / "infinity.json").unlink()
    (resumed, left), _ = pool.run(trainer_ranks.offloaded, tmp_path, "fp32", saved, True)
    assert left == ["checkpoint-4", "checkpoint-6"]
    resumed.equals(whole)
