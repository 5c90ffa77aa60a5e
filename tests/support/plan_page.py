"""Generated blocks of docs/how-to/plan.md. Run as a script, it updates the page."""

from __future__ import annotations

import importlib.util
import json
import shlex
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SAMPLE = shlex.split(
    "plan --parameters 70e9 --layers 80 --hidden 8192 --vocabulary 128256 --host-memory 256GiB "
    "--nvme-bandwidth 7e9/5e9 --nvme-count 4 --gpu h100 --update-cores 8 --batch-tokens 32768"
)

NODES = shlex.split(
    "plan --parameters 7e9 --layers 32 --hidden 4096 --vocabulary 32000 --nvme-bandwidth 7e9/5e9 --host-memory 16GiB "
    "--gpu rtx4090 --ranks 2 --nodes 2 --batch-tokens 131072 --interconnect 10GbE"
)
"""Command whose comparison of shardings the page contains."""


def shardings(output: str) -> str:
    """Return the comparison of shardings in the output of `infinity plan`, without trailing spaces."""
    start = output.index("sharding over")
    return "\n".join(line.rstrip() for line in output[start:].split("\n\n")[0].splitlines())


def errors(result: dict[str, Any]) -> str:
    """Return the table of prediction errors."""
    rows = [
        ("bytes per step, before the run", "bytes_error"),
        ("seconds per step, from the bandwidth and the speed of computation in the run", "time_error"),
        ("seconds per step, before the run, from two seconds of the drive and three layers", "before_error"),
    ]
    lines = [f"| error in {len(result['setups'])} setups | median | worst |", "|---|---|---|"]
    lines += [f"| {label} | {result[f'{key}_median']:.1%} | {result[f'{key}_worst']:.1%} |" for label, key in rows]
    return "\n".join(lines)


def paper(result: dict[str, Any]) -> str:
    """Return the table of published setups, as printed by the benchmark."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    spec = importlib.util.spec_from_file_location("paper_plan", ROOT / "benchmarks" / "paper_plan.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["paper_plan"] = module
    spec.loader.exec_module(module)
    return module.table(result)


def main() -> None:
    """Regenerate the blocks of docs/how-to/plan.md."""
    import os
    import re

    os.environ["COLUMNS"] = "80"
    from support.command import run_here

    page = ROOT / "docs" / "how-to" / "plan.md"
    results = ROOT / "benchmarks" / "results"
    sample = "\n".join(line.rstrip() for line in run_here(*SAMPLE).output.splitlines())
    blocks = {
        "sample": f"```\n{sample}\n```",
        "shardings": f"```\n{shardings(run_here(*NODES, '--no-changes').output)}\n```",
        "errors": errors(json.loads((results / "plan.json").read_text())),
        "paper": paper(json.loads((results / "plan-paper.json").read_text())),
    }
    text = page.read_text()
    for name, block in blocks.items():
        pattern = rf"(<!-- {name} -->\n)(?:```\n.*?\n```|.*?)(?=\n\n[A-Z!#`])"
        text = re.sub(pattern, lambda found, block=block: found[1] + block, text, count=1, flags=re.DOTALL)
    page.write_text(text)


if __name__ == "__main__":
    main()
