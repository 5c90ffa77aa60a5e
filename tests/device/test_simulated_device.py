"""Tests of the simulated device: vector clocks, streams and memory."""

from __future__ import annotations

import pytest
import torch

from infinity.memory.device import AcceleratorDevice, open_device
from support.device.simulation import POISON, Simulation, simulation


def pinned(device: AcceleratorDevice, nbytes: int = 64) -> torch.Tensor:
    """Return a tensor in registered host memory."""
    memory = memoryview(bytearray(nbytes))
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    device.pin(memory, nbytes)
    return tensor


@pytest.fixture(params=["order", "late"])
def simulated(request):
    """Simulate a device that reports every event as complete at the first query."""
    with simulation(request.param, looks=1) as device:
        yield device


def only(simulated: Simulation) -> str:
    """Return the message of the only race."""
    (message,) = simulated.races.found
    return message


def test_events_order_a_copy_and_its_readers(simulated: Simulation) -> None:
    """A stream waits for the event of the first copy, and the host waits for the event of the second one."""
    device = open_device(torch.device("cpu"))
    host, there = pinned(device), torch.empty(64, dtype=torch.uint8)
    host.fill_(7)
    device.copy_all([there], [host], device.stream("stage"))
    device.record_event(device.stream("stage")).before(device.current())
    assert int(there.sum()) == 7 * 64
    device.copy_all([host], [there * 2], device.current())
    assert device.record_event(device.current()).passed()
    assert host.tolist() == [14] * 64
    assert not simulated.races.found


def test_race_report_names_both_operations(simulated: Simulation) -> None:
    device = open_device(torch.device("cpu"))
    host, there = pinned(device), torch.empty(64, dtype=torch.uint8)
    device.copy_all([there], [host], device.stream("stage"))
    there.sum()
    assert "aten.sum.default (reads, the stream of the computation) is not ordered after" in only(simulated)
    assert "a copy to the device (writes, the stream 'stage')" in only(simulated)


def test_host_read_without_waiting_is_a_race(simulated: Simulation) -> None:
    """On a late device, such a read returns poison."""
    device = open_device(torch.device("cpu"))
    host, there = pinned(device), torch.ones(64, dtype=torch.uint8)
    device.copy_all([there], [host], device.current())  # marks it as device memory
    device.copy_all([host], [there + 3], device.stream("back"))
    value = int(host[0])
    assert value == (POISON if simulated.late else 3)
    assert any("_local_scalar_dense.default (reads, thread MainThread)" in race for race in simulated.races.found)


@pytest.mark.parametrize("kept", [False, True])
def test_reusing_memory_with_pending_reads_is_a_race(kept: bool, simulated: Simulation) -> None:
    """Freed memory is reused although another stream may still read it, unless `keep` has recorded that stream."""
    device = open_device(torch.device("cpu"))
    host, there = pinned(device), torch.ones(64, dtype=torch.uint8)
    device.copy_all([there], [host], device.current())
    back, result = device.stream("back"), there + 3
    device.record_event(device.current()).before(back)
    device.copy_all([host], [result], back)
    if kept:
        device.keep(result, back)
    del result
    there + 4
    device.record_event(back).passed()
    assert host.tolist() == [3 if kept or not simulated.late else POISON] * 64
    if kept:
        assert not simulated.races.found
    else:
        earlier = "a copy to the host (reads, the stream 'back')"
        assert f"after it was freed is not ordered after {earlier}" in only(simulated)


def test_unregistering_memory_before_copies_complete_is_a_race(simulated: Simulation) -> None:
    device = open_device(torch.device("cpu"))
    memory = memoryview(bytearray(64))
    registered = device.pin(memory, 64)
    device.copy_all(
        [torch.empty(64, dtype=torch.uint8)], [torch.frombuffer(memory, dtype=torch.uint8)], device.current()
    )
    registered.close()
    assert "unregistering it is not ordered after a copy to the device" in only(simulated)


def test_event_remains_complete_once_reported() -> None:
    """The number of queries before an event is reported as complete is random."""
    with simulation("order", looks=9) as simulated:
        device = open_device(torch.device("cpu"))
        counts = []
        for _ in range(20):
            device_event, count = device.record_event(device.current()), 0
            while not device_event.passed():
                count += 1
            assert device_event.passed()
            counts.append(count)
        assert set(counts) > {0, 8}
        assert not simulated.races.found
