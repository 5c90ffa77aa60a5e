"""Tests of TrainingArguments: for each, results are bitwise equal to the unmodified Trainer in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support.tables import all_but
from support.trainers import build, dataset, make, outcome_of


def custom_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """Compute a user-defined loss."""
    logits = outputs.logits[..., :-1, :].flatten(0, 1).float()
    total = torch.nn.functional.cross_entropy(logits, labels[..., 1:].flatten(), reduction="sum")
    return total / num_items_in_batch


class Stream(torch.utils.data.IterableDataset):
    """Dataset without a length."""

    def __iter__(self) -> Any:
        return iter(dataset())


EVALUATED = {"eval_strategy": "steps", "eval_steps": 1}
CASES: dict[str, dict[str, Any]] = {
    "label smoothing": {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2},
    "compute_loss_func": {"compute_loss_func": custom_loss, "gradient_accumulation_steps": 2},
    "sgd": {"optim": "sgd", "optim_args": "momentum=0.9"},
    "adagrad": {"optim": "adagrad"},
    "rmsprop": {"optim": "rmsprop"},
    "adamw_torch": {"optim": "adamw_torch"},
    "optimizer_cls_and_kwargs": {"optimizer_cls_and_kwargs": (torch.optim.NAdam, {"lr": 1e-3})},
    "reduce_lr_on_plateau": {
        **EVALUATED, "lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"patience": 0},
        "metric_for_best_model": "loss", "learning_rate": 0.1,
    },
    "greedy": {**EVALUATED, "lr_scheduler_type": "greedy"},
    "neftune": {"neftune_noise_alpha": 5.0},
    "tokens seen": {"include_num_input_tokens_seen": "all", "eval_on_start": True, "logging_first_step": True},
    "workers": {"dataloader_num_workers": 1},
    "by length": {"train_sampling_strategy": "group_by_length"},
    "rebalanced": {"train_sampling_strategy": "batch_rebalance"},
    "iterable": {"train_dataset": Stream()},
    "a shorter last step": {
        "max_steps": -1, "num_train_epochs": 2, "gradient_accumulation_steps": 3, "train_dataset": dataset(rows=16),
        "attached": {"layer_major": False},
    },
    "metrics": {**EVALUATED, "compute_metrics": lambda given: {"sum": float(given.predictions.sum())}},
    "reentrant checkpointing": {
        "activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": True},
    },
    "every second layer": {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"every_n_layers": 2}},
    "torch_compile": {"torch_compile": True, "torch_compile_backend": "aot_eager"},
    "empty cache steps": {"torch_empty_cache_steps": 1, "full_determinism": True},
    "debug": {"debug": "underflow_overflow"},
    "best": {"save_strategy": "best", "eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "loss"},
}  # fmt: skip
QUICK = {"label smoothing", "reduce_lr_on_plateau", "a shorter last step"}


@pytest.mark.parametrize("case", all_but(CASES, *(CASES.keys() - QUICK)))
def test_training_argument_equals_the_unmodified_trainer(case: str, tmp_path: Path) -> None:
    """Losses, norms, evaluations and weights are equal."""
    given = dict(CASES[case])
    attached = given.pop("attached", {})
    ordinary = make(tmp_path / "memory", build("plain"), **given)
    ordinary.train()
    trainer = make(tmp_path / "out", build(), nvme=tmp_path / "nvme", attached=attached, **given)
    trainer.train()
    outcome_of(trainer).equals(outcome_of(ordinary))
    assert trainer.optimizer.optimizer.steps == ordinary.state.global_step
    trainer.end()


def test_user_optimizer_and_scheduler(tmp_path: Path) -> None:
    """The scheduler was created for the optimizer before the offload."""

    def given(model: torch.nn.Module) -> dict[str, Any]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return {"optimizers": (optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2))}

    ordinary = make(tmp_path / "memory", model := build("plain"), **given(model))
    ordinary.train()
    trainer = make(tmp_path / "out", model := build(), nvme=tmp_path / "nvme", **given(model))
    trainer.train()
    outcome_of(trainer).equals(outcome_of(ordinary))
    trainer.end()


@pytest.mark.parametrize(
    "update_schedule", all_but(("auto", "in_backward", "in_forward", "after_backward"), "in_backward", "after_backward")
)
def test_norm_without_clipping(update_schedule: str, tmp_path: Path) -> None:
    """The norm is logged if gradients wait for the step anyway; it does not prevent updates in backward."""
    ordinary = make(tmp_path / "memory", build("plain"), max_grad_norm=0.0)
    ordinary.train()
    config = {"update": {"schedule": update_schedule}}
    trainer = make(tmp_path / "out", build(), nvme=tmp_path / "nvme", config=config, max_grad_norm=0.0)
    trainer.train()
    outcome, expected = outcome_of(trainer), outcome_of(ordinary)
    assert outcome.losses == expected.losses
    published = trainer.optimizer.optimizer.run.stats.snapshot().value("training_loss")
    assert published == pytest.approx(outcome.losses[-1])
    waits = update_schedule in ("in_forward", "after_backward")
    assert outcome.norms == (expected.norms if waits else [None] * len(expected.norms))
    assert trainer.optimizer.optimizer.update_schedule == (
        "in_backward" if update_schedule == "auto" else update_schedule
    )
    trainer.end()
