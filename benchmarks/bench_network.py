"""Predicted and measured step times on two nodes, by bandwidth, sharding and micro-batches; and bytes sent per step.

Two nodes are network namespaces of this machine, whose link has a limited rate (tests/support/nodes.py, root only).
Each node has one core. In each round, the nodes measure their link with `infinity probe --interconnect`, both nodes
train each set-up, and each node plans it with the result of the probe. All state fits in the host cache, so that drives
do not affect step times. The results are medians over rounds.

The second part counts the bytes that a node sends per step, for several numbers of micro-batches, with layer-major
accumulation (`infinity.micro_batches`) and with a plain loop.

    make bench-network ARGS="--rounds 3"
    make bench-network ARGS="--parts accumulation"
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench_step import RESULTS, machine

NODES, SEQUENCE, ROWS = 2, 8, 8
"""Nodes, tokens per sequence, and sequences per rank per step. With few tokens, the network takes most of a step."""
HOST_CACHE = "512MiB"
WARM = 2
"""Steps that are not timed."""


@dataclass(frozen=True)
class Setup:
    """A run to predict and to measure."""

    megabits: int
    """Rate of the link in each direction, in Mbit/s."""
    ranks: int
    """Ranks per node."""
    sharding: str
    """``full_shard`` or ``hsdp``."""
    micro_batches: int
    layer_major: bool = True


SETUPS = (
    Setup(100, 1, "full_shard", 1),
    Setup(100, 1, "hsdp", 4),
    Setup(500, 1, "full_shard", 4, layer_major=False),
    Setup(500, 1, "hsdp", 1),
    Setup(1000, 2, "full_shard", 4),
    Setup(1000, 2, "hsdp", 4),
    Setup(2000, 2, "full_shard", 1),
    Setup(2000, 1, "full_shard", 4),
)
ACCUMULATION = tuple(
    Setup(1000, 1, "full_shard", number, layer_major)
    for number in (1, 4, 8)
    for layer_major in (True, False)
    if layer_major or number > 1
)


def config() -> Any:
    """Return the configuration of the model."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=1024, hidden_size=384, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=4,
        max_position_embeddings=SEQUENCE, architectures=["LlamaForCausalLM"],
    )  # fmt: skip


def sent() -> int:
    """Return the number of bytes that this node has sent."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return int(next(line for line in lines if line.strip().startswith("eth0:")).split(":")[1].split()[8])


def train(setup: Setup, folder: str, steps: int) -> dict[str, float]:
    """Train and return the step time and the bytes that this node sends per step. Called on every rank."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    import infinity
    from infinity.models.sharding import layers_of
    from infinity_tools.presets import ModelSource, on_meta

    mesh = infinity.mesh("cpu")
    if setup.sharding == "hsdp":
        mesh = init_device_mesh("cpu", (NODES, setup.ranks), mesh_dim_names=("replicate", "shard"))
    model = on_meta(ModelSource(name="llama", config=config()))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for layer in (*layers_of(model), model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    if setup.layer_major and setup.micro_batches > 1:
        infinity.micro_batches(model, setup.micro_batches)
    passes = 1 if setup.layer_major else setup.micro_batches
    settings = {
        "storage": {"paths": [folder]},
        "memory": {"host_bytes": HOST_CACHE},
        "run": {"keep": "never"},
    }
    optimizer = infinity.offload(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True), settings)
    seconds: list[float] = []
    before = 0
    for step in range(WARM + steps):
        if step == WARM:
            before = sent()
        batch = torch.randint(1024, (ROWS, SEQUENCE))
        began = time.perf_counter()
        for part in batch.chunk(passes):
            (model(input_ids=part, labels=part).loss / passes).backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - began)
    found = {"seconds": statistics.median(seconds[WARM:]), "sent_bytes": (sent() - before) / steps}
    records = optimizer.records[WARM:]
    found |= {
        part: statistics.median(getattr(record, f"{part}_seconds") for record in records)
        for part in ("compute", "collective", "copy", "update", "python")
    }
    optimizer.close()
    dist.barrier()
    return found


def worker(order: Path) -> None:
    """Measure the link, and train each set-up, as one rank of torchrun."""
    import torch
    import torch.distributed as dist

    import infinity
    from infinity_tools.probe.interconnect import measure

    torch.set_num_threads(1)
    asked = json.loads(order.read_text())
    infinity.mesh("cpu")
    probed = measure(asked["probe_seconds"]) if asked["probe_seconds"] else None
    trained = [train(Setup(**setup), asked["folder"], asked["steps"]) for setup in asked["setups"]]
    if dist.get_rank() == 0:
        result = {"interconnect": probed.document() if probed else None, "trained": trained}
        order.with_suffix(".result").write_text(json.dumps(result))
    dist.destroy_process_group()


def on_each_node(nodes: Any, *words: object) -> list[Any]:
    """Run a command on each node at the same time, each on its own core, and return the programs."""
    cores = sorted(os.sched_getaffinity(0))
    python = (sys.executable, "-W", "ignore", "-m")
    programs = [
        node.command("taskset", "-c", cores[number % len(cores)], *python, *words) for number, node in enumerate(nodes)
    ]
    for program in programs:
        program.wait()
    return programs


def run(nodes: Any, folder: Path, setups: list[Setup], steps: int, probe_seconds: float) -> dict[str, Any]:
    """Run set-ups with the same rate and ranks under torchrun on the nodes."""
    for node in nodes:
        node.limit(setups[0].megabits * 10**6)
    order = folder / "order.json"
    asked = {"setups": list(map(asdict, setups)), "steps": steps, "probe_seconds": probe_seconds}
    order.write_text(json.dumps({**asked, "folder": str(nodes.local / "drive0")}))
    on_each_node(nodes, "torch.distributed.run", *nodes.rendezvous(setups[0].ranks), Path(__file__), "--worker", order)
    found: dict[str, Any] = json.loads(order.with_suffix(".result").read_text())
    return found


def plan(nodes: Any, folder: Path, setup: Setup) -> dict[str, Any]:
    """Plan a set-up on both nodes at the same time. They share the machine, and therefore slow each other down."""
    words = [
        "infinity_tools", "plan", "--model", folder / "model" / "config.json", "--nodes", NODES, "--ranks", setup.ranks,
        "--interconnect", folder / "interconnect.json", "--nvme-bandwidth", "1e9/1e9",
        "--batch-tokens", NODES * setup.ranks * ROWS * SEQUENCE, "--seq", SEQUENCE, "--host-memory", HOST_CACHE,
        "--micro-batches", setup.micro_batches, *(["--loop"] if not setup.layer_major else []),
        "--no-activation-checkpointing", "--no-changes", "--json",
    ]  # fmt: skip
    programs = on_each_node(nodes, *words)
    plans = [json.loads(program.output[program.output.index("{") :]) for program in programs]
    chosen = [found["shardings"][setup.sharding] for found in plans]
    return {
        "seconds": statistics.mean(one["step_seconds"] for one in chosen),
        "network_seconds": statistics.mean(
            one["network"]["gathering_seconds"] + one["network"]["reducing_seconds"] for one in chosen
        ),
        "sent_bytes": chosen[0]["network"]["sent_bytes_per_node"],
    }


def setups_part(nodes: Any, folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Predict and measure each set-up, in rounds."""
    found: dict[Setup, list[tuple[dict[str, Any], dict[str, Any]]]] = {setup: [] for setup in SETUPS}
    for number in range(options.rounds):
        for key in dict.fromkeys((setup.megabits, setup.ranks) for setup in SETUPS):
            these = [setup for setup in SETUPS if (setup.megabits, setup.ranks) == key]
            result = run(nodes, folder, these, options.steps, options.probe_seconds)
            (folder / "interconnect.json").write_text(json.dumps(result["interconnect"]))
            for setup, measured in zip(these, result["trained"], strict=True):
                planned = plan(nodes, folder, setup)
                found[setup].append((planned, measured))
                print(number, setup, planned, measured, file=sys.stderr, flush=True)
    rows = []
    for setup, pairs in found.items():
        planned, measured = (
            {name: statistics.median(one[side][name] for one in pairs) for name in pairs[0][side]} for side in (0, 1)
        )
        error = abs(planned["seconds"] / measured["seconds"] - 1)
        rows.append({**asdict(setup), "planned": planned, "measured": measured, "error": error})
    return rows


def accumulation_part(nodes: Any, folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Count the bytes that a node sends per step."""
    trained = run(nodes, folder, list(ACCUMULATION), options.steps, 0.0)["trained"]
    return [
        {**asdict(setup), "sent_bytes": one["sent_bytes"], "seconds": one["seconds"]}
        for setup, one in zip(ACCUMULATION, trained, strict=True)
    ]


def show(result: dict[str, Any]) -> None:
    """Print the tables."""
    from rich.console import Console

    from infinity_tools.tables import table

    console = Console(highlight=False)
    if rows := result.get("setups"):
        cells = [
            (
                f"{row['megabits']}", f"{NODES} x {row['ranks']}", row["sharding"].replace("_", " "),
                f"{row['micro_batches']}{'' if row['layer_major'] else ', loop'}",
                f"{row['planned']['seconds']:.2f}", f"{row['measured']['seconds']:.2f}",
                f"{row['planned']['seconds'] / row['measured']['seconds'] - 1:+.0%}",
                f"{row['planned']['sent_bytes'] / 1e6:.1f}", f"{row['measured']['sent_bytes'] / 1e6:.1f}",
            )
            for row in rows
        ]  # fmt: skip
        headings = (">Mbit/s", "nodes x ranks", "sharding", ">micro-batches", ">planned s", ">measured s", ">error")
        console.print(table("step time, and MB sent per node", (*headings, ">planned MB", ">measured MB"), cells))
        console.print(f"error of the step time: median {result['error_median']:.1%}, worst {result['error_worst']:.1%}")
    if rows := result.get("accumulation"):
        cells = [
            (
                str(row["micro_batches"]), "layer-major" if row["layer_major"] else "loop",
                f"{row['sent_bytes'] / 1e6:.1f}", f"{row['seconds']:.2f}",
            )
            for row in rows
        ]  # fmt: skip
        console.print(table("accumulation", (">micro-batches", "", ">MB sent per node per step", ">s/step"), cells))


def main() -> None:
    """Run the benchmark, and write results/network.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=("setups", "accumulation"), default=["setups", "accumulation"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="timed steps per set-up and round")
    parser.add_argument("--probe-seconds", type=float, default=0.3)
    parser.add_argument("--out", type=Path, default=RESULTS / "network.json")
    parser.add_argument("--json", action="store_true", help="print only JSON")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker)
        return
    import pytest

    from support.nodes import Nodes

    result = json.loads(options.out.read_text()) if options.out.exists() else {}
    try:
        with tempfile.TemporaryDirectory() as place, Nodes(Path(place), NODES) as nodes:
            config().save_pretrained(Path(place) / "model")
            if "setups" in options.parts:
                result["setups"] = setups_part(nodes, Path(place), options)
                errors = [row["error"] for row in result["setups"]]
                result |= {"error_median": statistics.median(errors), "error_worst": max(errors)}
            if "accumulation" in options.parts:
                result["accumulation"] = accumulation_part(nodes, Path(place), options)
    except pytest.skip.Exception as error:
        sys.exit(str(error))
    result |= machine()
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    if options.json:
        print(json.dumps(result))
    else:
        show(result)


if __name__ == "__main__":
    main()
