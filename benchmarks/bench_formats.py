"""State formats: the same training in each of them; loss against fp32, bytes per parameter, seconds per step.

The model, its batches and its seed are those of `infinity train`, so what differs is the format. Writes
results/formats.json and results/formats.png.

    python benchmarks/bench_formats.py --model tiny --steps 400 --nvme DIR
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from infinity.content.format import FORMATS

RESULTS = Path(__file__).parent / "results"


def train(name: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Train in one format; return its figures and losses."""
    out = folder / name
    command = [
        *(sys.executable, "-W", "ignore", "-m", "infinity_tools", "train", "--json", "--state-format", name),
        *("--model", options.model, "--dtype", "bf16", "--steps", str(options.steps), "--out", str(out)),
        *("--host-memory", options.host_memory, "--batch-tokens", str(options.batch_tokens), "--seq", str(options.seq)),
        *("--lr", str(options.lr), "--threads", str(options.threads), "--keep", "never"),
    ]
    summary = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout)
    rows = [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]
    moved = summary["nvme_read_bytes_per_step"] + summary["nvme_written_bytes_per_step"]
    return {
        "state_bytes_per_parameter": summary["state_bytes"] / summary["parameters"],
        "moved_bytes_per_parameter": moved / summary["parameters"],
        "seconds_per_step": statistics.median(row["seconds"] for row in rows[2:]),
        "losses": [row["loss"] for row in rows],
    }


def smooth(values: list[float], width: int) -> list[float]:
    """Return means over the last `width` values."""
    return [statistics.fmean(values[max(0, end - width) : end]) for end in range(1, len(values) + 1)]


def draw(result: dict[str, Any], file: Path) -> None:
    """Draw the losses, and how far each format is from fp32."""
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(8, 7), constrained_layout=True)
    reference = smooth(result["formats"]["fp32"]["losses"], result["smoothed_over"])
    for name, found in result["formats"].items():
        losses = smooth(found["losses"], result["smoothed_over"])
        label = f"{name}: {found['moved_bytes_per_parameter']:.1f} bytes per parameter and step"
        above.plot(losses, label=label, linewidth=1)
        below.plot([a - b for a, b in zip(losses, reference, strict=True)], label=name, linewidth=1)
    above.set_ylabel("loss")
    above.legend()
    below.set_ylabel("loss above that of fp32")
    below.set_xlabel(f"step (mean of {result['smoothed_over']})")
    above.set_title(f"{result['config']['model']}, {result['config']['batch_tokens']} tokens a step")
    figure.savefig(file, dpi=120)


def main() -> None:
    """Train in every format, write the figures and the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch-tokens", type=int, default=1024)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--host-memory", default="640KiB")
    parser.add_argument("--threads", type=int, default=0, help="threads that compute; 0: torch decides")
    parser.add_argument("--smooth", type=int, default=20, help="steps over which losses are averaged")
    parser.add_argument("--nvme", help="folder on the drive; default: a temporary one here")
    parser.add_argument("--out", type=Path, default=RESULTS / "formats.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="infinity-bench-", dir=options.nvme or ".") as folder:
        formats = {name: train(name, options, Path(folder)) for name in FORMATS}
    reference = smooth(formats["fp32"]["losses"], options.smooth)
    for found in formats.values():
        apart = [abs(a - b) for a, b in zip(smooth(found["losses"], options.smooth), reference, strict=True)]
        found |= {"final_loss": smooth(found["losses"], options.smooth)[-1], "most_apart_from_fp32": max(apart)}
    config = {key: value for key, value in vars(options).items() if key not in ("nvme", "out")}
    result = {"config": config, "smoothed_over": options.smooth, "formats": formats}
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    draw(result, options.out.with_suffix(".png"))
    for name, found in formats.items():
        print(f"{name:<14}", *(f"{key} {value:.4g}" for key, value in found.items() if key != "losses"), sep="  ")


if __name__ == "__main__":
    main()
