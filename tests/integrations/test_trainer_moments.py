"""Tests of each method that `attach` overrides, called at each moment of a Trainer's life.

Two Trainers go through the same two trainings: an unmodified one in memory, and one with its state on NVMe. At each
moment, both make the same calls, whose results must be bitwise equal.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainerCallback

from infinity.errors import ConfigError, InfinityError, UnsupportedError
from infinity.integrations.transformers.trainer import OffloadedTrainer
from support.trainers import build, dataset, make

ROWS = dataset()[:4]


def batch() -> dict[str, torch.Tensor]:
    return {name: torch.stack([row[name] for row in ROWS]) for name in ROWS[0]}


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor, gathered if it is sharded."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def training_step(trainer: Any) -> float:
    """Return the loss of a micro-batch outside of training, whose gradients are discarded."""
    loss = trainer.training_step(trainer.model, batch())
    trainer.model.zero_grad()
    return float(loss)


def saved(trainer: Any) -> dict[str, torch.Tensor]:
    """Return the weights that `save_model` writes."""
    folder = Path(trainer.args.output_dir, "saved")
    trainer.save_model(str(folder))
    return dict(type(trainer.model).from_pretrained(folder).named_parameters())


def checkpoint(trainer: Any) -> list[str]:
    """Save a checkpoint; return the names of the checkpoint folders."""
    trainer._save_checkpoint(trainer.model, None)
    return sorted(path.name for path in Path(trainer.args.output_dir).glob("checkpoint-*"))


def gradient_norm(trainer: Any) -> float:
    """Return the norm of the gradients. The step has clipped them already."""
    return float(trainer._clip_grad_norm(trainer.model))


CALLS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "evaluate": (lambda t: t.evaluate(ROWS)["eval_loss"], "evaluation_loop"),
    "predict": (lambda t: torch.tensor(t.predict(ROWS).predictions), "evaluation_loop"),
    "prediction_step": (lambda t: float(t.prediction_step(t.model, batch(), True)[0]), "prediction_step"),
    "compute_loss": (lambda t: float(t.compute_loss(t.model, batch()).detach()), ""),
    "generate": (
        lambda t: t.model.generate(batch()["input_ids"][:1], max_new_tokens=3, do_sample=False, pad_token_id=0), ""
    ),
    "training_step": (training_step, "training_step"),
    "save_model": (saved, "_save"),
    "checkpoint": (checkpoint, "_save_checkpoint _save_optimizer_and_scheduler"),
    "log": (lambda t: t.log({"loss": 1.0}), "log"),
    "create_optimizer": (lambda t: t.create_optimizer().param_groups[0]["weight_decay"], "create_optimizer"),
    "gradient norm": (gradient_norm, "_clip_grad_norm _get_grad_norm"),
    "weights": (lambda t: {name: full(param) for name, param in t.model.named_parameters()}, ""),
    "state_dict": (lambda t: {name: full(value) for name, value in t.model.state_dict().items()}, ""),
}  # fmt: skip
"""Calls, and the overridden methods that each runs."""
IN_EVERY_TRAINING = ("train", "get_batch_samples", "training_step", "_defer_fsdp_gradient_reduction", "_clip_grad_norm")
EVENTS = {
    "in training": "on_train_begin",
    "between micro-batches": "on_substep_end",
    "before an update": "on_pre_optimizer_step",
    "after an update": "on_optimizer_step",
    "after a step": "on_step_end",
    "in evaluation": "on_prediction_step",
    "at the end": "on_train_end",
}
GRADIENTS = ("between micro-batches", "before an update")
"""Moments at which gradients are pending."""
MOMENTS = ["before training", *EVENTS, "between trainings", "in the second training", "after training"]


def applies(call: str, moment: str) -> bool:
    """Return whether the unmodified Trainer supports a call at a moment, without an effect on its training."""
    match call:
        case "gradient norm":
            return moment == "before an update"
        case "training_step":  # requires attributes that training sets
            return moment not in (*GRADIENTS, "before training", "in training", "after an update", "in evaluation")
        case "checkpoint":  # "after an update", steps are not counted yet
            return moment not in ("before training", "after an update")
    return True


CELLS = [(call, moment) for call in CALLS for moment in MOMENTS if applies(call, moment)]


class Life:
    """A Trainer that is trained twice, with the result of each call at each moment."""

    def __init__(self, trainer: Any) -> None:
        self.found: dict[tuple[str, str], Any] = {}
        self.losses: list[list[float]] = []
        self.trainer, self.moments = trainer, {event: moment for moment, event in EVENTS.items()}
        self.call_all("before training")
        trainer.add_callback(_Calling(self))
        self.train()
        self.call_all("between trainings")
        self.moments = {"on_step_end": "in the second training"}
        self.train()
        self.call_all("after training")

    def train(self) -> None:
        self.trainer.train()
        self.losses.append([entry["loss"] for entry in self.trainer.state.log_history if "grad_norm" in entry])

    def event(self, event: str) -> None:
        """Make all calls at the first occurrence of an event."""
        moment = self.moments.pop(event, None)
        if moment is not None:
            self.call_all(moment)

    def call_all(self, moment: str) -> None:
        trainer, waiting = self.trainer, self.moments
        self.moments = {}  # calls cause events themselves
        control, history = dict(vars(trainer.control)), list(trainer.state.log_history)
        for call in (call for call in CALLS if applies(call, moment)):
            try:
                self.found[call, moment] = CALLS[call][0](trainer)
            except Exception as error:
                self.found[call, moment] = f"{type(error).__name__}: {error}"
        vars(trainer.control).update(control)
        trainer.state.log_history = history
        trainer.model.train()
        self.moments = waiting


class _Calling(TrainerCallback):
    def __init__(self, life: Life) -> None:
        for event in EVENTS.values():
            setattr(self, event, lambda *_, event=event, **__: life.event(event))


ARGUMENTS: dict[str, Any] = {
    "gradient_accumulation_steps": 2, "max_steps": 2, "eval_strategy": "steps", "eval_steps": 1, "eval_dataset": ROWS,
    "save_strategy": "steps", "save_steps": 2, "save_total_limit": 2, "per_device_train_batch_size": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> tuple[Life, Life]:
    """Return the Trainer in memory and the one with its state on NVMe."""
    folder = tmp_path_factory.mktemp("trainers")
    memory = Life(make(folder / "memory", build("plain"), **ARGUMENTS))
    attached = {"layer_major": False}
    paged = Life(make(folder / "out", build(), nvme=folder / "nvme", attached=attached, **ARGUMENTS))
    paged.trainer.end()
    return memory, paged


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(equal(one[name], other[name]) for name in one)
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and one == other


def test_overridden_methods_are_in_the_table() -> None:
    overridden = {name for name in vars(OffloadedTrainer) if hasattr(Trainer, name) and not name.startswith("__")}
    resuming = {"_load_from_checkpoint", "_load_optimizer_and_scheduler", "_load_best_model", "end"}  # see below
    assert overridden - resuming == {*IN_EVERY_TRAINING, *" ".join(methods for _, methods in CALLS.values()).split()}


def test_calls_at_all_moments_equal_memory(lives: tuple[Life, Life]) -> None:
    """Neither the results of the calls nor the losses of the trainings differ."""
    memory, paged = lives
    wrong = {}
    for cell in CELLS:
        assert not isinstance(memory.found[cell], str), memory.found[cell]
        if cell[0] in ("checkpoint", "save_model") and cell[1] in GRADIENTS:
            same = "was called between backward and step(); call it after step()" in paged.found[cell]
        else:
            same = equal(memory.found[cell], paged.found[cell])
        wrong |= {} if same else {cell: paged.found[cell]}
    assert not wrong
    assert [len(losses) for losses in memory.losses] == [2, 2]
    assert paged.losses == memory.losses


def test_first_call_of_a_model_on_the_meta_device_starts_the_run(lives: tuple[Life, Life], tmp_path: Path) -> None:
    build("plain").save_pretrained(tmp_path / "weights")
    for call in ("evaluate", "prediction_step", "save_model", "create_optimizer", "log"):
        folder, attached = tmp_path / call, {"weights": tmp_path / "weights"}
        trainer = make(folder / "out", build("meta"), nvme=folder / "nvme", attached=attached)
        assert equal(CALLS[call][0](trainer), lives[0].found[call, "before training"]), call
        trainer.end()


def test_calls_after_end_name_the_reason(lives: tuple[Life, Life]) -> None:
    """`log` still works, because it needs no weights, as does a second `end`."""
    trainer = lives[1].trainer
    for call in ("train", *CALLS.keys() - {"state_dict", "log"}):
        with pytest.raises(InfinityError, match=r"closed"):
            trainer.train() if call == "train" else CALLS[call][0](trainer)
    trainer.log({"loss": 1.0})
    trainer.end()


def test_replacing_the_optimizer_between_trainings_is_rejected(tmp_path: Path) -> None:
    """The run keeps the optimizer that it was started with."""
    trainer = make(tmp_path / "out", build(), nvme=tmp_path / "nvme", max_steps=1)
    trainer.train()
    for other in (None, torch.optim.SGD(trainer.model.parameters())):
        trainer.optimizer = other
        with pytest.raises(UnsupportedError, match=r"trainer\.optimizer was replaced.*save_model\(folder\)"):
            trainer.train()
    trainer.end()


def test_layer_major_training_does_not_hold_back_later_micro_batches(tmp_path: Path) -> None:
    """A `training_step` after training runs at once."""
    given = {"gradient_accumulation_steps": 2, "max_steps": 1, "per_device_train_batch_size": 4}
    trainer = make(tmp_path / "out", build(), nvme=tmp_path / "nvme", **given)
    trainer.train()
    assert training_step(trainer) > 0
    trainer.end()


@pytest.mark.parametrize("name", ["compute_loss_func", "compute_loss"])
def test_loss_function_set_after_attach_is_rejected_with_layer_major_execution(name: str, tmp_path: Path) -> None:
    trainer = make(tmp_path / "out", build(), nvme=tmp_path / "nvme", gradient_accumulation_steps=2)
    setattr(trainer, name, lambda outputs, labels, num_items_in_batch=None: outputs.logits.square().mean())
    with pytest.raises(ConfigError, match=r"loss.*before attach\(\), or pass layer_major=False"):
        trainer.train()
    assert not (tmp_path / "nvme").exists()
