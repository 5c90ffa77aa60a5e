"""Tests of waits and copies: how often the host waits for a simulated device, and how many copies a step starts."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import infinity
from infinity.memory.device import AcceleratorDevice, Device
from support import models
from support.device.simulation import simulation
from support.device.streams import Event
from support.ranks import RankPool
from support.train import Paging, Recipe, batch, offloaded

RECIPE = Recipe(model="toy")
PAGING = Paging(host_cache="all", update_schedule="in_forward", device=120 << 10)
STEPS = 5
COUNTED = 2
"""Number of counted steps. Steps before them record a trace and follow the first plan."""


@contextmanager
def waits() -> Iterator[list[int]]:
    """Yield a list with one item per wait of this thread for the device.

    A query of an event is not a wait, unless the package repeats it until the event has completed.
    """
    found: list[int] = []
    local = threading.local()

    def counted(original: Callable[..., Any], *args: Any, **settings: Any) -> Any:
        if threading.current_thread() is training and not getattr(local, "querying", False):
            found.append(1)
        local.querying, before = True, getattr(local, "querying", False)
        try:
            return original(*args, **settings)
        finally:
            local.querying = before

    def query(event: Event) -> bool:
        local.querying, before = True, getattr(local, "querying", False)
        try:
            return asked(event)
        finally:
            local.querying = before

    training, asked = threading.current_thread(), Event.query
    synchronize, wait = Event.synchronize, Device.wait
    with (
        patch.object(Event, "query", query),
        patch.object(Event, "synchronize", lambda event: counted(synchronize, event)),
        patch.object(Device, "wait", lambda *args: counted(wait, *args)),
    ):
        yield found


@contextmanager
def copies() -> Iterator[Counter[str]]:
    """Yield the number of copies that each thread starts. A list of tensors counts as one copy."""
    found: Counter[str] = Counter()

    original = AcceleratorDevice.copy_all

    def counted(device: AcceleratorDevice, target: Any, *args: Any) -> None:
        found[threading.current_thread().name.split("_")[0]] += bool(len(target))
        original(device, target, *args)

    with patch.object(AcceleratorDevice, "copy_all", counted):
        yield found


def step(model: Any, optimizer: infinity.PagedOptimizer, clips: str, number: int) -> None:
    """Take one training step. As in a loop that does not print, no value is read."""
    models.loss_of(model, batch(model, number)).backward()
    if clips == "optimizer":
        optimizer.clip_grad_norm_(0.5)
    elif clips == "torch":
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()


def waits_per_step(kind: str, clips: str, folder: str) -> tuple[list[int], int]:
    """Return the number of waits in each counted step, and the number of FSDP modules. Called on every rank."""
    with simulation(kind), offloaded(RECIPE, PAGING, Path(folder)) as (model, optimizer):
        found = []
        for number in range(STEPS):
            with waits() as waited:
                step(model, optimizer, clips, number)
            found.append(len(waited))
        assert optimizer.update_schedule == "in_forward"
        return found[-COUNTED:], len(optimizer.run.layout.fsdp_modules)


CLIPS = {"optimizer": 1, "torch": 0}
"""Maximum number of waits of a step by clipping function. ``optimizer.clip_grad_norm_`` reads the norm, to skip steps
that are not finite.
"""


@pytest.mark.parametrize("kind", ["order", "late-updates"])
@pytest.mark.parametrize("clips", CLIPS)
def test_waits_with_gradient_clipping(clips: str, kind: str, tmp_path: Path) -> None:
    """On one rank, the training thread also waits once per FSDP module to learn whether lower halves are zero.

    It then waits for the gradients of the module before, so that the device has work to do in the meantime.
    """
    found, fsdp_modules = waits_per_step(kind, clips, str(tmp_path))
    assert max(found) <= CLIPS[clips] + fsdp_modules


@pytest.mark.parametrize("kind", ["order", "late-updates"])
@pytest.mark.parametrize("clips", CLIPS)
def test_waits_with_gradient_clipping_on_two_ranks(clips: str, kind: str, tmp_path: Path, pair: RankPool) -> None:
    """The lower halves of sums are stored without looking at them."""
    for found, _ in pair.run(waits_per_step, kind, clips, str(tmp_path)):
        assert max(found) <= CLIPS[clips]


def test_copies_with_gradient_clipping(tmp_path: Path) -> None:
    """An update on the device copies its pages in one call per direction, and gradients are stored in one call."""
    with simulation("order-updates"), offloaded(RECIPE, PAGING, tmp_path) as (model, optimizer):
        for number in range(STEPS):
            with copies() as found:
                step(model, optimizer, "optimizer", number)
                optimizer._runner.updates.drain()
        fsdp_modules = len(optimizer.run.layout.fsdp_modules)
    assert found["infinity-update"] == 2 * fsdp_modules
    # Gradients and the number of lower halves of each module. A module whose weights were not prefetched is gathered
    # from the host cache, which happens at most once per module.
    assert 0 < found["MainThread"] <= 3 * fsdp_modules
