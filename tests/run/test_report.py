"""Tests of the training metrics that a rank publishes: loss, tokens, learning rate and gradient norm."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from infinity.config import Config
from infinity.errors import ConfigError
from infinity.integrations.transformers.trainer import _with_run_name
from support import models
from support.session import Session, draw


def test_training_metrics_describe_the_last_step(tmp_path: Path) -> None:
    """Learning rate and norm are recorded automatically, loss and tokens by `report`."""
    with Session(tmp_path) as session:
        optimizer, stats = session.optimizer, session.optimizer.run.stats

        def shown() -> dict[str, float]:
            page = stats.snapshot()
            names = ("training_loss", "training_learning_rate", "training_gradient_norm", "training_tokens_total")
            return {name: page.value(name) for name in names}

        assert set(shown().values()) == {0.0}
        tokens = 0
        for _ in range(3):
            batch = draw()
            tokens += batch.numel()
            loss = models.loss_of(session.model, batch)
            loss.backward()
            norm = optimizer.clip_grad_norm_(0.01)
            rate = optimizer.param_groups[0]["lr"]
            optimizer.step()
            optimizer.report(loss=loss, tokens=batch.numel())
            session.scheduler.step()
            optimizer.zero_grad()
            assert shown() == {
                "training_loss": loss.item(),
                "training_learning_rate": rate,
                "training_gradient_norm": norm.item(),
                "training_tokens_total": tokens,
            }
        optimizer.report(tokens=1)
        assert shown()["training_loss"] == loss.item()
        for invalid in (float("nan"), float("inf"), -1):  # would corrupt the counter permanently
            with pytest.raises(ConfigError, match="tokens = "):
                optimizer.report(tokens=invalid)
        optimizer.report(total_steps=20)
        assert stats.snapshot().value("training_target_steps") == 20
        with pytest.raises(ConfigError, match="total_steps = -1"):
            optimizer.report(total_steps=-1)
        optimizer.report(loss=math.inf)
        assert shown()["training_tokens_total"] == tokens + 1
        assert shown()["training_loss"] == math.inf


def test_run_has_a_name(tmp_path: Path) -> None:
    """The default consists of the model and the folder. After resuming, target steps exclude earlier steps."""
    with Session(tmp_path) as session:
        assert session.optimizer.run.stats.header.name == "Toy in nvme0"
        session.run(3)
        session.optimizer.save_checkpoint()
    with Session(tmp_path, run={"resume": "latest", "name": "second try"}) as session:
        header = session.optimizer.run.stats.header
        assert (header.name, header.steps_before) == ("second try", 3)
        session.optimizer.report(total_steps=10)
        assert session.optimizer.run.stats.snapshot().value("training_target_steps") == 7
    with pytest.raises(ConfigError, match=r"run\.name = 'a\\nb'"):
        Session(tmp_path, run={"name": "a\nb"})


def test_trainer_run_name_is_used() -> None:
    """Transformers of some releases set `run_name` to the output folder by default."""
    model, settings = models.Toy(), Config()
    for given, expected in (("mine", "mine"), ("runs/out", "Toy in out"), (None, "Toy in out")):
        arguments = SimpleNamespace(run_name=given, output_dir="runs/out")
        assert _with_run_name(settings, arguments, model).run.name == expected
    named = replace(settings, run=replace(settings.run, name="setting"))
    assert _with_run_name(named, SimpleNamespace(run_name="mine", output_dir="runs/out"), model).run.name == "setting"
