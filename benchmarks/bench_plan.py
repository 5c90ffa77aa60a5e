"""Predictions of step time and bytes, before a run and from the rates of the run, compared with measurements.

For each setup, `infinity plan` runs first. It measures the drive for two seconds and three layers of the model, and has
no information about the run. `infinity train` then takes steps and reports the prediction of its plan for the measured
bandwidth and speed of computation. Both commands are started as a user would start them, and no constant is fitted to
any of these setups.

    python benchmarks/bench_plan.py --nvme DIR --loop
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench_step import RESULTS, ROOT, machine, publish

MODELS = {"llama-100m": (256, 512, 1024), "gpt2-354m": (256, 512, 1024)}
"""Tokens per step, by model."""
HOST_CACHES = ("256MiB", "1GiB")
LOOP_BYTES = 14 << 30


def command(*words: object) -> dict[str, Any]:
    """Run `infinity` with ``--json`` in a separate process and return its output."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "infinity_tools", *map(str, words), "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{' '.join(map(str, words))}: {done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def measure(model: str, tokens: int, host_cache: str, device: str, folder: Path, steps: int) -> dict[str, Any]:
    """Plan a setup, then run it."""
    same = ("--model", model, "--host-memory", host_cache, "--nvme", folder)
    began = time.perf_counter()
    batch = ("--batch-tokens", tokens, "--seq", 256, "--dtype", "bf16", "--no-activation-checkpointing")
    planned = command("plan", *same, *batch, "--no-changes")
    plan_seconds = time.perf_counter() - began
    with tempfile.TemporaryDirectory() as out:
        batch = ("--per_device_train_batch_size", tokens // 256, "--max_length", 256, "--bf16", "true")
        run = command("train", *same, *batch, "--max_steps", steps, "--save_strategy", "no", "--out", Path(out, "run"))
    moved = run["nvme_read_bytes_per_step"] + run["nvme_written_bytes_per_step"]
    before = planned["read_bytes_per_step"] + planned["written_bytes_per_step"]
    clock = run["predicted_step_seconds"] or run["step_seconds"] - run["stall_seconds_per_step"]
    return {
        "model": model, "tokens": tokens, "host_cache": host_cache, "device": device,
        "step_seconds": run["step_seconds"], "bytes": moved, "stall_seconds": run["stall_seconds_per_step"],
        "planned_seconds": planned["seconds"]["step"], "planned_bytes": before, "plan_took_seconds": plan_seconds,
        "clock_seconds": clock, "parts": planned["seconds"], "drives": planned["machine"]["drives"],
        "before_error": abs(planned["seconds"]["step"] / run["step_seconds"] - 1),
        "time_error": abs(clock / run["step_seconds"] - 1),
        "bytes_error": abs(before / moved - 1) if moved else float(before > 0),
    }  # fmt: skip


def update_nanoseconds(folder: Path) -> dict[str, float]:
    """Return the CPU time of one core per updated parameter in nanoseconds, by format.

    These are the values of `UPDATE_SECONDS` in infinity/estimate.
    """
    from infinity.content.format import FORMATS

    cores = len(os.sched_getaffinity(0))
    found = {}
    for name in FORMATS:
        said = command("plan", "--model", "llama-100m", "--batch-tokens", 256, "--seq", 256, "--host-memory", "2GiB",
                       "--no-changes", "--nvme", folder, "--state-format", name)  # fmt: skip
        found[name] = 1e9 * cores * said["machine"]["update_seconds"][name]
    return found


def errors(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the median and the largest value of each error."""
    found = {}
    for name in ("time_error", "before_error", "bytes_error"):
        values = [row[name] for row in rows]
        found |= {f"{name}_median": statistics.median(values), f"{name}_worst": max(values)}
    return found


def draw(result: dict[str, Any], file: Path) -> None:
    """Plot planned against measured step times."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, key, title in zip(
        figure.subplots(1, 2), ("planned_seconds", "clock_seconds"), ("before the run", "from the rates of the run"),
        strict=True,
    ):  # fmt: skip
        rows = result["setups"]
        most = 1.15 * max(max(row["step_seconds"], row[key]) for row in rows)
        axes.plot([0, most], [0, most], color="#222222", linewidth=1)
        axes.fill_between([0, most], [0, 0.85 * most], [0, 1.15 * most], color="#bbbbbb", alpha=0.4, label="15 %")
        for device, marker in (("drive", "o"), ("loop device in memory", "s")):
            for model, color in zip(MODELS, ("#4477aa", "#ee6677"), strict=True):
                of = [row for row in rows if row["device"] == device and row["model"] == model]
                if of:
                    axes.scatter([row["step_seconds"] for row in of], [row[key] for row in of], marker=marker,
                                 color=color, label=f"{model}, {device}")  # fmt: skip
        axes.set(
            xlim=(0, most),
            ylim=(0, most),
            xlabel="measured seconds per step",
            ylabel="planned seconds per step",
            title=title,
        )
        axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize="small")
    figure.savefig(file, dpi=120)


def show(result: dict[str, Any]) -> None:
    """Print the table and the errors."""
    from rich.console import Console
    from rich.table import Table

    table = Table(
        "model",
        "tokens",
        "host cache",
        "device",
        "s/step",
        "plan before run",
        "plan with rates of run",
        "bytes error",
        box=None,
    )
    for row in result["setups"]:
        table.add_row(
            row["model"], str(row["tokens"]), row["host_cache"], row["device"].split()[0], f"{row['step_seconds']:.2f}",
            f"{row['planned_seconds'] / row['step_seconds'] - 1:+.0%}",
            f"{row['clock_seconds'] / row['step_seconds'] - 1:+.0%}", f"{100 * row['bytes_error']:.2f} %",
        )  # fmt: skip
    console = Console()
    console.print(table)
    for name in ("before_error", "time_error", "bytes_error"):
        console.print(f"{name}: median {result[f'{name}_median']:.1%}, worst {result[f'{name}_worst']:.1%}")
    if "update_nanoseconds" in result:
        console.print("update time per parameter on one core, in ns:", result["update_nanoseconds"])


def main() -> None:
    """Run the benchmark and write results/plan.json and its plot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nvme", type=Path, default=Path(), help="folder on the drive")
    parser.add_argument(
        "--loop",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also use a loop device in memory (root only)",
    )
    parser.add_argument(
        "--updates", action=argparse.BooleanOptionalAction, default=True, help="also measure update times"
    )
    parser.add_argument("--steps", type=int, default=9, help="steps per run; the first two are not timed")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--out", type=Path, default=RESULTS / "plan.json")
    parser.add_argument("--json", action="store_true", help="print only JSON")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    from rich.progress import Progress

    from benchmarks.loopdev import LoopDeviceError, loop_device

    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        drive = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.nvme)))
        devices = {"drive": drive}
        if options.loop:
            try:
                devices["loop device in memory"] = stack.enter_context(loop_device(LOOP_BYTES))
            except LoopDeviceError as error:
                sys.exit(f"--loop: {error}. Pass --no-loop to measure without a loop device.")
        cases = [
            (model, tokens, host_cache)
            for model in options.models
            for tokens in MODELS[model]
            for host_cache in HOST_CACHES
        ]
        progress = stack.enter_context(Progress(transient=True, disable=options.json))
        for number, case in enumerate(progress.track(cases, description="planning and running")):
            # Alternate devices, so that each model, number of tokens and host cache size is measured on both.
            of = list(devices)[(number + number // len(HOST_CACHES)) % len(devices)]
            rows.append(measure(*case, of, devices[of], options.steps))
        updates = {"update_nanoseconds": update_nanoseconds(drive)} if options.updates else {}
    publish({**errors(rows), **updates, "setups": rows, **machine()}, options, draw, show)


if __name__ == "__main__":
    main()
