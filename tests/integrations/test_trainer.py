"""Tests of transformers' Trainer with its state on NVMe: results are bitwise equal to training in memory."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard

import infinity
from infinity import torch_private
from infinity.accumulation.micro_batches import LayerMajor
from infinity.fsdp.gradient import PagedGradient
from infinity.integrations.transformers import attach
from support import trainers
from support.models import POLICIES
from support.tables import WIDE
from support.trainers import LENGTH, VOCABULARY, build, by_hand, make, outcome_of, with_adapters

CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "weights in bf16": ({}, {}, "bf16"),
    "autocast": ({"bf16": True}, {"step_context": partial(torch.autocast, "cpu", torch.bfloat16)}, "fp32"),
    "gradient checkpointing": ({"gradient_checkpointing": True, "max_grad_norm": 0.0}, {"clip": 0.0}, "fp32"),
}
"""Arguments of the Trainer, arguments of the loop, and the mixed precision policy."""


@pytest.mark.parametrize("case", CASES)
def test_trainer_equals_a_training_loop_in_memory(case: str, tmp_path: Path) -> None:
    """Losses, norms and weights of every step equal those of FSDP2 without a Trainer."""
    given, by, policy = CASES[case]
    expected = by_hand(build(policy=policy), **by)
    model = build(policy=policy)
    if case == "gradient checkpointing":  # the model is sharded, and has the device map that the Trainer needs
        build("plain").save_pretrained(tmp_path / "weights")
        model = infinity.from_pretrained(tmp_path / "weights", mp_policy=POLICIES[policy])
    trainer = make(tmp_path / "out", model, nvme=tmp_path / "nvme", **given)
    trainer.train()
    outcome_of(trainer).equals(expected)
    trainer.end()
    with pytest.raises(infinity.InfinityError, match="this optimizer was closed"):
        trainer.optimizer.step()


@WIDE
def test_predict_with_generate_of_an_encoder_decoder(tmp_path: Path) -> None:
    """`Seq2SeqTrainer` generates the same tokens as in memory, before and after training."""
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

    rows = [{"input_ids": torch.arange(2, 8) + row, "labels": torch.arange(20, 26) + row} for row in range(16)]

    def predictions(folder: Path, *, paged: bool) -> list[Any]:
        torch.manual_seed(0)
        config = T5Config(
            vocab_size=64, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, dropout_rate=0.0,
            decoder_start_token_id=0, eos_token_id=1, pad_token_id=0,
        )  # fmt: skip
        model = T5ForConditionalGeneration(config)
        for block in (*model.encoder.block, *model.decoder.block, model) if paged else ():
            fully_shard(block, mesh=infinity.mesh())
        arguments = Seq2SeqTrainingArguments(
            str(folder), max_steps=3, learning_rate=0.01, save_strategy="no", report_to=[], disable_tqdm=True,
            use_cpu=True, predict_with_generate=True, generation_max_length=5, per_device_eval_batch_size=4,
        )  # fmt: skip
        trainer = Seq2SeqTrainer(model, arguments, train_dataset=rows)
        if paged:
            attach(trainer, trainers.settings(tmp_path / "nvme"))
        before = trainer.predict(rows[:4]).predictions
        trainer.train()
        after = trainer.predict(rows[:4]).predictions
        if paged:
            trainer.end()
        return [before.tolist(), after.tolist()]

    expected = predictions(tmp_path / "memory", paged=False)
    assert expected[0] != expected[1]
    assert predictions(tmp_path / "out", paged=True) == expected


@pytest.mark.parametrize("clip", [1.0, pytest.param(0.0, marks=WIDE)])
@pytest.mark.parametrize("made", [build, pytest.param(with_adapters, marks=WIDE)])
def test_layer_major_accumulation_equals_memory(
    made: Any, clip: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All micro-batches of a step run as one batch in slices, so weights are read once for all of them."""
    model = made()
    infinity.micro_batches(model, 3)
    expected = by_hand(model, accumulation=3, clip=clip, joined=True)
    given = {"gradient_accumulation_steps": 3, "max_grad_norm": clip, "gradient_checkpointing": True}
    trainer = make(tmp_path / "out", made(), nvme=tmp_path / "nvme", **given)
    sliced, slices = [], LayerMajor.slices
    monkeypatch.setattr(LayerMajor, "slices", lambda self, number: sliced.append(number) or slices(self, number))
    trainer.train()
    outcome_of(trainer).equals(expected)
    assert sliced == [3] * trainers.STEPS
    trainer.end()


@pytest.mark.parametrize(
    ("slices", "clip"), [(3, 1.0), pytest.param(1, 1.0, marks=WIDE), pytest.param(1, 0.0, marks=WIDE)]
)
def test_evaluation_between_steps(slices: int, clip: float, tmp_path: Path) -> None:
    """Evaluation does not change the steps. Its batches are not sliced, so they may have any number of rows."""
    model = build()
    sliced = partial(LayerMajor(model).slices, slices)
    expected = by_hand(model, accumulation=slices, joined=True, evaluate_every=2, step_context=sliced, clip=clip)
    given = {
        "gradient_accumulation_steps": slices, "eval_strategy": "steps", "eval_steps": 2, "max_grad_norm": clip,
    }  # fmt: skip
    shapes: list[tuple[int, ...]] = []

    def record_shape(found: Any) -> dict[str, float]:
        shapes.append(found.predictions.shape)
        return {}

    trainer = make(tmp_path / "out", build(), nvme=tmp_path / "nvme", compute_metrics=record_shape, **given)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    outcome_of(trainer).equals(expected)
    assert before > trainer.evaluate()["eval_loss"] == expected.evaluations[-1]
    assert shapes == [(12, LENGTH, VOCABULARY)] * (trainers.STEPS // 2 + 2)
    assert trainer.optimizer.optimizer.run.stats.snapshot().value("plan_divergences_total") == 0
    trainer.end()


def test_accumulation_in_a_loop_equals_the_unmodified_trainer(tmp_path: Path) -> None:
    """The other Trainer trains an unsharded model in memory. Gradients are paged after every micro-batch."""
    from transformers import TrainerCallback

    checked = []

    class CheckGradients(TrainerCallback):
        def on_substep_end(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
            for _, group in torch_private.parameter_groups(model):
                for param in torch_private.fsdp_params(group):
                    assert param.unsharded_accumulated_grad is None
                    assert isinstance(param.sharded_param.grad.to_local(), PagedGradient)
                    checked.append(param)

    given = {"gradient_accumulation_steps": 2, "warmup_steps": 2, "lr_scheduler_type": "cosine"}
    ordinary = make(tmp_path / "memory", build("plain"), **given)
    ordinary.train()
    given |= {"attached": {"layer_major": False}, "callbacks": [CheckGradients()]}
    trainer = make(tmp_path / "out", build(), nvme=tmp_path / "nvme", **given)
    trainer.train()
    outcome_of(trainer).equals(outcome_of(ordinary))
    assert len(checked) == trainers.STEPS * len(list(trainer.model.parameters()))
    trainer.end()


def test_step_with_a_non_finite_norm_is_skipped(tmp_path: Path) -> None:
    """The update of that step changes no weights; other updates do."""
    calls = []

    def loss_of(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        calls.append(trainers.weights_of(trainer.model))
        loss = outputs.logits.float().square().mean()
        return loss * float("nan") if len(calls) == 2 else loss

    trainer = make(tmp_path / "out", build(), nvme=tmp_path / "nvme", compute_loss_func=loss_of)
    trainer.train()
    same = [all(a[name].equal(b[name]) for name in a) for a, b in pairwise(calls)]
    assert same == [False, True, False]
    trainer.end()
