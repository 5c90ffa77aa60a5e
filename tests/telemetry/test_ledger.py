"""Tests of the ledger and the timeline with a simulated clock: every second belongs to one part, and spans nest."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.errors import StallError
from infinity.schedule.transfers import _WAITS
from infinity.telemetry import Stats
from infinity.telemetry.ledger import Ledger
from infinity.telemetry.metrics import PARTS, PHASES
from infinity.telemetry.timeline import Timeline


class Clock:
    """Clock that advances only when a test advances it."""

    def __init__(self):
        self.now = 1000.0

    def perf_counter(self):
        return self.now

    def time(self):
        return 0.0


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr("infinity.telemetry.ledger.time", made)
    monkeypatch.setattr("infinity.telemetry.timeline.time", made)
    return made


def make(timeline=None):
    stats = Stats.create(None, run_id="r", rank=0, local_rank=0, world_size=1, devices=["nvme0"], info={})
    return Ledger(stats, timeline), stats


def end(ledger, step=1):
    return ledger.end_step(step, 0, {}, {}, {})


def parts_of(record):
    return {part: getattr(record, f"{part}_seconds") for part in PARTS}


def test_each_second_is_attributed_to_one_part(clock):
    ledger, stats = make()
    clock.now += 1  # the user's loop
    with ledger.part("python", name="gather"):
        ledger.enter("forward", "fsdp_module")
        with ledger.phase("update"):
            clock.now += 2
            ledger.stalled("write", 0, 0.5)
        with ledger.part("copy"):
            clock.now += 4
        clock.now += 8
        ledger.stalled("read", 0, 1.0)
    clock.now += 16
    with ledger.part("collective"):
        clock.now += 32
    ledger.enter("backward")
    clock.now += 64
    ledger.enter("other")
    clock.now += 128
    ledger.stalled("host_cache", -1, 2.0)
    record = end(ledger)
    assert parts_of(record) == {
        "compute": 80, "collective": 32, "copy": 4, "update": 1.5, "read_stall": 1, "write_stall": 0.5,
        "host_cache_stall": 2, "python": 1 + 7 + 126,
    }  # fmt: skip
    assert record.seconds == 255
    assert record.stall_seconds == 3.5
    assert stats.snapshot().value("stall_seconds_total", phase="forward", cause="read") == 1
    assert stats.snapshot().value("stall_seconds_total", phase="update", cause="write") == 0.5
    assert stats.snapshot().value("step_phase_seconds_total", phase="update") == 2
    clock.now += 1
    assert end(ledger).python_seconds == 1


def test_transfer_time_is_counted_separately():
    ledger, stats = make()
    ledger.moving(3)
    ledger.restart_step()  # earlier transfers belong to no step
    ledger.moving(1)
    ledger.moving(0.5)
    assert end(ledger).transfer_seconds == 1.5
    ledger.moving(2)
    assert end(ledger, 2).transfer_seconds == 2
    assert stats.snapshot().value("transfer_seconds_total") == 6.5


def test_an_abandoned_transfer_counts_as_an_error():
    ledger, stats = make()
    ledger.gave_up("write", StallError("waited 300 s for a page to be written"))
    snapshot = stats.snapshot()
    found = {op: snapshot.value("io_errors_total", op=op, reason="timeout") for op in ("read", "write")}
    assert found == {"read": 0, "write": 1}


def test_checkpoint_time_is_not_part_of_a_step(clock):
    ledger, stats = make()
    with ledger.phase("checkpoint"):
        clock.now += 5
    ledger.restart_step()
    clock.now += 1
    assert end(ledger).seconds == 1
    assert stats.snapshot().value("step_phase_seconds_total", phase="checkpoint") == 5
    assert sum(stats.snapshot().value("step_part_seconds_total", part=part) for part in PARTS) == 1


ACTIONS = st.recursive(
    st.one_of(
        st.tuples(st.just("enter"), st.sampled_from(PHASES)),
        st.tuples(st.just("stall"), st.sampled_from(sorted(_WAITS))),
        st.just(("step", "")),
    ),
    lambda inner: st.one_of(
        st.tuples(st.just("phase"), st.sampled_from(PHASES), st.lists(inner, max_size=4)),
        st.tuples(st.just("part"), st.sampled_from(PARTS), st.lists(inner, max_size=4)),
    ),
    max_leaves=30,
)


def perform(ledger, clock, actions, records):
    for kind, name, *inner in actions:
        clock.now += 0.125
        if kind == "enter":
            ledger.enter(name)
        elif kind == "stall":
            clock.now += 0.25
            ledger.stalled(name, 3, 0.25)
        elif kind == "step":
            records.append(end(ledger, len(records) + 1))
        else:
            with getattr(ledger, kind)(name):
                perform(ledger, clock, *inner, records)
        clock.now += 0.0625


@settings(max_examples=40)
@given(actions=st.lists(ACTIONS, max_size=12))
def test_parts_add_up_and_spans_nest_for_random_actions(tmp_path_factory, actions):
    """Steps end only outside of phases and parts, as in a run; the counters are the sums of the records."""
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock()
        patch.setattr("infinity.telemetry.ledger.time", clock)
        patch.setattr("infinity.telemetry.timeline.time", clock)
        file = tmp_path_factory.mktemp("t") / "t.json"
        timeline = Timeline(file, rank=0, limit=10_000, page_name=str)
        ledger, stats = make(timeline)
        records = []
        for action in actions:
            perform(ledger, clock, [action], records)
            records.append(end(ledger, len(records) + 1))
    for record in records:
        assert sum(parts_of(record).values()) == record.seconds
    for part in PARTS:
        booked = sum(max(0, parts_of(record)[part]) for record in records)
        assert stats.snapshot().value("step_part_seconds_total", part=part) == booked
    timeline.write()
    check_nesting([event for event in json.loads(file.read_text())["traceEvents"] if event["ph"] == "X"])


def check_nesting(events):
    """Check that two spans of a thread are either nested or disjoint."""
    for thread in {(event["pid"], event["tid"]) for event in events}:
        open_until = []
        spans = [
            (round(event["ts"] * 1000), round((event["ts"] + event["dur"]) * 1000))
            for event in events
            if (event["pid"], event["tid"]) == thread
        ]
        for start, stop in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_until and open_until[-1] <= start:
                open_until.pop()
            assert not open_until or stop <= open_until[-1], thread
            open_until.append(stop)


def test_a_timeline_keeps_the_last_events_and_counts_dropped_ones(tmp_path):
    timeline = Timeline(tmp_path / "t.json", rank=3, limit=5, page_name=lambda page: f"page {page}")
    for number in range(8):
        timeline.moved("read", 1, number, 4096, float(number), number + 2.5)
    timeline.write()
    assert [file.name for file in tmp_path.iterdir()] == ["t.rank3.json"]
    tree = json.loads((tmp_path / "t.rank3.json").read_text())
    assert tree["otherData"] == {"dropped": 3}
    spans = [event for event in tree["traceEvents"] if event["ph"] == "X"]
    assert [event["args"] for event in spans] == [{"page": f"page {n}", "bytes": 4096} for n in range(3, 8)]
    assert [(event["pid"], event["cat"], event["dur"]) for event in spans] == [(3, "nvme1 read", 2.5e6)] * 5
    check_nesting(spans)
    names = [event["args"]["name"] for event in tree["traceEvents"] if event["name"] == "thread_name"]
    assert names == ["nvme1 read", "nvme1 read (2)", "nvme1 read (3)"]
