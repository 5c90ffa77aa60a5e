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
    trainer = make(tmp_path / "out", build(policy=policy), nvme=tmp_path / "nvme", **given)
    trainer.train()
    outcome_of(trainer).equals(expected)
    trainer.end()
    with pytest.raises(infinity.InfinityError, match="this optimizer was closed"):
        trainer.optimizer.step()


def test_model_of_from_pretrained(tmp_path: Path) -> None:
    """The model is sharded, has the device map that the Trainer needs, and knows its weights folder."""
    build("plain").save_pretrained(tmp_path / "weights")
    model = infinity.from_pretrained(tmp_path / "weights", mp_policy=POLICIES["fp32"])
    trainer = make(tmp_path / "out", model, nvme=tmp_path / "nvme")
    trainer.train()
    outcome_of(trainer).equals(by_hand(build()))
    trainer.end()


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
def test_evaluation_between_steps(clip: float, tmp_path: Path) -> None:
    """Evaluation before, during and after training does not change the steps."""
    expected = by_hand(build(), evaluate_every=2, clip=clip)
    given = {"eval_strategy": "steps", "eval_steps": 2, "max_grad_norm": clip}
    trainer = make(tmp_path / "out", build(), nvme=tmp_path / "nvme", **given)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    outcome_of(trainer).equals(expected)
    assert before > expected.evaluations[0]
    assert trainer.evaluate()["eval_loss"] == expected.evaluations[-1]
    paged = trainer.optimizer.optimizer
    assert paged.run.stats.snapshot().value("plan_divergences_total") == 0
    trainer.end()


@pytest.mark.parametrize("clip", [1.0, pytest.param(0.0, marks=WIDE)])
@pytest.mark.parametrize("made", [build, with_adapters])
def test_layer_major_accumulation_equals_memory(made: Any, clip: float, tmp_path: Path) -> None:
    model = made()
    infinity.micro_batches(model, 3)
    expected = by_hand(model, accumulation=3, clip=clip, joined=True)
    given = {"gradient_accumulation_steps": 3, "max_grad_norm": clip, "gradient_checkpointing": True}
    trainer = make(tmp_path / "out", made(), nvme=tmp_path / "nvme", **given)
    trainer.train()
    outcome_of(trainer).equals(expected)
    trainer.end()


def test_evaluation_between_layer_major_steps(tmp_path: Path) -> None:
    """Evaluation batches are not sliced, so they may have any number of rows."""
    model = build()
    layers = LayerMajor(model)
    sliced = partial(layers.slices, 3)
    expected = by_hand(model, accumulation=3, joined=True, evaluate_every=2, step_context=sliced)
    given = {"gradient_accumulation_steps": 3, "eval_strategy": "steps", "eval_steps": 2}
    shapes: list[tuple[int, ...]] = []

    def record_shape(found: Any) -> dict[str, float]:
        shapes.append(found.predictions.shape)
        return {}

    trainer = make(tmp_path / "out", build(), nvme=tmp_path / "nvme", compute_metrics=record_shape, **given)
    trainer.train()
    outcome_of(trainer).equals(expected)
    assert shapes == [(12, LENGTH, VOCABULARY)] * (trainers.STEPS // 2)
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


def read_per_step(tmp_path: Path, accumulation: int, layer_major: bool | None) -> int:
    """Return the bytes that a step reads according to its plan, with a small host cache."""
    folder = tmp_path / f"{accumulation}-{layer_major}"
    folder.mkdir()
    given = {"gradient_accumulation_steps": accumulation, "max_grad_norm": 0.0, "max_steps": 3}
    given["per_device_train_batch_size"] = 2  # 4 batches must not have as many rows as a row has tokens
    small = {"memory": {"host_bytes": "2MiB", "page_bytes": "64KiB"}}
    attached = {"layer_major": layer_major}
    trainer = make(folder / "out", build(layers=8), nvme=folder / "nvme", config=small, attached=attached, **given)
    trainer.train()
    plan = trainer.optimizer.optimizer.run.plan
    assert plan is not None
    read = plan.traffic.read_bytes
    trainer.end()
    return read


def test_layer_major_accumulation_reads_weights_once(tmp_path: Path) -> None:
    """The loop reads weights and gradients again for every micro-batch."""
    one, layers, loop = (read_per_step(tmp_path, count, kind) for count, kind in ((1, None), (4, None), (4, False)))
    print(f"bytes read per step: {one} with one batch, {layers} layer-major, {loop} in a loop")
    assert layers == one
    assert loop > 2.5 * one
