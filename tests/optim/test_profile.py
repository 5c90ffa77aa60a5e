"""Tests of the ranges that a training step adds to the PyTorch profiler."""

from __future__ import annotations

from pathlib import Path

import torch

from support import models
from support.train import Paging, Recipe, batch, offloaded


def test_profiler_shows_infinity_ranges_with_module_names(tmp_path: Path) -> None:
    with offloaded(Recipe(model="toy"), Paging(host_cache="all", update_schedule="in_forward"), tmp_path) as (
        model,
        optimizer,
    ):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            models.loss_of(model, batch(model, 0)).backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.save_checkpoint()
        seen = {event.key for event in profile.key_averages() if event.key.startswith("infinity::")}
    modules = [fsdp_module.name for fsdp_module in optimizer.run.layout.fsdp_modules]
    assert {f"infinity::{action} ({name})" for action in ("gradients", "update") for name in modules} <= seen
    assert {"infinity::gather (head.weight)", "infinity::clip", "infinity::step", "infinity::checkpoint"} <= seen
