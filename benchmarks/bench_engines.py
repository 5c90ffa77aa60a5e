"""The engines in training and idle: threads, io_uring and what `auto` chooses, in turns, on one or several ranks.

All are alive at once, each in processes of its own with a run of its own. A turn is two steps, of which the second
counts, so that it begins with what the first one has left in flight; then, with nothing computing, half reads and half
writes of 1 MiB and of a page. Ratios are of one round, to the first engine; above 1 they are slower steps, and faster
transfers. `auto_over_better` is `auto` over the engine with the shorter steps: where `auto` is that engine, what it
departs from 1 by is the noise of the benchmark.

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
import time
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent)]

from bench_step import RESULTS, TURN, build, machine, spread, train_step  # noqa: E402
from loopdev import loop_device  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import track  # noqa: E402
from rich.table import Table  # noqa: E402

from infinity import torchrun  # noqa: E402
from infinity.units import MIB  # noqa: E402

ENGINES = {"threads": ("threads", 0), "io_uring": ("io_uring", 0), "auto": ("auto", 0)}
"""By name, the setting and how many rings there are; 0: as many as by default."""
ONE_RING = {"io_uring, one ring": ("io_uring", 1)}
IDLE_SECONDS, IDLE_BYTES = 0.25, 128 << 20
"""Length of a measurement without computation, and the size of its file on each path."""
TASKS = ("step", "1 MiB", "page")
LOOPS_BYTES = 12 << 30
"""Size of all loop devices together; the state of all engines' runs is on them."""


def train(pipe: Any, options: argparse.Namespace, engine: str, rings: int, folders: list[str], rank: int) -> None:
    """Take turns as the pipe asks for them; answer with the seconds of the last step, and idle bytes per second."""
    warnings.simplefilter("ignore")
    import torch

    from infinity.io import UringEngine
    from infinity.io.probe.bench import open_bench
    from infinity.io.probe.points import Load, Point

    if rings:
        UringEngine.__init__.__kwdefaults__["rings"] = rings  # type: ignore[misc]
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.ranks > 1:
        os.environ |= torchrun.variables(rank, options.ranks, pipe.recv())
    with tempfile.TemporaryDirectory() as runtime:  # nothing is measured before
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
                    with files.through(chosen, points[task]) as bench:
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
                while any(optimizer.run.pager.in_flight().values()):  # it is not to slow down the next one
                    time.sleep(0.01)
                pipe.send(seconds)
        optimizer.close()


class Variant:
    """An engine's run: a process for each rank."""

    def __init__(self, options: argparse.Namespace, engine: str, rings: int, folders: list[str]) -> None:
        context = mp.get_context("spawn")
        self._pipes, self._processes = [], []
        for rank in range(options.ranks):
            ours, theirs = context.Pipe()
            arguments = (theirs, options, engine, rings, folders, rank)
            self._processes.append(context.Process(target=train, args=arguments, daemon=True))
            self._processes[-1].start()
            theirs.close()  # so that one that has failed is not waited for
            self._pipes.append(ours)
        if options.ranks > 1:
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
            self._tell(port)
        self.facts = self._answers()[0]
        """Of the first rank."""

    def do(self, task: str) -> float:
        """Do a task on all ranks at once: seconds of the slowest for a step, bytes per second of all for others."""
        self._tell(task)
        return max(self._answers()) if task == "step" else sum(self._answers())

    def end(self) -> None:
        """Close the run."""
        self._tell("")
        for process in self._processes:
            process.join()

    def _tell(self, message: str | int) -> None:
        for pipe in self._pipes:
            pipe.send(message)

    def _answers(self) -> list[Any]:
        return [pipe.recv() for pipe in self._pipes]


def main() -> None:
    """Measure and write results/engines.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-100m")
    parser.add_argument("--tokens", type=int, default=16, help="few: so that the drive is what a step waits for")
    parser.add_argument(
        "--dtype", choices=("bf16", "fp32"), default="bf16", help="what computes; without AVX-512, fp32"
    )
    parser.add_argument("--host-memory", default="96MiB")
    parser.add_argument("--nvme", type=Path, action="append", help="a folder on each drive")
    parser.add_argument("--loops", type=int, default=0, help="instead of --nvme: so many loop devices in memory (root)")
    parser.add_argument("--threads", type=int, default=0, help="that compute, of each rank; 0: as many as torch takes")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--one-ring", action="store_true", help="io_uring with one ring, too")
    parser.add_argument("--rounds", type=int, default=20, help="rounds that count; one before them does not")
    parser.add_argument("--out", type=Path, default=RESULTS / "engines.json")
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")
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
    table = Table("engine", "step, median", "over threads", "quartiles", *(f"idle, {task}" for task in TASKS[1:]))
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
    """Return one engine over another, round by round."""
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
    """Return the steps of `auto` over those of the engine whose steps are shorter, by their median ratio."""
    better = "io_uring" if statistics.median(ratios(found, "io_uring", "step")) < 1 else "threads"
    return spread(ratios(found, "auto", "step", better))


if __name__ == "__main__":
    main()
