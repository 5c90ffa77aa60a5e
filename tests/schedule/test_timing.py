"""The clock of the planner: bounds that hold for any plan, and what wide windows are good for."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.content.format import Role
from infinity.content.layout import Layout
from infinity.schedule.planner import Plan, lengths, make_plan, predict_seconds, preferred
from infinity.schedule.schedule_choice import choose_plan
from infinity.schedule.tier import SLOTS, fsdp_module_bytes
from infinity.schedule.timing import BACKWARD, Clockwork, OtherResources, computation, staged_computation, updating
from infinity.schedule.trace import Access
from infinity.schedule.update_schedule import UpdateSchedule, expand
from support.layouts import transformer, transformer_step
from support.plans import plans

PAGE = 64 << 10
LAYERS, ELEMENTS = 12, 10 * 32 * 1024
"""An FSDP module has ten pages of weights and sixty of master and moments."""


def step(*, threaded: bool = False) -> tuple[tuple[Access, ...], Layout]:
    """Return the accesses of a transformer's step that updates in backward."""
    layout, events = transformer(LAYERS, ELEMENTS, PAGE), transformer_step(LAYERS)
    update_schedule = replace(UpdateSchedule.of("in_backward", events), overlapped=threaded)
    return expand(events, layout, update_schedule), layout


@given(plans(), st.sampled_from([0.0, 0.5, 1.0, 3.0]), st.booleans())
def test_a_step_takes_no_less_than_either_and_no_more_than_both(
    drawn: tuple[Plan, Layout], share: float, threaded: bool
) -> None:
    """Than computation; than computation and transfers one after the other, up to what a step leaves to the next."""
    plan, layout = drawn
    lead = len(plan.prefix)
    plan = replace(plan, prefix=(), reach=tuple(position - lead for position in plan.reach[lead:]))
    moved = plan.traffic.total_bytes
    work = share * (moved or layout.state_bytes)
    (found,) = lengths(plan, layout, [work], threaded=threaded)
    left_over = plan.cache_slots * layout.page_bytes
    assert work * (1 - 1e-9) <= found <= (work + moved + left_over) * (1 + 1e-9)


def test_computation_comes_behind_gathers() -> None:
    """In forward before the next gather, in backward before the update of the FSDP module, which takes longer."""
    trace, layout = step()
    shares = computation(trace, layout)
    assert sum(shares) == pytest.approx(1.0)
    due = [position for position, share in enumerate(shares) if share]
    roles = [layout.pages[trace[position][0].page].role for position in due]
    assert roles == [Role.PARAM] * (LAYERS - 1) + [Role.UPDATE] * LAYERS
    forward, backward = shares[due[0]], shares[due[-1]]
    assert backward == pytest.approx(BACKWARD * forward)


def test_nothing_is_waited_for_where_nothing_moves() -> None:
    """With everything in the host cache, a step takes as long as its computation."""
    trace, layout = step()
    plan = make_plan(trace, layout, len(layout.pages))
    assert lengths(plan, layout, [1e9], threaded=False) == pytest.approx([1e9])


def test_seconds_are_those_of_the_slower_and_what_cannot_hide() -> None:
    """Twice the bandwidth and half the computation: half the seconds. Neither alone takes longer than the step."""
    trace, layout = step()
    plan = make_plan(trace, layout, 200)
    moved = plan.traffic.total_bytes

    def seconds(bandwidth: float, computation: float) -> float:
        return predict_seconds(plan, layout, bandwidth=bandwidth, computation=computation, threaded=False)

    assert seconds(moved, 0.0) == pytest.approx(1.0, rel=0.2)
    assert 1.0 <= seconds(moved, 0.5) <= 1.7
    assert 10.0 <= seconds(moved, 10.0) <= 11.0
    assert seconds(2 * moved, 0.5) == pytest.approx(seconds(moved, 1.0) / 2)


def test_updates_on_another_thread_are_not_waited_for() -> None:
    """Neither can a step be longer for it."""
    trace, layout = step(threaded=True)
    plan = make_plan(trace, layout, 60)
    work = [plan.traffic.total_bytes]
    (alone,), (threaded,) = (lengths(plan, layout, work, threaded=choice) for choice in (False, True))
    assert threaded < alone


@pytest.mark.parametrize("threaded", [False, True])
@pytest.mark.parametrize("cache_slots", [14, 40, 160, 300])
def test_training_goes_no_further_ahead_of_updates_than_the_window_reaches(cache_slots: int, threaded: bool) -> None:
    """So the computation of forward hides nothing of what updates in backward move but what the cache slots hold.

    Those of the window and those that are being written, once before backward and once behind it.
    """
    trace, layout = step(threaded=threaded)
    plan = make_plan(trace, layout, cache_slots, threaded=threaded)
    work, traffic = plan.traffic.total_bytes, plan.traffic
    updates = traffic.read[Role.UPDATE] + traffic.written[Role.UPDATE]
    hidden = (plan.cache_slots - len(plan.resident)) * PAGE
    (found,) = lengths(plan, layout, [work], threaded=threaded)
    assert found >= work / (1 + BACKWARD) + updates - 2 * hidden


@pytest.mark.parametrize("threaded", [False, True])
def test_an_host_cache_with_room_for_a_fsdp_module_keeps_the_drive_busy(threaded: bool) -> None:
    """Where computation takes as long as the transfers, most of them hide behind it if the host cache holds an FSDP
    module.
    """
    trace, layout = step()
    narrow, wide = make_plan(trace, layout, 24, threaded=threaded), make_plan(trace, layout, 96, threaded=threaded)
    (of_narrow,), (of_wide,) = (
        lengths(plan, layout, [plan.traffic.total_bytes], threaded=threaded) for plan in (narrow, wide)
    )
    assert of_narrow > 1.4 * narrow.traffic.total_bytes
    assert of_wide < 1.3 * wide.traffic.total_bytes
    assert preferred([narrow, wide], layout, threaded=threaded) is wide


def test_the_drive_moves_one_page_after_the_other() -> None:
    """And a read that has no cache slot waits for one that is written."""
    clockwork = Clockwork([PAGE], 1)
    clockwork.wanted = 2
    clockwork.go_on(0.0)
    assert clockwork.enter([True], 0.0) == PAGE
    clockwork.go_on(3.0 * PAGE)
    clockwork.leave([PAGE])
    assert clockwork.enter([True], 3.0 * PAGE) == 5.0 * PAGE
    clockwork.leave([0])
    assert clockwork.enter([False], 7.0) == 7.0


def test_of_plans_that_are_about_as_quick_the_one_that_moves_least_is_taken() -> None:
    """Where nearly all pages fit, few cache slots stream: resident pages save bytes, a wide window little time."""
    trace, layout = step()
    used = {use.page for access in trace for use in access}
    missing = 40
    plan = make_plan(trace, layout, len(used) - missing)
    assert plan.streaming_cache_slots < 30
    assert plan.traffic.total_bytes <= 2 * (missing + plan.cache_slots - len(plan.resident)) * PAGE


def test_what_moves_is_spread_over_the_step() -> None:
    """Residents are weights, and of master and moments as much of each FSDP module:

    no FSDP module has to wait for more than most.
    """
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
def test_updates_take_their_time(threaded: bool) -> None:
    """On the training thread all of it; on their own thread it hides, up to what one thread can do in a step."""
    trace, layout = step(threaded=threaded)
    plan = make_plan(trace, layout, len(layout.pages), threaded=threaded)
    work = 1e9
    (alone,) = lengths(plan, layout, [work], threaded=threaded)
    (found,) = lengths(plan, layout, [work], beside=OtherResources(updates=work / 2), threaded=threaded)
    assert found == pytest.approx(alone + work / 2) if not threaded else alone <= found <= alone + work / 2
    (slow,) = lengths(plan, layout, [work], beside=OtherResources(updates=3 * work), threaded=threaded)
    assert slow >= 3 * work
    assert sum(updating(trace, layout)) == pytest.approx(1.0)


ALONE = 1e9
"""How long the computation of a step takes in the tests of what works beside it."""


def in_memory(name: str = "in_backward", *, fsdp_modules_ahead: int = 3) -> tuple[Plan, Layout]:
    """Return a plan that keeps everything, whose window reaches some FSDP modules ahead, with a thread for updates."""
    layout, events = transformer(LAYERS, ELEMENTS, PAGE), transformer_step(LAYERS)
    trace = expand(events, layout, UpdateSchedule.of(name, events))
    plan = make_plan(trace, layout, len(layout.pages), threaded=True)
    return replace(plan, reach=tuple(at + fsdp_modules_ahead * 80 for at in range(len(trace)))), layout


def length(drawn: tuple[Plan, Layout], work: float = ALONE, **beside: float) -> float:
    """Return how long a step takes."""
    plan, layout = drawn
    behind = int(beside.pop("behind", 0))
    (found,) = lengths(plan, layout, [work], beside=OtherResources(**beside, behind=behind), threaded=True)
    return found


@given(
    plans(),
    st.fixed_dictionaries(
        {
            name: st.sampled_from([0.0, 0.3, 2.0])
            for name in ("updates", "weights", "gradients", "read", "changed", "verifying", "hashing", "interpreter")
        }
    ),
    st.integers(0, 3),
    st.booleans(),
)
def test_nothing_makes_a_step_shorter_or_longer_than_all_of_it_one_after_the_other(
    drawn: tuple[Plan, Layout], shares: dict[str, float], behind: int, threaded: bool
) -> None:
    """Up to what a step leaves to the next, which is no more than what there is of it in a step."""
    plan, layout = drawn
    lead = len(plan.prefix)
    plan = replace(plan, prefix=(), reach=tuple(position - lead for position in plan.reach[lead:]))
    work = float(plan.traffic.total_bytes or layout.state_bytes)
    times = {name: share * work for name, share in shares.items()}
    beside = OtherResources(**times, behind=behind)
    (found,) = lengths(plan, layout, [work], beside=beside, threaded=threaded)
    left_over = plan.cache_slots * layout.page_bytes
    most = work + plan.traffic.total_bytes + left_over + 2 * sum(times.values())
    assert work * (1 - 1e-9) <= found <= most * (1 + 1e-9)
    seconds = predict_seconds(plan, layout, bandwidth=1.0, computation=work, beside=beside, threaded=threaded)
    assert seconds >= max(found, *(times[name] for name in ("weights", "gradients", "verifying", "hashing")))


@given(plans(), st.booleans())
def test_room_on_a_device_is_nothing_without_copies(drawn: tuple[Plan, Layout], threaded: bool) -> None:
    """A run on CPU is planned as ever."""
    plan, layout = drawn
    lead = len(plan.prefix)
    plan = replace(plan, prefix=(), reach=tuple(position - lead for position in plan.reach[lead:]))
    works = [0.0, float(plan.traffic.total_bytes)]
    with_room = lengths(plan, layout, works, beside=OtherResources(behind=2), threaded=threaded)
    assert with_room == lengths(plan, layout, works, threaded=threaded)


def prefetched(
    name: str = "in_backward", *, kept: int = 0, cache_slots: int = 0, fsdp_modules_ahead: int = 3
) -> tuple[Plan, Layout]:
    """Return a plan with weights that are staged, and of so many FSDP modules stay;

    by default all pages have cache slots.
    """
    layout, events = transformer(LAYERS, ELEMENTS, PAGE), transformer_step(LAYERS)
    room = (SLOTS + kept) * fsdp_module_bytes(layout, 0)
    _, plan = choose_plan(name, events, layout, cache_slots or len(layout.pages), threaded=True, device_bytes=room)
    assert plan.prefetched is not None
    if cache_slots:
        return plan, layout
    return replace(plan, reach=tuple(at + fsdp_modules_ahead * 80 for at in range(len(plan.trace)))), layout


@pytest.mark.parametrize("name", ["in_backward", "in_forward", "after_backward"])
@pytest.mark.parametrize("kept", [0, 4, LAYERS])
def test_a_staged_step_computes_as_much_as_any(name: str, kept: int) -> None:
    """All of it, each FSDP module twice, and waits for weights wherever they are copied;

    nothing where nothing takes time.
    """
    plan, layout = prefetched(name, kept=kept)
    assert plan.prefetched is not None
    assert sum(plan.prefetched.shares) + sum(share for *_, share in plan.prefetched.awaited) == pytest.approx(1.0)
    awaited = [fsdp_module for _, fsdp_module, _ in plan.prefetched.awaited]
    assert sorted(set(awaited)) == sorted(
        {layout.pages[plan.trace[at][0].page].fsdp_module for at in plan.prefetched.prefetched}
    )
    assert length((plan, layout)) == pytest.approx(ALONE)


def test_a_fsdp_module_is_computed_with_behind_the_reads_of_the_next_one() -> None:
    """And before those of the one after that; it is waited for first."""
    plan, layout = prefetched()
    assert plan.prefetched is not None
    module_at = {at: layout.pages[plan.trace[at][0].page].fsdp_module for at in plan.prefetched.prefetched}
    reads = [min(at for at, found in module_at.items() if found == wanted) for wanted in range(1, LAYERS)]
    forward = plan.prefetched.awaited[: LAYERS - 2]
    assert [fsdp_module for _, fsdp_module, _ in forward] == list(range(1, LAYERS - 1))
    assert [position for position, *_ in forward] == reads[1:]
    assert plan.prefetched.shares[reads[1]] == pytest.approx(1 / (1 + BACKWARD) / LAYERS, rel=0.1)


def test_nothing_is_staged_on_the_cpu() -> None:
    """A trace without staged accesses tells when a step computes."""
    layout, events = transformer(LAYERS, ELEMENTS, PAGE), transformer_step(LAYERS)
    assert staged_computation(events, layout, UpdateSchedule.of("in_backward", events)) is None


def test_weights_are_copied_ahead_of_computation() -> None:
    """Not staged: all are waited for. Staged: only the first ones, which a step begins with."""
    weights = 0.5 * ALONE
    assert length(in_memory(), weights=weights) == pytest.approx(ALONE + weights)
    assert ALONE < length(prefetched(), weights=weights) < ALONE + 2 * weights / (2 * LAYERS)
    assert length(prefetched(), weights=3 * ALONE) >= 3 * ALONE


def test_weights_that_stay_are_copied_once() -> None:
    """Copies that take longer than forward delay forward; in backward, nothing comes."""
    forward = ALONE / (1 + BACKWARD)
    found = length(prefetched(kept=LAYERS), weights=2 * forward)
    assert found == pytest.approx(ALONE + forward, rel=0.1)
    assert length(prefetched(), weights=2 * forward) < found  # the same time, of which half is for backward


def test_copies_are_hidden_beside_transfers_too() -> None:
    """Pages stream in both plans; where weights are staged, copying them adds next to nothing."""
    plan, layout = prefetched(cache_slots=96)
    _, not_prefetched = choose_plan("in_backward", transformer_step(LAYERS), layout, 96, threaded=True)
    moved = plan.traffic.total_bytes
    works, copies = [float(moved)], OtherResources(weights=0.3 * moved)
    (alone,), (copied,) = (
        lengths(plan, layout, works, beside=beside, threaded=True) for beside in (OtherResources(), copies)
    )
    (waiting,) = lengths(not_prefetched, layout, works, beside=copies, threaded=True)
    assert copied < 1.05 * alone < 0.95 * waiting


def test_weights_are_copied_after_their_update() -> None:
    """In forward a page is updated while the FSDP module before computes, and copied only then."""
    updates, weights = 2 * ALONE, 0.5 * ALONE
    backward = ALONE * BACKWARD / (1 + BACKWARD)
    found = length(prefetched("in_forward"), updates=updates, weights=weights)
    assert found >= updates + backward
    assert length(prefetched(), updates=updates, weights=weights) < found


def test_pages_that_are_updated_on_the_device_take_the_link() -> None:
    """Both ways at once; weights wait behind them, and gradients that are used there do not cross."""
    alone = length(prefetched(), read=1e-6)
    assert alone == pytest.approx(ALONE)
    there, back, both = (length(prefetched(), **times) for times in (
        {"read": 2 * ALONE}, {"read": 1e-6, "changed": 2 * ALONE}, {"read": 2 * ALONE, "changed": 2 * ALONE}
    ))  # fmt: skip
    assert max(there, back) >= 2 * ALONE
    assert both < 1.2 * max(there, back)
    assert length(prefetched(), read=2 * ALONE, weights=ALONE) >= 3 * ALONE
    assert length(prefetched(), read=1e-6, gradients=2 * ALONE) == pytest.approx(alone)


@pytest.mark.parametrize("name", ["in_backward", "in_forward", "after_backward"])
def test_gradients_leave_beside_computation(name: str) -> None:
    """Whether they are stored or used up at once; those of the last FSDP module are waited for at most."""
    found, without = (length(in_memory(name), gradients=gradients, behind=2) for gradients in (0.3 * ALONE, 0.0))
    assert without == pytest.approx(ALONE)
    assert found <= ALONE + 2 * 0.3 * ALONE / LAYERS
    assert length(in_memory(name), gradients=2 * ALONE, behind=2) >= 1.9 * ALONE


def test_updates_wait_for_gradients() -> None:
    """The update of an FSDP module is as late as its gradients."""
    drawn = in_memory()
    gradients, updates = 2 * ALONE, 0.5 * ALONE
    forward = ALONE / (1 + BACKWARD)
    found = length(drawn, gradients=gradients, updates=updates)
    assert found >= forward + gradients + updates / LAYERS - 1
    assert found < forward + gradients + updates


def test_only_so_many_fsdp_modules_are_between_computation_and_update() -> None:
    """The training thread waits for the update of the one before them; without a bound the window decides."""
    drawn = in_memory(fsdp_modules_ahead=2 * LAYERS)
    found = [length(drawn, gradients=0.1 * ALONE, updates=1.5 * ALONE, behind=behind) for behind in (1, 2, 6, 0)]
    assert all(fewer >= more - 1 for fewer, more in itertools.pairwise(found))
    assert found[0] > 1.05 * found[-1]


def test_python_is_a_part_of_the_time_of_whoever_needs_pages() -> None:
    """All of it if that is the training thread; else what is there of gathers, and what updates then take."""
    trace, layout = step()
    plan = make_plan(trace, layout, len(layout.pages))
    (alone,) = lengths(plan, layout, [ALONE], beside=OtherResources(interpreter=0.1 * ALONE), threaded=False)
    assert alone == pytest.approx(1.1 * ALONE)
    assert ALONE < length(in_memory(), interpreter=0.1 * ALONE) < alone


def test_a_page_is_there_when_it_has_been_verified_and_free_when_it_has_been_hashed() -> None:
    """Checksums are behind reads and beside writes, one after the other; the drive goes on meanwhile."""
    clockwork = Clockwork([PAGE], 2, verifying=2.0, hashing=3.0)
    clockwork.wanted = 2
    clockwork.go_on(0.0)
    assert clockwork.enter([True], 0.0) == 3 * PAGE
    assert clockwork.enter([True], 0.0) == 5 * PAGE
    clockwork.go_on(5 * PAGE)
    clockwork.leave([PAGE])
    assert clockwork.enter([False], 0.0) == 8 * PAGE


def test_checksums_that_take_longer_than_the_drive_are_what_a_step_takes() -> None:
    """And those that take less are hidden behind it."""
    trace, layout = step(threaded=True)
    plan = make_plan(trace, layout, 96, threaded=True)
    moved = plan.traffic.total_bytes
    (alone,) = lengths(plan, layout, [0.5 * moved], threaded=True)
    (hidden,), (exposed,) = (
        lengths(plan, layout, [0.5 * moved], beside=OtherResources(verifying=share * moved), threaded=True)
        for share in (0.3, 2.0)
    )
    assert hidden < 1.05 * alone
    assert exposed >= 0.98 * 2.0 * moved
