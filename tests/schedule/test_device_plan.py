"""What a device changes in a step: pages are read one gather ahead, and weights that stay there are read once."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

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
from infinity.schedule.schedule_choice import choose_plan
from infinity.schedule.stack import LEAST_CACHE_SLOTS
from infinity.schedule.tier import SLOTS, fsdp_module_bytes, with_device
from infinity.schedule.timing import staged_computation
from infinity.schedule.trace import Access, Event, EventKind, Mode
from infinity.schedule.update_schedule import UpdateSchedule, expand, expand_pending, next_gather
from infinity.units import parse_size
from support.layouts import FORMATS, gpu_resident_bytes, layouts, steps, transformer, transformer_step, update_schedules

LAYERS = 5
LAYOUT = transformer(LAYERS, 3 * 4096, 64 << 10)
EVENTS = transformer_step(LAYERS)
FSDP_MODULE = fsdp_module_bytes(LAYOUT, 0)
HOME = gpu_resident_bytes(LAYOUT, 0)
GRADS = sum(page.nbytes for page in LAYOUT.pages if page.fsdp_module == 0 and page.role is Role.GRAD)
UPDATE_SCHEDULES = [
    replace(UpdateSchedule.of(name, EVENTS), overlapped=overlapped)
    for name in ("in_backward", "in_forward", "after_backward")
    for overlapped in (True, False)
]


def reads(trace: tuple[Access, ...], fsdp_module: int) -> list[int]:
    """Return the positions at which weights of an FSDP module are read for a gather."""
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
def test_reads_come_one_gather_earlier_and_are_the_same(update_schedule: UpdateSchedule) -> None:
    """Nothing is read twice or not at all, and never on the wrong side of an update."""
    plain, prefetched = (
        expand(EVENTS, LAYOUT, update_schedule),
        expand(EVENTS, LAYOUT, replace(update_schedule, prefetched=True)),
    )
    assert Counter(plain) == Counter(prefetched)
    for fsdp_module in range(LAYERS):
        order = [sorted([(p, "read") for p in reads(t, fsdp_module)] + [(p, "update") for p in updates(t, fsdp_module)])
                 for t in (plain, prefetched)]  # fmt: skip
        assert [what for _, what in order[0]] == [what for _, what in order[1]]


def test_gradients_are_stored_behind_the_reads_of_the_next_fsdp_module() -> None:
    """So the device has weights to compute with while gradients leave it."""
    traces = [expand(EVENTS, LAYOUT, UpdateSchedule(prefetched=prefetched)) for prefetched in (False, True)]
    stores = [
        {position for position, access in enumerate(trace) if LAYOUT.pages[access[0].page].role is Role.GRAD}
        for trace in traces
    ]
    backward = [reads(trace, LAYERS - 2)[-1] for trace in traces]
    assert min(stores[0]) < backward[0]
    assert min(stores[1]) > backward[1]


def test_memory_of_the_device_is_for_slots_first_and_then_for_weights() -> None:
    """Those that are gathered again soonest come first; a byte too few is an FSDP module fewer."""
    update_schedule = UPDATE_SCHEDULES[0]
    assert with_device(update_schedule, EVENTS, LAYOUT, SLOTS * FSDP_MODULE - 1) == update_schedule
    for kept in range(LAYERS):
        found = with_device(update_schedule, EVENTS, LAYOUT, (SLOTS + kept) * FSDP_MODULE)
        assert found.prefetched
        assert found.kept == frozenset(range(LAYERS - kept, LAYERS)) - {0}
        assert with_device(update_schedule, EVENTS, LAYOUT, (SLOTS + kept + 1) * FSDP_MODULE - 1) == found


@pytest.mark.parametrize("update_schedule", UPDATE_SCHEDULES)
def test_weights_that_stay_are_read_once_a_step(update_schedule: UpdateSchedule) -> None:
    """The first gather of a step is not staged, so that FSDP module is not kept."""
    once = len(reads(expand(EVENTS, LAYOUT, update_schedule), 1)) // 2
    found = with_device(update_schedule, EVENTS, LAYOUT, (SLOTS + 2) * FSDP_MODULE)
    trace = expand(EVENTS, LAYOUT, found)
    assert [len(reads(trace, fsdp_module)) // once for fsdp_module in range(LAYERS)] == [2, 2, 2, 1, 1]


def test_weights_that_are_updated_are_read_again() -> None:
    """Where a loop gathers an FSDP module again behind its update in the same step, what the device has is old."""
    events = (Event(EventKind.GATHER, 0), Event(EventKind.GATHER, 1), *EVENTS)
    update_schedule = with_device(UpdateSchedule.of("after_backward", events), events, LAYOUT, 100 * FSDP_MODULE)
    assert update_schedule.kept
    trace = expand(events, LAYOUT, replace(update_schedule, in_forward=frozenset({1})))
    assert len(updates(trace, 1)) > 0
    assert min(updates(trace, 1)) < min(reads(trace, 1))


def test_plans_follow_from_it() -> None:
    """Fewer bytes from the drive with more memory on the device; the same where it has none."""
    cache_slots = len(LAYOUT.pages) // 2
    bytes_read = []
    for device_bytes in (0, SLOTS * FSDP_MODULE, (SLOTS + LAYERS) * FSDP_MODULE):
        update_schedule, plan = choose_plan(
            "in_backward", EVENTS, LAYOUT, cache_slots, threaded=True, device_bytes=device_bytes
        )
        assert update_schedule.prefetched == bool(device_bytes)
        bytes_read.append(plan.traffic.read_bytes)
    assert bytes_read[2] < bytes_read[0]


def gpu_resident(
    name: str, device_bytes: int, *, host_bytes: int = 0, events: tuple[Event, ...] = EVENTS
) -> UpdateSchedule:
    """Return what the memory of a device that updates is used for."""
    update_schedule = UpdateSchedule.of(name, events)
    return with_device(update_schedule, events, LAYOUT, device_bytes, host_bytes=host_bytes, update_on_device=True)


def test_memory_of_a_device_that_updates_is_for_whole_fsdp_modules() -> None:
    """Behind slots, which the last FSDP module needs no more;

    a byte too few is an FSDP module fewer, and weights that are kept.
    """
    for fsdp_modules in range(LAYERS):
        found = gpu_resident("in_backward", SLOTS * FSDP_MODULE + fsdp_modules * HOME)
        assert len(found.gpu_resident) == fsdp_modules
        assert found.prefetched
        less = gpu_resident("in_backward", SLOTS * FSDP_MODULE + fsdp_modules * HOME - 1)
        assert len(less.gpu_resident) == max(0, fsdp_modules - 1)
        assert bool(less.kept) == (fsdp_modules > 0)
    assert gpu_resident("in_backward", LAYERS * HOME - 1).prefetched
    everything = gpu_resident("in_backward", LAYERS * HOME)
    assert everything.gpu_resident == frozenset(range(LAYERS))
    assert not everything.prefetched


def test_fsdp_modules_that_live_on_the_device_are_spread_over_the_step() -> None:
    """So none of two, or of three, is beside another one."""
    for fsdp_modules in (2, 3):
        found = sorted(gpu_resident("in_backward", SLOTS * FSDP_MODULE + fsdp_modules * HOME).gpu_resident)
        assert min(b - a for a, b in pairwise(found)) > 1


def test_gradients_that_are_stored_live_there_too() -> None:
    """So an FSDP module takes more."""
    for name in ("in_forward", "after_backward"):
        assert len(gpu_resident(name, SLOTS * FSDP_MODULE + HOME + GRADS).gpu_resident) == 1
        assert not gpu_resident(name, SLOTS * FSDP_MODULE + HOME + GRADS - 1).gpu_resident


def test_weights_of_many_gathers_are_kept_first() -> None:
    """A byte of them saves a transfer for each gather but one, a byte of a whole FSDP module two, and of each a small
    part.

    Where the host cache has all weights, kept ones save no reads of the drive.
    """
    for times, first in ((1, "gpu_resident"), (2, "kept"), (4, "kept")):
        events = EVENTS[:-1] * times + EVENTS[-1:]
        found = gpu_resident("after_backward", SLOTS * FSDP_MODULE + HOME + GRADS, events=events)
        assert bool(found.gpu_resident) == (first == "gpu_resident")
        assert bool(found.kept) == (first == "kept")
    weights = LAYOUT.bytes_of(Role.PARAM)
    events = EVENTS[:-1] * 2 + EVENTS[-1:]
    for host_bytes, resident in ((0, False), (weights, True)):
        found = gpu_resident("after_backward", SLOTS * FSDP_MODULE + HOME + GRADS, host_bytes=host_bytes, events=events)
        assert bool(found.gpu_resident) is resident


def test_what_is_never_updated_may_live_there_whoever_updates() -> None:
    """Frozen FSDP modules, whose weights alone are all of it; others only where the device updates."""
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
def test_the_others_are_paged_as_before(data: st.DataObject) -> None:
    """A step in which FSDP modules live on the device is the same step without their accesses, bytes of the link
    included.
    """
    layout = data.draw(layouts())
    events = data.draw(steps(layout))
    update_schedule = replace(data.draw(update_schedules(layout, events)), prefetched=data.draw(st.booleans()))
    gpu_resident = frozenset(fsdp_module for fsdp_module in range(len(layout.fsdp_modules)) if data.draw(st.booleans()))
    gpu_resident_pages = replace(update_schedule, gpu_resident=gpu_resident)
    pending = data.draw(st.booleans())
    for found, plain in (
        (
            expand(events, layout, gpu_resident_pages, pending=pending),
            expand(events, layout, update_schedule, pending=pending),
        ),
        (expand_pending(events, layout, gpu_resident_pages), expand_pending(events, layout, update_schedule)),
    ):
        assert found == tuple(
            access for access in plain if layout.pages[access[0].page].fsdp_module not in gpu_resident
        )
    traffic = link_traffic(events, layout, gpu_resident_pages, update_on_device=True)
    whole = link_traffic(events, layout, update_schedule, update_on_device=True)
    assert all(some <= most for some, most in zip(traffic, whole, strict=True))
    if len(gpu_resident) == len(layout.fsdp_modules):
        assert not any(traffic)
    computed = staged_computation(events, layout, gpu_resident_pages)
    if computed is not None:
        total = sum(computed.shares) + sum(share for *_, share in computed.awaited)
        assert total == pytest.approx(1.0)


def test_a_step_in_which_all_fsdp_modules_live_on_the_device() -> None:
    """Has no accesses, needs no cache slots, and moves nothing."""
    cache_slots = len(LAYOUT.pages) // 4
    update_schedule, plan = choose_plan(
        "in_forward", EVENTS, LAYOUT, cache_slots, threaded=True, device_bytes=1 << 40, update_on_device=True
    )
    assert update_schedule.gpu_resident == frozenset(range(LAYERS))
    assert plan.trace == ()
    assert plan.traffic.total_bytes == 0
    assert prepend((), plan, LAYOUT).reach == ()


def test_the_next_gather() -> None:
    """Of the same step only."""
    assert next_gather(EVENTS, 0) == 1
    assert EVENTS[next_gather(EVENTS, LAYERS)].fsdp_module == LAYERS - 2
    assert next_gather(EVENTS, len(EVENTS) - 2) == -1


def test_gradients_on_their_way_take_a_part_of_the_memory() -> None:
    """The host cache is smaller by it, and the least that is said is enough."""
    fsdp_modules = LAYOUT.fsdp_modules
    used = {LAYOUT.shards[0].spec.segment_key}
    formats = {key: FORMATS[key] for key in used}
    plain = choose_budget(fsdp_modules, formats, 4 << 20, 64 << 10)
    budget = choose_budget(fsdp_modules, formats, plain.host_bytes, 64 << 10, device=True)
    beside = FETCHED * range_gradient_bytes(budget.layout)
    assert budget.host_bytes + beside <= plain.host_bytes < budget.host_bytes + beside + 2 * (64 << 10)
    with pytest.raises(BudgetError, match=r"for gradients .*memory\.host_bytes") as refused:
        choose_budget(fsdp_modules, formats, 64 << 10, 64 << 10, device=True)
    least = int(str(refused.value).split("memory.host_bytes to ")[1].split("KiB")[0]) << 10
    choose_budget(fsdp_modules, formats, least, 64 << 10, device=True)
    with pytest.raises(BudgetError):
        choose_budget(fsdp_modules, formats, least - 4096, 64 << 10, device=True)


def test_the_least_that_is_said_is_enough_for_activations_too() -> None:
    """Their part grows with the host cache, which a parameter that is updated whole makes large;

    and it is the least.
    """
    shard = ShardSpec(name="whole", numel=1 << 20, padded=1 << 20, segment_key="k", trainable=True, whole=1 << 20)
    formats, page = {"k": next(iter(FORMATS.values()))}, 64 << 10
    fsdp_modules = [FSDPModuleSpec(name="fsdp_module", shards=(shard,))]
    of = ActivationsConfig(tier="nvme")
    with pytest.raises(BudgetError, match="for activations") as refused:
        choose_budget(fsdp_modules, formats, page, page, activations=of)
    least = parse_size(str(refused.value).split("memory.host_bytes to ")[1].split(" or more")[0])
    budget = choose_budget(fsdp_modules, formats, least, page, activations=of)
    assert budget.activation_cache_slots > LEAST_CACHE_SLOTS
    with pytest.raises(BudgetError):
        choose_budget(fsdp_modules, formats, int(0.98 * least), page, activations=of)


def test_a_layout_without_gathers_is_left_alone() -> None:
    """A step of a single FSDP module has nothing to read ahead."""
    layout: Layout = transformer(1, 4096, 64 << 10)
    events = (Event(EventKind.GATHER, 0), Event(EventKind.GRADIENTS, 0), Event(EventKind.STEP))
    update_schedule = UpdateSchedule.of("in_backward", events)
    assert with_device(update_schedule, events, layout, 1 << 40) == update_schedule
