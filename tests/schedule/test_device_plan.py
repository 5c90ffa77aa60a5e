"""Tests of plans with GPU memory: weights are prefetched one gather ahead, and GPU-resident weights are read once."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.budget import FETCHED, choose_budget, range_gradient_bytes
from infinity.config import ActivationsConfig
from infinity.content.format import Role
from infinity.content.layout import FSDPModuleSpec, Layout, ShardSpec, build_layout
from infinity.errors import BudgetError
from infinity.schedule.link import link_traffic
from infinity.schedule.planner import prepend
from infinity.schedule.schedule_choice import choose_simulation
from infinity.schedule.stack import LEAST_CACHE_SLOTS
from infinity.schedule.tier import SLOTS, fsdp_module_bytes, with_device
from infinity.schedule.timing import staged_computation
from infinity.schedule.trace import Access, Event, EventKind, Mode
from infinity.schedule.update_schedule import UpdateSchedule, expand, expand_events, expand_pending
from infinity.units import parse_size
from support.layouts import FORMATS, gpu_resident_bytes, layouts, steps, transformer, transformer_step, update_schedules

LAYERS = 5
LAYOUT = transformer(LAYERS, 3 * 4096, 64 << 10)
EVENTS = transformer_step(LAYERS)
MODULE_BYTES = fsdp_module_bytes(LAYOUT, 0)
RESIDENT_BYTES = gpu_resident_bytes(LAYOUT, 0)
GRAD_BYTES = sum(page.nbytes for page in LAYOUT.pages if page.fsdp_module == 0 and page.role is Role.GRAD)
UPDATE_SCHEDULES = [
    replace(UpdateSchedule.of(name, EVENTS), overlapped=overlapped)
    for name in ("in_backward", "in_forward", "after_backward")
    for overlapped in (True, False)
]


def reads(trace: tuple[Access, ...], fsdp_module: int) -> list[int]:
    """Return the positions at which the weights of an FSDP module are read for a gather."""
    return [
        position
        for position, access in enumerate(trace)
        if len(access) == 1
        and access[0].mode is Mode.READ
        and LAYOUT.pages[access[0].page].role is Role.PARAM
        and LAYOUT.pages[access[0].page].fsdp_module == fsdp_module
    ]


def updates(trace: tuple[Access, ...], fsdp_module: int) -> list[int]:
    """Return the positions of the updates of an FSDP module."""
    return [
        position
        for position, access in enumerate(trace)
        if any(use.mode.modifies and LAYOUT.pages[use.page].role is Role.UPDATE for use in access)
        and LAYOUT.pages[access[0].page].fsdp_module == fsdp_module
    ]


@pytest.mark.parametrize("update_schedule", UPDATE_SCHEDULES)
def test_prefetching_moves_reads_one_gather_earlier(update_schedule: UpdateSchedule) -> None:
    """The accesses are the same, and no read moves across an update of its FSDP module."""
    plain, prefetched = (
        expand(EVENTS, LAYOUT, update_schedule),
        expand(EVENTS, LAYOUT, replace(update_schedule, prefetched=True)),
    )
    assert Counter(plain) == Counter(prefetched)
    for fsdp_module in range(LAYERS):
        order = [sorted([(p, "read") for p in reads(t, fsdp_module)] + [(p, "update") for p in updates(t, fsdp_module)])
                 for t in (plain, prefetched)]  # fmt: skip
        assert [kind for _, kind in order[0]] == [kind for _, kind in order[1]]


def test_gradients_are_stored_after_the_next_modules_reads() -> None:
    """The device has weights to compute with while it transfers the gradients."""
    traces = [expand(EVENTS, LAYOUT, UpdateSchedule(prefetched=prefetched)) for prefetched in (False, True)]
    stores = [
        {position for position, access in enumerate(trace) if LAYOUT.pages[access[0].page].role is Role.GRAD}
        for trace in traces
    ]
    backward = [reads(trace, LAYERS - 2)[-1] for trace in traces]
    assert min(stores[0]) < backward[0]
    assert min(stores[1]) > backward[1]


def test_gpu_memory_holds_prefetch_slots_before_kept_weights() -> None:
    """Modules that are gathered again soonest are kept first; one byte less means one module fewer."""
    update_schedule = UPDATE_SCHEDULES[0]
    assert with_device(update_schedule, EVENTS, LAYOUT, SLOTS * MODULE_BYTES - 1) == update_schedule
    for kept in range(LAYERS):
        found = with_device(update_schedule, EVENTS, LAYOUT, (SLOTS + kept) * MODULE_BYTES)
        assert found.prefetched
        assert found.kept == frozenset(range(LAYERS - kept, LAYERS)) - {0}
        assert with_device(update_schedule, EVENTS, LAYOUT, (SLOTS + kept + 1) * MODULE_BYTES - 1) == found


def test_fsdp_module_without_elements_takes_no_gpu_memory() -> None:
    """All parameters of the second FSDP module are empty, as on a rank whose slices have no elements."""
    shard = {"segment_key": "mixed", "trainable": True}
    modules = [
        FSDPModuleSpec(name=str(numel), shards=(ShardSpec(name=str(numel), numel=numel, padded=numel, **shard),))
        for numel in (4096, 0, 4096)
    ]
    layout, events = build_layout(modules, FORMATS, 64 << 10), transformer_step(len(modules)) * 2
    found = with_device(UPDATE_SCHEDULES[0], events, layout, 1 << 30, update_on_device=True)
    assert found.gpu_resident == {0, 2}
    assert not found.kept


@pytest.mark.parametrize("update_schedule", UPDATE_SCHEDULES)
def test_kept_weights_are_read_once_per_step(update_schedule: UpdateSchedule) -> None:
    """The first FSDP module is not prefetched and therefore not kept."""
    once = len(reads(expand(EVENTS, LAYOUT, update_schedule), 1)) // 2
    found = with_device(update_schedule, EVENTS, LAYOUT, (SLOTS + 2) * MODULE_BYTES)
    trace = expand(EVENTS, LAYOUT, found)
    assert [len(reads(trace, fsdp_module)) // once for fsdp_module in range(LAYERS)] == [2, 2, 2, 1, 1]


def test_kept_weights_are_read_again_after_an_update() -> None:
    """If a loop gathers an FSDP module again after its update in the same step, the copy on the device is outdated."""
    events = (Event(EventKind.GATHER, 0), Event(EventKind.GATHER, 1), *EVENTS)
    update_schedule = with_device(UpdateSchedule.of("after_backward", events), events, LAYOUT, 100 * MODULE_BYTES)
    assert update_schedule.kept
    trace = expand(events, LAYOUT, replace(update_schedule, in_forward=frozenset({1})))
    assert len(updates(trace, 1)) > 0
    assert min(updates(trace, 1)) < min(reads(trace, 1))


def resident_schedule(
    name: str, device_bytes: int, *, host_bytes: int = 0, events: tuple[Event, ...] = EVENTS
) -> UpdateSchedule:
    """Return the update schedule for a device that runs updates and has `device_bytes` of memory."""
    update_schedule = UpdateSchedule.of(name, events)
    return with_device(update_schedule, events, LAYOUT, device_bytes, host_bytes=host_bytes, update_on_device=True)


def test_gpu_that_runs_updates_holds_complete_fsdp_modules() -> None:
    """Prefetch slots come first, unless all modules fit; one byte less means one module fewer, plus kept weights."""
    for fsdp_modules in range(LAYERS):
        found = resident_schedule("in_backward", SLOTS * MODULE_BYTES + fsdp_modules * RESIDENT_BYTES)
        assert len(found.gpu_resident) == fsdp_modules
        assert found.prefetched
        less = resident_schedule("in_backward", SLOTS * MODULE_BYTES + fsdp_modules * RESIDENT_BYTES - 1)
        assert len(less.gpu_resident) == max(0, fsdp_modules - 1)
        assert bool(less.kept) == (fsdp_modules > 0)
    assert resident_schedule("in_backward", LAYERS * RESIDENT_BYTES - 1).prefetched
    everything = resident_schedule("in_backward", LAYERS * RESIDENT_BYTES)
    assert everything.gpu_resident == frozenset(range(LAYERS))
    assert not everything.prefetched


def test_first_modules_are_gpu_resident_and_the_others_are_spread_over_the_step() -> None:
    """Their updates are the last of a step, and their gathers are the first of the next step."""
    for fsdp_modules, expected in ((1, {0}), (2, {0, 1}), (3, {0, 1, 2}), (4, {0, 1, 2, 4})):
        found = resident_schedule("in_backward", SLOTS * MODULE_BYTES + fsdp_modules * RESIDENT_BYTES)
        assert found.gpu_resident == expected


def test_gpu_resident_modules_need_memory_for_stored_gradients() -> None:
    for name in ("in_forward", "after_backward"):
        assert len(resident_schedule(name, SLOTS * MODULE_BYTES + RESIDENT_BYTES + GRAD_BYTES).gpu_resident) == 1
        assert not resident_schedule(name, SLOTS * MODULE_BYTES + RESIDENT_BYTES + GRAD_BYTES - 1).gpu_resident


def test_frequently_gathered_weights_are_kept_first() -> None:
    """A kept byte saves a copy per gather but one; a byte of a GPU-resident module saves about two copies."""
    for times, first in ((1, "gpu_resident"), (2, "kept"), (4, "kept")):
        events = EVENTS[:-1] * times + EVENTS[-1:]
        found = resident_schedule("after_backward", SLOTS * MODULE_BYTES + RESIDENT_BYTES + GRAD_BYTES, events=events)
        assert bool(found.gpu_resident) == (first == "gpu_resident")
        assert bool(found.kept) == (first == "kept")
    weights = LAYOUT.bytes_of(Role.PARAM)  # with all weights in the host cache, kept weights save no reads
    events = EVENTS[:-1] * 2 + EVENTS[-1:]
    for host_bytes, resident in ((0, False), (weights, True)):
        found = resident_schedule(
            "after_backward", SLOTS * MODULE_BYTES + RESIDENT_BYTES + GRAD_BYTES, host_bytes=host_bytes, events=events
        )
        assert bool(found.gpu_resident) is resident


def test_frozen_modules_can_be_gpu_resident_with_cpu_updates() -> None:
    """Trainable modules are GPU-resident only if the device runs the updates."""
    specs = [
        replace(fsdp_module, shards=tuple(replace(s, trainable=False) for s in fsdp_module.shards))
        for fsdp_module in LAYOUT.fsdp_modules
    ]
    frozen = build_layout(specs, FORMATS, LAYOUT.page_bytes)
    events = tuple(event for event in EVENTS if event.kind is not EventKind.GRADIENTS)
    found = with_device(UpdateSchedule(), events, frozen, 1 << 40)
    assert found.gpu_resident == frozenset(range(LAYERS))
    assert not with_device(UPDATE_SCHEDULES[0], EVENTS, LAYOUT, 1 << 40).gpu_resident


@settings(max_examples=200)
@given(st.data())
def test_gpu_resident_modules_do_not_change_other_accesses(data: st.DataObject) -> None:
    """A step with GPU-resident modules is the same step without their accesses, and its link traffic is not larger."""
    layout = data.draw(layouts())
    events = data.draw(steps(layout))
    update_schedule = replace(data.draw(update_schedules(layout, events)), prefetched=data.draw(st.booleans()))
    gpu_resident = frozenset(fsdp_module for fsdp_module in range(len(layout.fsdp_modules)) if data.draw(st.booleans()))
    resident_schedule = replace(update_schedule, gpu_resident=gpu_resident)
    pending = data.draw(st.booleans())
    for found, plain in (
        (
            expand(events, layout, resident_schedule, pending=pending),
            expand(events, layout, update_schedule, pending=pending),
        ),
        (expand_pending(events, layout, resident_schedule), expand_pending(events, layout, update_schedule)),
    ):
        assert found == tuple(
            access for access in plain if layout.pages[access[0].page].fsdp_module not in gpu_resident
        )
    traffic = link_traffic(
        events, layout, resident_schedule, expand(events, layout, resident_schedule), update_on_device=True
    )
    full = link_traffic(events, layout, update_schedule, expand(events, layout, update_schedule), update_on_device=True)
    assert all(partial <= most for partial, most in zip(traffic, full, strict=True))
    if len(gpu_resident) == len(layout.fsdp_modules):
        assert not any(traffic)
    computed = staged_computation(events, layout, resident_schedule, expand_events(events, layout, resident_schedule))
    if computed is not None:
        total = sum(computed.shares) + sum(share for *_, share in computed.awaited)
        assert total == pytest.approx(1.0)


def test_step_with_all_modules_gpu_resident_moves_no_pages() -> None:
    """The step has no accesses and needs no cache slots."""
    cache_slots = len(LAYOUT.pages) // 4
    update_schedule, simulation = choose_simulation(
        "in_forward", EVENTS, LAYOUT, cache_slots, threaded=True, device_bytes=1 << 40, update_on_device=True
    )
    plan = simulation.plan
    assert update_schedule.gpu_resident == frozenset(range(LAYERS))
    assert plan.trace == ()
    assert plan.traffic.total_bytes == 0
    assert prepend((), plan, LAYOUT).reach == ()


def test_fetched_gradients_reduce_the_host_cache() -> None:
    """The error for a budget that is too small contains the smallest sufficient value."""
    fsdp_modules = LAYOUT.fsdp_modules
    used = {LAYOUT.shards[0].spec.segment_key}
    formats = {key: FORMATS[key] for key in used}
    plain = choose_budget(fsdp_modules, formats, 4 << 20, 64 << 10)
    budget = choose_budget(fsdp_modules, formats, plain.host_bytes, 64 << 10, device=True)
    gradient_bytes = FETCHED * range_gradient_bytes(budget.layout)
    assert budget.host_bytes + gradient_bytes <= plain.host_bytes < budget.host_bytes + gradient_bytes + 2 * (64 << 10)
    with pytest.raises(BudgetError, match=r"for gradients .*memory\.host_bytes") as caught:
        choose_budget(fsdp_modules, formats, 64 << 10, 64 << 10, device=True)
    least = int(str(caught.value).split("memory.host_bytes to ")[1].split("KiB")[0]) << 10
    choose_budget(fsdp_modules, formats, least, 64 << 10, device=True)
    with pytest.raises(BudgetError):
        choose_budget(fsdp_modules, formats, least - 4096, 64 << 10, device=True)


def test_reported_minimum_budget_is_sufficient_with_activations() -> None:
    """The share of activations grows with the host cache, which a full-parameter update makes large."""
    shard = ShardSpec(name="full", numel=1 << 20, padded=1 << 20, segment_key="k", trainable=True, whole=1 << 20)
    formats, page = {"k": next(iter(FORMATS.values()))}, 64 << 10
    fsdp_modules = [FSDPModuleSpec(name="fsdp_module", shards=(shard,))]
    activations = ActivationsConfig(tier="nvme")
    with pytest.raises(BudgetError, match="for activations") as caught:
        choose_budget(fsdp_modules, formats, page, page, activations=activations)
    least = parse_size(str(caught.value).split("memory.host_bytes to ")[1].split(" or more")[0])
    budget = choose_budget(fsdp_modules, formats, least, page, activations=activations)
    assert budget.activation_cache_slots > LEAST_CACHE_SLOTS
    with pytest.raises(BudgetError):
        choose_budget(fsdp_modules, formats, int(0.98 * least), page, activations=activations)


def test_single_module_step_keeps_its_schedule() -> None:
    """A step with a single FSDP module has no gather to prefetch."""
    layout: Layout = transformer(1, 4096, 64 << 10)
    events = (Event(EventKind.GATHER, 0), Event(EventKind.GRADIENTS, 0), Event(EventKind.STEP))
    update_schedule = UpdateSchedule.of("in_backward", events)
    assert with_device(update_schedule, events, layout, 1 << 40) == update_schedule
