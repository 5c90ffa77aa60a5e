"""Memory, time and traffic of a step with activations in memory and on NVMe, by the number of tokens.

A Llama with many layers trains with `infinity.micro_batches`, one sequence per slice, so that only the activations
between layers grow with the number of tokens. Each row is measured in its own process.

    python benchmarks/bench_activations.py --tokens 4096,65536 --nvme DIR
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

import psutil  # noqa: E402
from bench_step import RESULTS, apart, machine  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import Progress  # noqa: E402

from infinity.units import MIB  # noqa: E402
from infinity_tools.summary import peak_rss  # noqa: E402
from infinity_tools.tables import table  # noqa: E402

TIERS = ("device", "nvme")


def train(pipe: Any, options: argparse.Namespace, tokens: int, tier: str) -> None:
    """Train for a few steps and send the figures of a step through the pipe."""
    warnings.simplefilter("ignore")
    import torch
    from transformers import LlamaConfig

    import infinity

    torch.set_num_threads(options.threads)
    config = LlamaConfig(
        vocab_size=4096, hidden_size=options.hidden, intermediate_size=2 * options.hidden,
        num_hidden_layers=options.layers, num_attention_heads=options.hidden // 64, max_position_embeddings=options.seq,
        architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    model = infinity.from_config(config)
    model.train()
    infinity.micro_batches(model, tokens // options.seq)
    with tempfile.TemporaryDirectory(dir=options.nvme) as folder:
        settings = {
            "storage": {"paths": [folder]},
            "memory": {"host_bytes": options.host_memory},
            "activations": {"tier": tier},
        }
        optimizer = infinity.offload(model, torch.optim.AdamW(model.parameters(), lr=1e-4), settings)
        before, seconds = psutil.Process().memory_info().rss, []
        for step in range(options.steps):
            torch.manual_seed(step)
            batch = torch.randint(0, 4096, (tokens // options.seq, options.seq))
            began = time.perf_counter()
            model(input_ids=batch, labels=batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.perf_counter() - began)
        activations = optimizer.run.activation_traffic
        found = {
            "peak_bytes": peak_rss(),
            "grown_bytes": peak_rss() - before,
            "step_seconds": statistics.median(seconds[1:]),
            "moved_bytes": activations.read + activations.written,
            "kept_bytes": options.layers * tokens * options.hidden * 2,  # computed in bf16
            "stalled_seconds": statistics.median(record.stall_seconds for record in optimizer.records[1:]),
        }
        optimizer.close()
    pipe.send(found)


def main() -> None:
    """Measure and write results/activations.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", default="4096,65536", help="tokens per step")
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--host-memory", default="128MiB")
    parser.add_argument("--steps", type=int, default=3, help="steps per run; the first is not timed")
    parser.add_argument("--threads", type=int, default=1, help="compute threads; the remaining cores serve storage")
    parser.add_argument("--nvme", type=Path, default=Path())
    parser.add_argument("--out", type=Path, default=RESULTS / "activations.json")
    parser.add_argument("--json", action="store_true", help="print only JSON")
    options = parser.parse_args()
    console = Console(stderr=True)
    counts = [int(count) for count in options.tokens.split(",")]
    rows: dict[str, dict[str, Any]] = {}
    shown: list[tuple[str, ...]] = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("training runs", total=len(counts) * len(TIERS))
        for count in counts:
            for tier in TIERS:
                found = rows.setdefault(f"{count} tokens", {})[tier] = apart(train, options, count, tier)
                progress.advance(task)
                peak, grown, kept, moved = (
                    f"{found[f'{name}_bytes'] / MIB:.0f}" for name in ("peak", "grown", "kept", "moved")
                )
                seconds, stalled = f"{found['step_seconds']:.1f}", f"{found['stalled_seconds']:.2f}"
                shown.append((str(count), tier, peak, grown, seconds, stalled, kept, moved))
    result = {
        "layers": options.layers, "hidden": options.hidden, "sequence": options.seq,
        "host_memory": options.host_memory, "rows": rows, "machine": machine(),
    }  # fmt: skip
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    if options.json:
        print(json.dumps(result))
    else:
        headings = (">tokens", "activations", ">peak", ">grown", ">s/step", ">stalled (s)", ">saved", ">NVMe traffic")
        Console().print(table("per step; sizes in MiB", headings, shown))


if __name__ == "__main__":
    main()
