"""Step time of one model: infinity against FSDP2 in memory, FSDP2 with CPUOffloadPolicy and plain torch.

All variants are alive at once, each in a process of its own, and take steps in turn; so what the machine does
in the background hits all of them alike. Reported are medians and the median of the ratios round by round.

    python benchmarks/bench_step.py --model llama-100m --batch-tokens 512 --nvme DIR
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
VARIANTS = ("infinity", "infinity_resident", "fsdp_memory", "fsdp_cpu_offload", "torch_memory")


def worker(pipe: Connection, variant: str, options: argparse.Namespace, folder: str) -> None:
    """Hold one variant; take a step per message and answer with its figures."""
    import torch
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    import infinity
    from infinity_tools.presets import find_model, layers_of, on_meta

    source = find_model(options.model)
    model = on_meta(source)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if not variant.startswith("infinity"):
        model.to_empty(device="cpu")
        torch.manual_seed(0)
        model.init_weights()
    if variant == "torch_memory":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    else:
        offload = CPUOffloadPolicy(pin_memory=False) if variant == "fsdp_cpu_offload" else OffloadPolicy()
        mesh, policy = infinity.mesh(), MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        for layer in (*layers_of(model), model):
            fully_shard(layer, mesh=mesh, mp_policy=policy, offload_policy=offload)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    facts: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters())}
    if variant.startswith("infinity"):
        everything = 20 * facts["parameters"] + (1 << 30)
        optimizer = infinity.offload(
            model,
            optimizer,
            {
                "storage": {"paths": [folder]},
                "memory": {"host_bytes": everything if variant == "infinity_resident" else options.host_memory},
                "update": {"placement": options.update},
            },
        )
        facts["host_bytes"] = optimizer.host_bytes
        facts["state_bytes"] = optimizer.layout.state_bytes
    pipe.send(facts)
    step = 0
    while pipe.recv():
        torch.manual_seed(step)
        tokens = torch.randint(0, source.config.vocab_size, (options.batch_tokens // options.seq, options.seq))
        started = time.perf_counter()
        if variant == "torch_memory":
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(input_ids=tokens, labels=tokens).loss
        else:
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        answer: dict[str, Any] = {"seconds": time.perf_counter() - started, "loss": loss.item()}
        if variant.startswith("infinity"):
            traffic, record = optimizer.plan.traffic, optimizer.records[-1]
            answer |= {
                "read": record.read_bytes, "written": record.written_bytes,
                "predicted_read": traffic.read_bytes, "predicted_written": traffic.written_bytes,
                "stall": record.stall_seconds, "placement": optimizer.update_placement,
            }  # fmt: skip
        pipe.send(answer)
        step += 1
    if variant.startswith("infinity"):
        optimizer.close()


def spread(values: list[float]) -> dict[str, float]:
    """Return median, least and greatest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def measure(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Run all variants in turn and return the figures."""
    from rich.progress import Progress

    context = mp.get_context("spawn")
    pipes: dict[str, Connection] = {}
    processes = []
    facts: dict[str, Any] = {}
    for variant in options.variants:
        ours, theirs = context.Pipe()
        home = Path(folder) / variant
        home.mkdir()
        process = context.Process(target=worker, args=(theirs, variant, options, str(home)))
        process.start()
        theirs.close()
        processes.append(process)
        pipes[variant] = ours
        facts[variant] = ours.recv()
    steps: dict[str, list[dict[str, Any]]] = {variant: [] for variant in pipes}
    with Progress(transient=True) as progress:
        task = progress.add_task("steps in turn", total=(options.rounds + 2) * len(pipes))
        for _ in range(options.rounds + 2):
            for variant, pipe in pipes.items():
                pipe.send(True)
                steps[variant].append(pipe.recv())
                progress.advance(task)
    for pipe in pipes.values():
        pipe.send(False)
    for process in processes:
        process.join()
    return figures({variant: rows[2:] for variant, rows in steps.items()}, facts)


def figures(steps: dict[str, list[dict[str, Any]]], facts: dict[str, Any]) -> dict[str, Any]:
    """Return medians, ratios against FSDP2 in memory, and traffic."""
    seconds = {variant: [row["seconds"] for row in rows] for variant, rows in steps.items()}
    result: dict[str, Any] = {
        "parameters": facts["infinity"]["parameters"],
        "state_bytes": facts["infinity"]["state_bytes"],
        "host_bytes": facts["infinity"]["host_bytes"],
        "step_seconds": {variant: spread(values) for variant, values in seconds.items()},
        "samples": seconds,
    }
    for variant, values in seconds.items():
        if variant != "fsdp_memory" and "fsdp_memory" in seconds:
            ratios = [mine / theirs for mine, theirs in zip(values, seconds["fsdp_memory"], strict=True)]
            result.setdefault("over_in_memory", {})[variant] = spread(ratios)
    rows = steps["infinity"]
    moved = sum(row["read"] + row["written"] for row in rows)
    predicted = sum(row["predicted_read"] + row["predicted_written"] for row in rows)
    result["update_placement"] = rows[-1]["placement"]
    result["bytes_per_parameter"] = moved / len(rows) / result["parameters"]
    result["predicted_over_measured_bytes"] = predicted / moved if moved else 1.0
    result["stall_share"] = spread([row["stall"] / row["seconds"] for row in rows])
    return result


def machine() -> dict[str, Any]:
    """Return what was measured on."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    return {"commit": commit, "cpu": platform.processor() or platform.machine(), "kernel": platform.release(),
            "cores": os.cpu_count(), "python": platform.python_version()}  # fmt: skip


def show(result: dict[str, Any]) -> None:
    """Print the table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"{result['parameters'] / 1e6:.0f} M parameters, {result['config']['batch_tokens']} tokens a step"
    )
    for name in ("variant", "s/step (median)", "min", "max", "over FSDP2 in memory"):
        table.add_column(name, justify="left" if name == "variant" else "right")
    for variant, row in result["step_seconds"].items():
        ratio = result.get("over_in_memory", {}).get(variant)
        table.add_row(variant, *(f"{row[key]:.2f}" for key in ("median", "min", "max")),
                      f"{ratio['median']:.2f}" if ratio else "1")  # fmt: skip
    console = Console()
    console.print(table)
    console.print(
        f"infinity: {result['update_placement']}, {result['bytes_per_parameter']:.2f} bytes per parameter and step, "
        f"predicted/measured {result['predicted_over_measured_bytes']:.3f}, "
        f"stalled {result['stall_share']['median']:.0%} of the time"
    )


def main() -> None:
    """Measure and write results/step.json."""
    from infinity.units import parse_size

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-100m")
    parser.add_argument("--batch-tokens", type=int, default=1024)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--host-memory", default="256MiB", help="host arena of infinity")
    parser.add_argument("--update", default="auto")
    parser.add_argument("--rounds", type=int, default=7, help="counted rounds, after two that are not")
    parser.add_argument("--variants", default="infinity,infinity_resident,fsdp_memory,fsdp_cpu_offload")
    parser.add_argument("--nvme", help="folder on the drive; default: a temporary one here")
    parser.add_argument("--out", default=str(RESULTS / "step.json"))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    options.host_memory = parse_size(options.host_memory, name="--host-memory")
    options.variants = options.variants.split(",")
    if unknown := set(options.variants) - set(VARIANTS):
        sys.exit(f"unknown variants {', '.join(unknown)}; there are {', '.join(VARIANTS)}")
    if "infinity" not in options.variants:
        sys.exit("--variants must contain infinity")
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="infinity-bench-", dir=options.nvme or "."))
        result = {"config": {k: v for k, v in vars(options).items() if k not in ("nvme", "out", "json")}, **machine()}
        result |= measure(options, folder)
    Path(options.out).write_text(json.dumps(result, indent=1) + "\n")
    if options.json:
        print(json.dumps(result))
    else:
        show(result)


if __name__ == "__main__":
    main()
