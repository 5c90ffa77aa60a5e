"""Tests of Trainer checkpoints with the state on NVMe: folders that refer to checkpoints of the run."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from infinity.checkpoint.reader import CheckpointReader
from infinity.errors import CheckpointError, ConfigError, InfinityError
from infinity.integrations import checkpoint_folders, run_folders
from infinity.run.optimizer import PagedOptimizer
from support.processes import fork_server
from support.published import complete_checkpoints
from support.tables import WIDE, all_but
from support.trainers import Outcome, build, make, outcome_of, with_adapters

SHUFFLED = {"train_sampling_strategy": "random", "max_steps": 8, "lr_scheduler_type": "cosine", "warmup_steps": 2}
SAVED = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 2, "max_steps": 6}


def checkpoint_names(folder: Path) -> list[str]:
    """Return the names of the checkpoints in a folder, in order."""
    return sorted(path.name for path in folder.glob("checkpoint-*"))


def checkpoint_steps(nvme: Path) -> list[int]:
    """Return the steps of the checkpoints of the only run."""
    (run,) = (path for path in nvme.iterdir() if path.is_dir())
    return [checkpoint.step for checkpoint in complete_checkpoints(run)]


def close(trainer: Any) -> None:
    """Close the run, as at the end of the process."""
    trainer.optimizer.optimizer.close()


def test_trainer_checkpoint_contains_no_copy_of_the_state(tmp_path: Path) -> None:
    """The folder contains the Trainer's own files, but no weights, moments or secrets."""
    out, nvme = tmp_path / "out", tmp_path / "nvme"
    trainer = make(out, build(), nvme=nvme, **SAVED, hub_token="secret")
    trainer.train()
    assert checkpoint_names(out) == ["checkpoint-4", "checkpoint-6"]
    assert checkpoint_steps(nvme) == [4, 6]
    for step in (4, 6):
        folder = out / f"checkpoint-{step}"
        found = {path.name for path in folder.iterdir()}
        assert found == {
            "infinity.json", "config.json", "generation_config.json", "trainer_state.json", "scheduler.pt",
            "rng_state.pth", "training_args.bin",
        }  # fmt: skip
        named = json.loads((folder / "infinity.json").read_text())
        args = torch.load(folder / "training_args.bin", weights_only=False)
        assert (args.save_total_limit, args.hub_token) == (2, None)
        assert (named["run_id"], named["step"]) == (trainer.optimizer.optimizer.run.folder.run_id, step)
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    state = 12 * sum(param.numel() for param in trainer.model.parameters())
    print(f"two checkpoints: {size} bytes, compared with {state} bytes of state")
    assert size < state / 10
    close(trainer)


@pytest.mark.parametrize("limit", [1, pytest.param(2, marks=WIDE)])
def test_load_best_model_at_end(limit: int, tmp_path: Path) -> None:
    """The best checkpoint is kept in addition to the last one, with the weights of the unmodified Trainer."""
    given = {
        **SAVED, "save_total_limit": limit, "eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True,
        "learning_rate": 1e-1, "greater_is_better": True, "metric_for_best_model": "loss",
    }  # fmt: skip
    # With this learning rate, the loss is largest after 4 of 6 steps.
    ordinary = make(tmp_path / "memory", build("plain"), **given)
    ordinary.train()
    trainer = make(tmp_path / "out", build(), nvme=tmp_path / "nvme", **given)
    trainer.train()
    best = Path(trainer.state.best_model_checkpoint)
    assert best.name == Path(ordinary.state.best_model_checkpoint).name != "checkpoint-6"
    assert checkpoint_names(tmp_path / "out") == checkpoint_names(tmp_path / "memory")
    outcome_of(trainer).equals(outcome_of(ordinary))
    assert trainer.evaluate()["eval_loss"] == ordinary.evaluate()["eval_loss"] == trainer.state.best_metric
    assert checkpoint_steps(tmp_path / "nvme") == [4, 6]  # the last one can still be resumed
    close(trainer)


def test_load_best_adapters_at_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters are read from the best checkpoint; the frozen base is neither read nor written."""
    pytest.importorskip("peft")
    read: list[str] = []
    original = CheckpointReader.read

    def record_read(self: CheckpointReader, index: int, *given: Any, **named: Any) -> torch.Tensor:
        read.extend(self.tensors[index].names)
        return original(self, index, *given, **named)

    monkeypatch.setattr(CheckpointReader, "read", record_read)
    given = {
        **SAVED, "eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "quality",
        "greater_is_better": True, "load_best_model_at_end": True,
    }  # fmt: skip
    outcomes = []
    for name, where, nvme in (("memory", "plain", None), ("out", "cpu", tmp_path / "nvme")):
        quality = iter([0.1, 0.9, 0.2])
        metrics = partial(lambda left, _: {"quality": next(left)}, quality)
        trainer = make(tmp_path / name, with_adapters(where), nvme=nvme, compute_metrics=metrics, **given)
        trainer.train()
        assert Path(trainer.state.best_model_checkpoint).name == "checkpoint-4"
        outcomes.append(outcome_of(trainer))
    assert sorted(read) == sorted(name for name, param in trainer.model.named_parameters() if param.requires_grad)
    outcomes[1].equals(outcomes[0])
    close(trainer)


def kill(*_: Any, **__: Any) -> None:
    os._exit(9)


class Kill(TrainerCallback):
    """Kills the process at a moment."""

    def __init__(self, moment: str) -> None:
        self.moment = moment

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 7 and self.moment == "step":
            kill()
        if state.global_step == 6 and self.moment == "before the checkpoint":
            PagedOptimizer.save_checkpoint = kill  # type: ignore[method-assign]
        if state.global_step == 6 and self.moment == "after the checkpoint":
            checkpoint_folders.Checkpoints.remove_others = kill  # type: ignore[method-assign]


def train_and_die(folder: Path, moment: str, limit: int) -> None:
    torch.set_num_threads(1)
    given = {**SAVED, **SHUFFLED, "save_total_limit": limit, "callbacks": [Kill(moment)]}
    make(folder / "out", build(dropout=0.1), nvme=folder / "nvme", **given).train()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Outcome of an uninterrupted training of a model with dropout, which draws random numbers."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    trainer = make(folder / "out", build(dropout=0.1), nvme=folder / "nvme", **SHUFFLED)
    trainer.train()
    outcome = outcome_of(trainer)
    close(trainer)
    return outcome


KILLED = {
    "step": (2, True, [4, 6], [6, 8]),
    "step, resumed by name": (2, "checkpoint-4", [4, 6], [6, 8]),
    "before the checkpoint": (1, True, [4, 6], [8]),
    "after the checkpoint": (1, True, [4, 6], [8]),
}
"""Limit of checkpoints, checkpoint to resume from, and steps of the folders after the kill and at the end, by moment.

The folder of step 6 is already complete before its checkpoint is saved.
"""


@pytest.mark.parametrize("case", all_but(KILLED, "step", "step, resumed by name", "after the checkpoint"))
def test_killed_trainer_resumes_exactly(case: str, uninterrupted: Outcome, tmp_path: Path) -> None:
    """Weights, moments, scheduler, random numbers and the order of the data are restored."""
    limit, named, killed, ended = KILLED[case]
    process = fork_server().Process(target=train_and_die, args=(tmp_path, case.partition(",")[0], limit))
    process.start()
    process.join(600)
    assert process.exitcode == 9
    out, nvme = tmp_path / "out", tmp_path / "nvme"
    assert checkpoint_names(out) == [f"checkpoint-{step}" for step in killed]
    trainer = make(out, build("meta", dropout=0.1), nvme=nvme, **{**SAVED, **SHUFFLED, "save_total_limit": limit})
    trainer.train(resume_from_checkpoint=named if named is True else str(out / named))
    outcome_of(trainer).equals(uninterrupted)  # earlier losses are restored from trainer_state.json
    assert checkpoint_names(out) == [f"checkpoint-{step}" for step in ended]
    assert checkpoint_steps(nvme) == ended
    close(trainer)


def test_resume_without_a_valid_checkpoint_raises(tmp_path: Path) -> None:
    """There is no checkpoint, it belongs to an unmodified Trainer, or it was removed."""
    out, nvme = tmp_path / "out", tmp_path / "nvme"
    trainer = make(out, build(), nvme=nvme, **SAVED)
    with pytest.raises(CheckpointError, match="nothing to resume"):
        trainer.train(resume_from_checkpoint=True)
    (tmp_path / "checkpoint-6").mkdir()
    with pytest.raises(ConfigError, match=r"infinity\.json.*weights=folder"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    trainer.train()
    with pytest.raises(InfinityError, match="resume_from_checkpoint"):
        trainer.train(resume_from_checkpoint=str(out / "checkpoint-4"))
    close(trainer)


def test_damaged_last_checkpoint_is_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The run resumes exactly from the previous checkpoint and continues to save."""
    out, nvme = tmp_path / "out", tmp_path / "nvme"
    uninterrupted = make(out, build(), nvme=nvme, **SAVED)
    uninterrupted.train()
    expected = outcome_of(uninterrupted)
    close(uninterrupted)
    (out / "checkpoint-6" / "infinity.json").write_text('{"run_id": "')
    again = make(out, build("meta"), nvme=nvme, **SAVED)
    again.train(resume_from_checkpoint=True)
    outcome_of(again).equals(expected)
    assert "checkpoint-6 is ignored" in caplog.text
    assert checkpoint_names(out) == ["checkpoint-4", "checkpoint-6"]
    assert checkpoint_steps(nvme) == [4, 6]
    close(again)


def test_folder_whose_rewriting_was_interrupted_is_found(tmp_path: Path) -> None:
    for name in ("checkpoint-2", ".checkpoint-10.before", "checkpoint-007", "checkpoint-last"):
        (tmp_path / name).mkdir()
    found = checkpoint_folders.numbered_folders(tmp_path, "checkpoint-")
    assert [folder.name for folder in found] == ["checkpoint-10", "checkpoint-007", "checkpoint-2"]


def test_only_folders_of_removed_checkpoints_are_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    records = {
        ".checkpoint-1.before": '{"run_id": "mine", "step": 1, "token": "old"}',
        "checkpoint-1": '{"run_id": "mine", "step": 1, "token": "new"}',
        "checkpoint-2": '{"run_id": "mine", "step": 2, "token": ""}',
        "checkpoint-3": '{"run_id": "other", "step": 1, "token": ""}',
        "checkpoint-4": "damaged",
        "checkpoint-5": None,  # of a Trainer without infinity
    }
    for name, record in records.items():
        (tmp_path / name).mkdir()
        if record is not None:
            (tmp_path / name / "infinity.json").write_text(record)
    run = SimpleNamespace(
        folder=SimpleNamespace(run_id="mine"),
        store=SimpleNamespace(checkpoints={2: None}),
        ranks=SimpleNamespace(on_first=lambda _, function: function()),
    )
    checkpoints = checkpoint_folders.Checkpoints(SimpleNamespace(run=run, resumed_extra={}, steps=2), "")  # type: ignore[arg-type]
    checkpoints.remove_others(checkpoint_folders.numbered_folders(tmp_path, "checkpoint-"))
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"checkpoint-{number}" for number in range(2, 6)]
    (record,) = caplog.records
    assert "checkpoint-4 is not removed" in record.getMessage()


def test_files_of_a_folder_are_flushed_before_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folders of all frameworks are written by the same code."""
    flushed: set[Path] = set()
    original = (run_folders.sync_file, checkpoint_folders.write_durably, PagedOptimizer.save_checkpoint)
    monkeypatch.setattr(run_folders, "sync_file", lambda file: (original[0](file), flushed.add(file)))
    monkeypatch.setattr(
        checkpoint_folders, "write_durably", lambda file, data: (original[1](file, data), flushed.add(file))
    )
    folder = tmp_path / "out" / "checkpoint-2"

    def save_checkpoint(self: PagedOptimizer, *given: Any, **named: Any) -> None:
        assert flushed == set(folder.iterdir())
        assert folder / "infinity.json" in flushed
        original[2](self, *given, **named)
        flushed.clear()

    monkeypatch.setattr(PagedOptimizer, "save_checkpoint", save_checkpoint)
    trainer = make(tmp_path / "out", build(), nvme=tmp_path / "nvme", **SAVED | {"max_steps": 2})
    trainer.train()
    assert not flushed
    close(trainer)
