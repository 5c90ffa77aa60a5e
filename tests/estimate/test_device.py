"""Tests of the time that the planner predicts to remain exposed on one accelerator whose state streams from drives.

The reference machine has an H100 that reaches 400 TFLOP/s, a link with 55 GB/s per direction, drives with 7/5 GB/s,
updates on eight cores at the speed measured by `make bench-plan`, and three checksum threads per direction. A step of
32 Ki tokens computes layers twice. The bounds apply to predictions, not to measurements.

[Note: forward] Updates in backward overlap their traffic with backward, and only weights are moved during forward.
Therefore, a step whose drives are busy for about as long as it computes takes longer than either by the computation of
forward. A longer window helps little, because the traffic that it moves to forward displaces resident pages. For this
reason, the bound of 1.15 holds for one drive, and for four drives if half of the state fits in host memory, but not for
four drives with less memory.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from infinity.config import Config
from infinity.estimate.estimate import Estimate, Load, Workload, estimate
from infinity.estimate.machine import CALL_SECONDS, HASH_RATE, UPDATE_SECONDS, Accelerator, Drives, Machine
from infinity.estimate.model import decoder
from infinity.schedule.planner import Plan, Simulation
from infinity.schedule.schedule_choice import choose_simulation
from infinity.schedule.timing import BACKWARD, OtherResources
from infinity.units import GIB
from support.tables import WIDE, all_but

MODELS = {
    "8B": decoder(parameters=8.03e9, layers=32, hidden=4096, vocabulary=128256),
    "70B": decoder(parameters=70.6e9, layers=80, hidden=8192, vocabulary=128256),
}
"""Shapes of Llama 3."""
SIZES = all_but(MODELS, "70B")
HOST_CACHES = {"8B": 64 * GIB, "70B": 512 * GIB}
"""Enough for about half of the state."""
TOKENS = 32768
WITHIN = 1.15


SLOTS_ONLY = {"8B": GIB, "70B": 4 * GIB}
"""Device memory for prefetching two layers, without memory for weights that are kept."""


def planned(
    name: str, drives: int, host_cache: int, hash_threads: int = 3, cores: int = 8, device_bytes: int = 0
) -> Estimate:
    """Return the estimate of a model on the reference machine. Its plan does not depend on any speed.

    Args:
        device_bytes: value of `memory.device_bytes`; 0 stands for all memory that computation does not use.
    """
    found = planned_once(name, host_cache, device_bytes)
    machine = replace(
        found.machine.with_drives(drives),
        update_cores=cores,
        hash_rate=hash_threads * HASH_RATE,
    )
    return replace(found, machine=machine)


@cache
def planned_once(name: str, host_cache: int, device_bytes: int) -> Estimate:
    machine = Machine(
        drives=Drives(count=1, read=7e9, write=5e9),
        device=Accelerator(name="h100", flops=400e12, memory_bytes=80 * GIB, link=55e9),
        update_seconds=UPDATE_SECONDS,
        update_cores=8,
        call_seconds=CALL_SECONDS,
    )
    work = Workload(batch_tokens=TOKENS, sequence=4096, checkpointing=True, micro_batches=4)
    settings = {"memory.host_bytes": host_cache, "memory.device_bytes": device_bytes, "update.device": "cpu"}
    return estimate(MODELS[name], work, machine, Config().with_values(**settings))


def slowest(found: Estimate) -> tuple[float, str]:
    """Return the busy time and the name of the resource that is busy longest."""
    return max((load.busy, name) for name, load in found.seconds.loads.items())


def forward(found: Estimate) -> float:
    """Return the computation time of forward."""
    return found.seconds.computation.busy / (1 + BACKWARD)


def root_update(found: Estimate) -> float:
    """Return the update time of the root, which is updated last in a step and gathered first in the next one."""
    return found.seconds.updates.busy * found.model.root.numel / found.model.parameters


@pytest.mark.parametrize(("name", "of_layer", "weights", "gradients", "computation"), [
    ("8B", 7.9e-3, 0.55, 0.6, 5.2),
    pytest.param("70B", 31e-3, 5.1, 5.1, 46, marks=WIDE),
])  # fmt: skip
def test_busy_times_match_manual_calculation(
    name: str, of_layer: float, weights: float, gradients: float, computation: float
) -> None:
    """Weights are copied twice except for the root's, gradients have 32 bits, and a weight costs 8 FLOP per token."""
    found = planned(name, 4, HOST_CACHES[name], device_bytes=SLOTS_ONLY[name])
    assert found.resolved_schedule.prefetched
    assert not found.resolved_schedule.kept
    layer = 2 * found.model.layers[0].numel / found.machine.device.link
    assert layer == pytest.approx(of_layer, rel=0.03)
    assert found.seconds.weights.busy == pytest.approx(weights, rel=0.05)
    assert found.seconds.gradients.busy == pytest.approx(gradients, rel=0.05)
    assert computation < found.seconds.computation.busy < 1.15 * computation


@pytest.mark.parametrize("name", SIZES)
def test_weights_are_kept_in_free_device_memory(name: str) -> None:
    """All layers of 8B except the first, and some layers of 70B, are copied and read only once per step."""
    found, none = planned(name, 1, 16 * GIB), planned(name, 1, 16 * GIB, device_bytes=SLOTS_ONLY[name])
    assert found.device_bytes < found.machine.device.memory_bytes - found.working_bytes
    kept = found.resolved_schedule.kept
    stay = sum(2 * found.model.fsdp_modules[fsdp_module].numel for fsdp_module in kept)
    assert 0 < stay < found.device_bytes
    assert none.link_traffic.weights - found.link_traffic.weights == pytest.approx(stay, rel=0.01)
    # The difference is smaller than `stay`, because host memory also keeps some of the weights.
    assert found.traffic.read_bytes < none.traffic.read_bytes
    assert (len(kept) == len(found.model.layers)) is (name == "8B")


@pytest.mark.parametrize(("device", "cores", "expected"), [
    ("auto", 64, False), ("auto", 8, True), ("auto", 1, True), ("cuda", 8, True), ("cpu", 1, False)
])  # fmt: skip
def test_update_device_matches_a_run(device: str, cores: int, expected: bool) -> None:
    """On the device, updates use no core, and only pages of modules that are not GPU-resident cross the link."""
    found = planned("8B", 4, HOST_CACHES["8B"])
    machine = replace(found.machine, update_cores=cores)
    settings = found.settings.with_values(**{"update.device": device})
    again = estimate(found.model, found.workload, machine, settings)
    assert again.updates_on_device is expected
    pages = again.link_traffic.read + again.link_traffic.changed
    trained = found.model.trainable_parameters
    gpu_resident = sum(
        found.model.fsdp_modules[fsdp_module].numel for fsdp_module in again.resolved_schedule.gpu_resident
    )
    assert (gpu_resident > 0) is expected
    assert pages == (
        pytest.approx(26 * (trained - gpu_resident), rel=0.01) if expected else 0
    )  # weights are copied back, too
    assert again.seconds.updates.busy < 1.1 * (0.436e-9 if expected else 2.9e-9 / cores) * trained


@pytest.mark.parametrize("drives", [1, 4])
def test_step_time_is_close_to_the_slowest_resource(drives: int) -> None:
    found = planned("8B", drives, HOST_CACHES["8B"])
    longest, name = slowest(found)
    assert name == {1: "drives", 4: "computation"}[drives]
    assert found.seconds.step <= WITHIN * longest


@pytest.mark.parametrize(("name", "host_cache"), [("8B", 16 * GIB), pytest.param("70B", 256 * GIB, marks=WIDE)])
def test_less_memory_exposes_only_forward(name: str, host_cache: int) -> None:
    """Four drives are then busy for less than twice the computation time. See [Note: forward]."""
    found = planned(name, 4, host_cache)
    longest, slow = slowest(found)
    assert slow == "drives"
    assert found.seconds.computation.busy < longest < 2 * found.seconds.computation.busy
    first = found.seconds.computation.busy / len(found.model.layers)  # the first update waits for it
    python = 2 * found.seconds.interpreter.exposed  # forward also waits for a part of it
    assert WITHIN * longest < found.seconds.step < longest + forward(found) + root_update(found) + first + python
    assert found.seconds.computation.exposed < 1.05 * forward(found)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("drives", [1, 4])
def test_copies_and_checksums_are_hidden(name: str, drives: int) -> None:
    """Only the root's updates, the first page of a module and a part of the Python time are exposed."""
    found = planned(name, drives, HOST_CACHES[name])
    seconds = found.seconds
    for load in (seconds.weights, seconds.gradients, seconds.hashing):
        assert load.busy > 0
        assert load.exposed < 0.005 * seconds.step
    assert seconds.interpreter.exposed < 0.06 * seconds.step
    assert seconds.updates.exposed < 1.05 * root_update(found) + 0.005 * seconds.step


@pytest.mark.parametrize("name", SIZES)
def test_copies_without_prefetch_are_exposed(name: str) -> None:
    """Copies take 0.55 s of a step of 8B and 5.1 s of 70B. Prefetching hides all of them except the root's.

    The root's gradients are copied last, after those of the first layer, and its weights are used first.
    """
    found = planned(name, 4, 4 * HOST_CACHES[name], device_bytes=SLOTS_ONLY[name])
    seconds = found.seconds
    assert not found.traffic.total_bytes

    def step(plan: Plan) -> float:
        resources = OtherResources(weights=seconds.weights.busy, gradients=seconds.gradients.busy, update_limit=2)
        simulation = Simulation.of(plan, found.layout, threaded=True)
        return simulation.seconds(bandwidth=1e9, computation=seconds.computation.busy, resources=resources)

    _, simulation = choose_simulation(
        found.update_schedule, found.events, found.layout, found.budget.cache_slots, threaded=True
    )
    not_prefetched = simulation.plan
    root, layer = (2 * fsdp_module.numel / found.machine.device.link for fsdp_module in found.model.fsdp_modules[:2])
    last = seconds.computation.busy + 2 * (layer + root)  # gradients are in 32 bits
    assert step(not_prefetched) == pytest.approx(last + seconds.weights.busy, rel=1e-3)
    assert step(found.plan) == pytest.approx(last + root, rel=1e-3)


def test_single_update_core_or_hash_thread_is_the_bottleneck() -> None:
    """With 8B, one update core is slower than one drive, and one checksum thread is slower than four drives."""
    core, thread = planned("8B", 1, HOST_CACHES["8B"], cores=1), planned("8B", 4, HOST_CACHES["8B"], hash_threads=1)
    assert slowest(core)[1] == "updates"
    assert core.seconds.updates.exposed > 0.2 * core.seconds.step
    assert thread.seconds.hashing.busy > thread.seconds.drives.busy
    assert thread.seconds.step > WITHIN * slowest(thread)[0]
    for one, usual in ((core, planned("8B", 1, HOST_CACHES["8B"])), (thread, planned("8B", 4, HOST_CACHES["8B"]))):
        assert usual.seconds.step < 0.95 * one.seconds.step


def test_machine_without_a_link_uses_three_resources() -> None:
    """The step time is the prediction for computation, updates and drives alone."""
    linked = planned("8B", 1, HOST_CACHES["8B"])
    device = replace(linked.machine.device, link=0.0)
    found = replace(linked, machine=replace(linked.machine, device=device, hash_rate=0.0, call_seconds=0.0))
    seconds = found.seconds
    alone = Simulation.of(found.plan, found.layout, threaded=True).seconds(
        bandwidth=found._bandwidth(found.traffic),
        computation=seconds.computation.busy,
        resources=OtherResources(updates=seconds.updates.busy),
    )
    assert seconds.step == alone
    none = Load(busy=0.0, exposed=0.0)
    assert {name for name, load in seconds.loads.items() if load != none} == {"computation", "updates", "drives"}
