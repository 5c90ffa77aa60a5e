"""Tests of the planner's simulation: bounds that hold for every plan, and the effect of wide prefetch windows."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.content.format import Role
from infinity.content.layout import Layout
from infinity.optim import device_pages
from infinity.schedule import timing
from infinity.schedule.planner import Plan, Simulation, preferred
from infinity.schedule.schedule_choice import choose_simulation
from infinity.schedule.tier import SLOTS, fsdp_module_bytes
from infinity.schedule.timing import BACKWARD, NOTHING, OtherResources, computation, simulate, updating
from infinity.schedule.trace import Access
from infinity.schedule.update_schedule import UpdateSchedule, expand
from support.layouts import transformer, transformer_step
from support.plans import make_plan, plans

PAGE = 64 << 10
LAYERS, ELEMENTS = 12, 10 * 32 * 1024
"""An FSDP module has ten pages of weights and sixty pages of master and moments."""


def lengths(
    plan: Plan, layout: Layout, works: Sequence[float], *, resources: OtherResources = NOTHING, threaded: bool
) -> list[float]:
    """Return the simulated duration of a step for each computation time."""
    simulation = Simulation.of(plan, layout, threaded=threaded)
    return [simulation.length(work, resources) for work in works]


def step(*, threaded: bool = False) -> tuple[tuple[Access, ...], Layout]:
    """Return the accesses of a transformer step with updates in backward."""
    layout, events = transformer(LAYERS, ELEMENTS, PAGE), transformer_step(LAYERS)
    update_schedule = replace(UpdateSchedule.of("in_backward", events), overlapped=threaded)
    return expand(events, layout, update_schedule), layout


def test_computation_follows_gathers() -> None:
    """Forward precedes the next gather; backward precedes the update of the FSDP module and takes longer."""
    trace, layout = step()
    shares = computation(trace, layout)
    assert sum(shares) == pytest.approx(1.0)
    due = [position for position, share in enumerate(shares) if share]
    roles = [layout.pages[trace[position][0].page].role for position in due]
    assert roles == [Role.PARAM] * (LAYERS - 1) + [Role.UPDATE] * LAYERS
    forward, backward = shares[due[0]], shares[due[-1]]
    assert backward == pytest.approx(BACKWARD * forward)


def test_fully_cached_step_takes_its_computation_time() -> None:
    trace, layout = step()
    plan = make_plan(trace, layout, len(layout.pages))
    assert lengths(plan, layout, [1e9], threaded=False) == pytest.approx([1e9])


def test_seconds_scale_with_bandwidth_and_computation() -> None:
    """Twice the bandwidth and half the computation yield half the seconds."""
    trace, layout = step()
    plan = make_plan(trace, layout, 200)
    moved = plan.traffic.total_bytes

    def seconds(bandwidth: float, computation: float) -> float:
        return Simulation.of(plan, layout, threaded=False).seconds(bandwidth=bandwidth, computation=computation)

    assert seconds(moved, 0.0) == pytest.approx(1.0, rel=0.2)
    assert 1.0 <= seconds(moved, 0.5) <= 1.7
    assert 10.0 <= seconds(moved, 10.0) <= 11.0
    assert seconds(2 * moved, 0.5) == pytest.approx(seconds(moved, 1.0) / 2)


@pytest.mark.parametrize("threaded", [False, True])
@pytest.mark.parametrize("cache_slots", [14, 40, 160, 300])
def test_training_runs_ahead_of_updates_by_at_most_the_window(cache_slots: int, threaded: bool) -> None:
    """The computation of forward hides at most the transfers of updates in backward that the cache slots can hold."""
    trace, layout = step(threaded=threaded)
    plan = make_plan(trace, layout, cache_slots, threaded=threaded)
    work, traffic = plan.traffic.total_bytes, plan.traffic
    updates = traffic.read[Role.UPDATE] + traffic.written[Role.UPDATE]
    hidden = (plan.cache_slots - len(plan.resident)) * PAGE
    (found,) = lengths(plan, layout, [work], threaded=threaded)
    assert found >= work / (1 + BACKWARD) + updates - 2 * hidden


@pytest.mark.parametrize("threaded", [False, True])
def test_cache_slots_for_one_fsdp_module_keep_the_drive_busy(threaded: bool) -> None:
    """If computation takes as long as the transfers, a streaming window of one FSDP module overlaps most of them."""
    trace, layout = step()
    narrow, wide = make_plan(trace, layout, 24, threaded=threaded), make_plan(trace, layout, 96, threaded=threaded)
    (narrow_time,), (wide_time,) = (
        lengths(plan, layout, [plan.traffic.total_bytes], threaded=threaded) for plan in (narrow, wide)
    )
    assert narrow_time > 1.4 * narrow.traffic.total_bytes
    assert wide_time < 1.3 * wide.traffic.total_bytes
    simulations = [Simulation.of(plan, layout, threaded=threaded) for plan in (narrow, wide)]
    assert preferred(simulations).plan == wide


TRAINING_ACCESS = (0, 0, 1, 0, [True], [PAGE])
"""Access of the training thread that reads one page and modifies it."""


def test_drive_transfers_pages_one_at_a_time() -> None:
    """A read without a free cache slot waits for the page that is being written."""
    assert simulate([TRAINING_ACCESS], [PAGE], 1, [0.0], [()], [0.0]) == 2 * PAGE
    assert simulate([TRAINING_ACCESS], [PAGE], 1, [5.0 * PAGE], [()], [0.0]) == 5 * PAGE
    unmodified = (*TRAINING_ACCESS[:-1], [0])
    assert simulate([unmodified], [PAGE], 1, [0.0], [()], [0.0]) == PAGE


def test_equally_fast_plans_are_compared_by_bytes() -> None:
    """If nearly all pages fit, few slots stream: resident pages save bytes, a wide window saves little time."""
    trace, layout = step()
    used = {use.page for access in trace for use in access}
    missing = 40
    plan = make_plan(trace, layout, len(used) - missing)
    assert plan.streaming_cache_slots < 30
    assert plan.traffic.total_bytes <= 2 * (missing + plan.cache_slots - len(plan.resident)) * PAGE


def test_streamed_pages_are_spread_over_the_step() -> None:
    """All weights are resident, and each FSDP module has about as many resident update pages."""
    trace, layout = step()
    plan = make_plan(trace, layout, 450)
    resident = [layout.pages[page] for page in plan.resident]
    assert sum(page.role is Role.PARAM for page in resident) == layout.bytes_of(Role.PARAM) // PAGE
    updates = [
        sum(page.role is Role.UPDATE and page.fsdp_module == fsdp_module for page in resident)
        for fsdp_module in range(LAYERS)
    ]
    assert max(updates) - min(updates) <= 2


@pytest.mark.parametrize("threaded", [False, True])
def test_update_time_counts_once_per_thread(threaded: bool) -> None:
    """It adds to the step on the training thread, and is limited to one thread per step on an update thread."""
    trace, layout = step(threaded=threaded)
    plan = make_plan(trace, layout, len(layout.pages), threaded=threaded)
    work = 1e9
    (alone,) = lengths(plan, layout, [work], threaded=threaded)
    (found,) = lengths(plan, layout, [work], resources=OtherResources(updates=work / 2), threaded=threaded)
    assert found == pytest.approx(alone + work / 2) if not threaded else alone <= found <= alone + work / 2
    (slow,) = lengths(plan, layout, [work], resources=OtherResources(updates=3 * work), threaded=threaded)
    assert slow >= 3 * work
    assert sum(updating(trace, layout)) == pytest.approx(1.0)


ALONE = 1e9
"""Computation time of a step in the tests of other resources."""


def fully_cached(name: str = "in_backward", *, fsdp_modules_ahead: int = 3) -> tuple[Plan, Layout]:
    """Return a plan that keeps all pages resident and whose window reaches some FSDP modules ahead."""
    layout, events = transformer(LAYERS, ELEMENTS, PAGE), transformer_step(LAYERS)
    trace = expand(events, layout, UpdateSchedule.of(name, events))
    plan = make_plan(trace, layout, len(layout.pages), threaded=True)
    return replace(plan, reach=tuple(at + fsdp_modules_ahead * 80 for at in range(len(trace)))), layout


def step_time(drawn: tuple[Plan, Layout], work: float = ALONE, **resources: float) -> float:
    """Return the duration of a step."""
    plan, layout = drawn
    update_limit = int(resources.pop("update_limit", 0))
    (found,) = lengths(
        plan, layout, [work], resources=OtherResources(**resources, update_limit=update_limit), threaded=True
    )
    return found


RESOURCES = ("updates", "weights", "gradients", "read", "changed", "verifying", "hashing", "launching")


@settings(max_examples=60)
@given(
    plans(),
    st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    st.one_of(st.just({}), st.fixed_dictionaries({name: st.sampled_from([0.0, 0.3, 2.0]) for name in RESOURCES})),
    st.integers(0, 3),
    st.booleans(),
)
def test_step_time_is_between_computation_and_the_sum(
    drawn: tuple[Plan, Layout], share: float, shares: dict[str, float], update_limit: int, threaded: bool
) -> None:
    """The upper bound is computation plus transfers, plus the transfers that a step can leave to the next one.

    Other resources count twice, because a step may leave their work to the next one, too.
    """
    plan, layout = drawn
    lead = len(plan.prefix)
    plan = replace(plan, prefix=(), reach=tuple(position - lead for position in plan.reach[lead:]))
    unit = float(plan.traffic.total_bytes or layout.state_bytes)
    work, times = share * unit, {name: part * unit for name, part in shares.items()}
    resources = OtherResources(**times, update_limit=update_limit)
    (found,) = lengths(plan, layout, [work], resources=resources, threaded=threaded)
    left_over = plan.cache_slots * layout.page_bytes
    most = work + plan.traffic.total_bytes + left_over + 2 * sum(times.values())
    assert work * (1 - 1e-9) <= found <= most * (1 + 1e-9)
    simulation = Simulation.of(plan, layout, threaded=threaded)
    seconds = simulation.seconds(bandwidth=1.0, computation=work, resources=resources)
    assert seconds >= max(found, *(times.get(name, 0) for name in ("weights", "gradients", "verifying", "hashing")))


@settings(max_examples=40)
@given(plans(), st.booleans())
def test_update_limit_without_copies_has_no_effect(drawn: tuple[Plan, Layout], threaded: bool) -> None:
    """A run on CPU is planned as if the limit did not exist."""
    plan, layout = drawn
    lead = len(plan.prefix)
    plan = replace(plan, prefix=(), reach=tuple(position - lead for position in plan.reach[lead:]))
    works = [0.0, float(plan.traffic.total_bytes)]
    with_limit = lengths(plan, layout, works, resources=OtherResources(update_limit=2), threaded=threaded)
    assert with_limit == lengths(plan, layout, works, threaded=threaded)


def prefetched_plan(
    name: str = "in_backward", *, kept: int = 0, cache_slots: int = 0, fsdp_modules_ahead: int = 3
) -> tuple[Plan, Layout]:
    """Return a plan that prefetches weights and keeps `kept` modules on the device; by default all pages are cached."""
    layout, events = transformer(LAYERS, ELEMENTS, PAGE), transformer_step(LAYERS)
    device_bytes = (SLOTS + kept) * fsdp_module_bytes(layout, 0)
    _, simulation = choose_simulation(
        name, events, layout, cache_slots or len(layout.pages), threaded=True, device_bytes=device_bytes
    )
    plan = simulation.plan
    assert plan.prefetched is not None
    if cache_slots:
        return plan, layout
    return replace(plan, reach=tuple(at + fsdp_modules_ahead * 80 for at in range(len(plan.trace)))), layout


@pytest.mark.parametrize("name", ["in_backward", "in_forward", "after_backward"])
@pytest.mark.parametrize("kept", [0, 4, LAYERS])
def test_prefetched_step_has_the_same_computation(name: str, kept: int) -> None:
    """The fractions sum to 1, and without transfer times the step takes its computation time."""
    plan, layout = prefetched_plan(name, kept=kept)
    assert plan.prefetched is not None
    assert sum(plan.prefetched.shares) + sum(share for *_, share in plan.prefetched.awaited) == pytest.approx(1.0)
    awaited = [fsdp_module for _, fsdp_module, _ in plan.prefetched.awaited]
    assert sorted(set(awaited)) == sorted(
        {layout.pages[plan.trace[at][0].page].fsdp_module for at in plan.prefetched.prefetched}
    )
    assert step_time((plan, layout)) == pytest.approx(ALONE)


def test_module_computation_follows_the_next_modules_reads() -> None:
    """It precedes the reads of the module after that, and waits for the module's own weights."""
    plan, layout = prefetched_plan()
    assert plan.prefetched is not None
    module_at = {at: layout.pages[plan.trace[at][0].page].fsdp_module for at in plan.prefetched.prefetched}
    reads = [min(at for at, found in module_at.items() if found == wanted) for wanted in range(1, LAYERS)]
    forward = plan.prefetched.awaited[: LAYERS - 2]
    assert [fsdp_module for _, fsdp_module, _ in forward] == list(range(1, LAYERS - 1))
    assert [position for position, *_ in forward] == reads[1:]
    assert plan.prefetched.shares[reads[1]] == pytest.approx(1 / (1 + BACKWARD) / LAYERS, rel=0.1)


def test_prefetched_weights_overlap_computation() -> None:
    """Without prefetching all copies are exposed; with prefetching only the first ones of a step are."""
    weights = 0.5 * ALONE
    assert step_time(fully_cached(), weights=weights) == pytest.approx(ALONE + weights)
    assert ALONE < step_time(prefetched_plan(), weights=weights) < ALONE + 2 * weights / (2 * LAYERS)
    assert step_time(prefetched_plan(), weights=3 * ALONE) >= 3 * ALONE


def test_kept_weights_are_copied_once() -> None:
    """Copies that take longer than forward delay forward; backward copies nothing."""
    forward = ALONE / (1 + BACKWARD)
    found = step_time(prefetched_plan(kept=LAYERS), weights=2 * forward)
    assert found == pytest.approx(ALONE + forward, rel=0.1)
    assert step_time(prefetched_plan(), weights=2 * forward) < found  # the same time, of which half is for backward


def test_weights_are_copied_after_their_update() -> None:
    """In forward, a page is updated while the previous FSDP module computes, and copied afterwards."""
    updates, weights = 2 * ALONE, 0.5 * ALONE
    backward = ALONE * BACKWARD / (1 + BACKWARD)
    found = step_time(prefetched_plan("in_forward"), updates=updates, weights=weights)
    assert found >= updates + backward
    assert step_time(prefetched_plan(), updates=updates, weights=weights) < found


def test_pages_updated_on_the_device_occupy_the_link() -> None:
    """Both directions run concurrently, weights queue after these pages, and gradients are not copied."""
    alone = step_time(prefetched_plan(), read=1e-6)
    assert alone == pytest.approx(ALONE)
    there, back, both = (step_time(prefetched_plan(), **times) for times in (
        {"read": 2 * ALONE}, {"read": 1e-6, "changed": 2 * ALONE}, {"read": 2 * ALONE, "changed": 2 * ALONE}
    ))  # fmt: skip
    assert max(there, back) >= 2 * ALONE
    assert both < 1.2 * max(there, back)
    assert step_time(prefetched_plan(), read=2 * ALONE, weights=ALONE) >= 3 * ALONE
    assert step_time(prefetched_plan(), read=1e-6, gradients=2 * ALONE) == pytest.approx(alone)


@pytest.mark.parametrize("name", ["in_backward", "in_forward", "after_backward"])
def test_gradient_copies_overlap_computation(name: str) -> None:
    """Only the copies of the last FSDP module can be exposed."""
    found, without = (
        step_time(fully_cached(name), gradients=gradients, update_limit=2) for gradients in (0.3 * ALONE, 0.0)
    )
    assert without == pytest.approx(ALONE)
    assert found <= ALONE + 2 * 0.3 * ALONE / LAYERS
    assert step_time(fully_cached(name), gradients=2 * ALONE, update_limit=2) >= 1.9 * ALONE


def test_updates_wait_for_gradients() -> None:
    """The update of an FSDP module starts after its gradients have been copied."""
    drawn = fully_cached()
    gradients, updates = 2 * ALONE, 0.5 * ALONE
    forward = ALONE / (1 + BACKWARD)
    found = step_time(drawn, gradients=gradients, updates=updates)
    assert found >= forward + gradients + updates / LAYERS - 1
    assert found < forward + gradients + updates


def test_number_of_modules_awaiting_updates_is_limited() -> None:
    """The training thread waits for the update of an earlier module; without a limit the window decides."""
    drawn = fully_cached(fsdp_modules_ahead=2 * LAYERS)
    found = [
        step_time(drawn, gradients=0.1 * ALONE, updates=1.5 * ALONE, update_limit=update_limit)
        for update_limit in (1, 2, 6, 0)
    ]
    assert all(fewer >= more - 1 for fewer, more in itertools.pairwise(found))
    assert found[0] > 1.05 * found[-1]


@pytest.mark.parametrize("threaded", [False, True])
def test_python_of_all_threads_delays_the_launch_of_computation(threaded: bool) -> None:
    """A step takes as long as its computation or its Python code, whichever is longer."""
    trace, layout = step()
    plan = make_plan(trace, layout, len(layout.pages))

    def length(work: float, **times: float) -> float:
        (found,) = lengths(plan, layout, [work], resources=OtherResources(**times), threaded=threaded)
        return found

    each = ALONE / len(trace)
    assert length(ALONE, launching=0.5 * ALONE) == pytest.approx(ALONE)
    assert length(ALONE, launching=3 * ALONE) == pytest.approx(3 * ALONE)
    assert length(0.0, launching=ALONE, per_access=each) == pytest.approx(2 * ALONE, rel=0.02)
    assert length(100 * ALONE, launching=ALONE, per_access=each) < 100.2 * ALONE


def test_reading_and_writing_pages_takes_python_time() -> None:
    """All threads share one interpreter, so the time per page is added to the launch of computation."""
    trace, layout = step()
    plan = make_plan(trace, layout, len(layout.pages) // 2)
    pages = plan.traffic.total_bytes / PAGE
    assert pages > 10

    def length(each: float) -> float:
        resources = OtherResources(launching=ALONE, per_page=each)
        (found,) = lengths(plan, layout, [ALONE], resources=resources, threaded=True)
        return found

    each = 10 * plan.traffic.total_bytes / pages
    assert length(each) > 0.95 * (ALONE + pages * each)


def test_few_updates_are_queued_on_the_device() -> None:
    """The Python code of a batch waits until an earlier batch has been copied back."""
    assert timing.QUEUED == device_pages._MOST_QUEUED
    drawn = fully_cached()
    times = {"read": ALONE, "changed": ALONE, "per_access": 0.001 * ALONE}
    with patch.object(timing, "QUEUED", 1):
        alone = step_time(drawn, **times)
    assert alone > 1.5 * step_time(drawn, **times)


def test_verification_delays_reads_and_hashing_delays_free_slots() -> None:
    """Checksums run one after the other while the drive continues."""
    two = [(0, 0, 2, position, [True], [0]) for position in range(2)]
    assert simulate(two, [PAGE, PAGE], 2, [0.0, 0.0], [(), ()], [0.0, 0.0], verifying=2.0) == 5 * PAGE
    # Read and verified at 3, hashed at 6; then the slot is free for a read that is verified 3 later.
    assert simulate([TRAINING_ACCESS], [PAGE], 1, [0.0], [()], [0.0], verifying=2.0, hashing=3.0) == 6 * PAGE
