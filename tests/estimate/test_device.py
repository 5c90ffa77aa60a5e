"""What is exposed on one accelerator whose state streams from drives, by the planner's clock.

The reference machine: an H100 that reaches 400 TFLOP/s and is linked at 55 GB/s each way, drives of 7/5 GB/s, updates
on eight cores of the speed that `make bench-plan` found, three threads for checksums in each direction. A step of 32 Ki
tokens computes layers twice. Nothing of this is measured: these are bounds on what plans leave exposed.

[Note: forward] Updates in backward move what they need beside backward, and nothing but weights moves beside forward.
So a step whose drives are busy for about as long as it computes takes longer than either by the computation of forward.
A longer window changes little: what it moves beside forward it takes from pages that stay. That is why the bound of
1.15 holds for one drive, and for four with room for half of the state in host memory, and why it does not hold for four
with less.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from infinity.config import Config
from infinity.estimate.estimate import Estimate, Load, Workload, estimate
from infinity.estimate.machine import ACCESS_SECONDS, HASH_RATE, UPDATE_SECONDS, Accelerator, Drives, Machine
from infinity.estimate.model import decoder
from infinity.schedule.planner import predict_seconds
from infinity.schedule.timing import BACKWARD, Beside
from infinity.units import GIB

MODELS = {
    "8B": decoder(parameters=8.03e9, layers=32, hidden=4096, vocabulary=128256),
    "70B": decoder(parameters=70.6e9, layers=80, hidden=8192, vocabulary=128256),
}
"""The shapes of Llama 3."""
ARENAS = {"8B": 64 * GIB, "70B": 512 * GIB}
"""Room for about half of the state."""
TOKENS = 32768
WITHIN = 1.15


def planned(name: str, drives: int, arena: int, hash_threads: int = 3, cores: int = 8) -> Estimate:
    """Return the estimate of a model on the reference machine; its plan is the same whatever the speed of anything."""
    found = planned_once(name, arena)
    machine = replace(
        found.machine.with_drives(drives),
        update_cores=cores,
        hash_rate=hash_threads * HASH_RATE,
    )
    return replace(found, machine=machine)


@cache
def planned_once(name: str, arena: int) -> Estimate:
    """Return the estimate with one drive."""
    machine = Machine(
        drives=Drives(count=1, read=7e9, write=5e9),
        device=Accelerator(name="h100", flops=400e12, memory_bytes=80 * GIB, link=55e9),
        update_seconds=UPDATE_SECONDS,
        update_cores=8,
        access_seconds=ACCESS_SECONDS,
    )
    work = Workload(batch_tokens=TOKENS, sequence=4096, checkpointing=True, micro_batches=4)
    return estimate(MODELS[name], work, machine, Config().with_values(**{"memory.host_bytes": arena}))


def slowest(found: Estimate) -> tuple[float, str]:
    """Return the resource that is busy longest."""
    return max((load.busy, name) for name, load in found.seconds.loads.items())


def forward(found: Estimate) -> float:
    """Return how long forward computes."""
    return found.seconds.computation.busy / (1 + BACKWARD)


def root_update(found: Estimate) -> float:
    """Return how long the root is updated: last of all in a step, and it is gathered first in the next one."""
    return found.seconds.updates.busy * found.model.root.numel / found.model.parameters


@pytest.mark.parametrize(("name", "of_layer", "weights", "gradients", "computation"), [
    ("8B", 7.9e-3, 0.55, 0.3, 5.2),
    ("70B", 31e-3, 5.1, 2.5, 46),
])  # fmt: skip
def test_resources_are_busy_as_long_as_on_paper(
    name: str, of_layer: float, weights: float, gradients: float, computation: float
) -> None:
    """Weights twice but those of the root, gradients in 16 bits, eight operations per weight and token; attention."""
    found = planned(name, 4, ARENAS[name])
    layer = 2 * found.model.layers[0].numel / found.machine.device.link
    assert layer == pytest.approx(of_layer, rel=0.03)
    assert found.seconds.weights.busy == pytest.approx(weights, rel=0.05)
    assert found.seconds.gradients.busy == pytest.approx(gradients, rel=0.05)
    assert computation < found.seconds.computation.busy < 1.15 * computation


@pytest.mark.parametrize("drives", [1, 4])
def test_a_step_is_within_a_bound_of_its_slowest_resource(drives: int) -> None:
    """One accelerator, 8B, with one drive and with four."""
    found = planned("8B", drives, ARENAS["8B"])
    longest, name = slowest(found)
    assert name == {1: "drives", 4: "computation"}[drives]
    assert found.seconds.step <= WITHIN * longest


@pytest.mark.parametrize(("name", "arena"), [("8B", 16 * GIB), ("70B", 256 * GIB)])
def test_less_memory_exposes_forward_and_no_more(name: str, arena: int) -> None:
    """With four drives, which then take longer than computation by less than 2. [Note: forward]."""
    found = planned(name, 4, arena)
    longest, slow = slowest(found)
    assert slow == "drives"
    assert found.seconds.computation.busy < longest < 2 * found.seconds.computation.busy
    first = found.seconds.computation.busy / len(found.model.layers)  # which the first update waits for
    assert WITHIN * longest < found.seconds.step < longest + forward(found) + root_update(found) + first
    assert found.seconds.computation.exposed < 1.05 * forward(found)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("drives", [1, 4])
def test_copies_checksums_and_python_are_hidden(name: str, drives: int) -> None:
    """Of updates only those of the root are not, and what a unit's first page waits for."""
    found = planned(name, drives, ARENAS[name])
    seconds = found.seconds
    for load in (seconds.weights, seconds.gradients, seconds.hashing):
        assert load.busy > 0
        assert load.exposed < 0.005 * seconds.step
    assert seconds.interpreter.exposed < 0.02 * seconds.step
    assert seconds.updates.exposed < 1.05 * root_update(found) + 0.005 * seconds.step


@pytest.mark.parametrize("name", MODELS)
def test_weights_that_are_copied_when_they_are_due_are_exposed(name: str) -> None:
    """All of them: 0.55 s of a step of 8B, 5.1 s of 70B. Ahead of computation only those of the root are.

    Its gradients come last, behind those of the first layer, and its weights are used first. So both are on the way of
    computation in any case.
    """
    found = planned(name, 4, 4 * ARENAS[name])
    seconds = found.seconds
    assert not found.traffic.total_bytes

    def step(ahead: int) -> float:
        beside = Beside(weights=seconds.weights.busy, gradients=seconds.gradients.busy, ahead=ahead, behind=2)
        return predict_seconds(
            found.plan, found.layout, bandwidth=1e9, computation=seconds.computation.busy, beside=beside, threaded=True
        )

    root, layer = (2 * unit.numel / found.machine.device.link for unit in found.model.units[:2])
    last = seconds.computation.busy + layer + root
    assert step(0) == pytest.approx(last + seconds.weights.busy, rel=1e-3)
    assert step(2) == pytest.approx(last + root, rel=1e-3)


def test_one_core_for_updates_and_one_thread_for_checksums_are_too_few() -> None:
    """At 8B: the updates of one core take longer than one drive, checksums of one thread longer than four drives."""
    core, thread = planned("8B", 1, ARENAS["8B"], cores=1), planned("8B", 4, ARENAS["8B"], hash_threads=1)
    assert slowest(core)[1] == "updates"
    assert core.seconds.updates.exposed > 0.2 * core.seconds.step
    assert thread.seconds.hashing.busy > thread.seconds.drives.busy
    assert thread.seconds.step > WITHIN * slowest(thread)[0]
    for one, usual in ((core, planned("8B", 1, ARENAS["8B"])), (thread, planned("8B", 4, ARENAS["8B"]))):
        assert usual.seconds.step < 0.95 * one.seconds.step


def test_a_machine_without_a_link_is_what_it_was() -> None:
    """Only computation, updates and drives, and no other number than the clock gives for them alone."""
    linked = planned("8B", 1, ARENAS["8B"])
    device = replace(linked.machine.device, link=0.0)
    found = replace(linked, machine=replace(linked.machine, device=device, hash_rate=0.0, access_seconds=0.0))
    seconds = found.seconds
    alone = predict_seconds(
        found.plan,
        found.layout,
        bandwidth=found.bandwidth,
        computation=seconds.computation.busy,
        beside=Beside(updates=seconds.updates.busy),
        threaded=True,
    )
    assert seconds.step == alone
    none = Load(busy=0.0, exposed=0.0)
    assert {name for name, load in seconds.loads.items() if load != none} == {"computation", "updates", "drives"}
