"""Tests of `infinity probe --interconnect` on two nodes whose link has a known rate, and of the bytes sent per step."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from infinity.config import Config
from infinity.estimate.estimate import Workload, estimate
from infinity.estimate.machine import UPDATE_SECONDS, Accelerator, Drives, Machine
from infinity.estimate.network import network_of_rates
from infinity_tools.plan.shapes import shape_of
from infinity_tools.presets import ModelSource
from support.command import run_here
from support.network_runs import HOST_CACHE, NODES, ROWS, SEQUENCE, Setup, config, run_ranks
from support.nodes import Nodes

BITS = 40 * 10**6
"""Rate that any machine can reach."""
PLAN = shlex.split(
    "plan --parameters 3e8 --layers 8 --hidden 1536 --vocabulary 16000 --host-memory 512MiB --nvme-bandwidth 7e9/5e9 "
    "--tflops 1 --batch-tokens 8192 --no-changes --json"
)
PROBE = ["-m", "--", "infinity_tools", "probe", "--interconnect", "--seconds", "0.1"]
HEADERS = 1.15
"""Upper bound of the bytes on the link, which include the headers of packets, per byte that collectives send."""


@pytest.mark.slow
def test_probe_measures_the_rate_of_the_link_and_plan_reads_it(tmp_path: Path) -> None:
    """The 64 kB that the link sends at once let a collective exceed the rate slightly."""
    with Nodes(tmp_path, 2) as nodes:
        for node in nodes:
            node.limit(BITS)
        words = [*nodes.rendezvous(1), *PROBE, "--out", tmp_path / "probed"]
        agents = [node.torchrun(*words) for node in nodes]
        for agent in agents:
            agent.wait()
    file = tmp_path / "probed" / "interconnect.json"
    found = json.loads(file.read_text())
    assert (found["backend"], found["nodes"], found["ranks_per_node"]) == ("gloo", 2, 1)
    assert found["collectives"].keys() == {"all_gather", "reduce_scatter", "all_reduce"}
    for name, rows in found["collectives"].items():
        assert 0.2 * BITS / 8 < rows[-1]["sent_bytes_per_second"] < 1.4 * BITS / 8, name
    assert "all-reduce between nodes" in agents[0].output
    assert "all-reduce between nodes" not in agents[1].output  # only rank 0 prints
    planned = run_here(*PLAN, "--nodes", 2, "--interconnect", file).summary
    sent, seconds = planned["network"]["sent_bytes_per_node"], planned["seconds"]["collectives"]["busy"]
    assert 0.2 * BITS / 8 < sent / seconds < 1.4 * BITS / 8
    assert {"full_shard", "hsdp", "faster", "says"} == planned["shardings"].keys()
    other = run_here(*PLAN, "--nodes", 4, "--interconnect", file)
    assert other.status == 2
    assert "measured with --nodes 2 --ranks 1, not with --nodes 4 --ranks 1" in other.errors


def predicted(setup: Setup) -> float:
    """Return the bytes that a node sends per step, without headers."""
    ranks = NODES * setup.ranks
    machine = Machine(
        drives=Drives(count=1, read=1e9, write=1e9),
        ranks_per_node=setup.ranks,
        device=Accelerator(name="cpu", flops=1e12),
        update_seconds=UPDATE_SECONDS,
        network=network_of_rates(NODES, setup.ranks, network=1e9, within=0.0, gloo=True),
    )
    work = Workload(
        batch_tokens=ranks * ROWS * SEQUENCE,
        sequence=SEQUENCE,
        world_size=ranks,
        replicas=NODES if setup.sharding == "hsdp" else 1,
        micro_batches=setup.micro_batches,
        layer_major=setup.layer_major,
    )
    model = shape_of(ModelSource(name="llama", config=config()))
    return estimate(model, work, machine, Config().with_values(**{"memory.host_bytes": HOST_CACHE})).exchange.sent


@pytest.mark.wide
@pytest.mark.parametrize("ranks", [1, 2])
def test_bytes_sent_per_step_equal_the_prediction(ranks: int, tmp_path: Path) -> None:
    """Layer-major accumulation sends the same bytes for any number of micro-batches, and a loop a multiple of them."""
    one = Setup(0, ranks, "full_shard", 1)
    setups = {
        "one": one,
        "layer-major": replace(one, micro_batches=4),
        "loop": replace(one, micro_batches=4, layer_major=False),
        "hsdp": replace(one, sharding="hsdp"),
    }
    with Nodes(tmp_path, NODES) as nodes:
        trained = run_ranks(nodes, tmp_path, list(setups.values()), steps=2, probe_seconds=0.0)["trained"]
    sent = {name: row["sent_bytes"] for name, row in zip(setups, trained, strict=True)}
    for name, setup in setups.items():
        assert 0.99 * predicted(setup) < sent[name] < HEADERS * predicted(setup), name
    assert sent["layer-major"] == pytest.approx(sent["one"], rel=0.05)
    assert sent["loop"] == pytest.approx(4 * sent["one"], rel=0.05)
