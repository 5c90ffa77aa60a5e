"""Tests of checkpoints on nodes with private drives: what is where, replicas, and nodes that return without files."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import infinity
from infinity.checkpoint import reader, remote_files
from infinity.checkpoint.checkpoint_files import CheckpointFiles
from infinity.checkpoint.description import RunDescription
from infinity.checkpoint.held import HeldCheckpoint, problems
from infinity.checkpoint.manifest import CheckpointName, read_manifest
from infinity.checkpoint.parts import Part, digest_of_slices, replica_of, sources
from infinity.checkpoint.reader import CheckpointReader
from infinity.content.layout import build_layout
from infinity.errors import CheckpointError
from infinity.integrations.checkpoint_folders import Checkpoints, Record
from infinity.ranks import Ranks
from infinity.store.folder import RunFolder
from support.command import on_one_line
from support.ranks import RankFailedError, RankPool
from support.separate_nodes import RECIPE, State, different, export, flat, node, resume, save
from support.tables import all_but
from support.train import PAGE, Outcome, Paging, offloaded, train


def resume_unreadable(folder: str, error: Exception) -> None:
    """Resume on the nodes in reverse order, while reading a page raises an error. Called on every rank."""
    with patch.object(CheckpointFiles, "page", side_effect=error):
        resume(folder, swapped=True)


def resume_with_malformed_archive(folder: str) -> None:
    """Resume, while the files for exports arrive in a malformed archive. Called on every rank."""
    with patch.object(remote_files, "packed", return_value=b"not an archive"):
        resume(folder, "hsdp")


def resume_differing(folder: str) -> None:
    """Resume, while the parameters of the ranks in the checkpoint differ. Called on every rank."""
    with patch.object(reader, "_whole", side_effect=itertools.count()):
        resume(folder)


def train_on(folder: str, retained: int) -> None:
    """Resume, train one step and save a checkpoint. Called on every rank."""
    settings = {"resume": "latest", "retained_checkpoints": retained}
    with (
        node(folder) as place,
        offloaded(RECIPE, Paging(host_cache="least"), place, run=settings) as (model, optimizer),
    ):
        step = optimizer.steps
        train(replace(RECIPE, steps=step + 1), model, optimizer, Outcome(), first=step)
        optimizer.save_checkpoint()


def save_rates(folder: str) -> None:
    """Save replicas that differ, whose learning rates are 1 and 2. Called on every rank."""
    with (
        node(folder, meshes="local") as place,
        offloaded(RECIPE, Paging(host_cache="least"), place) as (model, optimizer),
    ):
        train(RECIPE, model, optimizer, Outcome())
        for group in optimizer.param_groups:
            group["lr"] = dist.get_rank() + 1.0
        optimizer.save_checkpoint()


def resume_rate(folder: str) -> list[float]:
    """Resume from replica 1; return the learning rates. Called on every rank."""
    settings = {"resume": "latest", "resume_replica": 1}
    with (
        node(folder, meshes="local") as place,
        offloaded(RECIPE, Paging(host_cache="least"), place, run=settings) as (_, optimizer),
    ):
        return sorted({group["lr"] for group in optimizer.param_groups})


def resume_pages(folder: str) -> int:
    """Resume without a setting for the page size; return the page size. Called on every rank."""
    settings = {"run": {"resume": "latest"}, "memory": {"host_bytes": "64MiB", "page_bytes": 0}}
    with (
        node(folder, meshes="hsdp") as place,
        offloaded(RECIPE, Paging(host_cache="least"), place, **settings) as (_, optimizer),
    ):
        return optimizer.run.layout.page_bytes


def find_folder(folder: str) -> str:
    """Return the name of the framework's folder to resume from. Called on every rank."""
    with node(folder) as place:
        config = infinity.Config().with_values(**{"storage.paths": (str(place / "nvme0"),)})
        found = Record.newest(Path(folder) / "out", "checkpoint-", config, Ranks.current())
        return found[0].name if found else ""


def save_folder(folder: str) -> None:
    """Train, and save a folder of a framework with its checkpoint. Called on every rank."""

    def write() -> Path:
        target = Path(folder) / "out/checkpoint-2"
        target.mkdir(parents=True, exist_ok=True)
        return target

    with node(folder) as place, offloaded(RECIPE, Paging(host_cache="least"), place) as (model, optimizer):
        train(RECIPE, model, optimizer, Outcome())
        Checkpoints(optimizer, "{}").save("saving", None, write)


def damage(nvme: Path, *, rank: int, step: int) -> None:
    """Change a page that is only in this checkpoint."""
    found = {
        number: read_manifest(file)
        for number in (1, 2)
        for file in nvme.glob(f"*/checkpoints/step{number:012d}.rank{rank:05d}*.json")
    }
    others = {version for number in found if number != step for version in found[number].pages.values()}
    version = next(version for version in found[step].pages.values() if version not in others)
    (data,) = nvme.glob(f"*/rank{rank:05d}.pages")
    with data.open("r+b") as file:
        file.seek(version.extent.offset)
        file.write(b"damaged")


@pytest.fixture(scope="module")
def sharded(pair: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint of step 2 of a model that is sharded over two nodes."""
    place = tmp_path_factory.mktemp("sharded")
    pair.run(save, str(place))
    return place


@pytest.fixture(scope="module")
def saved_replicas(pair: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[State]]:
    """Checkpoint of step 2 of an HSDP model with a replica per node, and the states of both ranks."""
    place = tmp_path_factory.mktemp("replicas")
    return place, pair.run(save, str(place), "hsdp")


@pytest.fixture
def replicas(saved_replicas: tuple[Path, list[State]], tmp_path: Path) -> list[State]:
    """Copy the checkpoint of two replicas to `tmp_path`; return the states."""
    place, states = saved_replicas
    shutil.copytree(place, tmp_path, dirs_exist_ok=True)
    return states


def test_store_names_hosts_of_other_ranks(sharded: Path) -> None:
    """Verifying the pages of one node must not look like verifying the checkpoint."""
    nvme = sharded / "node0/nvme0"
    status, output = on_one_line("store", "ls", nvme)
    assert (status, "1 of 2 ranks; rank 1 on node1" in output) == (0, True), output
    for words in (["verify"], ["scrub"]):
        status, output = on_one_line("store", *words, nvme)
        assert "pages are intact" in output
        assert (status, "not read: rank 1 on node1." in output) == (0, True), output
    found = json.loads(on_one_line("store", "verify", sharded / "node1/nvme0", "--json")[1])
    assert [(item["step"], item["files"]) for item in found["elsewhere"]] == [(2, "rank 0 on node0")]
    status, output = on_one_line("export", nvme, "--out", sharded / "exported")
    assert status == 2
    assert "rank 1 on node1" in output


def test_verify_recommends_checkpoint_that_is_intact_on_the_host(pair: RankPool, tmp_path: Path) -> None:
    """The other node's files do not count as missing, so the run is not to be removed."""
    pair.run(partial(save, retained_checkpoints=2), str(tmp_path), "", (1, 2))
    nvme = tmp_path / "node0/nvme0"
    damage(nvme, rank=0, step=2)
    status, output = on_one_line("store", "verify", nvme)
    advice = "resume from the checkpoint of step 1, which is intact on this host: --resume OUT/checkpoint-1"
    assert (status, advice in output, "infinity store rm" in output) == (1, True, False), output
    assert [step for step, _ in pair.run(partial(resume, resume_step=1), str(tmp_path))] == [1, 1]


@pytest.mark.parametrize("meshes", all_but(["hsdp", "local"], "hsdp"))
def test_verify_recommends_intact_replica(meshes: str, pair: RankPool, tmp_path: Path) -> None:
    """Both replicas were on one node, or one of them is on another host. Following the advice resumes the run."""
    states = pair.run(save, str(tmp_path), meshes)
    damage(tmp_path / "node0/nvme0", rank=0, step=2)
    status, output = on_one_line("store", "scrub", tmp_path / "node0/nvme0")
    found = re.search(
        r"other replicas can be resumed, if their files on other hosts are intact: remove (\S+), and", output
    )
    assert (status, found is not None) == (1, True), output

    place = tmp_path / "one/node0/nvme0"
    for name in ("node0", "node1"):
        shutil.copytree(tmp_path / name / "nvme0", place, dirs_exist_ok=True)
    status, output = on_one_line("store", "verify", place)
    found = re.search(r"other replicas can be resumed: remove (\S+), and resume with run.resume_step = 2", output)
    assert found is not None, output
    Path(found[1]).unlink()
    choice = {} if meshes == "hsdp" else {"resume_replica": 1}
    step, state = resume(str(tmp_path / "one"), resume_step=2, **choice)
    assert (step, different(state, states[1])) == (2, [])


def test_gc_keeps_parts_of_other_nodes_checkpoints(sharded: Path, tmp_path: Path) -> None:
    place = shutil.copytree(sharded / "node0/nvme0", tmp_path / "nvme0")
    assert "removed 0 items" in on_one_line("store", "gc", place, "--yes")[1]


def test_replicas_of_hsdp_are_interchangeable(replicas: list[State], pair: RankPool, tmp_path: Path) -> None:
    """One node's folder is lost: resume on one and on two ranks, verify and export use the other replica."""
    assert different(*replicas) == []
    shutil.copytree(tmp_path / "node1", tmp_path / "one/node0")
    shutil.rmtree(tmp_path / "node0")
    nvme = tmp_path / "node1/nvme0"
    assert "rank 0 on node0" in on_one_line("store", "ls", nvme)[1]
    assert on_one_line("store", "verify", nvme)[0] == 0
    status, output = on_one_line("export", nvme, "--to", "dcp", "--out", tmp_path / "exported")
    assert (status, "step 2" in output) == (0, True), output

    step, state = resume(str(tmp_path / "one"))
    assert (step, different(state, replicas[0])) == (2, [])
    found = pair.run(resume, str(tmp_path), "hsdp")
    assert [(step, different(state, replicas[0])) for step, state in found] == [(2, [])] * 2


def test_checkpoint_of_all_ranks_takes_precedence(pair: RankPool, tmp_path: Path) -> None:
    """The run was killed when one replica had published step 2. Resuming from step 1 needs no further space."""
    pair.run(partial(save, retained_checkpoints=2), str(tmp_path), "hsdp", (1, 2))
    for file in (tmp_path / "node1/nvme0").glob("*/checkpoints/step*2.rank*.json"):
        file.unlink()
    runs = list((tmp_path / "node1/nvme0").iterdir())
    assert [step for step, _ in pair.run(resume, str(tmp_path), "hsdp")] == [1, 1]
    assert list((tmp_path / "node1/nvme0").iterdir()) == runs, "the run continues in place"


def test_replicas_with_other_page_sizes_are_not_combined(pair: RankPool, tmp_path: Path) -> None:
    """Their checksums cannot be compared, so one of them must be chosen."""
    pair.run(partial(save, other_pages=True), str(tmp_path), "hsdp")
    place = shutil.copytree(tmp_path / "node0/nvme0", tmp_path / "nvme0")
    shutil.copytree(tmp_path / "node1/nvme0", place, dirs_exist_ok=True)
    words = ["export", place, "--to", "dcp", "--out", tmp_path / "exported"]
    assert "its replicas differ" in on_one_line(*words)[1]
    assert on_one_line(*words, "--replica", "1")[0] == 0


def test_replicas_that_differ_require_a_choice(pair: RankPool, tmp_path: Path) -> None:
    """They resume unchanged on the same ranks. Elsewhere, one replica must be chosen, also if the other one is lost."""
    states = pair.run(save, str(tmp_path), "local", (2,))
    assert different(*states) != []
    found = pair.run(resume, str(tmp_path), "local")
    assert [step for step, _ in found] == [2, 2]
    assert [different(state, states[rank]) for rank, (_, state) in enumerate(found)] == [[], []]

    together = tmp_path / "one/node0"
    for name in ("node0", "node1"):
        shutil.copytree(tmp_path / name / "nvme0", together / "nvme0", dirs_exist_ok=True)
    nvme = together / "nvme0"
    choice = "replica 0: rank 0 on node0, replica 1: rank 1 on node1"
    status, output = on_one_line("export", nvme, "--to", "dcp", "--out", tmp_path / "exported")
    assert (status, choice in output) == (2, True), output
    assert on_one_line("export", nvme, "--to", "dcp", "--out", tmp_path / "exported", "--replica", "1")[0] == 0
    with pytest.raises(CheckpointError, match=choice):
        resume(str(tmp_path / "one"))
    step, state = resume(str(tmp_path / "one"), resume_replica=1)
    assert (step, different(state, states[1])) == (2, [])

    shutil.rmtree(tmp_path / "node0")
    with pytest.raises(RankFailedError, match=r"rank 0 on node0; replica 1 is present \(run.resume_replica = 1\)"):
        pair.run(resume, str(tmp_path), "local")
    found = pair.run(partial(resume, resume_replica=1), str(tmp_path), "local")
    assert [(step, different(state, states[1])) for step, state in found] == [(2, [])] * 2


def test_state_of_a_rank_comes_from_the_chosen_replica(pair: RankPool, tmp_path: Path) -> None:
    """The ranks have different learning rates, and the state file of rank 0 is damaged."""
    pair.run(save_rates, str(tmp_path))
    (file,) = (tmp_path / "node0/nvme0").glob("*/checkpoints/*.safetensors")
    file.write_bytes(b"damaged")
    assert pair.run(resume_rate, str(tmp_path)) == [[2.0], [2.0]]


def test_intact_replica_is_chosen_among_equal_ones(replicas: list[State], pair: RankPool, tmp_path: Path) -> None:
    """A page of replica 0 is damaged. Its pages are not read if replica 1 is chosen."""
    with pytest.raises(RankFailedError, match="there is no replica 5: the checkpoint has 2 replicas"):
        pair.run(partial(resume, resume_replica=5), str(tmp_path), "hsdp")
    (data,) = (tmp_path / "node0/nvme0").glob("*/rank00000.pages")
    data.write_bytes(b"\1" * data.stat().st_size)
    place = shutil.copytree(tmp_path / "node0/nvme0", tmp_path / "nvme0")
    shutil.copytree(tmp_path / "node1/nvme0", place, dirs_exist_ok=True)
    words = ["export", place, "--to", "dcp", "--out", tmp_path / "exported", "--replica"]
    assert on_one_line(*words, "0")[0] != 0
    assert on_one_line(*words, "1")[0] == 0
    found = pair.run(partial(resume, resume_replica=1), str(tmp_path), "hsdp")
    assert [(step, different(state, replicas[1])) for step, state in found] == [(2, [])] * 2


@pytest.mark.usefixtures("replicas")
def test_ranks_agree_on_the_page_size_after_a_loss(pair: RankPool, tmp_path: Path) -> None:
    """Rank 0 has lost its files. It uses the page size of rank 1 instead of choosing its own."""
    shutil.rmtree(tmp_path / "node0")
    assert pair.run(resume_pages, str(tmp_path)) == [PAGE, PAGE]


def test_replicas_follow_the_device_mesh(tmp_path: Path) -> None:
    """Ranks 0, 3 and 1, 2 are replicas. No replica may combine ranks 0 and 2."""
    pool = RankPool(4)
    try:
        states = pool.run(save, str(tmp_path), "permuted")
    finally:
        pool.close()
    for rank in range(4):
        shutil.copytree(tmp_path / f"node{rank}/nvme0", tmp_path / "all", dirs_exist_ok=True)
    run = RunFolder.of([str(tmp_path / "all")], next((tmp_path / "all").glob("*/checkpoints")).parent.name)
    for number, (one, other) in enumerate(((0, 3), (1, 2))):
        reader = CheckpointReader(run, replica=number)
        for index, spec in enumerate(reader.tensors):
            slices = [states[rank][spec.names[0]]["master"].flatten() for rank in (one, other)]
            assert torch.equal(reader.read(index).flatten(), torch.cat(slices)), spec.names


def test_replicas_of_a_mixed_mesh_are_unknown() -> None:
    """Some tensors are sharded over four ranks, others over two. No replica can be chosen."""
    described = RunDescription(layout=build_layout((), {}, PAGE), tensors=(), buffers=())
    assert replica_of([(2, 3), (3, 2)]) == 2
    assert replica_of([(0, 1, 2, 3), (2, 3)]) is None
    assert digest_of_slices(described, 2, 2) == digest_of_slices(described, 0, 0)
    slices = [digest_of_slices(described, rank, None) for rank in range(2)]
    assert slices[0] != slices[1]
    parts = [Part("node0", each, "", None) for each in slices]
    assert sources(parts, [0, 1]) == ([0, 1], [])
    with pytest.raises(CheckpointError, match="no replica can be chosen"):
        sources(parts, [0, 1], 0)


def test_ranks_that_run_on_other_hosts_copy_their_state(sharded: Path, pair: RankPool, tmp_path: Path) -> None:
    """The result equals resuming in the original order. The files for exports come from the first node."""
    for name in ("node0", "node1"):
        shutil.copytree(sharded / name, tmp_path / name)
        (run,) = (tmp_path / name / "nvme0").glob("*/")
        (run / "checkpoints/model").mkdir(exist_ok=True)
        (run / "checkpoints/model/config.json").write_text(f'"{name}"')
    found = pair.run(partial(resume, swapped=True), str(tmp_path))
    (copy,) = (each for each in (tmp_path / "node1/nvme0").glob("*/checkpoints/model") if run not in each.parents)
    assert (copy / "config.json").read_text() == '"node0"'
    expected = pair.run(resume, str(shutil.copytree(sharded, tmp_path / "usual")))
    for rank in range(2):
        assert found[rank][0] == expected[rank][0] == 2
        assert different(found[rank][1], expected[rank][1]) == []


@pytest.mark.parametrize(
    "returns", all_but(["without files", "with an older copy", "with a common checkpoint"], "without files")
)
def test_nodes_that_return_with_other_files(returns: str, pair: RankPool, tmp_path: Path) -> None:
    """The newest checkpoint whose slices are all present is resumed. Otherwise, the error names what is missing."""
    pair.run(save, str(tmp_path), "", (1,))
    older = shutil.copytree(tmp_path / "node1", tmp_path / "older")
    retained = 2 if returns == "with a common checkpoint" else 1
    pair.run(train_on, str(tmp_path), retained)
    shutil.rmtree(tmp_path / "node1")
    if returns != "without files":
        shutil.copytree(older, tmp_path / "node1")
    if retained == 2:
        assert [step for step, _ in pair.run(resume, str(tmp_path))] == [1, 1]
        return
    with pytest.raises(RankFailedError, match=r"step 2: 1 of 2 ranks; rank 1 on node1") as caught:
        pair.run(resume, str(tmp_path))
    assert ("step 1: 1 of 2 ranks; rank 0 on node0" in str(caught.value)) == (returns != "without files")


def test_fewer_ranks_read_all_files_of_a_node(sharded: Path, pair: RankPool, tmp_path: Path) -> None:
    """Both drives are on one node now; the other rank reads from it over the network."""
    for name in ("node0", "node1"):
        shutil.copytree(sharded / name / "nvme0", tmp_path / "node0/nvme0", dirs_exist_ok=True)
    expected = pair.run(resume, str(shutil.copytree(sharded, tmp_path / "usual")))
    found = pair.run(resume, str(tmp_path))
    assert [different(state, expected[rank][1]) for rank, (_, state) in enumerate(found)] == [[], []]


def test_more_ranks_read_the_files_of_another_node(pair: RankPool, tmp_path: Path) -> None:
    """The run had one rank, so the second one reads its slices over the network."""
    state = flat(save(str(tmp_path)))
    found = pair.run(resume, str(tmp_path))
    assert [step for step, _ in found] == [2, 2]
    slices = [flat(part) for _, part in found]
    for name, value in state.items():
        parts = [part[name] for part in slices]
        whole = parts[0] if name.endswith("/step") else torch.cat([part for part in parts if part.numel()])
        assert torch.equal(whole, value), name


def test_damaged_page_on_another_node_ends_all_ranks(sharded: Path, pair: RankPool, tmp_path: Path) -> None:
    """The error names the file, and no page is used."""
    for name in ("node0", "node1"):
        shutil.copytree(sharded / name, tmp_path / name)
    (data,) = (tmp_path / "node1/nvme0").glob("*/rank00001.pages")
    data.write_bytes(b"\1" * data.stat().st_size)
    with pytest.raises(RankFailedError, match=r"rank 0 on host node1: .*rank00001\.pages.*checksum"):
        pair.run(partial(resume, swapped=True), str(tmp_path))
    assert len(list((tmp_path / "node1/nvme0").iterdir())) == 1, "the new run is removed"


def test_every_error_on_another_node_is_reported(sharded: Path, pair: RankPool, tmp_path: Path) -> None:
    """The serving thread must answer, because the asking rank waits. The type is also that of a lost connection."""
    for name in ("node0", "node1"):
        shutil.copytree(sharded / name, tmp_path / name)
    with pytest.raises(RankFailedError, match=r"rank \d on host node\d: RuntimeError: not a lost connection"):
        pair.run(resume_unreadable, str(tmp_path), RuntimeError("not a lost connection"))


def test_missing_rank_of_a_present_host_is_named() -> None:
    """The advice to include hosts is only for hosts without files."""
    name = CheckpointName(step=2, identity="0" * 24, world_size=2)
    for other, advice in (("here", ""), ("there", ". Include the named hosts, or restore their folders")):
        parts = [Part("here", "first", "x", 0), Part(other, "second", "x", 0)]
        found = HeldCheckpoint(name=name, holders={0: [0]}, parts=parts)
        assert problems([found]) == f"; step 2: 1 of 2 ranks; rank 1 on {other}{advice}"


def test_rank_0_may_be_on_a_node_without_files(sharded: Path, pair: RankPool, tmp_path: Path) -> None:
    """The node does not even have the folder. An error of the checkpoint names the file."""
    for name in ("node0", "node1"):
        shutil.copytree(sharded / name / "nvme0", tmp_path / "node1/nvme0", dirs_exist_ok=True)
    assert pair.run(export, str(tmp_path)) == [[2], []]
    with pytest.raises(RankFailedError, match=r"CheckpointError: .*rank0000\d-of-00002.* of run .* is malformed"):
        pair.run(resume_differing, str(tmp_path))


@pytest.mark.usefixtures("replicas")
def test_files_for_exports_are_copied_without_links(pair: RankPool, tmp_path: Path) -> None:
    """They are on another node than rank 0. An archive that rank 0 cannot unpack ends all ranks."""
    shutil.rmtree(tmp_path / "node1")
    (tmp_path / "node0").rename(tmp_path / "node1")
    (model,) = (tmp_path / "node1/nvme0").glob("*/checkpoints/model")
    (model / "tokenizer.json").write_text("{}")
    (model / "vocab.json").symlink_to(tmp_path / "secret")
    with pytest.raises(RankFailedError, match=r"CheckpointError: the files for exports cannot be copied"):
        pair.run(resume_with_malformed_archive, str(tmp_path))
    assert [step for step, _ in pair.run(resume, str(tmp_path), "hsdp")] == [2, 2]
    (copied,) = (tmp_path / "node0/nvme0").glob("*/checkpoints/model")
    assert sorted(file.name for file in copied.iterdir()) == sorted(
        {file.name for file in model.iterdir()} - {"vocab.json"}
    )


def test_folders_of_frameworks_name_the_missing_host(pair: RankPool, tmp_path: Path) -> None:
    """One node returns with an empty drive."""
    pair.run(save_folder, str(tmp_path))
    assert pair.run(find_folder, str(tmp_path)) == ["checkpoint-2"] * 2
    shutil.rmtree(tmp_path / "node1/nvme0")
    (tmp_path / "node1/nvme0").mkdir()
    with pytest.raises(RankFailedError, match=r"nothing to resume.*step 2: 1 of 2 ranks; rank 1 on node1"):
        pair.run(find_folder, str(tmp_path))
