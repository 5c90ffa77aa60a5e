"""What a first step is expected to look like: it is read ahead as far as it does, and served on demand from there."""

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
from support.train import Paging, Recipe, batch, host_bytes, make_optimizer, settings

OTHERS = ("repeated", "spare", "prompt", "prefix", "prompt-encoder")
"""Models that use an FSDP module twice or not at all, or whose inputs are computed by what they have last."""
ALIKE = tuple(name for name in models.MODELS if name not in OTHERS and not name.startswith("qlora"))
FEW = 0.2
"""Of pages that are read ahead, some are wanted before there was a cache slot for them."""


@pytest.mark.parametrize("name", ALIKE)
def test_a_first_step_is_as_expected(name: str, tmp_path: Path) -> None:
    """And next to nothing in it is fetched on demand."""
    expected, found, missed = first_step(name, str(tmp_path))
    assert found == expected
    assert missed < FEW


@pytest.mark.parametrize("name", ALIKE)
def test_a_first_step_of_two_ranks_is_as_expected(name: str, tmp_path: Path, pair: RankPool) -> None:
    """They gather an FSDP module ahead."""
    for expected, found, missed in pair.run(first_step, name, str(tmp_path)):
        assert found == expected
        assert missed < FEW


@pytest.mark.parametrize("name", OTHERS)
def test_another_first_step_is_served(name: str, tmp_path: Path) -> None:
    """That it departs is nothing to be told of."""
    expected, found, _ = first_step(name, str(tmp_path))
    assert found != expected


def test_a_departure_evicts_nothing(tmp_path: Path) -> None:
    """Where all fits the host cache, gradients of the first micro-batch stay there when the second one departs."""
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
    """Return the events that are expected and those that come, and the part of pages that were fetched on demand."""
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
