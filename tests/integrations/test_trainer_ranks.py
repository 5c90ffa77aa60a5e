"""Tests of a Trainer with its state on NVMe on two ranks."""

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
    """Two ranks for all tests of the module."""
    ranks = RankPool(2)
    yield ranks
    ranks.close()


@pytest.mark.parametrize("case", all_but(CASES, "not clipped", "weights in bf16", "loop"))
def test_trainer_on_two_ranks_equals_a_loop_in_memory(case: str, pool: RankPool, tmp_path: Path) -> None:
    """Labels are counted across both ranks."""
    given, by, policy = CASES[case]
    expected = pool.run(trainer_ranks.hand_written, policy, by)
    for (outcome, _), wanted in zip(pool.run(trainer_ranks.offloaded, tmp_path, policy, given), expected, strict=True):
        if outcome.losses:  # only rank 0 logs
            assert outcome.losses == wanted.losses
        assert {name: value.tolist() for name, value in outcome.weights.items()} == {
            name: value.tolist() for name, value in wanted.weights.items()
        }


def test_different_lengths_on_one_rank_select_the_loop(pool: RankPool, tmp_path: Path) -> None:
    """If rank 1 has micro-batches of two lengths, both ranks run the loop; otherwise they run layer by layer.

    The weights must therefore equal those of a training in which every second step is a loop on both ranks.
    """
    automatic = pool.run(trainer_ranks.uneven, tmp_path / "uneven", True)
    forced = pool.run(trainer_ranks.uneven, tmp_path / "forced", False)
    for (losses, weights, joined), (expected, wanted, _) in zip(automatic, forced, strict=True):
        assert joined == [0, 2] * (trainers.STEPS // 2)
        assert losses == expected
        assert weights == wanted


def test_resume_on_two_ranks_is_exact(pool: RankPool, tmp_path: Path) -> None:
    """Checkpoints of both ranks, including the best one, are kept and resumed."""
    saved = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 2}
    saved |= {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    (uninterrupted, names), _ = pool.run(trainer_ranks.offloaded, tmp_path, "fp32", saved)
    assert names == ["checkpoint-4", "checkpoint-6"]
    (tmp_path / "out" / "checkpoint-6" / "infinity.json").unlink()
    (resumed, names), _ = pool.run(trainer_ranks.offloaded, tmp_path, "fp32", saved, True)
    assert names == ["checkpoint-4", "checkpoint-6"]
    resumed.equals(uninterrupted)
