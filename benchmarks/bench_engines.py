"""I/O engines during training and on an idle machine: threads, io_uring and `auto`, on one or several ranks.

All engines are alive at the same time, each with its own run in its own processes, and take turns. A turn consists of
two steps, of which the second is timed, so that the timed step starts with the transfers that the first one has left in
flight. Each turn then measures, without computation, a load of half reads and half writes in blocks of 1 MiB and of one
page. Ratios compare an engine with the first engine in the same round: above 1, steps are slower, and transfers are
faster. `auto_over_better` compares `auto` with the engine that has the shorter steps. If `auto` chose that engine, the
deviation from 1 is the noise of the benchmark.

    python benchmarks/bench_engines.py --nvme DIR [--nvme DIR] --tokens 16 --host-memory 96MiB [--ranks 2]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import socket
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent)]

from bench_step import RESULTS, TURN, build, machine, spread, train_step  # noqa: E402
from loopdev import loop_device  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import track  # noqa: E402
from rich.table import Table  # noqa: E402

from infinity import torchrun  # noqa: E402
from infinity.config import StorageConfig  # noqa: E402
from infinity.io.probe.bench import Bench, open_bench  # noqa: E402
from infinity.io.probe.points import Load, Point  # noqa: E402
from infinity.io.select import open_engine  # noqa: E402
from infinity.units import MIB  # noqa: E402

ENGINES = {"threads": ("threads", 0), "io_uring": ("io_uring", 0), "auto": ("auto", 0)}
"""Setting `storage.engine` and number of rings, by name; 0 rings selects the default."""
ONE_RING = {"io_uring, one ring": ("io_uring", 1)}
IDLE_SECONDS, IDLE_BYTES = 0.25, 128 << 20
"""Duration of a measurement without computation, and the size of its file on each path."""
TASKS = ("step", "1 MiB", "page")
LOOPS_BYTES = 12 << 30
"""Total size of all loop devices, which store the runs of all engines."""


@contextmanager
def through(bench: Bench, engine: str, point: Point) -> Iterator[Bench]:
    """Open the files of a bench with a different engine, one engine for all files as in a run."""
    targets = list(bench.targets.values())
    settings = StorageConfig(
        paths=tuple(bench.targets), engine=engine, request_bytes=point.block_bytes, queue_depth=point.depth
    )  # type: ignore[arg-type]
    other = open_engine(settings)
    try:
        for target in targets:
            other.register(target.memory)
        files = [replace(one, engine=other, file=other.open(f"/proc/self/fd/{one.file.fd}")) for one in targets]
        yield Bench(files, threading.Event(), bench.written)
    finally:
        other.close()


def train(pipe: Any, options: argparse.Namespace, engine: str, rings: int, folders: list[str], rank: int) -> None:
    """Run tasks as the pipe requests them; answer with the seconds of the last step, or with idle bytes per second."""
    warnings.simplefilter("ignore")
    import torch

    from infinity.io import UringEngine

    if rings:
        UringEngine.__init__.__kwdefaults__["rings"] = rings  # type: ignore[misc]
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.ranks > 1:
        os.environ |= torchrun.variables(rank, options.ranks, pipe.recv())
    with tempfile.TemporaryDirectory() as runtime:  # without stored probe results
        model, optimizer, vocabulary = build(
            options, "infinity", folders[0], dtype=options.dtype,
            storage={"paths": folders, "engine": engine}, memory={"host_bytes": options.host_memory},
            run={"keep": "never", "retained_checkpoints": 0}, telemetry={"runtime_dir": runtime},
        )  # fmt: skip
        chosen, page = optimizer.run.engine.name, optimizer.run.layout.page_bytes
        points = {
            name: Point(load=Load.BOTH, block_bytes=block, depth=32) for name, block in (("1 MiB", MIB), ("page", page))
        }
        number = 0
        with open_bench(folders, list(points.values()), file_bytes=max(IDLE_BYTES, 64 * page), engine=chosen) as files:
            pipe.send({"engine": chosen, "page_bytes": page})
            while task := pipe.recv():
                if task != "step":
                    with through(files, chosen, points[task]) as bench:
                        found = bench.measure(points[task], seconds=IDLE_SECONDS)
                    pipe.send(sum(one.bytes_per_second for one in found.values()))
                    continue
                for _ in range(TURN):
                    torch.manual_seed(number)
                    tokens = torch.randint(0, vocabulary, (1, options.tokens))
                    began = time.perf_counter()
                    train_step(model, optimizer, tokens)
                    seconds = time.perf_counter() - began
                    number += 1
                while any(optimizer.run.pager.in_flight().values()):  # so that they do not slow down the next variant
                    time.sleep(0.01)
                pipe.send(seconds)
        optimizer.close()


class Variant:
    """The run of one engine, with one process per rank."""

    def __init__(self, options: argparse.Namespace, engine: str, rings: int, folders: list[str]) -> None:
        context = mp.get_context("spawn")
        self._pipes, self._processes = [], []
        for rank in range(options.ranks):
            ours, theirs = context.Pipe()
            arguments = (theirs, options, engine, rings, folders, rank)
            self._processes.append(context.Process(target=train, args=arguments, daemon=True))
            self._processes[-1].start()
            theirs.close()  # so that recv() raises EOFError if the process has failed
            self._pipes.append(ours)
        if options.ranks > 1:
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
            self._tell(port)
        self.facts = self._answers()[0]
        """Properties of the run, from rank 0."""

    def do(self, task: str) -> float:
        """Run a task on all ranks at the same time.

        Returns:
            For a step, the seconds of the slowest rank; for other tasks, the bytes per second of all ranks.
        """
        self._tell(task)
        return max(self._answers()) if task == "step" else sum(self._answers())

    def end(self) -> None:
        """Close the run and wait for its processes."""
        self._tell("")
        for process in self._processes:
            process.join()

    def _tell(self, message: str | int) -> None:
        for pipe in self._pipes:
            pipe.send(message)

    def _answers(self) -> list[Any]:
        return [pipe.recv() for pipe in self._pipes]


def main() -> None:
    """Run the benchmark and write results/engines.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-100m")
    parser.add_argument("--tokens", type=int, default=16, help="tokens per step; few, so that the drive limits a step")
    parser.add_argument(
        "--dtype", choices=("bf16", "fp32"), default="bf16", help="compute dtype; use fp32 without AVX-512"
    )
    parser.add_argument("--host-memory", default="96MiB")
    parser.add_argument("--nvme", type=Path, action="append", help="folder on a drive; repeatable")
    parser.add_argument(
        "--loops", type=int, default=0, help="use this many loop devices in memory instead of --nvme (root only)"
    )
    parser.add_argument("--threads", type=int, default=0, help="compute threads per rank; 0: the default of torch")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--one-ring", action="store_true", help="also measure io_uring with one ring")
    parser.add_argument("--rounds", type=int, default=20, help="measured rounds, after one warm-up round")
    parser.add_argument("--out", type=Path, default=RESULTS / "engines.json")
    parser.add_argument("--json", action="store_true", help="print only JSON")
    options = parser.parse_args()
    console = Console(stderr=True)
    engines = ENGINES | (ONE_RING if options.one_ring else {})
    with ExitStack() as stack:
        loops = [stack.enter_context(loop_device(LOOPS_BYTES // options.loops)) for _ in range(options.loops)]
        roots = [stack.enter_context(tempfile.TemporaryDirectory(dir=at)) for at in loops or options.nvme or [Path()]]
        variants: dict[str, Variant] = {}
        for name, (engine, rings) in engines.items():
            folders = [f"{root}/{name.replace(', ', '-').replace(' ', '-')}" for root in roots]
            for folder in folders:
                Path(folder).mkdir()
            variants[name] = Variant(options, engine, rings, folders)
        found: dict[str, dict[str, list[float]]] = {name: {task: [] for task in TASKS} for name in variants}
        names = list(variants)
        for number in track(range(options.rounds + 1), "rounds", console=console, transient=True):
            for task in TASKS:
                for name in names[number % len(names) :] + names[: number % len(names)]:
                    measured = variants[name].do(task)
                    if number:
                        found[name][task].append(measured)
        for variant in variants.values():
            variant.end()
    result = {
        "model": options.model, "tokens": options.tokens, "dtype": options.dtype, "threads": options.threads,
        "host_memory": options.host_memory, "ranks": options.ranks,
        "drives": len(roots), "loops": options.loops, "page_bytes": variants["auto"].facts["page_bytes"],
        "auto": variants["auto"].facts["engine"], "rows": {name: row(found, name) for name in names},
        "auto_over_better": over_better(found), "machine": machine(),
    }  # fmt: skip
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    if options.json:
        print(json.dumps(result))
        return
    table = Table("engine", "median step", "relative to threads", "quartiles", *(f"idle, {task}" for task in TASKS[1:]))
    for name in names:
        shown = ratios(found, name, "step")
        quarters = statistics.quantiles(shown, n=4)
        idle = [
            f"{statistics.median(found[name][task]) / 1e9:.2f} GB/s, {statistics.median(ratios(found, name, task)):.3f}"
            for task in TASKS[1:]
        ]
        table.add_row(
            f"{name} ({result['auto']})" if name == "auto" else name,
            f"{statistics.median(found[name]['step']):.2f} s", f"{statistics.median(shown):.3f}",
            f"{quarters[0]:.2f} to {quarters[2]:.2f}", *idle,
        )  # fmt: skip
    Console().print(table)


def ratios(found: dict[str, dict[str, list[float]]], name: str, task: str, over: str = "threads") -> list[float]:
    """Return the figures of one engine divided by the figures of another, by round."""
    return [one / other for one, other in zip(found[name][task], found[over][task], strict=True)]


def row(found: dict[str, dict[str, list[float]]], name: str) -> dict[str, Any]:
    """Return the figures of an engine."""
    return {
        "step_seconds": spread(found[name]["step"]),
        "over_threads": spread(ratios(found, name, "step")),
        "idle": {
            task: {
                "bytes_per_second": spread(found[name][task]),
                "over_threads": spread(ratios(found, name, task)),
            }
            for task in TASKS[1:]
        },
    }


def over_better(found: dict[str, dict[str, list[float]]]) -> dict[str, float]:
    """Return the step time of `auto` relative to the engine with the shorter steps, by their median ratio."""
    better = "io_uring" if statistics.median(ratios(found, "io_uring", "step")) < 1 else "threads"
    return spread(ratios(found, "auto", "step", better))


if __name__ == "__main__":
    main()
