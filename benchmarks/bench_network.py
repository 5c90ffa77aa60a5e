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
import statistics
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench_step import RESULTS, machine

from support.network_runs import (
    HOST_CACHE,
    NODES,
    ROWS,
    SEQUENCE,
    Setup,
    config,
    core_of,
    infinity_on,
    run_ranks,
)

SETUPS = (
    Setup(100, 1, "full_shard", 1),
    Setup(100, 1, "hsdp", 4),
    Setup(500, 1, "full_shard", 4, layer_major=False),
    Setup(500, 1, "hsdp", 1),
    Setup(1000, 2, "full_shard", 4),
    Setup(1000, 2, "hsdp", 4),
    Setup(2000, 1, "full_shard", 1),
    Setup(2000, 1, "full_shard", 4),
)
ACCUMULATION = tuple(
    Setup(1000, 1, "full_shard", number, layer_major)
    for number in (1, 4, 8)
    for layer_major in (True, False)
    if layer_major or number > 1
)


def limit(nodes: Any, megabits: int) -> None:
    """Limit the links of the nodes."""
    for node in nodes:
        node.limit(megabits * 10**6)


def plan(nodes: Any, folder: Path, setup: Setup) -> dict[str, Any]:
    """Plan a set-up on both nodes at the same time. They share the machine, and therefore slow each other down."""
    words = [
        "plan", "--model", folder / "model" / "config.json", "--nodes", NODES, "--ranks", setup.ranks,
        "--interconnect", folder / "interconnect.json", "--nvme-bandwidth", "1e9/1e9",
        "--batch-tokens", NODES * setup.ranks * ROWS * SEQUENCE, "--seq", SEQUENCE, "--host-memory", HOST_CACHE,
        "--micro-batches", setup.micro_batches, *(["--loop"] if not setup.layer_major else []),
        "--no-activation-checkpointing", "--no-changes", "--json",
    ]  # fmt: skip
    programs = [node.start(infinity_on, core_of(number), *map(str, words)) for number, node in enumerate(nodes)]
    for program in programs:
        program.wait()
    plans = [json.loads(program.output[program.output.index("{") :]) for program in programs]
    chosen = [found["shardings"][setup.sharding] for found in plans]
    return {
        "seconds": statistics.mean(one["step_seconds"] for one in chosen),
        "network_seconds": statistics.mean(
            one["network"]["gathering_seconds"] + one["network"]["reducing_seconds"] for one in chosen
        ),
        "sent_bytes": chosen[0]["network"]["sent_bytes_per_node"],
    }


Pairs = dict[Setup, list[tuple[dict[str, Any], dict[str, Any]]]]
"""Predictions and measurements of each round, by set-up."""


def measure_round(nodes: Any, folder: Path, options: argparse.Namespace, pairs: Pairs) -> None:
    """Predict and measure each set-up once."""
    for key in dict.fromkeys((setup.megabits, setup.ranks) for setup in SETUPS):
        these = [setup for setup in SETUPS if (setup.megabits, setup.ranks) == key]
        limit(nodes, key[0])
        result = run_ranks(nodes, folder, these, options.steps, options.probe_seconds)
        (folder / "interconnect.json").write_text(json.dumps(result["interconnect"]))
        for setup, measured in zip(these, result["trained"], strict=True):
            planned = plan(nodes, folder, setup)
            pairs.setdefault(setup, []).append((planned, measured))
            print(setup, planned, measured, file=sys.stderr, flush=True)


def medians(pairs: Pairs) -> dict[str, Any]:
    """Return the medians over rounds, and the errors of the medians."""
    rows = []
    for setup, found in pairs.items():
        planned, measured = (
            {name: statistics.median(one[side][name] for one in found) for name in found[0][side]} for side in (0, 1)
        )
        error = abs(planned["seconds"] / measured["seconds"] - 1)
        rows.append({**asdict(setup), "planned": planned, "measured": measured, "error": error})
    errors = [row["error"] for row in rows]
    return {"setups": rows, "error_median": statistics.median(errors), "error_worst": max(errors)}


def collective_errors(rows: list[dict[str, Any]]) -> list[float]:
    """Return the error of the time of collectives for each set-up with full shard.

    The all-reduce of HSDP counts as computation in a run.
    """
    full = [row for row in rows if row["sharding"] == "full_shard"]
    return [abs(row["planned"]["network_seconds"] / row["measured"]["collective"] - 1) for row in full]


def accumulation_part(nodes: Any, folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Count the bytes that a node sends per step."""
    limit(nodes, ACCUMULATION[0].megabits)
    trained = run_ranks(nodes, folder, list(ACCUMULATION), options.steps, 0.0)["trained"]
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
        errors = collective_errors(rows)
        console.print(f"error of the collectives: median {statistics.median(errors):.1%}, worst {max(errors):.1%}")
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
    parser.add_argument("--steps", type=int, default=3, help="timed steps per set-up and round")
    parser.add_argument("--probe-seconds", type=float, default=0.4)
    parser.add_argument("--out", type=Path, default=RESULTS / "network.json")
    parser.add_argument("--json", action="store_true", help="print only JSON")
    options = parser.parse_args()
    import pytest

    from support.nodes import Nodes

    result = json.loads(options.out.read_text()) if options.out.exists() else {}
    try:
        with tempfile.TemporaryDirectory() as place, Nodes(Path(place), NODES) as nodes:
            config().save_pretrained(Path(place) / "model")
            pairs: Pairs = {}
            for number in range(options.rounds if "setups" in options.parts else 0):
                measure_round(nodes, Path(place), options, pairs)
                result |= medians(pairs) | {"rounds": number + 1}
                options.out.write_text(json.dumps(result | machine(), indent=1) + "\n")
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
