"""Tests of starting and closing runs under unusual conditions, and of what they log and report."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import infinity
from infinity.cleanup import end_all
from infinity.config import Config, StorageConfig
from infinity.errors import ConfigError
from infinity.integrations.transformers.trainer import _with_run_name
from infinity.run.run import Run
from infinity.store.folder import holders
from support import models
from support.session import Session, draw
from support.train import MIB, Paging, Recipe, build, make_optimizer, settings, step

RECIPE = Recipe(model="toy")


def start(config: Any) -> tuple[torch.nn.Module, Any]:
    model = build(RECIPE)
    return model, infinity.offload(model, make_optimizer(RECIPE, model), config)


def test_interrupt_during_close_releases_the_remaining_resources(tmp_path: Path) -> None:
    """Otherwise the folder stays locked and the memory allocated until the process exits."""
    ended: list[str] = []

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        end_all(interrupted, lambda: ended.append("first"), cause=ValueError("why"))
    assert ended == ["first"]

    model, optimizer = start(settings(tmp_path, Paging(), 64 * MIB))
    step(model, optimizer)
    optimizer.run.undo.push(interrupted)
    with pytest.raises(KeyboardInterrupt):
        optimizer.close()
    assert holders(tmp_path / "nvme0") == []
    start(settings(tmp_path, Paging(), 64 * MIB))[1].close()


def test_with_block_inside_except_closes_without_a_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception that is handled outside the block must not be reported to other ranks, because they would stop."""
    causes: list[BaseException | None] = []
    close = Run.close
    monkeypatch.setattr(Run, "close", lambda run, cause, **how: causes.append(cause) or close(run, cause, **how))
    try:
        raise ImportError("an optional package")
    except ImportError:
        model, optimizer = start(settings(tmp_path, Paging(), 64 * MIB))
        with optimizer:
            step(model, optimizer)
    assert causes == [None]


def test_relative_paths_survive_a_change_of_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths are resolved when the run starts, because launchers may change the directory later."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    telemetry = {"timeline": "trace.json", "runtime_dir": "runtime"}
    model, optimizer = start(
        {"storage": {"paths": ["nvme"]}, "memory": {"host_bytes": 64 * MIB}, "telemetry": telemetry}
    )
    monkeypatch.chdir(tmp_path / "elsewhere")
    step(model, optimizer)
    optimizer.save_checkpoint()
    optimizer.close()
    assert len(list((tmp_path / "nvme").glob("*/checkpoints/*.json"))) == 1
    assert sorted(file.name for file in tmp_path.iterdir()) == ["elsewhere", "nvme", "runtime", "trace.json"]
    assert not list((tmp_path / "elsewhere").iterdir())


def test_config_object_is_validated() -> None:
    wrong: Any = "nvme"
    with pytest.raises(ConfigError, match=r"storage\.paths"):
        start(Config(storage=StorageConfig(paths=wrong)))
    wrong = 0
    with pytest.raises(ConfigError, match=r"storage\.queue_depth = 0"):
        start(Config(storage=StorageConfig(paths=("nvme",), queue_depth=wrong)))


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


@pytest.mark.parametrize(("crawls", "bf16"), [(True, True), (True, False), (False, True)])
def test_warning_requires_bf16_on_a_slow_processor(
    crawls: bool, bf16: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("infinity.run.inspection.crawls_in_bf16", lambda: crawls)
    model = nn.Linear(4, 4)
    fully_shard(
        model, mesh=infinity.mesh(), mp_policy=MixedPrecisionPolicy(torch.bfloat16 if bf16 else None, torch.float32)
    )
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with infinity.offload(model, optimizer, {"storage": {"paths": [str(tmp_path)]}, "memory": {"host_bytes": "1MiB"}}):
        pass
    assert ("MixedPrecisionPolicy" in caplog.text) is (crawls and bf16)
