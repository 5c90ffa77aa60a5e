"""`infinity plan` for published setups: required space, and the compute throughput that remains.

The models and nodes are from Rajbhandari et al., "ZeRO-Infinity", 2021 (table 1; DGX-2 nodes with 16 V100 of 32 GB,
1.5 TB of memory, 28 TB of NVMe at 25 GB/s, and 100 GB/s between nodes), and from Liao et al., "LoHan", 2024 (one
RTX 4090, 256 GB of memory and twelve drives). A plan assumes that an accelerator reaches 40 % of its peak when it never
waits. This is an assumption, not a result. The plan predicts the part of this throughput that remains after storage,
updates and links.

    python benchmarks/paper_plan.py
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_step import RESULTS, ROOT, machine, publish

DGX2 = {
    "device": "v100",
    "ranks": 16,
    "drives": (8, 25e9, 25e9, 28e12),
    "host_cache": 64 << 30,
    "exchange": 100e9,
    "cores": 3,
}
"""A node.

- `ranks`: ranks per node.
- `drives`: number of drives, total read and write bandwidth in bytes per second, and total size in bytes.
- `host_cache`: bytes of host cache per rank, of about 94 GB of memory per rank.
- `exchange`: bytes per second between nodes. A ring passes through each node once, so data crosses the network once
  for all ranks of a node.
- `cores`: cores per rank for updates.
"""
RTX4090 = {
    "device": "rtx4090",
    "ranks": 1,
    "drives": (12, 32e9, 24e9, 46e12),
    "host_cache": 192 << 30,
    "exchange": 0.0,
    "cores": 16,
}


@dataclass(frozen=True)
class Published:
    """A published setup and its reported throughput."""

    name: str
    layers: int
    hidden: int
    sequences: float
    """Sequences of 1024 tokens, per rank per step."""
    nodes: int
    node: dict[str, Any]
    tflops: float | None = None
    """Published throughput per accelerator; None if the paper only states that the model trains."""
    source: str = "ZeRO-Infinity, table 1"


SETUPS = (
    Published("0.5T, 1 DGX-2", 124, 18432, 8, 1, DGX2),
    Published("1T, 1 DGX-2", 128, 25600, 7, 1, DGX2),
    Published("1T, 32 DGX-2", 128, 25600, 5, 32, DGX2, 49.0, "ZeRO-Infinity: 25 PFLOP/s of 512"),
    Published("5T, 32 DGX-2", 174, 49152, 3, 32, DGX2),
    Published("10T, 32 DGX-2", 200, 65536, 2, 32, DGX2),
    Published("20T, 32 DGX-2", 205, 90112, 1.25, 32, DGX2),
    Published("32T, 32 DGX-2", 205, 114048, 1, 32, DGX2),
    Published("13B, 1 RTX 4090", 40, 5120, 64, 1, RTX4090, 156.0, "LoHan"),
    Published("70B, 1 RTX 4090", 80, 8192, 32, 1, RTX4090, None, ""),
    Published("175B, 1 RTX 4090", 96, 12288, 16, 1, RTX4090, None, "LoHan"),
)
_VOCABULARY, _SEQUENCE = 50257, 1024


def plan(setup: Published) -> dict[str, Any]:
    """Return the plan of a setup."""
    from infinity.config import Config
    from infinity.estimate.estimate import STORAGE, Workload, estimate
    from infinity.estimate.machine import ACCELERATORS, CALL_SECONDS, HASH_RATE, UPDATE_SECONDS, Drives, Machine
    from infinity.estimate.model import decoder
    from infinity.estimate.network import network_of_rates

    count, read, write, space = setup.node["drives"]
    ranks = setup.node["ranks"] * setup.nodes
    # A layer of GPT has 12 hidden² elements.
    size = 12 * setup.layers * setup.hidden**2 + 2 * _VOCABULARY * setup.hidden
    model = decoder(parameters=size, layers=setup.layers, hidden=setup.hidden, vocabulary=_VOCABULARY)
    device = ACCELERATORS[setup.node["device"]]
    rates = Machine(
        drives=Drives(count=count, read=read, write=write, space_bytes=int(space)),
        ranks_per_node=setup.node["ranks"],
        device=device,
        update_seconds=UPDATE_SECONDS,
        update_cores=setup.node["cores"],
        hash_rate=HASH_RATE,
        call_seconds=CALL_SECONDS,
        network=network_of_rates(
            setup.nodes, setup.node["ranks"], network=setup.node["exchange"], within=device.interconnect, gloo=False
        ),
    )
    tokens = int(setup.sequences * _SEQUENCE) * ranks
    work = Workload(batch_tokens=tokens, sequence=_SEQUENCE, world_size=ranks, checkpointing=True)
    found = estimate(model, work, rates, Config().with_values(**{"memory.host_bytes": setup.node["host_cache"]}))
    # Published figures count the forward of each layer twice, because of recomputation.
    reached = work.flops(model) / found.seconds.step / 1e12
    alone = device.flops / 1e12
    return {
        "name": setup.name,
        "parameters": model.parameters,
        "tokens_per_rank": tokens // ranks,
        "space_per_node_bytes": found.drive_bytes * setup.node["ranks"],
        "space_there_bytes": int(space),
        "fits": found.drive_bytes * setup.node["ranks"] <= space,
        "step_seconds": found.seconds.step,
        "storage_seconds": max(0.0, found.seconds.step - found.step_seconds(tokens, *STORAGE)),
        "bytes_per_parameter": found.traffic.total_bytes / found.layout.parameters,
        "tflops": reached,
        "of_assumed": reached / alone,
        "published_tflops": setup.tflops,
        "ratio": reached / setup.tflops if setup.tflops else None,
        "source": setup.source,
        "hidden_from_tokens_per_rank": (found.hidden_from_tokens or 0) // ranks,
    }


def table(result: dict[str, Any]) -> str:
    """Return the setups as a Markdown table, which docs/how-to/plan.md contains."""
    lines = [
        "| setup | space per node | bytes per parameter per step | step time | waiting for storage | "
        "TFLOP/s per accelerator | published | planned / published |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in result["setups"]:
        said = "runs" if row["published_tflops"] is None else f"{row['published_tflops']:.0f}"
        said = f"{said} ({row['source']})" if row["source"] else "-"
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
        lines.append(
            f"| {row['name']} | {row['space_per_node_bytes'] / 1e12:.1f} of {row['space_there_bytes'] / 1e12:.0f} TB"
            f"{'' if row['fits'] else ' (too small)'} | {row['bytes_per_parameter']:.1f} | "
            f"{row['step_seconds']:.0f} s | "
            f"{row['storage_seconds'] / row['step_seconds']:.0%} | {row['tflops']:.1f} | {said} | "
            f"{ratio} |"
        )
    return "\n".join(lines)


def draw(result: dict[str, Any], file: Path) -> None:
    """Plot planned, assumed and published throughput."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    rows = result["setups"][::-1]
    names = [row["name"] for row in rows]
    axes.barh(names, [row["tflops"] for row in rows], color="#4477aa", label="planned")
    axes.scatter([row["tflops"] / row["of_assumed"] for row in rows], names, marker="|", s=200, color="#222222",
                 label="assumed maximum, without waiting")  # fmt: skip
    said = [row for row in rows if row["published_tflops"]]
    axes.scatter([row["published_tflops"] for row in said], [row["name"] for row in said], color="#ee6677",
                 zorder=3, label="published")  # fmt: skip
    axes.set_xlabel("TFLOP/s per accelerator")
    axes.grid(alpha=0.3, axis="x")
    axes.set_axisbelow(True)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(file, dpi=120)


def main() -> None:
    """Plan all setups and write results/plan-paper.json and its plot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS / "plan-paper.json")
    parser.add_argument("--json", action="store_true", help="print only JSON")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    from rich.progress import track

    rows = [plan(setup) for setup in track(SETUPS, "planning", disable=options.json)]
    result = {"setups": rows, **machine()}
    publish(json.loads(json.dumps(result)), options, draw, lambda found: print(table(found)))


if __name__ == "__main__":
    main()
