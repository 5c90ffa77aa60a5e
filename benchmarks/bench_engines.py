"""The engines in training: steps of one model through threads, io_uring, and io_uring with one ring, in turns.

All are alive at once, each in a process of its own with a run of its own; a turn is two steps, of which the second
counts, so that it begins with what the first one has left in flight. Ratios are of one round, to the first engine.

    python benchmarks/bench_engines.py --nvme DIR [--nvme DIR] --tokens 16 --host-memory 96MiB
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
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

ENGINES = {"threads": ("threads", 0), "io_uring": ("io_uring", 0), "io_uring, one ring": ("io_uring", 1)}
"""By name, the setting and how many rings there are; 0: as many as by default."""
LOOPS_BYTES = 12 << 30
"""Size of all loop devices together; the state of all engines' runs is on them."""


def train(pipe: Any, options: argparse.Namespace, engine: str, rings: int, folders: list[str]) -> None:
    """Take turns as the pipe asks for them, and answer with the seconds of the last step of each."""
    warnings.simplefilter("ignore")
    import torch

    from infinity.io import UringEngine

    if rings:
        UringEngine.__init__.__kwdefaults__["rings"] = rings  # type: ignore[misc]
    sections = {"storage": {"paths": folders, "engine": engine}, "memory": {"host_bytes": options.host_memory}}
    model, optimizer, vocabulary = build(options, "infinity", folders[0], **sections)
    pipe.send("ready")
    number = 0
    while pipe.recv():
        for _ in range(TURN):
            torch.manual_seed(number)
            tokens = torch.randint(0, vocabulary, (1, options.tokens))
            began = time.perf_counter()
            train_step(model, optimizer, tokens)
            seconds = time.perf_counter() - began
            number += 1
        while any(optimizer.run.pager.in_flight().values()):  # what is in flight is not to slow down the next one
            time.sleep(0.01)
        pipe.send(seconds)
    optimizer.close()


def main() -> None:
    """Measure and write results/engines.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-100m")
    parser.add_argument("--tokens", type=int, default=16, help="few: so that the drive is what a step waits for")
    parser.add_argument("--host-memory", default="96MiB")
    parser.add_argument("--nvme", type=Path, action="append", help="a folder on each drive")
    parser.add_argument("--loops", type=int, default=0, help="instead of --nvme: so many loop devices in memory (root)")
    parser.add_argument("--rounds", type=int, default=20, help="rounds that count; one before them does not")
    parser.add_argument("--out", type=Path, default=RESULTS / "engines.json")
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")
    options = parser.parse_args()
    context, console = mp.get_context("spawn"), Console(stderr=True)
    with ExitStack() as stack:
        loops = [stack.enter_context(loop_device(LOOPS_BYTES // options.loops)) for _ in range(options.loops)]
        roots = [stack.enter_context(tempfile.TemporaryDirectory(dir=at)) for at in loops or options.nvme or [Path()]]
        pipes, processes = {}, []
        for name, (engine, rings) in ENGINES.items():
            folders = [f"{root}/{name.replace(', ', '-').replace(' ', '-')}" for root in roots]
            for folder in folders:
                Path(folder).mkdir()
            pipes[name], theirs = context.Pipe()
            arguments = (theirs, options, engine, rings, folders)
            processes.append(context.Process(target=train, args=arguments, daemon=True))
            processes[-1].start()
            theirs.close()  # so that one that has failed is not waited for
            pipes[name].recv()
        seconds: dict[str, list[float]] = {name: [] for name in ENGINES}
        names = list(ENGINES)
        for number in track(range(options.rounds + 1), "rounds", console=console, transient=True):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                pipes[name].send(True)
                taken = pipes[name].recv()
                if number:
                    seconds[name].append(taken)
        for pipe in pipes.values():
            pipe.send(False)
        for process in processes:
            process.join()
    base = seconds[names[0]]
    rows = {
        name: {
            "step_seconds": spread(found),
            "over_threads": spread([one / other for one, other in zip(found, base, strict=True)]),
        }
        for name, found in seconds.items()
    }
    result = {
        "model": options.model, "tokens": options.tokens, "host_memory": options.host_memory,
        "drives": len(roots), "loops": options.loops, "rows": rows, "machine": machine(),
    }  # fmt: skip
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    if options.json:
        print(json.dumps(result))
        return
    table = Table("engine", "step, median", "over threads", "quartiles")
    for name, row in rows.items():
        quarters = statistics.quantiles([one / other for one, other in zip(seconds[name], base, strict=True)], n=4)
        table.add_row(
            name, f"{row['step_seconds']['median']:.2f} s", f"{row['over_threads']['median']:.3f}",
            f"{quarters[0]:.2f} to {quarters[2]:.2f}",
        )  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    main()
