"""Cost of saving a checkpoint, compared with writing the state once, `torch.save` and DCP.

One process trains with its state on NVMe and holds a copy of the same state as tensors in memory for `torch.save` and
DCP. Each round takes one step without and one step with a checkpoint, and then saves in every way in turn.
`checkpoint_ratio` is the time of `save_checkpoint()`, with no modified pages in the host cache, divided by the time of
writing all pages once with the same engine. `extra_bytes_ratio` is the increase that a checkpoint in every step causes
in the bytes that the kernel counts as written by this process.

    python benchmarks/bench_checkpoint.py --model llama-100m --nvme DIR
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench_step import RESULTS, build, machine, publish, spread, train_step

NAMES = {"checkpoint": "infinity checkpoint", "write": "write the state once", "save": "torch.save", "dcp": "DCP"}


class Workload:
    """A run whose host cache keeps no pages, and a copy of its state in memory."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        from infinity.config import StorageConfig
        from infinity.hugepages import transfer_memory
        from infinity.io import open_engine

        self._shape = (options.batch_tokens // options.seq, options.seq)
        memory, update = {"host_bytes": options.host_memory}, {"schedule": "in_backward"}
        self.model, self.optimizer, self._vocabulary = build(
            options, "infinity", str(folder), recompute=False, memory=memory, update=update
        )
        self.state_bytes = self.optimizer.run.layout.state_bytes
        self.folder = folder
        self._engine = open_engine(StorageConfig(paths=(str(folder),)))
        self._memory = transfer_memory(self.optimizer.run.layout.page_bytes)
        self._file = folder / "once"
        with open(self._file, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, self.state_bytes)
        self._data = self._engine.open(str(self._file))

    def state(self) -> dict[str, Any]:
        """Return copies of the master weights and moments as tensors in memory.

        The tensors are cloned because the amount of state that can be loaded at once is limited.
        """
        return {
            name: {kind: value.clone() for kind, value in self.optimizer.read_state(name).items()}
            for name, _ in self.model.named_parameters()
        }

    def step(self) -> None:
        """Train one step."""
        import torch

        train_step(self.model, self.optimizer, torch.randint(0, self._vocabulary, self._shape))

    def flush(self) -> None:
        """Write the modified pages of the host cache."""
        self.optimizer.run.pager.flush()

    def write(self) -> None:
        """Write as many bytes as the state has, with the same number of concurrent requests as a run."""
        from infinity.io import Op

        step, tickets = len(self._memory), []
        for offset in range(0, self.state_bytes, step):
            memory = self._memory[: min(step, self.state_bytes - offset)]
            tickets.append(self._engine.submit(Op.WRITE, self._data, offset, memory))
        for ticket in tickets:
            ticket.wait()
        self._engine.sync(self._data)

    def save(self, state: dict[str, Any]) -> None:
        """Save with torch.save, durably."""
        import torch

        with open(self.folder / "state.pt", "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())

    def dcp(self, state: dict[str, Any]) -> None:
        """Save with torch.distributed.checkpoint, which syncs its files."""
        import torch.distributed.checkpoint as dcp

        dcp.save(state, checkpoint_id=self.folder / "dcp", no_dist=True)

    def close(self) -> None:
        """Close the engine and the run."""
        self._engine.forget(self._data)
        self._engine.close()
        self.optimizer.close()


def timed(action: Callable[[], None]) -> float:
    """Return the seconds that an action takes."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def written() -> int:
    """Return the number of bytes that the kernel counts as written by this process."""
    import psutil

    return psutil.Process().io_counters().write_bytes


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run all rounds and return the figures."""
    import torch
    from rich.progress import Progress

    torch.manual_seed(0)
    work = Workload(options, folder)
    for _ in range(3):
        work.step()
    state = work.state()
    seconds: dict[str, list[float]] = {name: [] for name in NAMES}
    steps: dict[str, list[float]] = {"without": [], "with": []}
    nbytes: dict[str, list[int]] = {"without": [], "with": []}
    with Progress(transient=True) as progress:
        for number in progress.track(range(options.rounds + 1), description="checkpointing and saving"):
            for kind in ("without", "with"):
                work.flush()
                before, began = written(), time.perf_counter()
                work.step()
                if kind == "with":
                    work.optimizer.save_checkpoint()
                steps[kind].append(time.perf_counter() - began)
                work.flush()
                nbytes[kind].append(written() - before)
            work.step()
            work.flush()
            ways: dict[str, Callable[[], None]] = {
                "checkpoint": work.optimizer.save_checkpoint,
                "write": work.write,
                "save": lambda: work.save(state),
                "dcp": lambda: work.dcp(state),
            }
            order = list(ways)[number % len(ways) :] + list(ways)[: number % len(ways)]
            for name in order:
                seconds[name].append(timed(ways[name]))
            shutil.rmtree(folder / "dcp")
            (folder / "state.pt").unlink()
    work.close()
    return figures(work.state_bytes, *({k: v[1:] for k, v in rows.items()} for rows in (seconds, steps, nbytes)))


def figures(
    state_bytes: int, seconds: dict[str, list[float]], steps: dict[str, list[float]], nbytes: dict[str, list[int]]
) -> dict[str, Any]:
    """Return medians, ratios by round, and traffic."""

    def ratios(above: list[float], below: list[float]) -> dict[str, float]:
        return spread([one / other for one, other in zip(above, below, strict=True)])

    extra = [more / less - 1 for more, less in zip(nbytes["with"], nbytes["without"], strict=True)]
    return {
        "state_bytes": state_bytes,
        "seconds": {name: spread(values) for name, values in seconds.items()},
        "step_seconds": {name: spread(values) for name, values in steps.items()},
        "checkpoint_ratio": ratios(seconds["checkpoint"], seconds["write"]),
        "checkpoint_over_save": ratios(seconds["checkpoint"], seconds["save"]),
        "checkpoint_over_dcp": ratios(seconds["checkpoint"], seconds["dcp"]),
        "step_with_checkpoint_over_without": ratios(steps["with"], steps["without"]),
        "extra_bytes_ratio": spread(extra),
        "bytes_per_step": statistics.median(nbytes["without"]),
        "samples": {"seconds": seconds, "step_seconds": steps, "bytes": nbytes},
    }


def draw(result: dict[str, Any], file: Path) -> None:
    """Plot the median time of each way to save."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 2.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    medians = [result["seconds"][name]["median"] for name in NAMES]
    bars = axes.barh(list(NAMES.values()), medians, color=["#4477aa", "#bbbbbb", "#bbbbbb", "#bbbbbb"])
    axes.bar_label(bars, [f" {value:.3g} s" for value in medians])
    axes.invert_yaxis()
    axes.set_xlabel("seconds until the state is durable")
    axes.set_xlim(0, 1.15 * max(medians))
    axes.set_title(f"{result['config']['model']}: {result['state_bytes'] / 1e9:.2f} GB of state")
    figure.savefig(file, dpi=120)


def show(result: dict[str, Any]) -> None:
    """Print the table of results."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{result['config']['model']}, {result['state_bytes'] / 1e9:.2f} GB of state")
    for name in ("", "s (median)", "min", "max"):
        table.add_column(name, justify="left" if not name else "right")
    for name, text in NAMES.items():
        table.add_row(text, *(f"{result['seconds'][name][key]:.3f}" for key in ("median", "min", "max")))
    console = Console()
    console.print(table)
    console.print(
        f"checkpoint_ratio {result['checkpoint_ratio']['median']:.4f}, extra_bytes_ratio "
        f"{result['extra_bytes_ratio']['median']:.5f}; a step with a checkpoint takes "
        f"{result['step_with_checkpoint_over_without']['median']:.3f} times as long as one without"
    )


def main() -> None:
    """Run the benchmark and write results/checkpoint.json and checkpoint.png."""
    from infinity.units import parse_size

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-100m")
    parser.add_argument("--batch-tokens", type=int, default=256)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--host-memory", default="256MiB", help="size of the host cache")
    parser.add_argument("--rounds", type=int, default=7, help="measured rounds, after one warm-up round")
    parser.add_argument("--nvme", help="folder on the drive (default: a temporary folder in the current directory)")
    parser.add_argument("--out", type=Path, default=RESULTS / "checkpoint.json")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    options.host_memory = parse_size(options.host_memory, name="--host-memory")
    config = {key: value for key, value in vars(options).items() if key not in ("nvme", "out", "json")}
    with tempfile.TemporaryDirectory(prefix="infinity-bench-", dir=options.nvme or ".") as folder:
        result = {"config": config, **machine(), **measure(options, Path(folder))}
    publish(result, options, draw, show)


if __name__ == "__main__":
    main()
