"""Suggestions for reducing the step time. Each suggestion is a single change to the run, with its own estimate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from infinity.config import Config
from infinity.content.format import FORMATS
from infinity.errors import InfinityError
from infinity.estimate.estimate import Estimate, Workload, estimate
from infinity.estimate.machine import Machine
from infinity.units import MIB, align_up, format_setting, format_size

LEAST_GAIN = 0.02
"""Minimum fraction of the time per token that a change must save to be suggested."""


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


def best_changes(before: Estimate, number: int = 3) -> list[Change]:
    """Return the changes that save the most time per token, best first.

    Args:
        before: Estimate of the unchanged run.
        number: Maximum number of changes.
    """
    found = []
    each = before.seconds.step / before.workload.batch_tokens
    for what, price, one in _changes(before):
        try:
            after = _after(before, one)
        except InfinityError:  # this change is not possible for this run
            continue
        saved = 1 - after.step_seconds(after.workload.batch_tokens) / after.workload.batch_tokens / each
        if saved >= LEAST_GAIN and len(after.problems) <= len(before.problems):
            found.append(Change(what=what, price=price, result=after, saved=saved))
    return sorted(found, key=lambda change: -change.saved)[:number]


def _after(before: Estimate, one: _Inputs) -> Estimate:
    """Return the estimate for changed inputs. The plan is reused if only the hardware speeds or the batch changed."""
    same = one.settings is before.settings and one.workload.layer_major == before.workload.layer_major
    if same and one.machine.threaded == before.machine.threaded:
        return replace(before, workload=one.workload, machine=one.machine)
    return estimate(before.model, one.workload, one.machine, one.settings)


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
    larger = replace(work, batch_tokens=2 * work.batch_tokens)
    yield f"{larger.batch_tokens} tokens per step", "different batch size", before._replace(workload=larger)
    if not work.layer_major and work.micro_batches > 1:
        layers = replace(work, layer_major=True)
        yield "infinity.micro_batches", "sums are rounded differently", before._replace(workload=layers)
    if settings.update.schedule != "auto":
        yield 'update.schedule = "auto"', "bitwise equal", before.setting("update.schedule", "auto")
