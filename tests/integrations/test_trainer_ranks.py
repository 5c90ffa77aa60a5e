"""Tests of a Trainer with its state on NVMe on two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from safetensors.torch import load_file

import infinity
from support.ranks import RankPool
from support.tables import WIDE, all_but
from support.trainers import (
    BATCH,
    LENGTH,
    STEPS,
    Outcome,
    as_torchrun,
    build,
    by_hand,
    dataset,
    make,
    outcome_of,
    with_adapters,
)

CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "clipped": ({}, {}, "fp32"),
    "not clipped": ({"max_grad_norm": 0.0}, {"clip": 0.0}, "fp32"),
    "weights in bf16": ({}, {}, "bf16"),
    "layer-major": ({"gradient_accumulation_steps": 2}, {"accumulation": 2, "joined": True}, "fp32"),
    "loop": ({"gradient_accumulation_steps": 2, "attached": {"layer_major": False}}, {"accumulation": 2}, "fp32"),
}


def hand_written(policy: str, options: dict[str, Any]) -> Outcome:
    """Return the outcome of the reference loop in memory on this rank."""
    model = build(policy=policy)
    if options.get("joined"):
        infinity.micro_batches(model, options["accumulation"])
    return by_hand(model, **options)


@as_torchrun()
def offloaded(folder: Path, policy: str, options: dict[str, Any], resume: bool = False) -> tuple[Outcome, list[str]]:
    """Return the outcome of an offloaded Trainer on this rank, and the names of the retained checkpoints."""
    model = build("meta" if resume else "cpu", policy=policy)
    trainer = make(folder / "out", model, nvme=folder / "nvme", **options)
    assert (trainer.args.world_size, trainer.args.process_index) == (dist.get_world_size(), dist.get_rank())
    trainer.train(resume_from_checkpoint=resume)
    outcome = outcome_of(trainer)
    trainer.optimizer.optimizer.close()
    return outcome, sorted(path.name for path in (folder / "out").glob("checkpoint-*"))


@as_torchrun()
def uneven(folder: Path, chosen: bool) -> tuple[list[float], dict[str, list[float]], list[int]]:
    """Train on rows of which some are shorter on rank 1 in every second step.

    Args:
        folder: Folder of the run.
        chosen: Whether the Trainer selects layer-major execution or a loop. Otherwise these steps use the loop.

    Returns:
        Losses (of rank 0), weights, and the number of micro-batches that each step ran as one batch.
    """
    folder.mkdir(exist_ok=True)
    rows = dataset()
    for batch in range(3, len(rows) // BATCH, 8):  # the ranks receive batches alternately, two of each per step
        for row in range(batch * BATCH, (batch + 1) * BATCH):
            rows[row] = {name: value[: LENGTH - 4] for name, value in rows[row].items()}
    options = {"train_dataset": rows, "gradient_accumulation_steps": 2}
    trainer = make(folder / "out", build(), nvme=folder / "nvme", **options)
    accumulation, joined = trainer._infinity.accumulation, []
    begin = accumulation.begin

    def begin_and_record(batches: Any, labels: Any) -> None:
        if chosen:
            begin(batches, labels)
        else:
            accumulation._held, accumulation._joined = [], 2 * (trainer.state.global_step % 2)
        joined.append(accumulation._joined)

    accumulation.begin = begin_and_record
    trainer.train()
    outcome = outcome_of(trainer)
    trainer.optimizer.optimizer.close()
    return outcome.losses, {name: value.tolist() for name, value in outcome.weights.items()}, joined


@as_torchrun()
def adapters(folder: Path) -> dict[str, tuple[int, ...]]:
    """Train and save adapters; return their shapes by their names in peft."""
    trainer = make(folder / "out", with_adapters(), nvme=folder / "nvme", max_steps=2)
    trainer.train()
    trainer.save_model()
    trainer.optimizer.optimizer.close()
    trained = {name: param for name, param in trainer.model.named_parameters() if param.requires_grad}
    return {name.replace(".default", ""): tuple(param.shape) for name, param in trained.items()}


@as_torchrun()
def adapters_to_unwritable_folder(folder: Path) -> str:
    """Save adapters to a path that rank 0 cannot write; return the error on this rank."""
    trainer = make(folder / "out", with_adapters(), nvme=folder / "nvme", max_steps=2)
    trainer.train()
    (folder / "file").write_text("")
    target = folder / "file" if dist.get_rank() == 0 else folder / "saved"
    try:
        trainer.model.save_pretrained(str(target), True)  # positional arguments, as in peft
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        trainer.optimizer.optimizer.close()
    return "no error"


@pytest.mark.parametrize("case", all_but(CASES, "clipped", "not clipped", "weights in bf16", "loop"))
def test_trainer_on_two_ranks_equals_a_loop_in_memory(case: str, pair: RankPool, tmp_path: Path) -> None:
    """Labels are counted across both ranks."""
    given, by, policy = CASES[case]
    expected = pair.run(hand_written, policy, by)
    for (outcome, _), wanted in zip(pair.run(offloaded, tmp_path, policy, given), expected, strict=True):
        if outcome.losses:  # only rank 0 logs
            assert outcome.losses == wanted.losses
        assert {name: value.tolist() for name, value in outcome.weights.items()} == {
            name: value.tolist() for name, value in wanted.weights.items()
        }


def test_different_lengths_on_one_rank_select_the_loop(pair: RankPool, tmp_path: Path) -> None:
    """If rank 1 has micro-batches of two lengths, both ranks run the loop; otherwise they run layer by layer.

    The weights must therefore equal those of a training in which every second step is a loop on both ranks.
    """
    automatic = pair.run(uneven, tmp_path / "uneven", True)
    forced = pair.run(uneven, tmp_path / "forced", False)
    for (losses, weights, joined), (expected, wanted, _) in zip(automatic, forced, strict=True):
        assert joined == [0, 2] * (STEPS // 2)
        assert losses == expected
        assert weights == wanted


def test_resume_on_two_ranks_is_exact(pair: RankPool, tmp_path: Path) -> None:
    """Checkpoints of both ranks, including the best one, are kept and resumed."""
    saved = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 2, "max_steps": 6}
    saved |= {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    (uninterrupted, names), _ = pair.run(offloaded, tmp_path, "fp32", saved)
    assert names == ["checkpoint-4", "checkpoint-6"]
    (tmp_path / "out" / "checkpoint-6" / "infinity.json").unlink()
    (resumed, names), _ = pair.run(offloaded, tmp_path, "fp32", saved, True)
    assert names == ["checkpoint-4", "checkpoint-6"]
    resumed.equals(uninterrupted)


@WIDE
def test_save_model_with_adapters_on_two_ranks(pair: RankPool, tmp_path: Path) -> None:
    """The file contains full tensors. If rank 0 cannot write it, both ranks report the reason."""
    pytest.importorskip("peft")
    shapes = pair.run(adapters, tmp_path)[0]
    found = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert {name: tuple(value.shape) for name, value in found.items()} == shapes
    first, second = pair.run(adapters_to_unwritable_folder, tmp_path)
    assert "should be a directory, not a file" in first
    assert "save_pretrained failed on rank 0" in second
    assert "should be a directory, not a file" in second
