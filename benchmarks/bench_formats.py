"""State formats compared in the same training: loss relative to fp32, bytes per parameter and seconds per step.

All trainings use the model, batches and seed of `infinity train` and differ only in the format. The results are written
to results/formats.json and results/formats.png. The benchmark also measures the cost of encoding, alternating between
torch and the compiled kernels: nanoseconds per element for each encoding, and per parameter for an update, as CPU time
of a single thread. `--costs` measures only that.

    python benchmarks/bench_formats.py --model tiny --steps 400 --nvme DIR
    python benchmarks/bench_formats.py --costs
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

from infinity.content.format import FORMATS

RESULTS = Path(__file__).parent / "results"
_ELEMENTS = 1 << 17  # encoded at once; an update decodes as many
_WIDTH, _LAYERS = 1024, 16  # shape of the model whose updates are measured, 17M parameters
_STEPS = 8


def train(name: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Train in one format and return the figures and losses."""
    out = folder / name
    command = [
        *(sys.executable, "-W", "ignore", "-m", "infinity_tools", "train", "--json", "--offload.state.format", name),
        *("--model", options.model, "--bf16", "true", "--max_steps", str(options.steps), "--out", str(out)),
        *("--host-memory", options.host_memory, "--max_length", str(options.seq), "--save_strategy", "no"),
        *(
            "--per_device_train_batch_size",
            str(options.batch_tokens // options.seq),
            "--learning_rate",
            str(options.lr),
        ),
    ]
    environment = os.environ | ({"OMP_NUM_THREADS": str(options.threads)} if options.threads else {})
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, env=environment)
    summary = json.loads(done.stdout)
    rows = [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]
    moved = summary["nvme_read_bytes_per_step"] + summary["nvme_written_bytes_per_step"]
    return {
        "state_bytes_per_parameter": summary["state_bytes"] / summary["parameters"],
        "moved_bytes_per_parameter": moved / summary["parameters"],
        "seconds_per_step": statistics.median(row["seconds"] for row in rows[2:]),
        "losses": [row["loss"] for row in rows],
    }


def nanoseconds(job: Callable[[], object], count: int) -> float:
    """Return the CPU time per element of a job that processes `count` elements, in nanoseconds."""
    begun = time.thread_time_ns()
    job()
    return (time.thread_time_ns() - begun) / count


def cost_of_encodings(rounds: int = 100) -> dict[str, Any]:
    """Return nanoseconds per element by encoding and direction, for the reference and the compiled kernels.

    Reference and compiled kernels take turns.
    """
    import torch

    from infinity.content import compiled, encoding, reference
    from infinity.content.format import ENCODINGS

    torch.set_num_threads(1)
    torch.manual_seed(0)
    values, into, found = torch.randn(_ELEMENTS), torch.empty(_ELEMENTS), compiled.prepare()
    if found.kernels is None:
        raise SystemExit(f"cannot compare with compiled encodings: {found.reason}")
    costs: dict[str, Any] = {"compile_seconds": found.seconds}
    for name in ENCODINGS:
        parts = [part.contiguous() for part in reference.encode(values, name, 1)]
        jobs: dict[str, Callable[[], object]] = {
            "encode_reference": lambda name=name: reference.encode(values, name, 1),
            "encode_compiled": lambda name=name, parts=parts: encoding.encode(values, name, 1, parts),
            "decode_reference": lambda name=name, parts=parts: reference.decode(parts, name),
            "decode_compiled": lambda name=name, parts=parts: encoding.decode(parts, name, into),
        }
        taken: dict[str, list[float]] = {job: [] for job in jobs}
        for _ in range(rounds):
            for job, run in jobs.items():
                taken[job].append(nanoseconds(run, _ELEMENTS))
        costs[name] = {job: statistics.median(each) for job, each in taken.items()}
    return costs


def cost_of_update(name: str, folder: str) -> float:
    """Return the CPU time of this process to update one parameter with AdamW, in nanoseconds.

    The state has one format, and all pages are in memory.
    """
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    import infinity
    from infinity.optim.update import Update

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)))
    for module in (*model, model):
        fully_shard(module, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    config = {
        "storage": {"paths": [folder]},
        "state": {"format": name},
        "memory": {"host_bytes": "512MiB"},
        "run": {"keep": "never"},
        "update": {"schedule": "after_backward"},
    }
    run, taken = Update.run, [0]

    def timed(self: Update, ranges: Any) -> None:
        begun = time.thread_time_ns()
        run(self, ranges)
        taken[-1] += time.thread_time_ns() - begun

    Update.run = timed
    with infinity.offload(model, optimizer, config) as paged:
        for _ in range(_STEPS):
            model(torch.randn(4, _WIDTH)).square().mean().backward()
            paged.step()
            paged.zero_grad()
            paged.save_checkpoint()  # runs pending updates
            taken.append(0)
    count = sum(param.numel() for param in model.parameters())
    dist.destroy_process_group()
    return statistics.median(taken[2:_STEPS]) / count


def costs(folder: str, rounds: int = 3) -> dict[str, Any]:
    """Return the cost of each encoding and of updates in each format, with torch and compiled kernels in turns."""
    found: dict[str, Any] = {"encodings": cost_of_encodings(), "updates": {}}
    taken: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name in FORMATS:
            for kind, switch in (("reference", "1"), ("compiled", "0")):
                command = [sys.executable, "-W", "ignore", __file__, "--update", name, "--nvme", folder]
                said = subprocess.run(
                    command,
                    stdout=subprocess.PIPE,
                    check=True,
                    text=True,
                    env=os.environ | {"NUMBA_DISABLE_JIT": switch},
                ).stdout
                taken.setdefault(f"{name} {kind}", []).append(float(said))
    for key, each in taken.items():
        name, _, kind = key.partition(" ")
        found["updates"].setdefault(name, {})[kind] = statistics.median(each)
    return found


def show_costs(found: dict[str, Any]) -> None:
    """Print the costs."""
    for name, each in found["encodings"].items():
        print(
            f"{name:<16}", *(f"{key} {value:.3g}" for key, value in each.items()) if isinstance(each, dict) else [each]
        )
    for name, each in found["updates"].items():
        print(f"update {name:<14}", *(f"{key} {value:.3g}" for key, value in each.items()), "ns per parameter")


def smooth(values: list[float], width: int) -> list[float]:
    """Return moving averages over the last `width` values."""
    return [statistics.fmean(values[max(0, end - width) : end]) for end in range(1, len(values) + 1)]


def draw(result: dict[str, Any], file: Path) -> None:
    """Plot the loss of each format, and its difference from fp32."""
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(8, 7), constrained_layout=True)
    reference = smooth(result["formats"]["fp32"]["losses"], result["smoothed_over"])
    for name, found in result["formats"].items():
        losses = smooth(found["losses"], result["smoothed_over"])
        label = f"{name}: {found['moved_bytes_per_parameter']:.1f} bytes per parameter per step"
        above.plot(losses, label=label, linewidth=1)
        below.plot([a - b for a, b in zip(losses, reference, strict=True)], label=name, linewidth=1)
    above.set_ylabel("loss")
    above.legend()
    below.set_ylabel("loss relative to fp32")
    below.set_xlabel(f"step (mean of {result['smoothed_over']})")
    above.set_title(f"{result['config']['model']}, {result['config']['batch_tokens']} tokens per step")
    figure.savefig(file, dpi=120)


def main() -> None:
    """Run the benchmark and write the figures and the plot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch-tokens", type=int, default=1024)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--host-memory", default="640KiB")
    parser.add_argument("--threads", type=int, default=0, help="compute threads; 0: the default of torch")
    parser.add_argument("--smooth", type=int, default=20, help="steps over which losses are averaged")
    parser.add_argument("--nvme", help="folder on the drive (default: a temporary folder in the current directory)")
    parser.add_argument("--out", type=Path, default=RESULTS / "formats.json")
    parser.add_argument(
        "--costs", action="store_true", help="measure only the cost of encodings and keep the other results in --out"
    )
    parser.add_argument(
        "--update", choices=FORMATS, help="only print the update time per parameter in this format, in ns"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="infinity-bench-", dir=options.nvme or ".") as folder:
        if options.update:
            print(cost_of_update(options.update, folder))
            return
        cost = costs(folder)
        show_costs(cost)
        if options.costs:
            known = json.loads(options.out.read_text()) if options.out.exists() else {}
            options.out.write_text(json.dumps({**known, "costs": cost}, indent=1) + "\n")
            return
        formats = {name: train(name, options, Path(folder)) for name in FORMATS}
    reference = smooth(formats["fp32"]["losses"], options.smooth)
    for found in formats.values():
        apart = [abs(a - b) for a, b in zip(smooth(found["losses"], options.smooth), reference, strict=True)]
        found |= {"final_loss": smooth(found["losses"], options.smooth)[-1], "most_apart_from_fp32": max(apart)}
    config = {key: value for key, value in vars(options).items() if key not in ("nvme", "out", "costs", "update")}
    result = {"config": config, "smoothed_over": options.smooth, "formats": formats, "costs": cost}
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    draw(result, options.out.with_suffix(".png"))
    for name, found in formats.items():
        print(f"{name:<14}", *(f"{key} {value:.4g}" for key, value in found.items() if key != "losses"), sep="  ")


if __name__ == "__main__":
    main()
