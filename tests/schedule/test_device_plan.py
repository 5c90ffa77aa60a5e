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
from infinity.content.layout import Layout, ShardSpec, UnitSpec, build_layout
from infinity.errors import BudgetError
from infinity.schedule.choice import choose_plan
from infinity.schedule.link import link_traffic
from infinity.schedule.placement import Placement, expand, expand_pending, next_gather
from infinity.schedule.planner import prepend
from infinity.schedule.stack import LEAST_FRAMES
from infinity.schedule.tier import SLOTS, unit_bytes, with_device
from infinity.schedule.timing import staged_computation
from infinity.schedule.trace import Access, Event, EventKind, Mode
from infinity.units import parse_size
from support.layouts import FORMATS, home_bytes, layouts, placements, steps, transformer, transformer_step

LAYERS = 5
LAYOUT = transformer(LAYERS, 3 * 4096, 64 << 10)
EVENTS = transformer_step(LAYERS)
UNIT = unit_bytes(LAYOUT, 0)
HOME = home_bytes(LAYOUT, 0)
GRADS = sum(page.nbytes for page in LAYOUT.pages if page.unit == 0 and page.role is Role.GRAD)
PLACEMENTS = [
    replace(Placement.of(name, EVENTS), overlapped=overlapped)
    for name in ("in_backward", "in_forward", "after_backward")
    for overlapped in (True, False)
]


def reads(trace: tuple[Access, ...], unit: int) -> list[int]:
    """Return the positions at which weights of a unit are read for a gather."""
    return [
        position
        for position, access in enumerate(trace)
        if len(access) == 1
        and access[0].mode is Mode.READ
        and LAYOUT.pages[access[0].page].role is Role.PARAM
        and LAYOUT.pages[access[0].page].unit == unit
    ]


def updates(trace: tuple[Access, ...], unit: int) -> list[int]:
    """Return the positions of the updates of a unit."""
    return [
        position
        for position, access in enumerate(trace)
        if any(use.mode.modifies and LAYOUT.pages[use.page].role is Role.UPDATE for use in access)
        and LAYOUT.pages[access[0].page].unit == unit
    ]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_reads_come_one_gather_earlier_and_are_the_same(placement: Placement) -> None:
    """Nothing is read twice or not at all, and never on the wrong side of an update."""
    plain, staged = expand(EVENTS, LAYOUT, placement), expand(EVENTS, LAYOUT, replace(placement, staged=True))
    assert Counter(plain) == Counter(staged)
    for unit in range(LAYERS):
        order = [sorted([(p, "read") for p in reads(t, unit)] + [(p, "update") for p in updates(t, unit)])
                 for t in (plain, staged)]  # fmt: skip
        assert [what for _, what in order[0]] == [what for _, what in order[1]]


def test_gradients_are_stored_behind_the_reads_of_the_next_unit() -> None:
    """So the device has weights to compute with while gradients leave it."""
    traces = [expand(EVENTS, LAYOUT, Placement(staged=staged)) for staged in (False, True)]
    stores = [
        {position for position, access in enumerate(trace) if LAYOUT.pages[access[0].page].role is Role.GRAD}
        for trace in traces
    ]
    backward = [reads(trace, LAYERS - 2)[-1] for trace in traces]
    assert min(stores[0]) < backward[0]
    assert min(stores[1]) > backward[1]


def test_memory_of_the_device_is_for_slots_first_and_then_for_weights() -> None:
    """Those that are gathered again soonest come first; a byte too few is a unit fewer."""
    placement = PLACEMENTS[0]
    assert with_device(placement, EVENTS, LAYOUT, SLOTS * UNIT - 1) == placement
    for kept in range(LAYERS):
        found = with_device(placement, EVENTS, LAYOUT, (SLOTS + kept) * UNIT)
        assert found.staged
        assert found.kept == frozenset(range(LAYERS - kept, LAYERS)) - {0}
        assert with_device(placement, EVENTS, LAYOUT, (SLOTS + kept + 1) * UNIT - 1) == found


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_weights_that_stay_are_read_once_a_step(placement: Placement) -> None:
    """The first gather of a step is not staged, so that unit is not kept."""
    once = len(reads(expand(EVENTS, LAYOUT, placement), 1)) // 2
    found = with_device(placement, EVENTS, LAYOUT, (SLOTS + 2) * UNIT)
    trace = expand(EVENTS, LAYOUT, found)
    assert [len(reads(trace, unit)) // once for unit in range(LAYERS)] == [2, 2, 2, 1, 1]


def test_weights_that_are_updated_are_read_again() -> None:
    """Where a loop gathers a unit again behind its update in the same step, what the device has is old."""
    events = (Event(EventKind.GATHER, 0), Event(EventKind.GATHER, 1), *EVENTS)
    placement = with_device(Placement.of("after_backward", events), events, LAYOUT, 100 * UNIT)
    assert placement.kept
    trace = expand(events, LAYOUT, replace(placement, in_forward=frozenset({1})))
    assert len(updates(trace, 1)) > 0
    assert min(updates(trace, 1)) < min(reads(trace, 1))


def test_plans_follow_from_it() -> None:
    """Fewer bytes from the drive with more memory on the device; the same where it has none."""
    frames = len(LAYOUT.pages) // 2
    bytes_read = []
    for device_bytes in (0, SLOTS * UNIT, (SLOTS + LAYERS) * UNIT):
        placement, plan = choose_plan("in_backward", EVENTS, LAYOUT, frames, threaded=True, device_bytes=device_bytes)
        assert placement.staged == bool(device_bytes)
        bytes_read.append(plan.traffic.read_bytes)
    assert bytes_read[2] < bytes_read[0]


def homed(name: str, device_bytes: int, *, host_bytes: int = 0, events: tuple[Event, ...] = EVENTS) -> Placement:
    """Return what the memory of a device that updates is used for."""
    placement = Placement.of(name, events)
    return with_device(placement, events, LAYOUT, device_bytes, host_bytes=host_bytes, update_on_device=True)


def test_memory_of_a_device_that_updates_is_for_whole_units() -> None:
    """Behind slots, which the last unit needs no more; a byte too few is a unit fewer, and weights that are kept."""
    for units in range(LAYERS):
        found = homed("in_backward", SLOTS * UNIT + units * HOME)
        assert len(found.at_home) == units
        assert found.staged
        less = homed("in_backward", SLOTS * UNIT + units * HOME - 1)
        assert len(less.at_home) == max(0, units - 1)
        assert bool(less.kept) == (units > 0)
    assert homed("in_backward", LAYERS * HOME - 1).staged
    everything = homed("in_backward", LAYERS * HOME)
    assert everything.at_home == frozenset(range(LAYERS))
    assert not everything.staged


def test_units_that_live_on_the_device_are_spread_over_the_step() -> None:
    """So none of two, or of three, is beside another one."""
    for units in (2, 3):
        at_home = sorted(homed("in_backward", SLOTS * UNIT + units * HOME).at_home)
        assert min(b - a for a, b in pairwise(at_home)) > 1


def test_gradients_that_are_stored_live_there_too() -> None:
    """So a unit takes more."""
    for name in ("in_forward", "after_backward"):
        assert len(homed(name, SLOTS * UNIT + HOME + GRADS).at_home) == 1
        assert not homed(name, SLOTS * UNIT + HOME + GRADS - 1).at_home


def test_weights_of_many_gathers_are_kept_first() -> None:
    """A byte of them saves a transfer for each gather but one, a byte of a whole unit two, and of each a small part.

    Where the arena has all weights, kept ones save no reads of the drive.
    """
    for times, first in ((1, "at_home"), (2, "kept"), (4, "kept")):
        events = EVENTS[:-1] * times + EVENTS[-1:]
        found = homed("after_backward", SLOTS * UNIT + HOME + GRADS, events=events)
        assert bool(found.at_home) == (first == "at_home")
        assert bool(found.kept) == (first == "kept")
    weights = LAYOUT.bytes_of(Role.PARAM)
    events = EVENTS[:-1] * 2 + EVENTS[-1:]
    for host_bytes, at_home in ((0, False), (weights, True)):
        found = homed("after_backward", SLOTS * UNIT + HOME + GRADS, host_bytes=host_bytes, events=events)
        assert bool(found.at_home) is at_home


def test_what_is_never_updated_may_live_there_whoever_updates() -> None:
    """Frozen units, whose weights alone are all of it; others only where the device updates."""
    specs = [replace(unit, shards=tuple(replace(s, trainable=False) for s in unit.shards)) for unit in LAYOUT.units]
    frozen = build_layout(specs, FORMATS, LAYOUT.page_bytes)
    events = tuple(event for event in EVENTS if event.kind is not EventKind.GRADIENTS)
    found = with_device(Placement(), events, frozen, 1 << 40)
    assert found.at_home == frozenset(range(LAYERS))
    assert not with_device(PLACEMENTS[0], EVENTS, LAYOUT, 1 << 40).at_home


@settings(max_examples=200)
@given(st.data())
def test_the_others_are_paged_as_before(data: st.DataObject) -> None:
    """A step in which units live on the device is the same step without their accesses, bytes of the link included."""
    layout = data.draw(layouts())
    events = data.draw(steps(layout))
    placement = replace(data.draw(placements(layout, events)), staged=data.draw(st.booleans()))
    at_home = frozenset(unit for unit in range(len(layout.units)) if data.draw(st.booleans()))
    homes = replace(placement, at_home=at_home)
    pending = data.draw(st.booleans())
    for found, plain in (
        (expand(events, layout, homes, pending=pending), expand(events, layout, placement, pending=pending)),
        (expand_pending(events, layout, homes), expand_pending(events, layout, placement)),
    ):
        assert found == tuple(access for access in plain if layout.pages[access[0].page].unit not in at_home)
    traffic = link_traffic(events, layout, homes, update_on_device=True)
    whole = link_traffic(events, layout, placement, update_on_device=True)
    assert all(some <= most for some, most in zip(traffic, whole, strict=True))
    if len(at_home) == len(layout.units):
        assert not any(traffic)
    computed = staged_computation(events, layout, homes)
    if computed is not None:
        total = sum(computed.shares) + sum(share for *_, share in computed.awaited)
        assert total == pytest.approx(1.0)


def test_a_step_in_which_all_units_live_on_the_device() -> None:
    """Has no accesses, needs no frames, and moves nothing."""
    frames = len(LAYOUT.pages) // 4
    placement, plan = choose_plan(
        "in_forward", EVENTS, LAYOUT, frames, threaded=True, device_bytes=1 << 40, update_on_device=True
    )
    assert placement.at_home == frozenset(range(LAYERS))
    assert plan.trace == ()
    assert plan.traffic.total_bytes == 0
    assert prepend((), plan, LAYOUT).reach == ()


def test_the_next_gather() -> None:
    """Of the same step only."""
    assert next_gather(EVENTS, 0) == 1
    assert EVENTS[next_gather(EVENTS, LAYERS)].unit == LAYERS - 2
    assert next_gather(EVENTS, len(EVENTS) - 2) == -1


def test_gradients_on_their_way_take_a_part_of_the_memory() -> None:
    """The arena is smaller by it, and the least that is said is enough."""
    units = LAYOUT.units
    used = {LAYOUT.shards[0].spec.segment_key}
    formats = {key: FORMATS[key] for key in used}
    plain = choose_budget(units, formats, 4 << 20, 64 << 10)
    budget = choose_budget(units, formats, plain.host_bytes, 64 << 10, device=True)
    beside = FETCHED * range_gradient_bytes(budget.layout)
    assert budget.host_bytes + beside <= plain.host_bytes < budget.host_bytes + beside + 2 * (64 << 10)
    with pytest.raises(BudgetError, match="gradients that come from the device") as refused:
        choose_budget(units, formats, 64 << 10, 64 << 10, device=True)
    least = int(str(refused.value).split("memory.host_bytes to ")[1].split("KiB")[0]) << 10
    choose_budget(units, formats, least, 64 << 10, device=True)
    with pytest.raises(BudgetError):
        choose_budget(units, formats, least - 4096, 64 << 10, device=True)


def test_the_least_that_is_said_is_enough_for_activations_too() -> None:
    """Their part grows with the arena, which a parameter that is updated whole makes large; and it is the least."""
    shard = ShardSpec(name="whole", numel=1 << 20, padded=1 << 20, segment_key="k", trainable=True, whole=1 << 20)
    formats, page = {"k": next(iter(FORMATS.values()))}, 64 << 10
    units = [UnitSpec(name="unit", shards=(shard,))]
    of = ActivationsConfig(tier="nvme")
    with pytest.raises(BudgetError, match="for activations") as refused:
        choose_budget(units, formats, page, page, activations=of)
    least = parse_size(str(refused.value).split("memory.host_bytes to ")[1].split(" or more")[0])
    budget = choose_budget(units, formats, least, page, activations=of)
    assert budget.activation_frames > LEAST_FRAMES
    with pytest.raises(BudgetError):
        choose_budget(units, formats, int(0.98 * least), page, activations=of)


def test_a_layout_without_gathers_is_left_alone() -> None:
    """A step of a single unit has nothing to read ahead."""
    layout: Layout = transformer(1, 4096, 64 << 10)
    events = (Event(EventKind.GATHER, 0), Event(EventKind.GRADIENTS, 0), Event(EventKind.STEP))
    placement = Placement.of("in_backward", events)
    assert with_device(placement, events, layout, 1 << 40) == placement
