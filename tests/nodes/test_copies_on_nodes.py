"""Daemons copy checkpoints between nodes, and a run survives the loss of a node with its drive."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch.distributed as dist

from infinity.checkpoint.parity import parities_in
from support.daemon_process import until
from support.node_failures import NodeRun
from support.nodes import Node, Nodes
from support.ranks import RankPool
from support.session import EVERY, Session
from support.tables import WIDE

COPIES = {"copies": 1, "resume": "auto"}


def start_daemons(nodes: Sequence[Node] | Nodes) -> None:
    """Start infinityd with copies on nodes."""
    for node in nodes:
        (node.folder / "infinityd.toml").write_text('[copies]\nhost = "eth0"\n')
        node.daemon("--config", str(node.local / "infinityd.toml"))


def wait_for_copies(nodes: Nodes, run: NodeRun) -> None:
    """Wait until all nodes store a complete copy of the same checkpoint, or a rank has exited."""

    def identities(node: Node) -> set[str]:
        return {parity.contents.identity for parity in parities_in((node.folder / "nvme0").glob("2*"))}

    def ended() -> bool:
        return any(program.poll() is not None for program in run.programs)

    until(lambda: ended() or bool(set.intersection(*map(identities, nodes))), 900)
    assert not ended(), [program.output for program in run.programs]


def keep(nodes: Nodes, place: Path) -> Path:
    """Copy the drives of all nodes."""
    for node in nodes:
        shutil.copytree(node.folder / "nvme0", place / node.name / "nvme0")
    return place


def resume(folder: str, step: int, count: int) -> dict[int, str]:
    """Resume from the drives that `keep` has copied; return the losses by step. Called on every rank."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    with Session(Path(folder) / f"node{rank}", run={"resume": "latest", "resume_step": step}) as session:
        return {step + number: session.step().hex() for number in range(1, count + 1)}


@pytest.mark.slow
def test_run_survives_the_loss_of_a_node_with_its_drive(pair: RankPool, tmp_path: Path) -> None:
    """It resumes on the remaining node, and on two nodes of which one is empty. Both continue as if it had not been
    lost.
    """
    with Nodes(tmp_path, 2) as nodes:
        start_daemons(nodes)
        run = NodeRun(nodes, run=COPIES)
        run.wait_for_steps(EVERY + 1)
        wait_for_copies(nodes, run)
        nodes[1].kill()
        run.programs[0].wait(1)
        before = keep(nodes, tmp_path / "before")
        shutil.rmtree(nodes[1].folder / "nvme0")

        alone = NodeRun(nodes[:1], run={"resume": "latest", "keep": "never"})
        alone.wait_for_steps(2)
        alone.stop()
        alone.programs[0].wait()
        losses = alone.losses()

        start_daemons(nodes[1:])
        both = NodeRun(nodes, run=COPIES)
        both.wait_for_steps(2)
        both.stop()
        for program in both.programs:
            program.wait()
        assert "computed from copies" in both.programs[0].output
        assert "could not be copied" not in both.programs[0].output

    step = min(both.losses()) - 1
    assert step % EVERY == 0
    assert step == min(losses) - 1
    expected = pair.run(resume, str(before), step, 2)
    for rank in (0, 1):
        assert {number: both.losses(rank)[number] for number in expected[rank]} == expected[rank]
    one = tmp_path / "one"
    for name in ("node0", "node1"):
        shutil.copytree(before / name / "nvme0", one / "node0/nvme0", dirs_exist_ok=True)
    assert resume(str(one), step, 2).items() <= losses.items()


@pytest.mark.slow
@pytest.mark.parametrize("_", [pytest.param(0, marks=WIDE)])
def test_any_of_three_nodes_may_be_lost(_: int, tmp_path: Path) -> None:
    """Each node stores the parity of parts of the two other nodes."""
    with Nodes(tmp_path, 3) as nodes:
        start_daemons(nodes)
        run = NodeRun(nodes, run={**COPIES, "copy_nodes": 3})
        run.wait_for_steps(EVERY)
        run.stop()
        for program in run.programs:
            program.wait()
        before = keep(nodes, tmp_path / "before")
        losses = []
        for lost in (None, 0, 1, 2):
            for node in nodes:
                shutil.rmtree(node.folder / "nvme0")
                if node.name != f"node{lost}":
                    shutil.copytree(before / node.name / "nvme0", node.folder / "nvme0")
            run = NodeRun(nodes, resume=True)
            run.wait_for_steps(2)
            run.stop()
            for program in run.programs:
                program.wait()
            first = min(run.losses())
            losses.append([run.losses(rank)[first + number] for rank in range(3) for number in (0, 1)])
        assert losses == losses[:1] * 4


@pytest.mark.slow
@pytest.mark.parametrize("hsdp", [False, pytest.param(True, marks=WIDE)])
def test_all_ranks_of_a_lost_node_are_computed(hsdp: bool, tmp_path: Path) -> None:
    """Each node has two ranks with their own data. With HSDP, it also has a replica of the model."""

    def train(nodes: Nodes, **options: object) -> tuple[list[dict[int, str]], str]:
        run = NodeRun(nodes, 2, hsdp=hsdp, own_data=True, **options)
        run.wait_for_steps(EVERY)
        run.stop()
        for program in run.programs:
            program.wait()
        losses = [run.losses(rank) for rank in range(4)]
        first = min(losses[0])
        return (
            [{step: of_rank[step] for step in range(first, first + EVERY)} for of_rank in losses],
            "".join(program.output for program in run.programs),
        )

    with Nodes(tmp_path, 2) as nodes:
        start_daemons(nodes)
        train(nodes, run=COPIES)
        before = keep(nodes, tmp_path / "before")
        expected, _ = train(nodes, resume=True)
        for node in nodes:
            shutil.rmtree(node.folder / "nvme0")
        shutil.copytree(before / "node0/nvme0", nodes[0].folder / "nvme0")
        computed, output = train(nodes, resume=True)
    source = "which other ranks also hold" if hsdp else "which are computed from copies"
    assert f"lost the files of ranks 2, 3 on node1, {source}" in output
    assert "random states" not in output
    assert computed == expected
    assert len({next(iter(of_rank.values())) for of_rank in computed}) == 4


@pytest.mark.slow
def test_node_without_copies_is_an_error_before_training(tmp_path: Path) -> None:
    with Nodes(tmp_path, 2) as nodes:
        start_daemons(nodes[:1])
        nodes[1].daemon()
        run = NodeRun(nodes, run=COPIES)
        for program in run.programs:
            program.wait(1)
            assert "run.copies = 1, but infinityd on node1: copies.host of infinityd is not set" in program.output
        assert not run.losses()
