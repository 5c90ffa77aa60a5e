"""Tests of link traffic: the bytes copied between host and device equal the prediction of the plan."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from support import models
from support.device.simulation import KINDS, simulation
from support.layouts import gpu_resident_bytes
from support.tables import one_of, variants
from support.train import Paging, Recipe, batch, offloaded

STEPS = 4
PAGINGS = {
    f"{host_cache}-{update_schedule}-{device >> 10}KiB": Paging(
        host_cache=host_cache, update_schedule=update_schedule, cores=0, device=device
    )
    for host_cache, update_schedule, device in (
        ("least", "in_backward", 0),
        ("least", "in_forward", 64 << 20),
        ("all", "in_backward", 64 << 20),
        ("all", "after_backward", 120 << 10),
    )
}


GPU_RESIDENT_PAGES = {
    f"resident-{update_schedule}": Paging(
        host_cache="least", update_schedule=update_schedule, cores=0, device=device, gpu_resident_pages="some"
    )
    for update_schedule, device in (("in_backward", 3 << 20), ("in_forward", 4 << 20))
}
"""With GPU-resident FSDP modules of about 1 MiB."""
UPDATED = {kind: kind for kind in KINDS if kind.endswith("updates")}
ROWS = [
    *one_of(4, variants(PAGINGS, {kind: kind for kind in KINDS})),
    *variants(GPU_RESIDENT_PAGES, UPDATED, wide=True),  # `test_gpu_resident_modules_cause_no_traffic` is stricter
]


@pytest.mark.parametrize(("paging", "kind"), ROWS)
def test_link_bytes_match_the_prediction(paging: Paging, kind: str, tmp_path: Path) -> None:
    """Every step is within 1 % of the prediction, which omits only numbers that the host reads."""
    recipe = Recipe(model="even", steps=STEPS)
    with simulation(kind, 0), offloaded(recipe, paging, tmp_path) as (model, optimizer):
        counted = []
        for number in range(STEPS):
            models.loss_of(model, batch(model, number)).backward()
            optimizer.step()
            optimizer.zero_grad()
            counted.append(found(optimizer.run.stats.snapshot(), "link_bytes_total"))
        predicted = found(optimizer.run.stats.snapshot(), "plan_predicted_link_bytes_per_step")
        gpu_resident = optimizer.run.planner.update_schedule.gpu_resident
        fsdp_modules = len(optimizer.run.layout.fsdp_module_shards)
    assert (min(predicted) > 0) is (len(gpu_resident) < fsdp_modules)
    assert bool(gpu_resident) or not paging.gpu_resident_pages
    for before, after in pairwise(counted[2:]):
        for expected, first, last in zip(predicted, before, after, strict=True):
            assert last - first == pytest.approx(expected, rel=0.01, abs=8 * fsdp_modules)


@pytest.mark.parametrize("micro", [pytest.param(1, marks=pytest.mark.wide), 2])
def test_gpu_resident_modules_cause_no_traffic(micro: int, tmp_path: Path) -> None:
    """Steps move no bytes if all modules are GPU-resident; a checkpoint copies the bytes that updates have changed."""
    recipe = Recipe(model="even", steps=STEPS, micro=micro)
    paging = Paging(host_cache="least", update_schedule="after_backward", cores=0, device=64 << 20)
    with simulation("order-updates", 0), offloaded(recipe, paging, tmp_path) as (model, optimizer):
        run = optimizer.run
        for number in range(STEPS):
            for part in range(micro):
                models.loss_of(model, batch(model, 10 * number + part)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if number == 1:
                before = found(run.stats.snapshot(), "link_bytes_total")
        there, back = found(run.stats.snapshot(), "link_bytes_total")
        assert there == before[0]
        assert back - before[1] <= 8 * len(run.layout.fsdp_modules) * (STEPS - 2)  # numbers that the host reads
        assert found(run.stats.snapshot(), "plan_predicted_link_bytes_per_step") == [0, 0]
        assert [(record.read_bytes, record.written_bytes) for record in optimizer.records[3:]] == [(0, 0)] * (STEPS - 3)
        assert optimizer.predict_seconds(1e9, 1.0) == pytest.approx(1.0)
        sent = sum(
            gpu_resident_bytes(run.layout, fsdp_module) for fsdp_module in run.planner.update_schedule.gpu_resident
        )
        for expected in (sent, 0):  # no update since the first checkpoint
            written, copied = run.ledger.total_bytes["write"], found(run.stats.snapshot(), "link_bytes_total")
            optimizer.save_checkpoint()
            assert run.ledger.total_bytes["write"] - written == expected
            there, back = found(run.stats.snapshot(), "link_bytes_total")
            assert (there - copied[0], back - copied[1]) == (0, expected)


def found(snapshot: object, name: str) -> list[float]:
    """Return the values of a metric in both directions."""
    return [snapshot.value(name, direction=way) for way in ("to_device", "from_device")]  # type: ignore[attr-defined]
