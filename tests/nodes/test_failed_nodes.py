"""A cut link, a dead node or a stopped process ends the run on all ranks with a message that names it.

Rank `r` runs on host `node{r}` unless stated otherwise. Rank 0 hosts the store of the process group.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from support.node_failures import NodeRun, reference
from support.nodes import Nodes
from support.ranks import RankPool
from support.session import EVERY
from support.tables import WIDE

SILENT = r"no sign of life from rank {rank} on host node{rank} for \d+ s \(host down, link cut, or process stopped\); "
NO_STORE = r"no sign of life from the store of the process group on host node0 \(rank 0\) for \d+ s \(host down, "
CLOSED = r"the store of the process group on host node0 \(rank 0\) closed its connections \(process killed, or host"


def cut(nodes: Nodes, run: NodeRun, index: int) -> None:
    """Cut the link of a node."""
    nodes[index].cut()


def lose_power(nodes: Nodes, run: NodeRun, index: int) -> None:
    """Kill the processes of a node without a trace on the network."""
    nodes[index].cut()
    nodes[index].kill()


def kill(nodes: Nodes, run: NodeRun, index: int) -> None:
    """Kill the processes of a node. The kernel closes their connections."""
    nodes[index].kill()


def stop(nodes: Nodes, run: NodeRun, index: int) -> None:
    """Stop the processes of a node."""
    run.programs[index].signal(signal.SIGSTOP)


CASES = [  # number of nodes, failure, failing node, message of other ranks, message of the failing node
    pytest.param(3, cut, 2, SILENT, NO_STORE, id="cut-link"),
    pytest.param(2, cut, 0, NO_STORE, SILENT.format(rank=1), id="cut-link-of-store", marks=WIDE),
    pytest.param(2, lose_power, 1, SILENT, "", id="dead-host", marks=WIDE),
    pytest.param(2, lose_power, 0, NO_STORE, "", id="dead-host-of-store", marks=WIDE),
    pytest.param(3, kill, 2, SILENT, "", id="killed"),
    pytest.param(2, kill, 0, CLOSED, "", id="killed-store"),
    pytest.param(2, stop, 1, SILENT, "", id="stopped"),
    pytest.param(2, stop, 0, NO_STORE, "", id="stopped-store", marks=WIDE),
]


@pytest.mark.slow
@pytest.mark.parametrize(("count", "act", "index", "message", "own"), CASES)
def test_failed_node_is_named_and_the_run_resumes(
    count: int, act: Callable[[Nodes, NodeRun, int], None], index: int, message: str, own: str, tmp_path: Path
) -> None:
    with Nodes(tmp_path, count) as nodes:
        run = NodeRun(nodes)
        run.wait_for_steps(EVERY + 1)
        act(nodes, run, index)
        for rank, program in enumerate(run.programs):
            if rank != index:
                program.wait(1)
                assert re.search(message.format(rank=index), program.output), program.output
        if own:
            run.programs[index].wait(1)
            assert re.search(own, run.programs[index].output), run.programs[index].output
        check_resumes(nodes)


def check_resumes(nodes: Nodes) -> None:
    """Resume the run; its losses must be those of an uninterrupted run."""
    for node in nodes:
        node.restore()
        node.kill()
    run = NodeRun(nodes, resume=True, limit=100)
    run.wait_for_steps(2)
    run.stop()
    for program in run.programs:
        program.wait()
    first = min(run.losses())
    assert first > EVERY
    assert first % EVERY == 1
    pool = RankPool(len(nodes))
    (folder := nodes.folder / "reference").mkdir()
    try:
        expected = pool.run(reference, folder, max(run.losses()))
    finally:
        pool.close()
    for rank, losses in enumerate(expected):
        assert run.losses(rank).items() <= losses.items()


@pytest.mark.slow
def test_stopped_rank_is_named_if_another_rank_of_its_node_runs(tmp_path: Path) -> None:
    """The heartbeats of the node continue, so its other rank reports the stopped process."""
    with Nodes(tmp_path, 2) as nodes:
        run = NodeRun(nodes, ranks=2)
        run.wait_for_steps(1)
        run.programs[3].signal(signal.SIGSTOP)
        for program in run.programs[:3]:
            program.wait(1)
            found = rf"rank 3 \(process {run.programs[3].pid}\) on host node1 has been stopped for \d+ s \(SIGSTOP"
            assert re.search(found, program.output), program.output


@pytest.mark.slow
def test_short_pauses_are_survived(tmp_path: Path) -> None:
    with Nodes(tmp_path, 2) as nodes:
        run = NodeRun(nodes, limit=30)
        run.wait_for_steps(1)
        nodes[1].cut()
        time.sleep(4)
        nodes[1].restore()
        run.wait_for_steps(2)
        run.programs[0].signal(signal.SIGSTOP)
        time.sleep(4)
        run.programs[0].signal(signal.SIGCONT)
        run.wait_for_steps(2)
        run.stop()
        for program in run.programs:
            program.wait()
            assert "no sign of life" not in program.output


@pytest.mark.slow
def test_run_with_heavy_packet_loss_continues_or_names_the_cause(tmp_path: Path) -> None:
    with Nodes(tmp_path, 2) as nodes:
        run = NodeRun(nodes, limit=10)
        run.wait_for_steps(1)
        nodes[1].lose(0.6)
        run.wait_for_steps(1)
        nodes[1].restore()
        run.wait_for_steps(1)
        run.stop()
        for program, cause in zip(run.programs, (SILENT.format(rank=1), NO_STORE), strict=True):
            status = program.wait(None)
            assert status in (0, 1), program.output
            assert status == 0 or re.search(f"{cause}|{SILENT.format(rank='[01]')}", program.output), program.output


def test_reason_reaches_other_nodes_before_the_store_is_gone(tmp_path: Path) -> None:
    """The process of rank 0 hosts the store and exits after it has failed."""
    with Nodes(tmp_path, 2) as nodes:
        failing, other = NodeRun(nodes, fail=0).programs
        failing.wait(1)
        assert "ValueError: user error" in failing.output
        other.wait(1)
        assert "rank 0 on host node0 failed: ValueError: user error" in other.output


@pytest.mark.slow
def test_rank_may_outlive_rank_0(tmp_path: Path) -> None:
    """After rank 0 has closed the run, it may exit, and the other ranks may still save files."""
    with Nodes(tmp_path, 2) as nodes:
        run = NodeRun(nodes, linger=1)
        run.wait_for_steps(1)
        run.stop()
        run.programs[0].wait()
        assert run.programs[1].poll() is None
        run.programs[1].wait()
        assert (tmp_path / "shared" / "weights").exists()


@pytest.mark.wide
def test_run_that_was_stopped_as_a_whole_continues(tmp_path: Path) -> None:
    """A job scheduler may stop all processes for longer than the limit."""
    with Nodes(tmp_path, 2) as nodes:
        run = NodeRun(nodes, limit=10)
        run.wait_for_steps(1)
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for program in run.programs:
                program.signal(number)
            if number == signal.SIGSTOP:
                time.sleep(15)
        run.wait_for_steps(2)
        run.stop()
        for program in run.programs:
            program.wait()
