"""Training and planning on two nodes with a slow network, for benchmarks/bench_network.py and its tests.

The functions run in processes that `support.nodes.Node.start` forks, so that libraries are imported only once.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from support.nodes import Nodes, Program

NODES, SEQUENCE, ROWS = 2, 8, 8
"""Nodes, tokens per sequence, and sequences per rank per step. With few tokens, the network takes most of a step."""
HOST_CACHE = "512MiB"
"""Host cache per rank, which holds the complete state."""
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


def config() -> Any:
    """Return the configuration of the model."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=2048, hidden_size=256, intermediate_size=704, num_hidden_layers=6, num_attention_heads=4,
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


def worker(order: Path, core: int) -> None:
    """Measure the link, and train each set-up, as one rank."""
    import torch.distributed as dist

    import infinity
    from infinity_tools.probe.interconnect import measure

    os.sched_setaffinity(0, {core})
    asked = json.loads(order.read_text())
    infinity.mesh("cpu")
    probed = measure(asked["probe_seconds"]) if asked["probe_seconds"] else None
    trained = [train(Setup(**setup), asked["folder"], asked["steps"]) for setup in asked["setups"]]
    if dist.get_rank() == 0:
        result = {"interconnect": probed.document() if probed else None, "trained": trained}
        order.with_suffix(".result").write_text(json.dumps(result))
    dist.destroy_process_group()


def infinity_on(core: int, *words: str) -> None:
    """Run `infinity WORDS` on one core."""
    from infinity_tools.cli import main

    os.sched_setaffinity(0, {core})
    sys.argv = ["infinity", *words]
    main()


def core_of(node: int) -> int:
    """Return the core of a node."""
    cores = sorted(os.sched_getaffinity(0))
    return cores[node % len(cores)]


def run_ranks(nodes: Nodes, folder: Path, setups: list[Setup], steps: int, probe_seconds: float) -> dict[str, Any]:
    """Run set-ups with the same number of ranks on the nodes, after a measurement of the link if requested.

    Returns:
        Results of the set-ups as ``trained``, and of the probe as ``interconnect``.
    """
    order, ranks = folder / "order.json", setups[0].ranks
    asked = {"setups": list(map(asdict, setups)), "steps": steps, "probe_seconds": probe_seconds}
    order.write_text(json.dumps({**asked, "folder": str(nodes.local / "drive0")}))
    programs: list[Program] = []
    for number, node in enumerate(nodes):
        for local in range(ranks):
            variables = {
                "RANK": number * ranks + local, "WORLD_SIZE": len(nodes) * ranks,
                "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": nodes[0].name, "MASTER_PORT": 29501,
            }  # fmt: skip
            words = {name: str(value) for name, value in variables.items()}
            programs.append(node.start(worker, order, core_of(number), **words))
    for program in programs:
        program.wait()
    found: dict[str, Any] = json.loads(order.with_suffix(".result").read_text())
    return found
