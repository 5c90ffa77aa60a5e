"""Tests of `infinity train --log` with TensorBoard and W&B."""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path

import pytest

from support.command import SMALL, run_here

TRAIN = [*SMALL, "--data", "t.txt", "--eval-data", "t.txt", "--max-grad-norm", "1"]
FIGURES = {"loss", "lr", "grad_norm", "tokens_per_second", "stall_seconds", "nvme_read_bytes", "nvme_written_bytes"}


@pytest.fixture(autouse=True)
def text(tmp_path: Path) -> None:
    """Write a text to train on."""
    (tmp_path / "t.txt").write_text("far home and over the sea " * 50)


def test_tensorboard_has_every_step_once(tmp_path: Path) -> None:
    """Values match steps.jsonl, and a resumed run replaces the steps after its checkpoint."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    few = [*TRAIN, "--log", "tensorboard", "--checkpoint-every", "2", "--retained-checkpoints", "2", "--out", "o"]
    assert run_here(*few, "--steps", "4", "--lr-steps", "5").status == 0
    assert run_here("train", "--resume", "--resume-step", "2", "--steps", "5", "--out", "o", *SMALL[-4:]).status == 0
    (folder,) = (tmp_path / "o/tensorboard").iterdir()
    found = EventAccumulator(str(folder)).Reload()
    tags = found.Tags()["scalars"]
    assert {f"train/{name}" for name in FIGURES} | {"eval/loss"} <= set(tags)
    rows = [json.loads(line) for line in (tmp_path / "o/steps.jsonl").read_text().splitlines()]
    assert [event.step for event in found.Scalars("train/loss")] == [1, 2, 3, 4, 5]
    for tag, key in (("train/loss", "loss"), ("train/lr", "lr"), ("train/grad_norm", "grad_norm")):
        assert [event.value for event in found.Scalars(tag)] == pytest.approx([row[key] for row in rows])
    evaluated = [row for row in rows if "eval_loss" in row]
    assert found.Scalars("eval/loss")[-1].value == pytest.approx(evaluated[-1]["eval_loss"])


def test_wandb_works_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are logged under their names, and the files are stored in the output folder."""
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    logged: dict[int, dict[str, float]] = {}
    log = wandb.Run.log

    def noted(run: wandb.Run, data: dict[str, float], step: int) -> None:
        logged[step] = data
        log(run, data, step=step)

    monkeypatch.setattr(wandb.Run, "log", noted)
    names, init = [], wandb.init
    monkeypatch.setattr(wandb, "init", lambda **given: names.append(given["name"]) or init(**given))
    assert run_here(*TRAIN, "--log", "wandb", "--steps", "2", "--out", "o").status == 0
    assert names == ["tiny in o"]
    assert list((tmp_path / "o/wandb").glob("offline-run-*/run-*.wandb"))
    assert sorted(logged) == [1, 2]
    assert {f"train/{name}" for name in FIGURES} <= set(logged[1])
    assert "eval/loss" in logged[2]


def test_full_log_does_not_stop_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is reported once, and steps.jsonl is complete."""
    from torch.utils.tensorboard import SummaryWriter

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(SummaryWriter, "add_scalar", full)
    ended = run_here(*TRAIN, "--log", "tensorboard", "--steps", "3", "--out", "o")
    assert ended.status == 0
    assert len(Path("o/steps.jsonl").read_text().splitlines()) == 3
    said = " ".join(ended.errors.split())
    assert said.count("--log tensorboard is missing steps from 1 on: No space left on device") == 1, said


def test_wandb_without_api_key_suggests_offline_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message is one line, and no checkpoint remains."""
    import wandb

    def fail(**_: object) -> None:
        raise wandb.Error("No API key configured.")

    monkeypatch.setattr(wandb, "init", fail)
    ended = run_here(*TRAIN, "--log", "wandb", "--steps", "2", "--out", "o")
    assert ended.status == 2
    said = " ".join(ended.errors.split())
    assert "--log wandb: No API key configured.; " in said
    assert "WANDB_MODE=offline" in said
    assert not list(tmp_path.glob("o/nvme/*/checkpoints/*"))


@pytest.mark.parametrize(
    ("package", "options", "extra"),
    [
        ("tensorboard", ["--log", "tensorboard"], "tensorboard"),
        ("wandb", ["--log", "wandb"], "wandb"),
        ("peft", ["--lora", "r=4"], "peft"),
        ("datasets", ["--data", "d.jsonl"], "data"),
    ],
)
def test_missing_optional_package_names_extra(
    package: str, options: list[str], extra: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The message is one line, and nothing is written."""
    (tmp_path / "d.jsonl").write_text('{"text": "far home"}\n')
    monkeypatch.setitem(sys.modules, package, None)
    ended = run_here(*SMALL, *options, "--out", "o")
    assert ended.status == 2
    assert ended.errors.endswith(
        f"needs the package {package}, which is not installed: pip install 'infinity-offload[{extra}]'\n"
    )
    assert not (tmp_path / "o").exists()
