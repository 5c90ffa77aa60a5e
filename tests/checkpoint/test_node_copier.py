"""Tests of copies on other nodes: when checkpoints are copied, and how a run survives the loss of a node's drive."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from infinity.checkpoint.copier import Copier, Progress
from infinity.checkpoint.manifest import CheckpointName, Manifest, published_in, read_manifest
from infinity.checkpoint.node_copier import NodeCopier
from infinity.checkpoint.parity import INDEX_NAME, Stream, cells_of, folder_of, parities_in, peers_of, remove_index
from infinity.config import RunConfig
from infinity.daemon_client import NodeDaemon
from infinity.errors import ConfigError
from infinity.ranks import Ranks
from infinity.store.folder import RunFolder
from infinity_tools.cli import app
from infinity_tools.stored_runs import Check, stored_runs
from support import separate_nodes
from support.copying_daemon import copying, copying_over_sockets
from support.published import flip
from support.ranks import RankFailedError, RankPool
from support.separate_nodes import RECIPE, State, different, export, node, resume, save
from support.train import Outcome, Paging, Recipe, offloaded, state_on_nvme, train


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


@pytest.mark.parametrize(
    ("name", "position", "reason"),
    [
        ("rank00000.a", -1, "bytes: checksum"),
        ("rank00000.a.d/checksums", 0, "bytes: checksum"),
        ("rank00000.a.d/step*.json", 99, ".json"),
        ("rank00000.a.d/step*.safetensors", 99, "does not match its checksum"),
    ],
)
def test_verify_and_scrub_name_a_damaged_copy(
    name: str, position: int, reason: str, copied: tuple[Path, list[State]], tmp_path: Path
) -> None:
    nvme = shutil.copytree(copied[0] / "node0/nvme0", tmp_path / "nvme0")
    (parity,) = parities_in(nvme.glob("*/"))
    for words in ("verify", "scrub"):
        status, output = command("store", words, nvme)
        assert (status, "the copy of rank 1 on node1 that rank 0 stores is intact" in output) == (0, True), output
    (file,) = nvme.glob(f"*/parity/{name}")
    flip(file, parity.contents.length - 1 if position < 0 else position)
    for words in ("verify", "scrub"):
        status, output = command("store", words, nvme)
        assert status == 1
        assert "step 2: the copy of rank 1 on node1 that rank 0 stores is damaged" in output
        assert reason in output
        assert "if this node is lost, its files cannot be computed from this copy" in output
        assert "pages are intact" in output
        assert "which copies on this host can replace" not in output
    status, output = command("store", "verify", nvme, "--json")
    (found,) = json.loads(output)["copies"]
    assert (status, found["peers"], found["path"], bool(found["problem"])) == (1, [1], str(parity.target), True)


@pytest.mark.parametrize("damage", ["index", "length"])
def test_verify_names_a_copy_without_a_valid_index(
    damage: str, copied: tuple[Path, list[State]], tmp_path: Path
) -> None:
    nvme = shutil.copytree(copied[0] / "node0/nvme0", tmp_path / "nvme0")
    (parity,) = parities_in(nvme.glob("*/"))
    if damage == "index":
        flip(folder_of(parity.target) / INDEX_NAME, 40)
    else:
        os.truncate(parity.target, parity.contents.length - 1)
    status, output = command("store", "verify", nvme)
    assert status == 1
    assert f"unknown step: the copy of other ranks that rank 0 stores is damaged: {parity.target}" in output


def test_copy_that_a_live_run_replaces_is_not_damaged(copied: tuple[Path, list[State]], tmp_path: Path) -> None:
    nvme = shutil.copytree(copied[0] / "node0/nvme0", tmp_path / "nvme0")
    (parity,) = parities_in(nvme.glob("*/"))
    check = Check(*stored_runs([nvme]))
    parity.target.write_bytes(b"")
    remove_index(parity.target)
    assert (check.run(lambda _: None), check.copies) == ([], [])


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


def start_unequal(folder: str) -> None:
    """Start a run with copies and 2 ranks on node0, but one on node1. Called on every rank."""
    number, local = divmod(dist.get_rank(), 2)
    place = Path(folder) / f"node{number}"
    with (
        patch.object(socket, "gethostname", lambda: place.name),
        patch.dict(os.environ, LOCAL_RANK=str(local)),
        copying(),
        offloaded(RECIPE, Paging(host_cache="least"), place, run={"copies": 1}),
    ):
        raise AssertionError


def test_different_numbers_of_ranks_are_an_error(tmp_path: Path) -> None:
    for name in ("node0", "node1"):
        (tmp_path / name).mkdir()
    pool = RankPool(3)
    expected = (
        r"run\.copies = 1 requires the same number of ranks on each node, but node0 has 2, node1 has 1\. Start the "
        r"same number on each, or set run\.copies = 0"
    )
    try:
        with pytest.raises(RankFailedError, match=expected):
            pool.run(start_unequal, str(tmp_path))
    finally:
        pool.close()
    assert not list(tmp_path.glob("*/nvme0/2*"))


def start_without_space(folder: str) -> None:
    """Start a run with copies, for which the drive has only 8 KiB. Called on every rank."""
    usage = shutil.disk_usage

    def full(place: Path) -> Any:
        return (1 << 40, 1 << 40, 8192) if place.name == "parity" else usage(place)

    with patch.object(shutil, "disk_usage", full):
        save_with_copies(folder)


def test_too_little_space_for_copies_is_an_error(pair: RankPool, tmp_path: Path) -> None:
    """The message names the sizes and the fixes, and nothing is left."""
    expected = (
        r"copies of other nodes: \S+/parity has [\d.]+ [KM]iB free, including [\d.]+ [KM]iB that this run occupies, "
        r"but this run needs [\d.]+ [KM]iB there \(No space left on device\)\. Free space, .*, or set run\.copies = 0"
    )
    with pytest.raises(RankFailedError, match=expected):
        pair.run(start_without_space, str(tmp_path))
    assert not list(tmp_path.glob("*/nvme0/2*"))


def save_replicas(folder: str) -> tuple[State, list[float]]:
    """Save and copy a checkpoint of an HSDP model; return this rank's state and its next random numbers."""
    with (
        node(folder, meshes="hsdp") as place,
        copying(),
        patch.dict(os.environ, LOCAL_RANK="0"),
        offloaded(RECIPE, Paging(host_cache="least"), place, run={"copies": 1}) as (model, optimizer),
    ):
        train(RECIPE, model, optimizer, Outcome())
        torch.manual_seed(100 + dist.get_rank())
        optimizer.save_checkpoint()
        return state_on_nvme(model, optimizer), torch.rand(3).tolist()


def resume_replicas(folder: str) -> tuple[State, list[float]]:
    """Resume an HSDP model; return this rank's state and its next random numbers."""
    torch.manual_seed(0)
    return resume(folder, "hsdp")[1], torch.rand(3).tolist()


def test_lost_replica_keeps_its_random_states(pair: RankPool, tmp_path: Path) -> None:
    """Its pages are read from the other replica, and its random states from the copy."""
    expected = pair.run(save_replicas, str(tmp_path))
    assert expected[0][1] != expected[1][1]
    lose(tmp_path, 1)
    for (state, numbers), (before, following) in zip(pair.run(resume_replicas, str(tmp_path)), expected, strict=True):
        assert (different(state, before), numbers) == ([], following)


def go_back(
    folder: str, resume_step: int, steps: tuple[int, ...] = (), fails: tuple[int, ...] = ()
) -> tuple[State, list[int]]:
    """Resume a run from a step with `save_with_copies`."""
    run = {"resume": "latest", "resume_step": resume_step, "retained_checkpoints": 2}
    return save_with_copies(folder, steps, fails, **run)


def copied_steps(folder: Path) -> list[list[int]]:
    """Return the steps of the copies that each node stores."""
    found = (parities_in((folder / f"node{rank}/nvme0").glob("*/")) for rank in (0, 1))
    return [sorted(int(each.contents.peers[0].manifest[4:16]) for each in parities) for parities in found]


def test_run_that_goes_back_is_copied_again(pair: RankPool, tmp_path: Path) -> None:
    """The run goes back from step 3, which was copied, to step 2, which was not. Until step 2 has been copied, a lost
    node is an error, because the copy of the removed checkpoint is not used.
    """
    save_both = partial(save_with_copies, fails=(2,), retained_checkpoints=2)
    (folder := tmp_path / "run").mkdir()
    assert [steps for _, steps in pair.run(save_both, str(folder), (2, 3))] == [[3]] * 2
    pair.run(partial(go_back, fails=(2,)), str(folder), 2)
    assert copied_steps(folder) == [[3]] * 2  # until a newer copy is complete, in case that the start fails
    shutil.copytree(folder, tmp_path / "lost")
    lose(tmp_path / "lost", 1)
    with pytest.raises(RankFailedError, match=r"steps with a complete checkpoint: none|no checkpoint to resume from"):
        pair.run(resume, str(tmp_path / "lost"))
    assert [steps for _, steps in pair.run(go_back, str(folder), 2)] == [[2]] * 2
    assert copied_steps(folder) == [[2, 3]] * 2
    found = pair.run(go_back, str(folder), 2, (3,))
    assert [steps for _, steps in found] == [[3]] * 2
    lose(folder, 1)
    for (step, state), (before, _) in zip(pair.run(resume, str(folder)), found, strict=True):
        assert (step, different(state, before)) == (3, [])


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

    def _wait(self) -> bool:
        self.end()
        return True

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
        self.waited = 0.0
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def answer(self, op: str, **values: Any) -> dict[str, Any]:
        """Record a request, and return the response."""
        self.asked.append((op, values))
        if self.restarted and op == "copies_progress":
            return {"ok": False, "error": "rank 0 has not joined"}
        address = "node0:9472" if self.restarted else "node0:9471"
        return {} if self.ended else {"ok": True, "busy": True, "copied": "", "address": address, "waited": self.waited}

    def requests(self, op: str) -> list[dict[str, Any]]:
        """Return the values of the requests of a kind."""
        return [values for each, values in self.asked if each == op]


def _copier(folder: Path, daemon: NodeDaemon, **settings: int) -> NodeCopier:
    run = RunFolder.of([str(folder)], "run")
    run.create()
    return NodeCopier(RunConfig(copies=1, **settings), run, _TwoNodes(0, 0, 1), daemon, 8192, 1000)


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


@pytest.mark.parametrize(("limit", "waited"), [(15, 15.5), (60, 60.5)])
def test_last_copy_ends_without_progress(
    limit: int, waited: float, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """The warning names the other host, and there is no further attempt. Progress on any rank continues the copy."""
    daemon = _Requests()
    copier = _copier(tmp_path, daemon, heartbeat_timeout_seconds=limit)
    daemon.waited = waited
    _publish(copier, 1)
    moves = iter([True, True, False])  # whether the other rank makes progress
    ranks = Mock(rank=0, collect=lambda own: [own, own._replace(stalled=not next(moves))])
    with (
        patch.object(copier, "_ranks", ranks),
        patch("infinity.checkpoint.node_copier.CHECK_SECONDS", 0),
        caplog.at_level("WARNING", "infinity"),
    ):
        copier.finish()
    assert next(moves, None) is None
    assert [record.getMessage() for record in caplog.records] == [
        f"rank 0: the checkpoint {1:024x} of step 1 could not be copied to this node: no progress for {limit} s from "
        "other"
    ]
    assert [len(daemon.requests(f"copies_{op}")) for op in ("start", "stop")] == [1, 1]


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
