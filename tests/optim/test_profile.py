"""What users see of a step in their own traces."""

from __future__ import annotations

from pathlib import Path

import torch

from support import models
from support.train import Paging, Recipe, batch, offloaded


def test_a_profile_names_what_a_step_does(tmp_path: Path) -> None:
    """With FSDP modules and shards, as FSDP2 names its own."""
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
    fsdp_modules = {f"({fsdp_module.name})" for fsdp_module in optimizer.run.layout.fsdp_modules}
    assert {
        f"infinity::{what} {fsdp_module}" for what in ("gradients", "update") for fsdp_module in fsdp_modules
    } <= seen
    assert {"infinity::gather (head.weight)", "infinity::clip", "infinity::step", "infinity::checkpoint"} <= seen
