"""Tests of docs/how-to/several-nodes.md: its commands are valid, and the Slurm example gives each node its rank."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

from torch.distributed.run import get_args_parser

PAGE = (Path(__file__).parents[2] / "docs/how-to/several-nodes.md").read_text()
BLOCKS = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)


def test_torchrun_commands_are_valid() -> None:
    """torchrun must not take an option of `infinity` as its own."""
    lines = [block.replace("\\\n", "") for block in BLOCKS if "SBATCH" not in block]
    given = [get_args_parser().parse_args(shlex.split(line.partition("torchrun ")[2])) for line in lines]
    assert [(found.nnodes, found.node_rank, found.module, found.training_script) for found in given] == [
        ("2", 0, True, "infinity_tools"),
        ("2", 0, True, "infinity_tools"),
        ("1:4", 0, True, "infinity_tools"),
    ]
    assert given[0].training_script_args == ["train", "recipe.yaml"]
    assert given[1].training_script_args == ["export", "/nvme0/run", "--out", "exported"]
    assert given[2].training_script_args == ["train", "recipe.yaml", "--resume", "auto"]


def test_slurm_example_gives_each_node_its_rank(tmp_path: Path) -> None:
    """`srun` and `scontrol` are replaced by scripts that act as on two nodes."""
    scripts = {
        "scontrol": "printf 'a\\nb\\n'",
        "srun": 'for node in 0 1; do SLURM_NODEID=$node "$@"; done',
        "torchrun": 'echo "$@"',
    }
    for name, text in scripts.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (block,) = [block for block in BLOCKS if "SBATCH" in block]
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_NNODES": "2", "SLURM_NODELIST": "[a-b]"}
    done = subprocess.run(["bash", "-euc", block], env=variables, capture_output=True, text=True, check=True)
    found = [get_args_parser().parse_args(line.split()) for line in done.stdout.splitlines()]
    assert [(one.nnodes, one.node_rank, one.master_addr) for one in found] == [("2", 0, "a"), ("2", 1, "a")]
    assert found[1].training_script_args == ["train", "recipe.yaml", "--resume", "auto"]
