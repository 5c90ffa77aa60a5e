"""Tests of the collectives between ranks in estimates: bytes and times in closed form, and their overlap."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from infinity.config import Config
from infinity.estimate.estimate import Estimate, Workload, estimate
from infinity.estimate.machine import UPDATE_SECONDS, Accelerator, Drives, Machine
from infinity.estimate.model import decoder
from infinity.estimate.network import Network, network_of_measurements, network_of_rates, ring_share, seconds_of
from infinity.estimate.shardings import shardings_of
from infinity.units import GIB

MODEL = decoder(parameters=1e8, layers=8, hidden=512, vocabulary=16000)
WEIGHTS = sum(2 * layer.numel for layer in MODEL.layers), 2 * MODEL.root.numel
"""Bytes of the weights of all layers and of the root in bf16."""
GRADIENTS = 4 * MODEL.parameters
RATE = 1.25e9
CPU = Accelerator(name="cpu", flops=1e12)
GPU = Accelerator(name="gpu", flops=100e12, memory_bytes=16 * GIB, link=25e9)


def planned(nodes: int, ranks: int, device: Accelerator = CPU, network: Network | None = None, **work: Any) -> Estimate:
    """Return an estimate whose state fits in the host cache."""
    gloo = not device.link
    machine = Machine(
        drives=Drives(count=1, read=1e9, write=1e9),
        ranks_per_node=ranks,
        device=device,
        update_seconds=UPDATE_SECONDS,
        network=network or network_of_rates(nodes, ranks, network=RATE, within=0.0, gloo=gloo),
    )
    size = nodes * ranks
    workload = Workload(batch_tokens=8192 * size, sequence=512, world_size=size, checkpointing=True, **work)
    return estimate(MODEL, workload, machine, Config().with_values(**{"memory.host_bytes": "8GiB"}))


@pytest.mark.parametrize(("nodes", "ranks"), [(2, 1), (2, 2), (4, 2)])
def test_full_shard_sends_weights_twice_and_gradients_once(nodes: int, ranks: int) -> None:
    """The root is gathered once. A ring sends (n - 1) / n of a tensor, and gloo's reduce-scatter twice as much."""
    gathered = 2 * WEIGHTS[0] + WEIGHTS[1]
    share = ring_share(nodes * ranks)
    nccl, gloo = planned(nodes, ranks, GPU).exchange, planned(nodes, ranks).exchange
    assert nccl.sent == pytest.approx(share * (gathered + GRADIENTS), rel=1e-3)
    assert gloo.sent == pytest.approx(share * (gathered + 2 * GRADIENTS), rel=1e-3)
    for exchange in (nccl, gloo):
        assert exchange.seconds == pytest.approx(exchange.sent / RATE)


@pytest.mark.parametrize(("nodes", "ranks"), [(2, 1), (2, 4), (8, 2)])
def test_hsdp_sends_only_gradients(nodes: int, ranks: int) -> None:
    """A ring all-reduce sends 2 (N - 1) / N of the gradients, whatever the number of ranks per node."""
    found = planned(nodes, ranks, replicas=nodes)
    assert found.exchange.sent == pytest.approx(2 * ring_share(nodes) * GRADIENTS)
    assert found.exchange.seconds == pytest.approx(found.exchange.sent / RATE)
    assert found.layout.parameters == pytest.approx(MODEL.parameters / ranks, rel=1e-3)


@pytest.mark.parametrize("replicas", [1, 2])
def test_layer_major_accumulation_sends_the_same_for_any_number_of_micro_batches(replicas: int) -> None:
    """A loop sends as much for each micro-batch as layer-major accumulation does for all of them."""
    one = planned(2, 1, replicas=replicas).exchange
    for number in (4, 8):
        assert planned(2, 1, replicas=replicas, micro_batches=number).exchange == one
        loop = planned(2, 1, replicas=replicas, micro_batches=number, layer_major=False).exchange
        assert loop.sent == pytest.approx(number * one.sent)
        assert loop.seconds == pytest.approx(number * one.seconds)


def test_computation_waits_for_collectives_only_on_the_cpu() -> None:
    """The step takes the sum on the CPU. On a GPU, it takes at least the longer of both, and less than the sum."""
    slow, fast = planned(2, 1), planned(2, 1, network=Network())
    assert slow.seconds.step == pytest.approx(fast.seconds.step + slow.exchange.seconds, rel=1e-6)
    assert slow.seconds.collectives.exposed == pytest.approx(slow.exchange.seconds, rel=1e-6)
    slow, fast = planned(2, 1, GPU), planned(2, 1, GPU, network=Network())
    longest = max(slow.exchange.seconds, fast.seconds.step)
    assert longest <= slow.seconds.step < fast.seconds.step + slow.exchange.seconds


@pytest.mark.parametrize("device", [CPU, GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_faster_network_never_takes_longer(device: Accelerator, replicas: int) -> None:
    found = planned(2, 2, device, replicas=replicas)
    steps = [
        replace(
            found,
            machine=replace(
                found.machine, network=network_of_rates(2, 2, network=rate, within=10 * RATE, gloo=not device.link)
            ),
        ).seconds.step
        for rate in (1e8, 1e9, 1e10, 1e11)
    ]
    assert steps == sorted(steps, reverse=True)


def test_time_is_interpolated_between_measurements() -> None:
    points = ((100.0, 1.0), (200.0, 2.0), (400.0, 3.0))
    expected = {0: 1.0, 100: 1.0, 150: 1.5, 200: 2.0, 300: 2.5, 400: 3.0, 800: 5.0}
    assert {nbytes: seconds_of(points, nbytes) for nbytes in expected} == expected
    assert seconds_of(points[:1], 1e9) == 1.0
    assert seconds_of((), 1e9) == 0.0
    assert seconds_of(((100.0, 2.0), (200.0, 1.0)), 1e9) == 1.0  # noise is not extrapolated


def test_shardings_are_compared() -> None:
    """Full shard needs less NVMe space. HSDP is faster on a slow network, because it gathers within the node."""
    found = shardings_of(planned(2, 2), 2)
    assert found.hsdp is not None
    assert found.faster == "hsdp"
    assert found.hsdp.drive_bytes == pytest.approx(2 * found.full_shard.drive_bytes, rel=0.1)
    alike = shardings_of(planned(2, 2, network=Network(nodes=2, ranks_per_node=2), clipping=True), 2)
    assert alike.full_shard.exchange.seconds == 0
    small = replace(found.full_shard, settings=Config().with_values(**{"memory.host_bytes": "256KiB"}))
    impossible = shardings_of(small, 2)
    assert (impossible.hsdp, impossible.faster) == (None, "full_shard")
    assert "memory.host_bytes" in impossible.shortfall


MEASURED: dict[str, Any] = {
    "backend": "gloo",
    "nodes": 2,
    "ranks_per_node": 1,
    "collectives": {
        name: [{"bytes": 1000, "seconds": 0.5}, {"bytes": 2000, "seconds": 0.75}]
        for name in ("all_gather", "reduce_scatter", "all_reduce")
    },
}


def test_measurements_are_read() -> None:
    found = network_of_measurements(MEASURED)
    assert (found.nodes, found.ranks_per_node, found.overlapped, found.reduces_all) == (2, 1, False, True)
    assert found.all_gather == found.all_reduce == ((1000.0, 0.5), (2000.0, 0.75))
    assert found.node_all_gather == ()
    assert network_of_measurements({**MEASURED, "backend": "nccl"}).overlapped


@pytest.mark.parametrize(
    "changed",
    [
        {"nodes": 0}, {"nodes": None}, {"backend": "mpi"}, {"collectives": {}}, {"collectives": []},
        {"collectives": {"all_gather": [{"bytes": 1}]}}, {"collectives": {"all_gather": 3}},
        {"collectives": {"all_gather": [{"bytes": 1, "seconds": -1}], "reduce_scatter": [{"bytes": 1, "seconds": 1}]}},
        {"collectives": {"all_gather": [{"bytes": 1, "seconds": float("nan")}]}},
        {"collectives": {"all_gather": [{"bytes": 2, "seconds": 1}, {"bytes": 1, "seconds": 1}]}},
    ],
    ids=str,
)  # fmt: skip
def test_malformed_measurements_raise(changed: dict[str, Any]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        network_of_measurements({**MEASURED, **changed})
