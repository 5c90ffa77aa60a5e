"""Tests of the step time by part: a delay appears in its own part and in no other."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from infinity.io import Op
from infinity.memory.device import Device
from infinity.optim.update import Update
from infinity.telemetry.metrics import PARTS
from support import models
from support.fault_engine import Fault, FaultKind
from support.ranks import RankPool
from support.tables import alternate, one_of
from support.train import Outcome, Paging, Recipe, batch, faulty, offloaded, train

RECIPE = Recipe(model="even", steps=2)
STEPS = 2
SLOW = 0.02


def seconds_by_part(
    model: torch.nn.Module, optimizer: Any, between: Callable[[], None] = lambda: None
) -> dict[str, float]:
    """Train several steps; return the seconds by part, checked against the clock.

    A step lasts from the end of the previous step to its own end, so one extra step runs first.
    """
    found = dict.fromkeys(PARTS, 0.0)
    ends: list[tuple[float, float]] = []  # two times for each step, between which it ended
    for step in range(1 + STEPS):
        between()
        models.loss_of(model, batch(model, step)).backward()
        before = time.perf_counter()
        optimizer.step()
        ends.append((before, time.perf_counter()))
        optimizer.zero_grad()
    for record in optimizer.records[-STEPS:]:
        parts = {part: getattr(record, f"{part}_seconds") for part in PARTS}
        assert sum(parts.values()) == pytest.approx(record.seconds, rel=1e-6)
        assert min(parts.values()) > -1e-9
        for part, seconds in parts.items():
            found[part] += seconds
    (earliest, latest), (least, most) = ends[0], ends[-1]
    assert least - latest - 1e-6 <= sum(found.values()) <= most - earliest + 1e-6
    return found


def delayed(function: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    """Return a function that sleeps before it calls `function`."""

    def slow(*arguments: Any, **named: Any) -> Any:
        time.sleep(seconds)
        return function(*arguments, **named)

    return slow


def delay_compute(patch: pytest.MonkeyPatch, model: torch.nn.Module, slow: float = SLOW) -> float:
    for block in model.blocks:
        block[0].register_forward_pre_hook(lambda *_: time.sleep(slow))
    return slow * len(model.blocks)


def delay_update(patch: pytest.MonkeyPatch, model: torch.nn.Module) -> float:
    patch.setattr(Update, "run", delayed(Update.run, SLOW / 10))
    return SLOW / 10 * 8


def delay_copy(patch: pytest.MonkeyPatch, model: torch.nn.Module) -> float:
    patch.setattr(Device, "copy_all", delayed(Device.copy_all, SLOW))
    return SLOW * 8


@pytest.mark.parametrize(
    ("slow", "update_schedule"),
    alternate(
        [("compute", delay_compute), ("update", delay_update), ("copy", delay_copy), ("python", None)],
        ["in_backward", "in_forward", "after_backward"],
    ),
)
def test_delay_appears_in_its_part(
    slow: tuple[str, Any], update_schedule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The delays are in forward, in updates, during copies and in the user's loop."""
    part, delay = slow
    with offloaded(RECIPE, Paging(host_cache="all", update_schedule=update_schedule), tmp_path) as (model, optimizer):
        train(RECIPE, model, optimizer, Outcome())
        added = STEPS * (delay(monkeypatch, model) if delay else 5 * SLOW)
        # The parts add up to the elapsed time, so a delay in this part is in no other.
        assert seconds_by_part(model, optimizer, between=lambda: time.sleep(0 if delay else 5 * SLOW))[part] >= added


@pytest.mark.parametrize(
    ("op", "parts"), [(Op.READ, {"read_stall"}), (Op.WRITE, {"read_stall", "write_stall", "host_cache_stall"})]
)
def test_slow_drive_appears_as_stalls_of_its_direction(op: Op, parts: set[str], tmp_path: Path) -> None:
    """The host cache has the minimum size, so delays of the drive are exposed."""
    with (
        faulty(Fault(kind=FaultKind.SLOW, op=op, seconds=0.06), on=False) as engines,
        offloaded(RECIPE, Paging(host_cache="least", update_schedule="in_backward", cores=0), tmp_path) as (
            model,
            optimizer,
        ),
    ):
        train(RECIPE, model, optimizer, Outcome())
        before = seconds_by_part(model, optimizer)
        engines[0].on = True
        after = seconds_by_part(model, optimizer)
        grown = {part: after[part] - before[part] for part in PARTS}
        # Only the part that grew most counts, because all parts grow on a busy machine. A page cannot be used before
        # its read ends. Reads also wait for cache slots, and cache slots for writes; the thread then stalls on the
        # read.
        assert max(PARTS, key=grown.__getitem__) in parts
        assert sum(grown[part] for part in parts) > 0.1


def train_with_late_rank(folder: str, slow: float) -> dict[str, float]:
    """Train on two ranks while the second is late in every layer's forward; return the seconds by part."""
    with offloaded(RECIPE, Paging(host_cache="all"), Path(folder)) as (model, optimizer):
        train(RECIPE, model, optimizer, Outcome())
        if dist.get_rank() == 1:
            delay_compute(pytest.MonkeyPatch(), model, slow)
        return seconds_by_part(model, optimizer)


def test_late_rank_appears_as_compute_and_its_peer_as_collective(tmp_path: Path, pair: RankPool) -> None:
    """On the CPU, FSDP2 waits in the all-gather of the next FSDP module."""
    for slow in (SLOW, 10 * SLOW, 100 * SLOW):  # on a busy machine, the prompt rank is late as well
        prompt, tardy = pair.run(train_with_late_rank, str(tmp_path), slow)
        added = STEPS * slow * 6
        assert tardy["compute"] >= added
        if prompt["collective"] >= 0.8 * added and prompt["compute"] < tardy["compute"] - 0.5 * added:
            break
    assert prompt["collective"] >= 0.8 * added
    assert prompt["compute"] < tardy["compute"] - 0.5 * added


def norm_seconds(folder: str, slow: float) -> list[float]:
    """Delay the gradient norm on the second rank; return the collective seconds before and after it."""
    recipe = Recipe(model="even", steps=2, clip=0.5)
    with offloaded(recipe, Paging(host_cache="all"), Path(folder)) as (model, optimizer):
        train(recipe, model, optimizer, Outcome())
        models.loss_of(model, batch(model, 0)).backward()
        dist.barrier()
        before = optimizer.run.ledger._spent["collective"]
        time.sleep(slow * dist.get_rank())
        optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        return [before, optimizer.records[-1].collective_seconds]


def test_gradient_norm_counts_as_collective(tmp_path: Path, pair: RankPool) -> None:
    """The first rank waits in the reduction of the norm."""
    for slow in (0.3, 3, 30):  # on a busy machine, the prompt rank is late as well
        prompt, tardy = ((after - before) / slow for before, after in pair.run(norm_seconds, str(tmp_path), slow))
        if prompt > 0.8 > tardy:
            break
    assert prompt > 0.8 > tardy


@pytest.mark.parametrize("update_schedule", one_of(3, ["in_backward", "in_forward", "after_backward"]))
def test_timeline_contains_all_transfers_and_stalls(update_schedule: str, tmp_path: Path) -> None:
    """Bytes by path and direction match the counters, stalls match the metrics, and all events are within the run."""
    file = tmp_path / "timeline.json"
    began = time.perf_counter()
    with (
        faulty(Fault(kind=FaultKind.SLOW, probability=0.2, seconds=0.01)),
        offloaded(
            RECIPE,
            Paging(host_cache="least", update_schedule=update_schedule, paths=2),
            tmp_path,
            telemetry={"timeline": str(file)},
        ) as (model, optimizer),
    ):
        stats = optimizer.run.stats
        train(Recipe(model="even", steps=3), model, optimizer, Outcome())
        optimizer.save_checkpoint()
        optimizer.drain()
        names = [fsdp_module.name for fsdp_module in optimizer.run.layout.fsdp_modules]
        steps = [f"step {record.step}" for record in optimizer.records]
    ended = time.perf_counter()
    tree = json.loads(file.read_text())
    assert tree["otherData"] == {"dropped": 0}
    spans = [event for event in tree["traceEvents"] if event["ph"] == "X"]
    assert all(began <= event["ts"] / 1e6 <= (event["ts"] + event["dur"]) / 1e6 <= ended for event in spans)
    for op in ("read", "write"):
        for device in ("nvme0", "nvme1"):
            counted = sum(
                stats.snapshot().value("io_bytes_total", op=op, state=state, device=device)
                for state in ("param", "update", "grad")
            )
            traced = sum(event["args"]["bytes"] for event in spans if event["cat"] == f"{device} {op}")
            assert traced == counted > 0
    for cause in ("read", "write", "host_cache"):
        booked = sum(
            stats.snapshot().value("stall_seconds_total", phase=phase, cause=cause)
            for phase in ("forward", "backward", "update", "checkpoint", "other")
        )
        traced = sum(event["dur"] for event in spans if event["name"] == f"{cause} stall") / 1e6
        assert traced == pytest.approx(booked, abs=1e-4)
    assert [event["name"] for event in spans if event["name"].startswith("step ")] == steps
    assert {event["args"]["of"] for event in spans if event["name"] == "update" and event["args"]} == set(names)
    assert {event["args"].get("of") for event in spans if event["name"] == "compute"} >= set(names)
    assert any(event["name"] == "checkpoint" for event in spans)
    check_nesting(spans)


def check_nesting(spans: list[dict[str, Any]]) -> None:
    """Check that two spans of the same thread are nested or do not overlap."""
    for thread in {event["tid"] for event in spans}:
        ends: list[int] = []
        times = [(round(e["ts"] * 1e3), round((e["ts"] + e["dur"]) * 1e3)) for e in spans if e["tid"] == thread]
        for start, end in sorted(times, key=lambda span: (span[0], -span[1])):
            while ends and ends[-1] <= start:
                ends.pop()
            assert not ends or end <= ends[-1]
            ends.append(end)
