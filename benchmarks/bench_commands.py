"""Run time of commands that do not need torch, from process start to exit, as medians of alternating turns.

python benchmarks/bench_commands.py
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench_step import RESULTS, machine

COMMANDS = ("-h", "plan -h", "tune -h", "train -h", "probe -h", "doctor -h", "top -h", "migrate -h", "status -h",
            "store ls -h", "store ls .", "--version")  # fmt: skip


def seconds(words: str, folder: str) -> float:
    """Return the run time of a command in seconds."""
    program = Path(sys.executable).with_name("infinity")
    began = time.perf_counter()
    subprocess.run([program, *words.split()], cwd=folder, capture_output=True, check=True)
    return time.perf_counter() - began


def main() -> None:
    """Run the benchmark and write results/commands.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=9, help="measured turns, after one warm-up turn")
    parser.add_argument("--out", type=Path, default=RESULTS / "commands.json")
    parser.add_argument("--json", action="store_true", help="print only JSON")
    options = parser.parse_args()
    found: dict[str, list[float]] = {words: [] for words in COMMANDS}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(options.turns + 1):
            for words in COMMANDS:
                took = seconds(words, folder)
                if turn:
                    found[words].append(took)
    medians = {words: statistics.median(values) for words, values in found.items()}
    result = {"seconds": medians, "slowest": max(medians.values()), **machine()}
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    if options.json:
        print(json.dumps(result))
    else:
        for words, median in medians.items():
            print(f"{median:.3f} s  infinity {words}")


if __name__ == "__main__":
    main()
