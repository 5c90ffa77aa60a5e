"""Time of the first two steps relative to later steps: read ahead, with clipping, on demand, and FSDP2 in memory.

Each start is a separate process, and the variants take turns. Later steps are all steps from the third one on, because
the second step still runs updates of the first in its forward pass, and because the host cache fills with the pages
that the plan keeps.

    python benchmarks/bench_first_step.py --model llama-100m --tokens 64,512 --nvme DIR
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent)]

from bench_step import RESULTS, apart, build, machine, spread, train_step  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import Progress  # noqa: E402
from rich.table import Table  # noqa: E402

WAYS = {
    "infinity": {},
    "infinity, clipping": {"clip": True},
    "infinity, on demand": {"on_demand": True},
    "FSDP2 in memory": {"variant": "fsdp_memory"},
}  # fmt: skip
FLUSHED = 2
"""Number of first steps, each of which is compared with the steps after them."""


def start(
    pipe: Any, options: argparse.Namespace, tokens: int, variant: str = "infinity", clip: bool = False,
    on_demand: bool = False,
) -> None:  # fmt: skip
    """Build the model, train for a few steps, and send the seconds of each through the pipe."""
    warnings.simplefilter("ignore")
    import torch

    from infinity.optim.planning import StepPlanner

    if on_demand:
        StepPlanner.expect = lambda *_: None  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory(dir=options.nvme) as folder:
        sections = {"memory": {"host_bytes": options.host_memory}}
        model, optimizer, vocabulary = build(options, variant, folder, **sections)
        seconds = []
        for number in range(FLUSHED + options.steps):
            torch.manual_seed(number)
            batch = torch.randint(0, vocabulary, (max(1, tokens // options.seq), min(tokens, options.seq)))
            began = time.perf_counter()
            train_step(model, optimizer, batch, clip=clip)
            seconds.append(time.perf_counter() - began)
        if variant == "infinity":
            optimizer.close()
    pipe.send(seconds)


def main() -> None:
    """Run the benchmark and write results/first_step.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-100m")
    parser.add_argument("--tokens", default="64,512", help="tokens per step")
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--host-memory", default="256MiB")
    parser.add_argument("--steps", type=int, default=5, help="later steps, with which the first two are compared")
    parser.add_argument("--starts", type=int, default=3, help="starts of each variant")
    parser.add_argument("--nvme", type=Path, default=Path())
    parser.add_argument("--out", type=Path, default=RESULTS / "first_step.json")
    parser.add_argument("--json", action="store_true", help="print only JSON")
    options = parser.parse_args()
    console = Console(stderr=True)
    counts = [int(count) for count in options.tokens.split(",")]
    found: dict[tuple[int, str], list[list[float]]] = {}
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("starts", total=options.starts * len(WAYS) * len(counts))
        for _ in range(options.starts):
            for count in counts:
                for name, how in WAYS.items():
                    found.setdefault((count, name), []).append(apart(start, options, count, **how))
                    progress.advance(task)
    rows: dict[str, dict[str, Any]] = {}
    table = Table("tokens", "", "later steps", "first / later (range)", "second / later (range)")
    for (count, name), starts in found.items():
        others = [statistics.median(seconds[FLUSHED:]) for seconds in starts]
        over = [
            spread([seconds[number] / other for seconds, other in zip(starts, others, strict=True)])
            for number in range(FLUSHED)
        ]
        rows.setdefault(f"{count} tokens", {})[name] = {
            "step_seconds": statistics.median(others), "first_over_others": over[0], "second_over_others": over[1],
        }  # fmt: skip
        shown = [f"{ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})" for ratio in over]
        table.add_row(str(count), name, f"{statistics.median(others):.2f} s", *shown)
    result = {"model": options.model, "host_memory": options.host_memory, "rows": rows, "machine": machine()}
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    if options.json:
        print(json.dumps(result))
    else:
        Console().print(table)


if __name__ == "__main__":
    main()
