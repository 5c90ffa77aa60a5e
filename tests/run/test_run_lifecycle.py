"""Tests of starting and closing runs under unusual conditions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.cleanup import end_all
from infinity.config import Config, StorageConfig
from infinity.errors import ConfigError
from infinity.run.run import Run
from infinity.store.folder import holders
from support import models
from support.train import MIB, Paging, Recipe, batch, build, make_optimizer, settings

RECIPE = Recipe(model="toy")


def start(config: Any) -> tuple[torch.nn.Module, Any]:
    model = build(RECIPE)
    return model, infinity.offload(model, make_optimizer(RECIPE, model), config)


def step(model: torch.nn.Module, optimizer: Any) -> None:
    models.loss_of(model, batch(model, 0)).backward()
    optimizer.step()
    optimizer.zero_grad()


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


def test_resume_step_requires_resume(tmp_path: Path) -> None:
    """Otherwise the run would silently start at step 0."""
    with pytest.raises(ConfigError, match=r"run\.resume_step = 100.*run\.resume"):
        start(settings(tmp_path, Paging(), 64 * MIB, run={"resume_step": 100}))
