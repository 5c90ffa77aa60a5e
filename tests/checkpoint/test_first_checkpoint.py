"""Tests of `run.resume = "auto"` after a run was killed while its ranks published their first checkpoint."""

from __future__ import annotations

import itertools
import logging
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from infinity.checkpoint.held import Seen, never_complete
from infinity.checkpoint.manifest import CheckpointName
from infinity.checkpoint.parity import Parity, ParityIndex
from infinity.checkpoint.parts import Part
from support.ends import End, ending
from support.processes import fork_server
from support.ranks import TIMEOUT, RankFailedError, RankPool
from support.separate_nodes import node
from support.session import Session
from support.tables import WIDE


def publish(rank: int, folder: str, victim: int, call: int) -> None:
    """Publish a first checkpoint as a rank on a node of its own. The victim kills itself before a system call."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=TIMEOUT)
    with node(folder) as place, Session(place, run={"resume": "auto"}) as session:
        session.step()
        with ending(End(call=call) if rank == victim else End(), 0, place):
            session.save_checkpoint()
    dist.destroy_process_group()


def start(folder: str, steps: int = 0, mirror: str = "") -> tuple[int, str, str]:
    """Start a run with ``auto``; return its step, its id, and the warnings of this rank. Called on every rank.

    It trains until a number of steps and then saves a checkpoint.
    """
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("infinity").addHandler(handler)
    try:
        with node(folder) as place, Session(place, run={"resume": "auto", "mirror": mirror}) as session:
            first = session.optimizer.steps
            if steps:
                session.run(steps, every=0)
                session.save_checkpoint()
            return first, session.optimizer.run.folder.run_id, "\n".join(messages)
    finally:
        logging.getLogger("infinity").removeHandler(handler)


def killed(folder: Path, victim: int, call: int) -> bool:
    """Start two ranks of which one kills itself before a system call of its checkpoint; return whether it did."""
    folder.mkdir()
    ranks = [fork_server().Process(target=publish, args=(rank, str(folder), victim, call)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    codes = [process.exitcode for process in ranks]
    assert codes[1 - victim] in (0, 1)  # an error, unless both ranks had published
    assert codes[victim] in (0, -signal.SIGKILL)
    return codes[victim] != 0


def files(folder: Path) -> list[str]:
    """Return the names of all files of runs."""
    return sorted(str(file.relative_to(folder)) for file in folder.glob("node*/nvme0/*/**/*") if file.is_file())


def manifests(folder: Path) -> list[list[Path]]:
    """Return the manifests on each node."""
    return [list(folder.glob(f"node{rank}/nvme0/*/checkpoints/*.json")) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=WIDE)])
def test_auto_starts_again_unless_all_ranks_have_published(victim: int, pair: RankPool, tmp_path: Path) -> None:
    """A rank is killed before each system call of its first checkpoint."""
    started, resumed = 0, 0
    for call in itertools.count():
        if not killed(folder := tmp_path / str(call), victim, call):
            break
        complete = all(manifests(folder))
        (before,) = {run.name for run in folder.glob("node*/nvme0/*") if run.is_dir()}
        left = files(folder)
        (step, run_id, warnings), other = pair.run(start, str(folder))
        assert (step, run_id) == other[:2]
        if complete:
            resumed += 1
            assert (step, run_id) == (1, before)
            continue
        started += 1
        assert step == 0
        assert run_id > before
        assert set(left) <= set(files(folder)), "the interrupted run is left to the user"
        if any(manifests(folder)):
            assert f"starting a new run, because run {before} was interrupted while it wrote its first" in warnings
    assert started
    assert resumed


@pytest.fixture(scope="module")
def first_node_published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of two nodes, of which only the first one has published the first checkpoint."""
    folder = tmp_path_factory.mktemp("first") / "nodes"
    assert killed(folder, 1, 0)
    assert [len(found) for found in manifests(folder)] == [1, 0]
    return folder


@pytest.fixture
def interrupted(first_node_published: Path, tmp_path: Path) -> Path:
    """Copy of these folders."""
    return shutil.copytree(first_node_published, tmp_path / "nodes")


def test_auto_names_the_interrupted_run_and_starts_again(interrupted: Path, pair: RankPool) -> None:
    """A later start resumes the new run."""
    (before,) = (run.name for run in interrupted.glob("node0/nvme0/*") if run.is_dir())
    (step, run_id, warnings), _ = pair.run(start, str(interrupted))
    assert (step, run_id > before) == (0, True)
    assert f"run {before} was interrupted while it wrote its first checkpoint (step 1: 1 of 2 ranks)" in warnings
    pair.run(start, str(interrupted), 2)
    assert pair.run(start, str(interrupted))[0][0] == 2


@pytest.mark.parametrize("lost", ["host", "data file", "folder for manifests"])
def test_auto_fails_if_a_rank_may_have_published_elsewhere(lost: str, interrupted: Path, pair: RankPool) -> None:
    (run,) = (run for run in interrupted.glob("node1/nvme0/*") if run.is_dir())
    if lost == "host":
        shutil.rmtree(interrupted / "node1")
    elif lost == "data file":
        (run / "rank00001.pages").unlink()
    else:
        shutil.rmtree(run / "checkpoints")
    before = files(interrupted)
    with pytest.raises(RankFailedError, match=f"found part of run {run.name} in .*, but no complete checkpoint"):
        pair.run(start, str(interrupted))
    assert files(interrupted) == before


def test_auto_resumes_from_a_mirror_after_an_interrupted_run(interrupted: Path, pair: RankPool, tmp_path: Path) -> None:
    address = f"file://{tmp_path}/mirror"
    (other := tmp_path / "other").mkdir()
    pair.run(start, str(other), 2, address)
    assert [step for step, *_ in pair.run(start, str(interrupted), 0, address)] == [2, 2]


def die_before_the_marker(folder: str) -> None:
    """Start a run that kills itself when it has written the marker under a temporary name."""
    torch.set_num_threads(1)
    os.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    Session(Path(folder))


def test_auto_starts_again_after_a_start_without_marker(tmp_path: Path) -> None:
    process = fork_server().Process(target=die_before_the_marker, args=(str(tmp_path),))
    process.start()
    process.join()
    (draft,) = tmp_path.glob("nvme0/*/.infinity.run.*")
    with Session(tmp_path, run={"resume": "auto"}) as session:
        assert session.optimizer.steps == 0
        assert draft.exists()


NAME, OTHER = (CheckpointName(step=1, identity=digit * 24, world_size=2) for digit in "01")
APART = (Part("node0", "first", "x", 0), Part("node1", "second", "y", 0))
REPLICAS = (Part("node0", "same", "x", 0), Part("node1", "same", "y", 1))  # which differ
FIRST = Seen([NAME.of(0)], {NAME: APART}, (), [0])
PARITY = Parity(1, Path("parity"), ParityIndex(identity=NAME.identity, peers=()))
CASES = {  # what the process on each node sees, and whether no checkpoint has ever been complete
    "interrupted": ([FIRST, Seen(ranks=[1])], True),
    "interrupted in a shared folder": ([FIRST._replace(ranks=[0, 1])] * 2, True),
    "absent host": ([FIRST, Seen()], False),
    "manifests of different checkpoints": ([FIRST, Seen([OTHER.of(1)], {OTHER: APART}, (), [1])], False),
    "unreadable manifest": ([FIRST._replace(parts={}), Seen(ranks=[1])], False),
    "copy on another node": ([FIRST, Seen(parities=[PARITY], ranks=[1])], False),
    "complete replica": ([FIRST._replace(parts={NAME: REPLICAS}), Seen(ranks=[1])], False),
    "no manifest": ([Seen(ranks=[0]), Seen(ranks=[1])], False),
}


@pytest.mark.parametrize("case", CASES)
def test_an_interrupted_first_checkpoint_is_recognized_by_the_files_of_all_ranks(case: str) -> None:
    seen, expected = CASES[case]
    assert never_complete(seen) == expected
