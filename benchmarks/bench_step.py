"""Step time and bytes of one model: infinity and its two limits, FSDP2 in memory and with CPUOffloadPolicy, and torch.

All variants are alive at the same time, each in its own process, and take steps in turn, so that background activity of
the machine affects all of them alike. A turn consists of two steps without a pause, of which the second is timed: as in
training, it starts with the transfers that the first one has left in flight. The results are medians, and medians of
the ratios by round:

- `over_in_memory`: step time of a variant relative to FSDP2 in memory, by device and tokens per step.
- `roofline_ratio`: step time of infinity relative to the slower of its two limits, by device and regime (the resource
  that limits the step). The limits are the same model with all state resident (compute), and the transfers of the same
  plan without computation (I/O).
- `roofline_with_cores`: the same with a third limit, the CPU time of both divided by the number of cores. Computation,
  checksums and (on a device in memory) the transfers themselves compete for the same cores, so no step can be shorter.
  Threads that spin while they wait count as busy.
- `hides_from_tokens`: smallest measured number of tokens per step whose computation takes longer than the transfers.
  `over_torch`: step time of infinity relative to plain torch in memory, from this number of tokens on.
- `bytes_per_parameter`: by state format and update schedule, with almost no host cache.
  `predicted_over_measured_bytes`: by update schedule and by the part of the state that fits into the host cache. Both
  use bf16 compute and few tokens.

If computation takes about as long as the transfers, `bound_by` is "both".

Variants other than infinity use the default allocator of torch, without the huge pages that infinity requests, except
`fsdp_memory_huge`. `--threads` is the number of compute threads in all variants. With fewer threads than cores, one
core remains for storage and updates, as on a machine where a GPU computes.

`--against WORKTREE` adds the variant `against`: infinity from another worktree of this repository (`git worktree add`).
In the results, `against` contains the ratio of the medians (this tree to WORKTREE) and the quartiles of both, by device
and tokens per step. Both trees run this file, so WORKTREE needs `infinity.mesh`, `infinity.offload` with the settings
`storage.paths`, `run.keep`, `update.schedule` and `memory.host_bytes`, `infinity.models.sharding.layers_of`,
`infinity_tools.presets.find_model` and `on_meta`, and an optimizer with `records`, `update_schedule`, `run.host_bytes`,
`run.layout` and `run.pager.in_flight`.

    python benchmarks/bench_step.py --model llama-100m --tokens 32,128,512 --nvme DIR [--threads 0,1] [--loop]
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing as mp
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
VARIANTS = (
    "infinity", "resident", "io_only", "fsdp_memory", "fsdp_memory_huge", "fsdp_cpu_offload", "torch_memory"
)  # fmt: skip
PAGED = VARIANTS[:3]
UPDATE_SCHEDULES = ("in_backward", "in_forward", "after_backward")
SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9)
LEAST_PAGES, PAGE_BYTES = 48 + 8, 1 << 20
"""Number of pages in the smallest host cache, and their size in bytes.

The pages are being streamed or written. The smallest host cache also holds the weights of the largest FSDP module.
"""
FEW_TOKENS, BYTES_STEPS = 16, 2
TURN = 2
"""Steps per turn, of which the last one is timed."""
LEAST_ROUNDS = 7
"""Minimum number of rounds with `--against`."""
WARM = 2
"""Warm-up steps of each variant. infinity records its trace in the first and fills its host cache in the second."""


def build(
    options: argparse.Namespace,
    variant: str,
    folder: str,
    *,
    dtype: str = "bf16",
    recompute: bool = True,
    **sections: dict[str, Any],
) -> tuple[Any, Any, int]:
    """Return model, optimizer and vocabulary size of a variant that computes in `dtype`."""
    import torch
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    import infinity
    from infinity.models.sharding import layers_of
    from infinity_tools.presets import find_model, on_meta

    source = find_model(options.model)
    model = on_meta(source)
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if variant not in PAGED:
        model.to_empty(device="cpu")
        torch.manual_seed(0)
        model.init_weights()
    if variant != "torch_memory":
        offload = CPUOffloadPolicy(pin_memory=False) if variant == "fsdp_cpu_offload" else OffloadPolicy()
        mesh = infinity.mesh()
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if dtype == "bf16" else MixedPrecisionPolicy()
        for layer in (*layers_of(model), model):
            fully_shard(layer, mesh=mesh, mp_policy=policy, offload_policy=offload)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if variant in PAGED:
        config = {"storage": {"paths": [folder]}, "run": {"keep": "never"}, **sections}
        if variant == "resident":
            parameters = sum(param.numel() for param in model.parameters())
            config["memory"] = {"host_bytes": 18 * parameters + (1 << 29)}  # state, gradients, and padding of pages
        optimizer = infinity.offload(model, optimizer, config)
    return model, optimizer, source.config.vocab_size


def train_step(model: Any, optimizer: Any, tokens: Any, *, clip: bool = False, autocast: bool = False) -> float:
    """Take a step and return its loss."""
    import torch

    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    if clip:
        optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss)


def processor_seconds() -> float:
    """Return the accumulated busy time of all cores in seconds, including kernel threads."""
    import psutil

    times = psutil.cpu_times()
    return float(times.user + times.system + sum(getattr(times, name, 0.0) for name in ("nice", "irq", "softirq")))


def replay(optimizer: Any) -> None:
    """Transfer the pages of the plan without computing. The contents of the pages become invalid."""
    for access in optimizer.run.plan.trace:
        with optimizer.run.pager.access(access):
            pass
    optimizer.run.pager.begin_step()


def import_from(tree: Path) -> None:
    """Import the packages of a tree, in this process and its children, instead of the installed ones."""
    folders = [str(folder) for folder in (tree, tree / "tools", tree / "daemon")]
    sys.path[:0] = folders
    os.environ["PYTHONPATH"] = os.pathsep.join([*folders, *filter(None, [os.environ.get("PYTHONPATH")])])
    import infinity
    import infinity_tools

    for package in (infinity, infinity_tools):
        assert Path(package.__file__ or "").is_relative_to(tree), f"{package.__file__} is not in {tree}"


def worker(pipe: Connection, variant: str, options: argparse.Namespace, folder: str, threads: int) -> None:
    """Hold one variant; take a turn with the number of tokens in each message and answer with its figures."""
    tree = ROOT
    if variant == "against":
        tree, variant = options.against, "infinity"
    # infinity enables huge pages in the allocator of torch, which does not use them by default.
    os.environ["THP_MEM_ALLOC_ENABLE"] = str(int(variant in (*PAGED, "fsdp_memory_huge")))
    warnings.simplefilter("ignore")
    import torch

    import_from(tree)
    if threads:
        torch.set_num_threads(threads)
    sections = {"update": {"schedule": options.update}, "memory": {"host_bytes": options.host_memory}}
    model, optimizer, vocabulary = build(options, variant, folder, dtype=options.dtype, **sections)
    facts: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters())}
    if variant in PAGED:
        facts |= {"host_bytes": optimizer.run.host_bytes, "state_bytes": optimizer.run.layout.state_bytes}
    pipe.send(facts)
    number, autocast = 0, variant == "torch_memory" and options.dtype == "bf16"
    while count := pipe.recv():
        for _ in range(TURN):
            torch.manual_seed(number)
            tokens = torch.randint(0, vocabulary, (max(1, count // options.seq), min(count, options.seq)))
            answer: dict[str, Any] = {}
            began, busy = time.perf_counter(), processor_seconds()
            if variant == "io_only" and number >= WARM:
                replay(optimizer)
            else:
                answer["loss"] = train_step(model, optimizer, tokens, autocast=autocast)
            answer |= {"seconds": time.perf_counter() - began, "processor_seconds": processor_seconds() - busy}
            number += 1
        if variant == "infinity":
            answer |= {"stall": optimizer.records[-1].stall_seconds, "schedule": optimizer.update_schedule}
        if variant in PAGED:  # so that transfers in flight do not slow down the next variant
            while any(optimizer.run.pager.in_flight().values()):
                time.sleep(0.01)
        pipe.send(answer)
    if variant in PAGED:
        optimizer.close()


def apart(function: Callable[..., None], *arguments: Any, **named: Any) -> Any:
    """Call a function in a separate process, with a pipe as its first argument, and return the object that it sends."""
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=function, args=(theirs, *arguments), kwargs=named)
    process.start()
    theirs.close()  # so that recv() raises EOFError if the process has failed
    found = ours.recv()
    process.join()
    return found


def spread(values: list[float]) -> dict[str, float]:
    """Return median, minimum and maximum."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def measure_time(options: argparse.Namespace, folder: Path, threads: int) -> dict[str, Any]:
    """Take steps of all variants in turn, for each number of tokens; return the figures of a drive."""
    from rich.progress import Progress

    context = mp.get_context("spawn")
    pipes: dict[str, Connection] = {}
    processes = []
    facts: dict[str, Any] = {}
    for variant in options.variants:
        ours, theirs = context.Pipe()
        home = folder / f"{variant}-{threads}"
        home.mkdir()
        process = context.Process(target=worker, args=(theirs, variant, options, str(home), threads))
        process.start()
        theirs.close()
        processes.append(process)
        pipes[variant] = ours
        facts[variant] = ours.recv()
    steps: dict[int, dict[str, list[dict[str, Any]]]] = {
        count: {variant: [] for variant in pipes} for count in options.tokens
    }

    def round_of(count: int) -> dict[str, dict[str, Any]]:
        found = {}
        for variant, pipe in pipes.items():
            pipe.send(count)
            found[variant] = pipe.recv()
            progress.advance(task)
        return found

    with Progress(transient=True) as progress:
        rounds = 1 + len(options.tokens) * options.rounds
        task = progress.add_task("measuring steps in turn", total=rounds * len(pipes))
        round_of(options.tokens[0])  # warm-up: TURN steps, at least WARM
        for _ in range(options.rounds):
            for count in options.tokens:
                for variant, row in round_of(count).items():
                    steps[count][variant].append(row)
    for pipe in pipes.values():
        pipe.send(0)
    for process in processes:
        process.join()
    return {**facts["infinity"], "by_tokens": {str(count): figures(rows) for count, rows in steps.items()}}


def measure_devices(options: argparse.Namespace, folder: Path, stack: ExitStack) -> dict[str, Any]:
    """Return the figures of all drives and numbers of threads."""
    from benchmarks.loopdev import LoopDeviceError, loop_device
    from infinity.units import GIB

    (folder / "time").mkdir()
    drives = {"drive": folder / "time"}
    if options.loop:
        try:
            drives["loop device in memory"] = stack.enter_context(loop_device(12 * GIB))
        except LoopDeviceError as error:
            sys.exit(f"--loop: {error}")
    found = {}
    for threads, (drive, place) in itertools.product(options.threads, drives.items()):
        name = f"{drive}, {threads} of {os.cpu_count()} cores compute" if threads else drive
        found[name] = measure_time(options, place, threads)
    return found


def figures(rows: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return medians and ratios for one number of tokens."""
    seconds = {variant: [row["seconds"] for row in found] for variant, found in rows.items()}

    def over(variant: str, below: list[float]) -> dict[str, float]:
        return spread([mine / other for mine, other in zip(seconds[variant], below, strict=True)])

    result: dict[str, Any] = {
        "step_seconds": {variant: spread(values) for variant, values in seconds.items()},
        "cores_busy": {
            variant: spread([row["processor_seconds"] / row["seconds"] for row in found])
            for variant, found in rows.items()
        },
        "stall_share": spread([row["stall"] / row["seconds"] for row in rows["infinity"]]),
        "update_schedule": rows["infinity"][-1]["schedule"],
        "samples": seconds,
    }
    if "fsdp_memory" in seconds:
        others = [variant for variant in seconds if variant not in ("fsdp_memory", "io_only")]
        result["over_in_memory"] = {variant: over(variant, seconds["fsdp_memory"]) for variant in others}
    if "torch_memory" in seconds:
        result["over_torch"] = over("infinity", seconds["torch_memory"])
    if "against" in seconds:
        ours, theirs = (statistics.quantiles(seconds[name], n=4) for name in ("infinity", "against"))
        quartiles = {"infinity": ours, "against": theirs}
        result["against"] = {"ratio_of_medians": ours[1] / theirs[1], "quartiles": quartiles}
    if {"resident", "io_only"} <= seconds.keys():
        limits = [max(pair) for pair in zip(seconds["resident"], seconds["io_only"], strict=True)]
        both = zip(rows["resident"], rows["io_only"], strict=True)
        cores = [sum(row["processor_seconds"] for row in pair) / (os.cpu_count() or 1) for pair in both]
        compute, io = (statistics.median(seconds[name]) for name in ("resident", "io_only"))
        result["cores_limit_seconds"] = spread(cores)
        result["roofline_ratio"] = over("infinity", limits)
        result["roofline_with_cores"] = over("infinity", list(map(max, limits, cores)))
        result["bound_by"] = "compute" if compute > 1.5 * io else "I/O" if io > 1.5 * compute else "both"
        result["hidden"] = compute >= io
    return result


def headlines(result: dict[str, Any]) -> dict[str, Any]:
    """Return the headline figures of all devices, numbers of tokens and host cache sizes."""
    devices = {device: found["by_tokens"] for device, found in result["devices"].items()}
    hiding = {device: [int(n) for n, row in rows.items() if row.get("hidden")] for device, rows in devices.items()}
    found: dict[str, Any] = {
        "over_in_memory": {
            device: {n: row["over_in_memory"]["infinity"] for n, row in rows.items() if "over_in_memory" in row}
            for device, rows in devices.items()
        },
        **{
            name: {
                device: {row["bound_by"]: {"tokens": int(n), **row[name]} for n, row in rows.items() if name in row}
                for device, rows in devices.items()
            }
            for name in ("roofline_ratio", "roofline_with_cores")
        },
        "hides_from_tokens": {device: min(counts, default=None) for device, counts in hiding.items()},
        "over_torch": {
            device: {n: row["over_torch"] for n, row in rows.items() if "over_torch" in row and row.get("hidden")}
            for device, rows in devices.items()
        },
        "bytes_per_parameter": {},
        "predicted_over_measured_bytes": {},
    }
    if "against_commit" in result:
        found["against"] = {device: {n: row["against"] for n, row in rows.items()} for device, rows in devices.items()}
    for row in result.get("bytes", ()):
        if row["smallest"]:
            found["bytes_per_parameter"].setdefault(row["format"], {})[row["schedule"]] = row["bytes_per_parameter"]
        if row["format"] == "fp32":
            by_share = found["predicted_over_measured_bytes"].setdefault(row["schedule"], {})
            by_share[f"{row['share']:.2f}"] = row["predicted_over_measured_bytes"]
    return found


def measure_bytes(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Return measured, predicted and least possible bytes per step.

    There is one row for each format, update schedule and part of the state that fits into the host cache.
    """
    from rich.progress import Progress

    from infinity.content.format import FORMATS

    cases = [("fp32", update_schedule, share) for update_schedule in UPDATE_SCHEDULES for share in SHARES]
    cases += [(fmt, "in_backward", 0.0) for fmt in FORMATS if fmt != "fp32"]
    found = []
    with Progress(transient=True) as progress:
        for case in progress.track(cases, description="counting bytes"):
            with tempfile.TemporaryDirectory(dir=folder) as home:
                found.append(apart(count_bytes, options, home, *case))
    return found


def largest_fsdp_module(options: argparse.Namespace) -> int:
    """Return the number of parameters of the largest FSDP module."""
    from infinity.models.sharding import layers_of
    from infinity_tools.presets import find_model, on_meta

    model = on_meta(find_model(options.model))
    layers = [sum(param.numel() for param in layer.parameters()) for layer in layers_of(model)]
    return max(*layers, sum(param.numel() for param in model.parameters()) - sum(layers))


def count_bytes(
    pipe: Connection, options: argparse.Namespace, folder: str, fmt: str, update_schedule: str, share: float
) -> None:
    """Take a few steps with few tokens and send the transferred bytes through the pipe."""
    warnings.simplefilter("ignore")
    import torch

    from infinity.content.format import Role

    state = (14 if update_schedule == "in_backward" else 16) * options.parameters  # gradients in bf16
    memory = {"host_bytes": max(options.smallest_host_cache, int(share * state)), "page_bytes": PAGE_BYTES}
    sections = {"update": {"schedule": update_schedule}, "memory": memory, "state": {"format": fmt}}
    model, optimizer, vocabulary = build(options, "infinity", folder, recompute=False, **sections)
    layout, steps = optimizer.run.layout, BYTES_STEPS
    for number in range(WARM + steps):
        tokens = torch.randint(0, vocabulary, (1, FEW_TOKENS))
        train_step(model, optimizer, tokens, clip=update_schedule in ("in_forward", "after_backward"))
        if number + 1 == WARM:
            before = optimizer.run.ledger.total_bytes
    moved = {op: nbytes - before[op] for op, nbytes in optimizer.run.ledger.total_bytes.items()}
    traffic, parameters = optimizer.run.plan.traffic, layout.parameters
    used = {use.page for access in optimizer.run.plan.trace for use in access}
    gradients = sum(page.nbytes for page in layout.pages if page.role is Role.GRAD and page.index in used)
    weights = layout.bytes_of(Role.PARAM)
    reads = 2 if update_schedule == "in_forward" else 3  # transfers per weight: one read per pass, and one write
    rest = layout.state_bytes - weights + gradients
    cached = optimizer.run.host_bytes
    first = min(cached, weights)
    least = reads * (weights - first) + 2 * max(0, rest - (cached - first))
    pipe.send(
        {
            "format": fmt,
            "schedule": update_schedule,
            "share": cached / (layout.state_bytes + gradients),
            "smallest": not share,
            "bytes_per_parameter": sum(moved.values()) / steps / parameters,
            "predicted": (traffic.read_bytes + traffic.written_bytes) / parameters,
            "predicted_over_measured_bytes": (traffic.read_bytes + traffic.written_bytes) * steps / sum(moved.values())
            if sum(moved.values())
            else 1.0,
            "least": max(0, least) / parameters if update_schedule in UPDATE_SCHEDULES else None,
        }
    )
    optimizer.close()


def commit_of(tree: Path) -> str:
    """Return the commit of a worktree."""
    return subprocess.run(["git", "rev-parse", "HEAD"], cwd=tree, capture_output=True, text=True).stdout.strip()


def machine() -> dict[str, Any]:
    """Return the properties of the machine. `bf16` is the CPU instruction set for bf16 matrix products."""
    from infinity import processor

    there = processor.flags()
    products = next((flag for flag in ("amx_bf16", "avx512_bf16", "avx512bw") if flag in there), "")
    return {"commit": commit_of(ROOT), "cpu": platform.processor() or platform.machine(), "kernel": platform.release(),
            "cores": os.cpu_count(), "python": platform.python_version(), "bf16": products}  # fmt: skip


def draw(result: dict[str, Any], file: Path) -> None:
    """Plot step time by tokens with its limits, and bytes by host cache size with their lower bound."""
    devices = result["devices"]
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    number = len(devices) + ("bytes" in result)
    columns = min(number, 3)
    rows = -(-number // columns)
    figure = Figure(figsize=(5.5 * columns, 4.2 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    plots = figure.subplots(rows, columns, squeeze=False).flat[:number]
    for empty in figure.axes[number:]:
        empty.remove()
    styles = {"resident": ("compute only", "#888888", "--"), "io_only": ("I/O only", "#888888", ":"),
              "infinity": ("infinity", "#4477aa", "-"), "fsdp_memory": ("FSDP2 in memory", "#ee6677", "-")}  # fmt: skip
    for axes, (device, found) in zip(plots, devices.items(), strict=False):
        counts = [int(count) for count in found["by_tokens"]]
        for variant, (label, color, line) in styles.items():
            if variant in result["config"]["variants"]:
                medians = [found["by_tokens"][str(n)]["step_seconds"][variant]["median"] for n in counts]
                axes.plot(counts, medians, line, color=color, marker="o", markersize=4, label=label)
        if all("cores_limit_seconds" in row for row in found["by_tokens"].values()):
            medians = [row["cores_limit_seconds"]["median"] for row in found["by_tokens"].values()]
            axes.plot(
                counts, medians, "-.", color="#ccbb44", marker="o", markersize=4, label="CPU time of both / cores"
            )
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
        axes.set_xlabel("tokens per step")
        axes.set_ylabel("seconds per step")
        axes.set_title(f"{result['config']['model']}, {device}")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    if "bytes" in result:
        draw_bytes(plots[-1], result["bytes"])
    figure.savefig(file, dpi=120)


def draw_bytes(axes: Any, found: list[dict[str, Any]]) -> None:
    """Plot measured bytes as points and the lower bound as lines."""
    colors = dict(zip(UPDATE_SCHEDULES, ("#4477aa", "#228833", "#ccbb44"), strict=True))
    for update_schedule, color in colors.items():
        rows = [row for row in found if (row["format"], row["schedule"]) == ("fp32", update_schedule)]
        shares = [100 * row["share"] for row in rows]
        axes.plot(shares, [row["bytes_per_parameter"] for row in rows], "o", color=color, label=update_schedule)
        axes.plot(shares, [row["least"] for row in rows], "-", color=color, linewidth=1)
    axes.set_xlabel("host cache, % of the state (lines: lower bound)")
    axes.set_ylabel("NVMe bytes per parameter per step")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)


def show(result: dict[str, Any]) -> None:
    """Print the tables."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(
        "s/step: median. cores: busy cores. /FSDP2, /torch: relative to FSDP2 and torch in memory. /limit: relative to "
        "the slower of computation and transfers alone. /cores: the same, or relative to their CPU time per core if "
        "that is longer."
    )
    for device, found in result["devices"].items():
        title = f"\n{result['config']['model']}, {found['parameters'] / 1e6:.0f} M parameters, {device}"
        table = Table(title=title, box=None, padding=(0, 1, 0, 0))
        names = ("tokens", "variant", "s/step", "min", "max", "cores", "/FSDP2", "/torch", "/limit", "/cores")
        for name in names:
            table.add_column(name, justify="left" if name == "variant" else "right")
        for count, row in found["by_tokens"].items():
            for variant, seconds in row["step_seconds"].items():
                ratio = row.get("over_in_memory", {}).get(variant)
                ours = variant == "infinity"
                ratios = ("roofline_ratio", "roofline_with_cores", "over_torch")
                roofline, cores, plain = (row.get(name) if ours else None for name in ratios)
                table.add_row(count, variant, *(f"{seconds[key]:.2f}" for key in ("median", "min", "max")),
                              f"{row['cores_busy'][variant]['median']:.1f}",
                              f"{ratio['median']:.2f}" if ratio else "",
                              f"{plain['median']:.2f}" if plain else "",
                              f"{roofline['median']:.2f}" if roofline else "",
                              f"{cores['median']:.2f}" if cores else "")  # fmt: skip
        console.print(table)
        for count, row in found["by_tokens"].items():
            if "against" in row:
                both = row["against"]["quartiles"].values()
                ours, theirs = (" / ".join(f"{seconds:.3f}" for seconds in quartiles) for quartiles in both)
                console.print(
                    f"{count} tokens, this tree relative to {result['against_commit'][:7]}: "
                    f"{row['against']['ratio_of_medians']:.3f}\n  quartiles: {ours} s; {theirs} s"
                )
    if "bytes" not in result:
        return
    table = Table(title="\nNVMe bytes per parameter per step", box=None, padding=(0, 1, 0, 0))
    for name in ("format", "schedule", "host cache, %", "measured", "predicted/measured", "lower bound"):
        table.add_column(name, justify="left" if name in ("format", "schedule") else "right")
    for row in result["bytes"]:
        table.add_row(row["format"], row["schedule"], f"{100 * row['share']:.0f}", f"{row['bytes_per_parameter']:.2f}",
                      f"{row['predicted_over_measured_bytes']:.4f}",
                      "" if row["least"] is None else f"{row['least']:.2f}")  # fmt: skip
    console.print(table)


def publish(
    result: dict[str, Any],
    options: argparse.Namespace,
    draw: Callable[[dict[str, Any], Path], None],
    show: Callable[[dict[str, Any]], None],
) -> None:
    """Write a result and its plot to `options.out`, and print the result."""
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    draw(result, options.out.with_suffix(".png"))
    if options.json:
        print(json.dumps(result))
    else:
        show(result)


def main() -> None:
    """Run the benchmark and write its results and their plot.

    With `--no-time --no-bytes`, plot stored results again.
    """
    sys.path.insert(0, str(ROOT))
    from infinity.units import parse_size
    from infinity_tools.presets import best_dtype

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-100m")
    parser.add_argument("--tokens", default="32,128,512", help="tokens per step, from I/O-bound to compute-bound")
    parser.add_argument("--seq", type=int, default=128, help="maximum tokens per sequence")
    parser.add_argument(
        "--dtype",
        choices=("auto", "bf16", "fp32"),
        default="auto",
        help="compute dtype; auto: bf16 if the CPU supports it",
    )
    parser.add_argument("--host-memory", default="256MiB", help="size of the host cache of infinity")
    parser.add_argument("--update", default="auto")
    parser.add_argument("--threads", default="0", help="compute threads; 0: the default of torch")
    parser.add_argument("--rounds", type=int, default=LEAST_ROUNDS, help="measured rounds, after one warm-up round")
    parser.add_argument("--variants", default="infinity,resident,io_only,fsdp_memory,torch_memory")
    parser.add_argument(
        "--against", type=Path, metavar="WORKTREE",
        help=f"also measure infinity from another worktree; at least {LEAST_ROUNDS} rounds",
    )  # fmt: skip
    parser.add_argument("--nvme", help="folder on the drive (default: a temporary folder in the current directory)")
    parser.add_argument("--loop", action="store_true", help="also measure XFS on a loop device in memory (root only)")
    parser.add_argument("--no-time", action="store_true", help="only count bytes, and keep the times in --out")
    parser.add_argument("--no-bytes", action="store_true", help="do not count bytes")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/step.json, with --against against.json")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    options.out = options.out or RESULTS / ("against.json" if options.against else "step.json")
    options.host_memory = parse_size(options.host_memory, name="--host-memory")
    options.dtype = best_dtype() if options.dtype == "auto" else options.dtype
    options.variants = options.variants.split(",")
    options.threads = [int(count) for count in options.threads.split(",")]
    options.tokens = [int(count) for count in options.tokens.split(",")]
    if unknown := set(options.variants) - set(VARIANTS):
        sys.exit(f"--variants: unknown variants {', '.join(unknown)}. Choose from {', '.join(VARIANTS)}.")
    if "infinity" not in options.variants:
        sys.exit("--variants must include infinity")
    if bad := [count for count in options.tokens if count > options.seq and count % options.seq]:
        sys.exit(f"--tokens {bad[0]} is not a multiple of --seq {options.seq}")
    if options.against:
        options.against = options.against.resolve()
        if not (options.against / "infinity" / "__init__.py").exists():
            sys.exit(f"--against {options.against} is not a worktree of this repository. Run `git worktree add` first.")
        if options.rounds < LEAST_ROUNDS:
            sys.exit(f"--rounds {options.rounds} is too few for --against. Pass --rounds {LEAST_ROUNDS} or more.")
        options.variants.append("against")
    left_out = ("nvme", "out", "json", "no_time", "against")
    if options.no_time:
        result = json.loads(options.out.read_text())
        changed = [name for name in ("model", "dtype", "seq") if result["config"][name] != getattr(options, name)]
        if changed:
            sys.exit(f"--no-time: the times in {options.out} were measured with a different --{changed[0]}")
    else:
        result = {"config": {k: v for k, v in vars(options).items() if k not in left_out}, **machine(), "devices": {}}
        if options.against:
            result["against_commit"] = commit_of(options.against)
    with ExitStack() as stack:
        folder = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="infinity-bench-", dir=options.nvme or "."))
        )
        if not options.no_time:
            result["devices"] = measure_devices(options, folder, stack)
        if not options.no_bytes:
            options.parameters = next(iter(result["devices"].values()))["parameters"]
            # A weight takes 2 bytes in bf16.
            options.smallest_host_cache = LEAST_PAGES * PAGE_BYTES + 2 * largest_fsdp_module(options)
            result["bytes"], result["bytes_commit"] = measure_bytes(options, folder), machine()["commit"]
    first = headlines(result)
    publish({**first, **result, **first}, options, draw, show)


if __name__ == "__main__":
    main()
