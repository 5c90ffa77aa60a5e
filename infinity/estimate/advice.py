"""Suggestions for reducing the step time and SSD wear. Each is a single change to the run, with its own estimate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from infinity.budget import device_update_bytes
from infinity.config import Config
from infinity.content.format import FORMATS
from infinity.errors import InfinityError
from infinity.estimate.estimate import Estimate, Workload, budget_of, estimate, spare_bytes, working_bytes
from infinity.estimate.machine import Machine
from infinity.units import MIB, align_up, format_setting, format_size

LEAST_GAIN = 0.02
"""Minimum fraction of the time, or of the bytes written, per token that a change must save to be suggested."""
WORN_DAYS = 5 * 365.0
"""Drives wear out too early if they reach their rated endurance within this number of days. Data sheets of NVMe drives
for data centers rate the endurance for a warranty of five years.
"""


@dataclass(frozen=True, kw_only=True)
class Change:
    """Suggested change, with its cost and effect."""

    what: str
    """Short description of the change."""
    price: str
    """Cost of the change, or ``bitwise equal`` if the change does not affect the training results."""
    result: Estimate
    """Estimate of the run with the change."""
    saved: float
    """Fraction of the time per token that the change saves."""
    writes_saved: float
    """Fraction of the bytes that are written to the drives per token that the change saves, which extends their life
    accordingly.
    """


def best_changes(before: Estimate, number: int = 3) -> list[Change]:
    """Return the changes that save the most time or the most drive writes per token, largest time savings first.

    Up to `number` changes save time. If none of them is the one that saves the most writes, that change is added,
    provided that it does not increase the time per token. If the drives would reach their rated endurance within
    `WORN_DAYS`, up to `number` changes that save writes are added, even those that increase the time per token.

    Args:
        before: Estimate of the unchanged run.
        number: Maximum number of changes that save time, and of changes that save writes of drives that wear out.
    """
    found = []
    worn = before.drive_days is not None and before.drive_days < WORN_DAYS
    each, written = _step_seconds(before) / before.workload.batch_tokens, _written(before)
    for what, price, one in _changes(before):
        if not worn and _least_seconds(before, one) / one.workload.batch_tokens > each:
            continue  # no plan can make up for this
        try:
            after = _after(before, one)
        except InfinityError:  # this change is not possible for this run
            continue
        if after is None:
            continue
        saved = 1 - _step_seconds(after) / after.workload.batch_tokens / each
        writes_saved = 1 - _written(after) / written if written else 0.0
        found.append(Change(what=what, price=price, result=after, saved=saved, writes_saved=writes_saved))
    found.sort(key=lambda change: -change.saved)
    best = [change for change in found if change.saved >= LEAST_GAIN][:number]
    gentle = [change for change in found if (worn or change.saved >= 0) and change.writes_saved >= LEAST_GAIN]
    gentle.sort(key=lambda change: (-change.writes_saved, -change.saved))
    return best + [change for change in gentle[: number if worn else 1] if change not in best]


def _step_seconds(of: Estimate) -> float:
    return of.step_seconds(of.workload.batch_tokens)


def _written(of: Estimate) -> float:
    """Return the number of bytes written to the drives of all nodes per token."""
    return of.traffic.written_bytes * of.workload.world_size / of.workload.batch_tokens


def _least_seconds(before: Estimate, one: _Inputs) -> float:
    """Return a lower bound on the step time for changed inputs, which requires no plan."""
    work, machine, form = one.workload, one.machine, one.settings.state.format
    computation = work.flops(before.model) / machine.device.flops
    if form == "fp32":  # updates may run on the device
        return computation
    return max(computation, before.model.trainable_parameters / work.shards * machine.update(form))


def _after(before: Estimate, one: _Inputs) -> Estimate | None:
    """Return the estimate for changed inputs, or ``None`` if they make another resource too small.

    The plan is reused if its inputs are the same.
    """
    same = one.settings is before.settings
    alike = one.workload is before.workload and one.settings.state == before.settings.state
    known = before.layout if alike else None
    budget = before.budget if same else budget_of(before.model, one.workload, one.machine, one.settings, known)
    changed = replace(before, workload=one.workload, machine=one.machine, settings=one.settings, budget=budget)
    if len(changed.shortfalls) > len(before.shortfalls):  # requires no plan, which takes much longer
        return None
    same = same and one.workload.passes == before.workload.passes
    same = same and one.workload.layer_major == before.workload.layer_major
    if same and one.machine.threaded == before.machine.threaded and _spare(before, one) == before.device_bytes:
        return changed
    return estimate(before.model, one.workload, one.machine, one.settings, budget)


def _spare(before: Estimate, one: _Inputs) -> int:
    """Return the device memory for prefetched and GPU-resident pages with a different batch or machine."""
    if one.settings.memory.device_bytes or not one.machine.device.link:
        return before.device_bytes
    updates = device_update_bytes(before.layout) if before.updates_on_device else 0
    paged = one.settings.activations.tier != "device"
    return spare_bytes(before.model, one.workload, one.machine, updates, paged=paged)


class _Inputs(NamedTuple):
    workload: Workload
    machine: Machine
    settings: Config

    def setting(self, name: str, value: object) -> _Inputs:
        return self._replace(settings=self.settings.with_values(**{name: value}))


def _changes(of: Estimate) -> Iterator[tuple[str, str, _Inputs]]:
    before = _Inputs(of.workload, of.machine, of.settings)
    work, drives, settings = before.workload, before.machine.drives, before.settings
    if len(of.plan.resident) < len(of.layout.pages):
        host_cache = 2 * align_up(of.settings.memory.host_bytes, MIB)
        price = f'memory.host_bytes = "{format_setting(host_cache)}"'
        yield f"{format_size(host_cache / 2)} more host memory", price, before.setting("memory.host_bytes", host_cache)
    formats = tuple(FORMATS)
    for name in formats[formats.index(settings.state.format) + 1 :]:
        price = "bitwise equal" if name == "split" else "moments are rounded"
        yield f'state.format = "{name}"', price, before.setting("state.format", name)
    more = before.machine.with_drives(drives.count + 1)
    yield "one more drive of the same kind", f"{drives.count + 1} drives", before._replace(machine=more)
    if cores := of.machine.update_cores:
        faster = before._replace(machine=replace(of.machine, update_cores=2 * cores))
        yield f"update.cores = {2 * cores}", f"cores for updates: +{cores}", faster
    larger, price = _with_twice_the_tokens(of)
    yield f"{larger.batch_tokens:,} tokens per step", price, before._replace(workload=larger)
    if not work.layer_major and work.micro_batches > 1:
        layers = replace(work, layer_major=True)
        yield "infinity.micro_batches", "sums are rounded differently", before._replace(workload=layers)
    if settings.update.schedule != "auto":
        yield 'update.schedule = "auto"', "bitwise equal", before.setting("update.schedule", "auto")


def _with_twice_the_tokens(of: Estimate) -> tuple[Workload, str]:
    """Return the workload with twice the tokens per step, in micro-batches that fit device memory, and its cost."""
    larger = replace(of.workload, batch_tokens=2 * of.workload.batch_tokens)
    memory, paged = of.machine.device.memory_bytes, of.settings.activations.tier != "device"
    if memory and working_bytes(of.model, larger, paged=paged) > memory:
        more = replace(larger, micro_batches=2 * larger.micro_batches)
        return more, f"changes the batch size; {more.micro_batches} micro-batches"
    return larger, "changes the batch size"
