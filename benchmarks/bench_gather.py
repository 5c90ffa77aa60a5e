"""Benefit of copying pages directly into FSDP2's all-gather buffer instead of assembling shards first, on two ranks.

Both variants run the same steps of the same model in turns, with all pages in the host cache, so that they differ only
in copies within memory.

    python benchmarks/bench_gather.py
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from bench_step import RESULTS, machine

WAYS = ("landed", "assembled")


def rank_main(rank: int, folder: str, options: argparse.Namespace, pipe: Any) -> None:
    """Train as one of two ranks and send the seconds of each step, by variant."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    import infinity
    from infinity import torch_private

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    torch.manual_seed(0)
    layers = [nn.Linear(options.width, options.width, bias=False) for _ in range(options.layers)]
    model = nn.Sequential(*layers)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for layer in (*layers, model):
        fully_shard(layer, mp_policy=policy)
    settings = {
        "storage": {"paths": [f"{folder}/nvme"]},
        "memory": {"host_bytes": options.host_memory},
        "run": {"keep": "never"},
    }
    optimizer = infinity.offload(model, torch.optim.SGD(model.parameters(), lr=1e-3), settings)
    tokens = torch.randn(options.tokens, options.width)
    took = torch_private.COPY_IN
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(options.turns + 1):
        for way in WAYS if turn % 2 else reversed(WAYS):
            torch_private.COPY_IN = took if way == "landed" else None
            dist.barrier()
            began = time.perf_counter()
            model(tokens).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if turn:
                seconds[way].append(time.perf_counter() - began)
    optimizer.close()
    pipe.send(seconds)
    dist.destroy_process_group()


def main() -> None:
    """Run the benchmark and write results/gather.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument(
        "--tokens", type=int, default=8, help="tokens per step; few, so that all-gathers dominate a step"
    )
    parser.add_argument("--host-memory", default="512MiB", help="host cache per rank; must hold all of its pages")
    parser.add_argument("--turns", type=int, default=15, help="measured turns, after one warm-up turn")
    parser.add_argument("--out", type=Path, default=RESULTS / "gather.json")
    parser.add_argument("--json", action="store_true", help="print only JSON")
    options = parser.parse_args()
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory(dir=".") as folder:
        pipes, processes = [], []
        for rank in range(2):
            ours, theirs = context.Pipe()
            processes.append(context.Process(target=rank_main, args=(rank, folder, options, theirs)))
            processes[-1].start()
            pipes.append(ours)
        seconds, _ = [pipe.recv() for pipe in pipes]
        for process in processes:
            process.join()
    medians = {way: statistics.median(found) for way, found in seconds.items()}
    ratios = [a / b for a, b in zip(seconds["landed"], seconds["assembled"], strict=True)]
    result = {
        "width": options.width, "layers": options.layers, "tokens": options.tokens, "turns": options.turns,
        "step_seconds": medians, "landed_over_assembled": medians["landed"] / medians["assembled"],
        "spread": [min(ratios), max(ratios)], "machine": machine(),
    }  # fmt: skip
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    if options.json:
        print(json.dumps(result))
    else:
        print(f"copied into the all-gather buffer: {medians['landed']:.3f} s per step; assembled to shards first: "
              f"{medians['assembled']:.3f} s; ratio {result['landed_over_assembled']:.3f}")  # fmt: skip


if __name__ == "__main__":
    main()
