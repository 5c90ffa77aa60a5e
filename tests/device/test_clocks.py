"""Vector clocks, streams and memory of the simulated device, by themselves."""

from __future__ import annotations

import pytest
import torch

from infinity.memory.device import AcceleratorDevice, open_device
from support.device.simulation import POISON, Simulation, simulation


def pinned(device: AcceleratorDevice, nbytes: int = 64) -> torch.Tensor:
    """Return registered memory, in one piece."""
    memory = memoryview(bytearray(nbytes))
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    device.pin(memory, nbytes)
    return tensor


@pytest.fixture(params=["order", "late"])
def simulated(request):
    """Be on a simulated device, whose marks have been passed when they are looked at first."""
    with simulation(request.param, looks=1) as device:
        yield device


def only(simulated: Simulation) -> str:
    """Return the one race."""
    (message,) = simulated.races.found
    return message


def test_a_copy_and_what_waits_for_it_are_ordered(simulated: Simulation) -> None:
    """By a mark for another stream, by a wait for the host."""
    device = open_device(torch.device("cpu"))
    host, there = pinned(device), torch.empty(64, dtype=torch.uint8)
    host.fill_(7)
    device.copy(there, host, device.stream("stage"))
    device.record_event(device.stream("stage")).before(device.current())
    assert int(there.sum()) == 7 * 64
    device.copy(host, there * 2, device.current())
    assert device.record_event(device.current()).passed()
    assert host.tolist() == [14] * 64
    assert not simulated.races.found


def test_a_stream_that_does_not_wait_is_named(simulated: Simulation) -> None:
    """And so is what it should have waited for."""
    device = open_device(torch.device("cpu"))
    host, there = pinned(device), torch.empty(64, dtype=torch.uint8)
    device.copy(there, host, device.stream("stage"))
    there.sum()
    assert "aten.sum.default (reads, the stream of the computation) is not ordered behind" in only(simulated)
    assert "a copy to the device (writes, the stream 'stage')" in only(simulated)


def test_the_host_that_does_not_wait_reads_what_is_not_there(simulated: Simulation) -> None:
    """On a late device it reads poison."""
    device = open_device(torch.device("cpu"))
    host, there = pinned(device), torch.ones(64, dtype=torch.uint8)
    device.copy(there, host, device.current())  # so that it is memory of the device
    device.copy(host, there + 3, device.stream("back"))
    value = int(host[0])
    assert value == (POISON if simulated.late else 3)
    assert any("_local_scalar_dense.default (reads, thread MainThread)" in race for race in simulated.races.found)


@pytest.mark.parametrize("kept", [False, True])
def test_memory_that_is_used_again(kept: bool, simulated: Simulation) -> None:
    """What another stream may still read is not the next tensor's, unless the allocator was told."""
    device = open_device(torch.device("cpu"))
    host, there = pinned(device), torch.ones(64, dtype=torch.uint8)
    device.copy(there, host, device.current())
    back, result = device.stream("back"), there + 3
    device.record_event(device.current()).before(back)
    device.copy(host, result, back)
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
        assert f"once it was freed, is not ordered behind {earlier}" in only(simulated)


def test_memory_that_is_unregistered(simulated: Simulation) -> None:
    """Not before copies have ended."""
    device = open_device(torch.device("cpu"))
    memory = memoryview(bytearray(64))
    registered = device.pin(memory, 64)
    device.copy(torch.empty(64, dtype=torch.uint8), torch.frombuffer(memory, dtype=torch.uint8), device.current())
    registered.close()
    assert "unregistering it is not ordered behind a copy to the device" in only(simulated)


def test_a_mark_is_looked_at_in_vain() -> None:
    """As often as chance says, and then it has been passed for good."""
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
