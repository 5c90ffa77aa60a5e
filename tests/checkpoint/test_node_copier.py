"""Tests of copies on other nodes: when checkpoints are copied, and how a run survives the loss of a node's drive."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from typer.testing import CliRunner

from infinity.checkpoint.copier import Copier, Progress
from infinity.checkpoint.manifest import CheckpointName, Manifest, published_in, read_manifest
from infinity.checkpoint.node_copier import NodeCopier
from infinity.checkpoint.parity import Stream, cells_of, parities_in, peers_of
from infinity.config import RunConfig
from infinity.daemon_client import NodeDaemon
from infinity.errors import ConfigError
from infinity.ranks import Ranks
from infinity.store.folder import RunFolder
from infinity_tools.cli import app
from support import separate_nodes
from support.copying_daemon import copying, copying_over_sockets
from support.ranks import RankFailedError, RankPool
from support.separate_nodes import State, different, export, resume, save
from support.train import Recipe


def command(*words: object) -> tuple[int, str]:
    """Run `infinity`; return its status and its output on one line."""
    done = CliRunner().invoke(app, [*map(str, words)])
    return done.exit_code, " ".join(done.output.split())


def save_with_copies(
    folder: str, steps: tuple[int, ...] = (2,), fails: tuple[int, ...] = (), **run: Any
) -> tuple[State, list[int]]:
    """Train with copies on other nodes; return this rank's state, and the steps that were copied."""
    with copying(fails) as daemon, patch.dict(os.environ, LOCAL_RANK="0"):
        return save(folder, "", steps, **{"copies": 1, **run}), daemon.steps


def lose(folder: Path, node: int) -> None:
    """Remove the drive of a node."""
    shutil.rmtree(folder / f"node{node}/nvme0")


@pytest.fixture(scope="module")
def copied(pair: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[State]]:
    """Folder of two nodes that have copied a checkpoint, and the state of each rank."""
    place = tmp_path_factory.mktemp("copied")
    return place, [state for state, _ in pair.run(save_with_copies, str(place))]


@pytest.mark.parametrize("lost", [0, 1])
def test_run_resumes_on_an_empty_node(
    lost: int, copied: tuple[Path, list[State]], pair: RankPool, tmp_path: Path
) -> None:
    folder, states = shutil.copytree(copied[0], tmp_path / "run"), copied[1]
    lose(folder, lost)
    for rank, (step, state) in enumerate(pair.run(resume, str(folder))):
        assert (step, different(state, states[rank])) == (2, [])


def test_run_resumes_on_the_remaining_node(copied: tuple[Path, list[State]], tmp_path: Path) -> None:
    """Without the other node, one rank computes the same state as from the files of both."""
    both = tmp_path / "both"
    for name in ("node0", "node1"):
        shutil.copytree(copied[0] / name / "nvme0", both / "node0/nvme0", dirs_exist_ok=True)
    expected = resume(str(both))
    folder = shutil.copytree(copied[0], tmp_path / "run")
    lose(folder, 1)
    step, state = resume(str(folder))
    assert (step, different(state, expected[1])) == (2, [])


def test_commands_use_the_copies_of_a_lost_node(
    copied: tuple[Path, list[State]], pair: RankPool, tmp_path: Path
) -> None:
    folder = shutil.copytree(copied[0], tmp_path / "run")
    status, output = command("store", "ls", folder / "node1/nvme0")
    assert (status, "rank 0 on node0: from copies" in output) == (0, True), output
    status, output = command("store", "verify", folder / "node1/nvme0")
    assert (status, "not read: rank 0 on node0, which copies on this host can replace" in output) == (0, True), output
    lose(folder, 0)
    nvme = folder / "node1/nvme0"
    assert command("export", nvme, "--to", "dcp", "--out", tmp_path / "alone")[0] == 0
    assert pair.run(export, str(folder)) == [[2], []]
    (parity,) = nvme.glob("*/parity")
    assert command("store", "rm", nvme, parity.parent.name, "--yes")[0] == 0
    assert not list(nvme.glob("*/"))


def test_files_for_exports_survive_the_loss_of_the_first_node(
    copied: tuple[Path, list[State]], pair: RankPool, tmp_path: Path
) -> None:
    """Every node of a run with copies has the tokenizer, also if an earlier start had no copies."""
    folder = shutil.copytree(copied[0], tmp_path / "run")
    (checkpoints,) = (folder / "node0/nvme0").glob("*/checkpoints")
    (checkpoints / "model/tokenizer.json").write_text("{}")
    pair.run(partial(save_with_copies, resume="latest"), str(folder), (3,))
    lose(folder, 0)
    pair.run(resume, str(folder))
    assert [file.read_text() for file in (folder / "node0/nvme0").glob("*/checkpoints/model/tokenizer.json")] == ["{}"]


def test_damaged_copy_is_an_error(copied: tuple[Path, list[State]], tmp_path: Path) -> None:
    folder = shutil.copytree(copied[0], tmp_path / "run")
    lose(folder, 1)
    (run,) = (folder / "node0/nvme0").glob("*/")
    (parity,) = parities_in([run])
    parity.target.write_bytes(b"damaged" * parity.contents.length)
    status, output = command("export", folder / "node0/nvme0", "--to", "dcp", "--out", tmp_path / "out")
    assert status
    assert "the copies of rank 1 on other nodes" in output


@pytest.mark.parametrize("lost", [0, 1])
def test_interrupted_copy_leaves_the_earlier_one(lost: int, pair: RankPool, tmp_path: Path) -> None:
    """The earlier checkpoint is retained, although `retained_checkpoints` is 1. The other rank stops its copy."""
    found = pair.run(partial(save_with_copies, fails=(2, 3)), str(tmp_path), (1, 2, 3))
    assert [steps for _, steps in found] == [[1], [1]]
    lose(tmp_path, lost)
    assert [step for step, _ in pair.run(resume, str(tmp_path))] == [1, 1]


def save_again(folder: str, saves: int, steps: tuple[int, ...]) -> list[int]:
    """Save step 2 several times, and later steps after a resume, but copy only the first checkpoint.

    Return the steps of the checkpoint files on this node.
    """
    with copying() as daemon:
        copy = daemon._copy

        def copy_first(self: Any, **values: Any) -> int:
            self.fails = {2, *steps} if self.steps else set()
            step: int = copy(self, **values)
            return step

        with patch.object(daemon, "_copy", copy_first):
            save(folder, "", (2,) * saves, copies=1)
            if steps:
                save(folder, "", steps, copies=1, resume="latest")
    (checkpoints,) = Path(folder).glob(f"node{dist.get_rank()}/nvme0/*/checkpoints")
    return sorted(name.step for name in published_in(checkpoints))


@pytest.mark.parametrize(("saves", "steps"), [(2, ()), (4, ()), (3, (3, 4, 5))])
@pytest.mark.parametrize("lost", [0, 1])
def test_copied_checkpoint_of_a_repeated_step_is_kept(
    lost: int, saves: int, steps: tuple[int, ...], pair: RankPool, tmp_path: Path
) -> None:
    """Until a newer checkpoint has been copied, the checkpoint of the last copy is kept, also after a resume."""
    newest = 5 if steps else 2
    assert pair.run(partial(save_again, saves=saves, steps=steps), str(tmp_path)) == [[2, newest]] * 2
    lose(tmp_path, lost)
    assert [step for step, _ in pair.run(resume, str(tmp_path))] == [2, 2]


def test_superseded_checkpoint_of_a_repeated_step_is_removed(pair: RankPool, tmp_path: Path) -> None:
    found = pair.run(partial(save_with_copies, copies=1), str(tmp_path), (2, 2, 3, 4))
    assert [steps for _, steps in found] == [[2, 2, 3, 4]] * 2
    for rank in (0, 1):
        (checkpoints,) = tmp_path.glob(f"node{rank}/nvme0/*/checkpoints")
        assert sorted(name.step for name in published_in(checkpoints) if name.step < 3) == []


def test_only_every_nth_checkpoint_is_copied(pair: RankPool, tmp_path: Path) -> None:
    """The newest one is copied at the end. A resumed run does not copy it again."""
    found = pair.run(partial(save_with_copies, copies=3), str(tmp_path), (1, 2, 3, 4, 5))
    assert [steps for _, steps in found] == [[1, 4, 5]] * 2
    found = pair.run(partial(save_with_copies, resume="latest"), str(tmp_path), (6,))
    assert [steps for _, steps in found] == [[6]] * 2
    for rank in (0, 1):
        (run,) = (tmp_path / f"node{rank}/nvme0").glob("*/")
        assert sorted(int(parity.contents.peers[0].manifest[4:16]) for parity in parities_in([run])) == [5, 6]


def test_checkpoint_after_a_failed_copy_is_copied(pair: RankPool, tmp_path: Path) -> None:
    found = pair.run(partial(save_with_copies, copies=9, fails=(1,)), str(tmp_path), (1, 2, 3, 4))
    assert [steps for _, steps in found] == [[2, 4]] * 2


def test_state_of_any_of_three_nodes_is_computed(tmp_path: Path) -> None:
    """Each node stores half as much as with full copies."""
    (tmp_path / "run").mkdir()
    pool = RankPool(3)
    try:
        states = [state for state, _ in pool.run(partial(save_with_copies, copy_nodes=3), str(tmp_path / "run"))]
        for lost in range(3):
            folder = shutil.copytree(tmp_path / "run", tmp_path / f"lost{lost}")
            lose(folder, lost)
            for rank, (step, state) in enumerate(pool.run(resume, str(folder))):
                assert (step, different(state, states[rank])) == (2, [])
    finally:
        pool.close()


def test_changed_number_of_nodes_leaves_the_earlier_copy(tmp_path: Path) -> None:
    """The copies over 2 nodes are used until a checkpoint has been copied over 3 nodes."""
    (tmp_path / "run").mkdir()
    pool = RankPool(3)
    try:
        pool.run(save_with_copies, str(tmp_path / "run"))
        change = partial(save_with_copies, fails=(2, 3), copy_nodes=3, resume="latest")
        assert [copied for _, copied in pool.run(change, str(tmp_path / "run"), (3,))] == [[]] * 3
        lose(tmp_path / "run", 1)
        assert [step for step, _ in pool.run(resume, str(tmp_path / "run"))] == [2] * 3
    finally:
        pool.close()


def copy_again(folder: str, nodes: int) -> list[int]:
    """Resume, and copy the checkpoint over another number of nodes into the other file; return the copied steps."""
    slots = NodeCopier._slots
    with (
        patch.object(NodeCopier, "_slots", lambda self: slots(self)[::-1]),
        patch.object(NodeCopier, "_find_complete", return_value=None),
    ):
        return save_with_copies(folder, (), copy_nodes=nodes, resume="latest")[1]


def test_copies_over_different_numbers_of_nodes_are_distinguished(tmp_path: Path) -> None:
    """The two parity files of a rank contain the same checkpoint."""
    folder = tmp_path / "run"
    folder.mkdir()
    pool = RankPool(3)
    try:
        states = [state for state, _ in pool.run(save_with_copies, str(folder))]
        assert pool.run(copy_again, str(folder), 3) == [[2]] * 3
        lose(folder, 1)
        for rank, (step, state) in enumerate(pool.run(resume, str(folder))):
            assert (step, different(state, states[rank])) == (2, [])
    finally:
        pool.close()


def save_adapters(folder: str, steps: tuple[int, ...], **run: Any) -> tuple[State, list[int]]:
    """Train LoRA adapters with copies; return this rank's state, and the bytes that each copy has received."""
    with (
        patch.object(separate_nodes, "RECIPE", Recipe(model="lora")),
        patch.dict(os.environ, LOCAL_RANK="0"),
        copying_over_sockets() as received,
    ):
        return save(folder, "", steps, **{"copies": 1, **run}), received


def resume_adapters(folder: str) -> tuple[int, State]:
    """Resume the training of `save_adapters`."""
    with patch.object(separate_nodes, "RECIPE", Recipe(model="lora")):
        return resume(folder)


@pytest.mark.parametrize("nodes", [2, 3])
def test_copies_of_adapters_do_not_include_the_base_model(nodes: int, tmp_path: Path) -> None:
    """After a complete copy in each of the two files, frozen pages are not sent. Any node may be lost."""
    folder, pool = tmp_path / "run", RankPool(nodes)
    folder.mkdir()
    try:
        found = pool.run(partial(save_adapters, copy_nodes=nodes), str(folder), (1, 2, 3, 4))
        manifests = []
        for rank in range(nodes):
            (file,) = folder.glob(f"node{rank}/nvme0/*/checkpoints/step000000000004.rank{rank:05d}-*.json")
            manifests.append(read_manifest(file))
        for rank, (_, received) in enumerate(found):
            peers = [manifests[peer] for peer in peers_of(range(nodes), rank, nodes)]
            frozen = {peer.pages[page.index] for peer in peers for page in peer.layout.pages if page.fixed}
            complete, adapters = 0, 0
            for cell in cells_of([Stream(peer.pages) for peer in peers]):
                nbytes = sum(piece.stop - piece.start for piece in cell.pieces)
                complete += nbytes
                adapters += nbytes * any(piece.version not in frozen for piece in cell.pieces)
            assert received == [complete, complete, adapters, adapters]
            assert 0 < adapters < complete / 2
        for lost in range(nodes):
            place = shutil.copytree(folder, tmp_path / f"lost{lost}")
            lose(place, lost)
            for rank, (step, state) in enumerate(pool.run(resume_adapters, str(place))):
                assert (step, different(state, found[rank][0])) == (4, [])
    finally:
        pool.close()


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ({"copy_nodes": 3}, r"run\.copy_nodes = 3, but the run has 2 nodes"),
        ({}, r"infinityd on node[01] does not respond"),
    ],
)
def test_missing_node_or_daemon_is_an_error(run: dict[str, int], message: str, pair: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RankFailedError, match=message):
        pair.run(partial(save, copies=1, **run), str(tmp_path))


def test_single_node_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"all ranks report the host name node0"):
        save(str(tmp_path), copies=1)


def test_retained_checkpoints_are_required(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.copies is set, but run\.retained_checkpoints = 0"):
        save(str(tmp_path), copies=1, retained_checkpoints=0)


class Recorder(Copier):
    """Copier of a rank whose copies take as long as a test wants."""

    def __init__(self, every: int) -> None:
        super().__init__(every, None)
        self.running: CheckpointName | None = None
        self.started: list[int] = []

    def _busy(self) -> bool:
        return self.running is not None

    def _has_copied(self, checkpoint: CheckpointName) -> bool:
        return self._copied == checkpoint

    def _start(self, manifest: Manifest, retained: Collection[CheckpointName]) -> None:
        self.running = manifest.name.checkpoint
        self.started.append(manifest.step)

    def _wait(self) -> None:
        self.end()

    def end(self) -> None:
        """End the copy."""
        self._copied, self.running = self.running or self._copied, None

    def close(self) -> None:
        """Do nothing."""


class _Manifest:
    def __init__(self, step: int) -> None:
        self.step = step
        self.name = CheckpointName(step, f"{step:024x}", 2).of(0)
        self.identity, self.file_name = self.name.identity, self.name.file_name


class _TwoNodes(Ranks):
    """Rank 0 of two, of which the other one is simulated."""

    def collect(self, value: Any) -> list[Any]:
        """Return the value twice, with another host name for the other rank."""
        named = isinstance(value, tuple) and isinstance(value[0], str)
        return [value, ("other", *value[1:]) if named else value]


class _Requests(NodeDaemon):
    """Daemon that never completes a copy."""

    def __init__(self) -> None:
        super().__init__(Path("missing"))
        self.ended = self.restarted = False
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def answer(self, op: str, **values: Any) -> dict[str, Any]:
        """Record a request, and return the response."""
        self.asked.append((op, values))
        if self.restarted and op == "copies_progress":
            return {"ok": False, "error": "rank 0 has not joined"}
        address = "node0:9472" if self.restarted else "node0:9471"
        return {} if self.ended else {"ok": True, "busy": True, "copied": "", "address": address}

    def requests(self, op: str) -> list[dict[str, Any]]:
        """Return the values of the requests of a kind."""
        return [values for each, values in self.asked if each == op]


def _copier(folder: Path, daemon: NodeDaemon) -> NodeCopier:
    run = RunFolder.of([str(folder)], "run")
    run.create()
    return NodeCopier(RunConfig(copies=1), run, _TwoNodes(0, 0, 1), daemon, 8192, 1000)


def _publish(copier: NodeCopier, step: int) -> None:
    copier.exchanged([copier.progress, copier.progress._replace(idle=True)])
    copier.published(_Manifest(step), ())  # type: ignore[arg-type]


def test_daemon_that_restarts_on_another_port_joins_again(tmp_path: Path) -> None:
    """The ranks exchange the new address before the next copy."""
    daemon = _Requests()
    copier = _copier(tmp_path, daemon)
    _publish(copier, 1)
    daemon.restarted = True
    _publish(copier, 2)
    started = [(values["identity"], values["peers"][0]["address"]) for values in daemon.requests("copies_start")]
    assert started == [(f"{1:024x}", "node0:9471"), (f"{2:024x}", "node0:9472")]


def test_space_for_files_of_other_ranks_is_requested(tmp_path: Path) -> None:
    """Both slots may be on one drive, so that each request includes the files of both."""
    daemon = _Requests()
    _copier(tmp_path, daemon)
    assert [values["bytes"] for values in daemon.requests("reserve")] == [8192 + 2 * 1000] * 2


def test_daemon_that_ended_is_reported_at_the_next_checkpoint(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    daemon = _Requests()
    copier = _copier(tmp_path, daemon)
    _publish(copier, 1)
    daemon.ended = True
    with caplog.at_level("WARNING", "infinity"):
        _publish(copier, 2)
    assert [record.getMessage() for record in caplog.records] == [
        f"rank 0: the checkpoint {step:024x} of step {step} could not be copied to this node: "
        "infinityd does not respond"
        for step in (1, 2)
    ]


def test_checkpoint_is_copied_when_it_is_due_and_no_rank_is_copying() -> None:
    """A checkpoint that is due while another one is copied is replaced by the next one."""
    copier = Recorder(every=2)

    def publish(step: int, *, other: bool = False) -> None:
        copier.exchanged([copier.progress, Progress(not other, "")])
        copier.published(_Manifest(step), ())  # type: ignore[arg-type]

    publish(1)
    publish(2)
    publish(3)
    copier.end()
    publish(4, other=True)
    assert copier.started == [1]
    publish(5)
    copier.end()
    publish(6)
    assert copier.started == [1, 5]
    copier.finish()
    assert copier.started == [1, 5, 6]
    copier.finish()
    assert copier.started == [1, 5, 6]


def test_space_for_two_more_checkpoints_is_reserved() -> None:
    assert [RunConfig(copies=copies).copied_checkpoints for copies in (0, 1, 5)] == [0, 2, 2]
    assert RunConfig(copies=1, mirror="memory://x").copied_checkpoints == 3
