"""Commands and checkpoints of a run on two nodes, each with its own drive."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

from support.command import SMALL
from support.nodes import Node, Nodes, Program


def run_on_all(
    nodes: Nodes, start: str, *words: object, order: tuple[int, ...] = (0, 1), status: int = 0
) -> list[Program]:
    """Run `torchrun START WORDS` on every node, with the node ranks of `order`; return the programs after their end."""
    options = shlex.split(start)
    assert options[:2] == ["torchrun", "--nnodes=2"]
    programs = [
        nodes[order[rank]].command(
            *_TORCHRUN, *[f"--node-rank={rank}" if word == "--node-rank=0" else word for word in options[1:]], *words
        )
        for rank in range(len(order))
    ]
    for program in programs:
        program.wait(status)
    return programs


_TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


@pytest.mark.wide
def test_printed_commands_work_without_shared_drives(tmp_path: Path) -> None:
    """A run with fixed node ranks is exported and resumed as printed. Then the two hosts change places."""
    out = tmp_path / "out"
    with Nodes(tmp_path, 2) as nodes:
        address = nodes[0].address
        start = f"torchrun --nnodes=2 --node-rank=0 --nproc-per-node=1 --master-addr={address} --master-port=29500"
        train = ["-m", "infinity_tools", *SMALL, "--nvme", nodes.local / "drive0", "--out", out]
        (text := tmp_path / "text").write_bytes(bytes(range(32, 127)) * 40)
        evaluation = ["--data", text, "--eval_data", text, "--eval_steps", "1", "--load_best_model_at_end"]
        run_on_all(nodes, start, *train, "--max_steps", "1", "--save_steps", "1", *evaluation)
        commands = json.loads((out / "summary.json").read_text())["next"]
        listed = infinity(nodes[0], "store", "ls", nodes.local / "drive0")
        assert "1 of 2 ranks; rank 1 on node1" in listed

        for name in ("export", "resume"):
            command, _, comment = commands[name].partition("  # ")
            assert command.startswith(f"{start} -m ")
            assert comment == "on each of 2 nodes, with its own --node-rank"
            run_on_all(nodes, start, *shlex.split(command.removeprefix(start)))
        assert (out / "step1/model.safetensors").exists()
        assert (out / "step1/config.json").exists()
        assert steps(out) == (2, 2)

        words = shlex.split(commands["resume"].partition("  # ")[0].removeprefix(start))
        moved = start.replace(address, nodes[1].address)
        first, _ = run_on_all(nodes, moved, *words, "--max_steps", "3", order=(1, 0))
        assert "rank 0 on node0 and rank 1 on node1, where other ranks run now" in " ".join(first.output.split())
        assert steps(out) == (3, 3)


@pytest.mark.wide
def test_nodes_may_share_a_folder(tmp_path: Path) -> None:
    """Every node can export the run, and it resumes in place after the hosts have changed places."""
    out = tmp_path / "out"
    with Nodes(tmp_path, 2) as nodes:
        start = f"torchrun --nnodes=2 --node-rank=0 --master-addr={nodes[0].address}"
        run_on_all(nodes, start, "-m", "infinity_tools", *SMALL, "--out", out, "--max_steps", "1", "--save_steps", "1")
        commands = json.loads((out / "summary.json").read_text())["next"]
        assert infinity(nodes[1], *shlex.split(commands["export"])[1:]).startswith(f"{out}/step1: step 1 of ")
        moved = start.replace(nodes[0].address, nodes[1].address)
        words = ["-m", "infinity_tools", "train", out / "recipe.yaml", "--resume", "--max_steps", "2"]
        first, _ = run_on_all(nodes, moved, *words, order=(1, 0))
        assert steps(out) == (2, 2)
        assert "copied to a new run" not in " ".join(first.output.split())


@pytest.mark.wide
def test_private_output_folders_are_rejected_on_all_nodes(tmp_path: Path) -> None:
    """Each node prints the reason, because it may have a terminal of its own."""
    with Nodes(tmp_path, 2) as nodes:
        start = f"torchrun --nnodes=2 --node-rank=0 --master-addr={nodes[0].address}"
        out = nodes.local / "out"
        for program in run_on_all(nodes, start, "-m", "infinity_tools", *SMALL, "--out", out, status=1):
            assert "Choose a folder on a file system that all nodes share" in " ".join(program.output.split())
        assert not any((node.folder / "out").exists() for node in nodes)


def infinity(node: Node, *words: object) -> str:
    """Run `infinity WORDS` on a node; return its output on one line."""
    program = node.infinity(*words)
    program.wait()
    return " ".join(program.output.split())


def steps(out: Path) -> tuple[int, int]:
    """Return the first and last step of the last run."""
    summary = json.loads((out / "summary.json").read_text())
    return summary["first_step"], summary["last_step"]
