"""Quality and run time of `infinity tune`, compared with a sweep over all combinations of a grid.

The benchmark trains a small model and starts from deliberately bad settings. The sweep trains once with every
combination of a grid, exactly as a trial of `infinity tune` does. `infinity tune` then starts as a user would start it,
from the bad settings and with a tenth of the time of the sweep. It does not know the grid and also tries other values.
Finally, the best settings of the sweep, the settings of tune, the bad settings and the defaults are measured in
alternation for several rounds.

- `of_best`: seconds per step with the best settings of the sweep, relative to the settings of tune, by round. Above 1,
  the settings of tune are faster. The goal is 0.95 or more.
- `time_share`: run time of tune, including the start of its process, relative to the sweep. The goal is 0.1 or less.
- `over_start`, `over_defaults`: seconds per step with the bad settings and with the defaults, relative to the settings
  of tune.

    python benchmarks/bench_tune.py --nvme DIR
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
SIZES = {
    "small": ((384, 1024, 8, 6), 128, 64, "64MiB"),
    "least": ((64, 128, 4, 4), 64, 32, "4MiB"),
}
"""Presets by name: hidden and intermediate size, layers and heads of a Llama; tokens per step and per sequence; and the
size of the host cache, a third of the state.
"""
GRID: dict[str, tuple[Any, ...]] = {
    "storage.request_bytes": (64 << 10, 512 << 10, 2 << 20),
    "storage.queue_depth": (1, 8, 32),
    "memory.page_bytes": (256 << 10, 1 << 20, 4 << 20),
    "update.schedule": ("in_backward", "in_forward", "after_backward"),
    "storage.engine": ("io_uring", "threads"),
}
"""Settings of the sweep, with 162 combinations."""
BAD = {
    "storage.request_bytes": 64 << 10,
    "storage.queue_depth": 1,
    "memory.page_bytes": 256 << 10,
    "update.schedule": "after_backward",
    "storage.engine": "threads",
}
"""Settings from which tune starts."""
SHARE = 0.092
"""Time limit of tune relative to the sweep, with a margin because tune may finish slightly after its limit."""


def combinations(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the grid, or `--points` evenly spaced combinations of it."""
    rows = [dict(zip(GRID, values, strict=True)) for values in itertools.product(*GRID.values())]
    count = min(options.points or len(rows), len(rows))
    return [rows[number * len(rows) // count] for number in range(count)]


def write_model(options: argparse.Namespace, folder: Path) -> Path:
    """Write the config.json of the model and return its path."""
    hidden, inner, layers, heads = SIZES[options.size][0]
    values = {
        "model_type": "llama", "vocab_size": 256, "max_position_embeddings": 512, "tie_word_embeddings": False,
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": heads, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    file = folder / "config.json"
    file.write_text(json.dumps(values))
    return file


def sweep(worker: Any, options: argparse.Namespace, start: dict[str, Any]) -> tuple[list[dict[str, Any]], float]:
    """Return the measurement of each combination, and the duration of the sweep in seconds."""
    from rich.progress import Progress

    from infinity_tools.tune.outcome import Bounds

    found, began = [], time.monotonic()
    with Progress(transient=True) as progress:
        for changes in progress.track(combinations(options), description="measuring all combinations"):
            outcome = worker.measure({**start, **changes}, Bounds())
            row = {"settings": changes, "kind": outcome.kind, "reason": outcome.reason}
            found.append({**row, "seconds": outcome.seconds if outcome.counts else None})
    return found, time.monotonic() - began


def run_tune(options: argparse.Namespace, model: Path, folder: Path, home: Path, seconds: float) -> tuple[Any, float]:
    """Run `infinity tune` from the bad settings; return its output and its run time in seconds."""
    from infinity_tools.toml import settings_toml

    config = folder / "bad.toml"
    config.write_text(settings_toml(bad_settings(options), ["deliberately bad settings"]))
    _, tokens, seq, host = SIZES[options.size]
    words = ["tune", "--model", str(model), "--nvme", str(home), "--host-memory", host, "--batch-tokens", str(tokens),
             "--seq", str(seq), "--config", str(config), "--minutes", str(max(0.05, seconds / 60)), "--json",
             "--repeats", "1", "--out", str(folder / "tuned"), "--threads", str(options.threads)]  # fmt: skip
    paths = [str(ROOT), str(ROOT / "tools"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "infinity_tools", *words],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        check=False,
    )
    taken = time.monotonic() - began
    if done.returncode:
        sys.exit(f"infinity tune failed with exit status {done.returncode}")
    return json.loads(done.stdout), taken


def bad_settings(options: argparse.Namespace) -> Any:
    """Return the settings from which tune starts."""
    from infinity.config import Config

    return Config().with_values(**BAD, **{"memory.host_bytes": SIZES[options.size][3]})


def rounds(worker: Any, options: argparse.Namespace, rivals: dict[str, dict[str, Any]]) -> dict[str, list[float]]:
    """Measure all candidates in turn, and reverse their order in every second round to avoid a bias."""
    from infinity_tools.tune.outcome import Bounds

    seconds: dict[str, list[float]] = {name: [] for name in rivals}
    for number in range(options.rounds):
        order = list(rivals) if number % 2 == 0 else list(reversed(rivals))
        for name in order:
            outcome = worker.measure(rivals[name], Bounds())
            if not outcome.counts:
                sys.exit(f"cannot train with the settings of {name}: {outcome.reason}")
            seconds[name].append(outcome.seconds)
    return seconds


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run the sweep, `infinity tune` and the comparison; return the figures."""
    from benchmarks.bench_step import machine, spread
    from infinity.config import Config
    from infinity.units import parse_size
    from infinity_tools.trial_folders import trial_folders
    from infinity_tools.tune.search_space import candidate_of
    from infinity_tools.tune.trial import Workload
    from infinity_tools.tune.trial_worker import Worker

    model, home = write_model(options, folder), folder / "nvme"
    _, tokens, seq, host = SIZES[options.size]
    workload = Workload(model=str(model), dtype="auto", activation_checkpointing=False, batch_tokens=tokens,
                        micro_tokens=None, loss_tokens=None, seq=seq, max_grad_norm=None,
                        threads=options.threads)  # fmt: skip
    settings = bad_settings(options)
    host_bytes = parse_size(host)
    start, defaults = candidate_of(settings, host_bytes), candidate_of(Config(), host_bytes)
    with ExitStack() as stack:
        folders = stack.enter_context(trial_folders([str(home)], settings.telemetry))
        worker = stack.enter_context(Worker(workload, settings, folders))
        worker.start()
        swept, sweep_seconds = sweep(worker, options, start)
        tuned, tune_seconds = run_tune(options, model, folder, home, SHARE * sweep_seconds)
        best = min((row for row in swept if row["seconds"]), key=lambda row: row["seconds"])
        rivals = {"sweep": {**start, **best["settings"]}, "tune": tuned["best"], "start": start, "defaults": defaults}
        seconds = rounds(worker, options, rivals)
        facts = worker.facts

    def over(name: str) -> dict[str, float]:
        return spread([other / mine for other, mine in zip(seconds[name], seconds["tune"], strict=True)])

    return {
        "config": {"size": options.size, "points": options.points, "rounds": options.rounds, "threads": options.threads,
                   "tokens": tokens, "seq": seq, "host_memory": host, "grid": {k: list(v) for k, v in GRID.items()}},
        **machine(),
        **{name: facts[name] for name in ("parameters", "dtype", "device")},
        "of_best": over("sweep"),
        "time_share": tune_seconds / sweep_seconds,
        "over_start": over("start"),
        "over_defaults": over("defaults"),
        "sweep_seconds": sweep_seconds,
        "tune_seconds": tune_seconds,
        "step_seconds": {name: spread(values) for name, values in seconds.items()},
        "samples": seconds,
        "settings": rivals,
        "tune_changes": tuned["changes"],
        "tune_trials": tuned["trials"],
        "tune_noise": tuned["noise"],
        "sweep": swept,
    }  # fmt: skip


def draw(result: dict[str, Any], file: Path) -> None:
    """Plot the combinations of the sweep in order, and the final comparison."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    swept = sorted(row["seconds"] for row in result["sweep"] if row["seconds"])
    left.plot(range(1, len(swept) + 1), swept, color="#888888", marker="o", markersize=3, label="combination")
    colors = {"sweep": "#4477aa", "tune": "#228833", "defaults": "#ccbb44", "start": "#ee6677"}
    names = {"sweep": "best of the sweep", "tune": "infinity tune", "defaults": "defaults", "start": "bad settings"}
    left.axhline(result["step_seconds"]["tune"]["median"], color=colors["tune"], label="infinity tune")
    left.set_xlabel(f"combinations of the sweep, fastest first ({result['sweep_seconds']:.0f} s)")
    left.set_ylabel("seconds per step")
    left.set_title(f"sweep, and infinity tune in {result['time_share']:.1%} of its time")
    for place, name in enumerate(colors):
        values = result["samples"][name]
        right.plot([place] * len(values), values, "o", color=colors[name], alpha=0.5)
        right.hlines(result["step_seconds"][name]["median"], place - 0.3, place + 0.3, color=colors[name], linewidth=3)
    right.set_xticks(range(len(colors)), [names[name] for name in colors])
    right.set_title(f"measured in alternation: {result['of_best']['median']:.3f} of the best of the sweep")
    for axes in (left, right):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    left.legend(frameon=False)
    figure.savefig(file, dpi=120)


def show(result: dict[str, Any]) -> None:
    """Print the table."""
    from rich.console import Console
    from rich.table import Table

    from infinity_tools.tune.search_space import describe

    console = Console()
    table = Table(title=f"{result['parameters'] / 1e6:.0f} M parameters, {result['device']}", box=None)
    for name in ("", "s/step", "min", "max", "settings"):
        table.add_column(name, justify="left" if name in ("", "settings") else "right", overflow="fold")
    defaults = result["settings"]["defaults"]
    for name, row in result["step_seconds"].items():
        changes = {key: value for key, value in result["settings"][name].items() if value != defaults[key]}
        table.add_row(name, *(f"{row[key]:.3f}" for key in ("median", "min", "max")), describe(changes, "defaults"))
    console.print(table)
    for name in ("of_best", "over_start", "over_defaults"):
        row = result[name]
        console.print(f"{name:<14}{row['median']:.3f}  ({row['min']:.3f} to {row['max']:.3f})", highlight=False)
    console.print(
        f"time_share    {result['time_share']:.3f}  ({result['tune_seconds']:.0f} of {result['sweep_seconds']:.0f} s)",
        highlight=False,
    )


def main() -> None:
    """Run the benchmark and write results/tune.json and tune.png; with `--draw`, only plot and print stored results."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tools")]
    from benchmarks.bench_step import publish

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--size", choices=tuple(SIZES), default="small", help="size of the model; use least to try the benchmark"
    )
    parser.add_argument("--points", type=int, default=0, help="number of combinations to sweep; 0: all")
    parser.add_argument("--rounds", type=int, default=9, help="rounds of the final comparison")
    parser.add_argument("--threads", type=int, default=0, help="compute threads; 0: the default of torch")
    parser.add_argument("--nvme", help="folder on the drive (default: a temporary folder in the current directory)")
    parser.add_argument("--draw", action="store_true", help="only plot and print stored results")
    parser.add_argument("--out", type=Path, default=RESULTS / "tune.json")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.rounds < 1 or options.points < 0:
        sys.exit("--rounds must be 1 or more, --points 0 or more")
    if options.draw:
        result = json.loads(options.out.read_text())
    else:
        with tempfile.TemporaryDirectory(prefix="infinity-bench-", dir=options.nvme or ".") as folder:
            result = measure(options, Path(folder).resolve())
    publish(result, options, draw, show)


if __name__ == "__main__":
    main()
