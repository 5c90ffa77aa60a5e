"""Tests of the predicted first step: pages are prefetched while the step follows it, and read on demand afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import infinity
from infinity.content.format import Role
from infinity.fsdp.sharded_model import ShardedModel
from infinity.schedule.trace import Event
from infinity.telemetry.metrics import FETCH_RESULTS
from support import models
from support.ranks import RankPool
from support.tables import all_but
from support.train import Paging, Recipe, batch, host_bytes, make_optimizer, settings

UNPREDICTED = ("repeated", "spare", "prompt", "prefix", "prompt-encoder")
"""Models that use an FSDP module twice or not at all, or whose last FSDP module computes the inputs."""
PREDICTED = tuple(name for name in models.MODELS if name not in UNPREDICTED and not name.startswith("qlora"))
QUICK = ("llama", "loose", "lora-reentrant", "upper-layers", "tied-frozen")
"""Models that differ in their FSDP modules, or in which of them have gradients."""
ON_TWO = ("upper-layers",)
MISS_LIMIT = 0.4
"""Maximum fraction of pages read on demand. Some prefetched pages are needed before a cache slot is free."""


@pytest.mark.parametrize("name", all_but(PREDICTED, *set(PREDICTED).difference(QUICK)))
def test_first_step_follows_the_prediction(name: str, tmp_path: Path) -> None:
    """Few pages are read on demand."""
    expected, found, missed = first_step(name, str(tmp_path))
    assert found == expected
    assert missed < MISS_LIMIT


@pytest.mark.parametrize("name", all_but(PREDICTED, *set(PREDICTED).difference(ON_TWO)))
def test_first_step_on_two_ranks_follows_the_prediction(name: str, tmp_path: Path, pair: RankPool) -> None:
    """With several ranks FSDP2 prefetches the next FSDP module."""
    for expected, found, missed in pair.run(first_step, name, str(tmp_path)):
        assert found == expected
        assert missed < MISS_LIMIT


@pytest.mark.parametrize("name", all_but(UNPREDICTED, "prompt", "prefix"))
def test_unpredicted_first_step_is_served_without_a_message(name: str, tmp_path: Path) -> None:
    expected, found, _ = first_step(name, str(tmp_path))
    assert found != expected


def test_departure_from_the_prediction_evicts_no_pages(tmp_path: Path) -> None:
    """If everything fits the host cache, the first micro-batch's gradients stay cached when the second one departs."""
    model = models.build("toy")
    paging = Paging(host_cache="all")
    passed_in = make_optimizer(Recipe(model="toy"), model)
    with infinity.offload(model, passed_in, settings(tmp_path, paging, 64 << 20)) as optimizer:
        for number in range(2):
            models.loss_of(model, batch(model, number)).backward()
        counted = optimizer.run.stats.snapshot()
        assert counted.value("plan_divergences_total") == 0
        assert optimizer.run.pager.in_flight() == {"read": 0, "write": 0}
        assert optimizer.run.pager.held_bytes()[Role.GRAD.value] > 0


def first_step(name: str, folder: str) -> tuple[tuple[Event, ...], tuple[Event, ...], float]:
    """Return the predicted events, the recorded events, and the fraction of pages that were read on demand."""
    model = models.build(name)
    expected = ShardedModel.inspect(model).expected_step(alone=torch.distributed.get_world_size() == 1)
    passed_in = make_optimizer(Recipe(model=name), model)
    paging = Paging(host_cache="least")
    host = host_bytes(paging, model, passed_in, Path(folder))
    with infinity.offload(model, passed_in, settings(Path(folder), paging, host)) as optimizer:
        models.loss_of(model, batch(model, 0)).backward()
        optimizer.step()
        counted = optimizer.run.stats.snapshot()
        assert counted.value("plan_divergences_total") == 0
        fetched = {result: counted.value("prefetch_fetches_total", result=result) for result in FETCH_RESULTS}
        return expected, optimizer.run.planner.events, fetched["miss"] / sum(fetched.values())
