"""A checkpoint goes on where pages lie otherwise: other ranks, pages, paths; every bit is the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import infinity
from infinity.errors import CheckpointError, FolderBusyError, LostRankError
from infinity.run import inspection
from infinity.store.folder import holders
from support.ranks import RankPool
from support.resharding import LATEST, begin, everything, go_on, newest, same
from support.session import EVERY, STEPS, Session, reference
from support.train import KIB, MIB, Recipe

MODELS = ("gpt2", "toy", "frozen", "spare")


@pytest.mark.parametrize("name", MODELS)
def test_from_one_rank_to_two_and_back(name: str, pair: RankPool, tmp_path: Path) -> None:
    """Weights, moments and step counts are the same in every world; training goes on in each."""
    recipe = Recipe(model=name, steps=2)
    begin(recipe, str(tmp_path))
    states = [everything(newest(tmp_path))]
    assert [first for first, _ in pair.run(go_on, recipe, str(tmp_path), 0)] == [2, 2]
    two = newest(tmp_path)
    assert (two.world_size, two.step, two.extra["note"]) == (2, 2, "mine")
    assert same(states[0], everything(two)) == []

    assert pair.run(go_on, recipe, str(tmp_path), 1)[0][0] == 2
    trained = everything(newest(tmp_path))
    assert same(states[0], trained) != []
    assert go_on(recipe, str(tmp_path), 0)[0] == 3
    one = newest(tmp_path)
    assert (one.world_size, one.step) == (1, 3)
    assert same(trained, everything(one)) == []


@pytest.mark.wide
def test_from_two_ranks_to_four(pair: RankPool, tmp_path: Path) -> None:
    """Four ranks, of which some have nothing of the smallest parameters."""
    recipe = Recipe(model="toy", steps=2)
    pair.run(begin, recipe, str(tmp_path))
    before = everything(newest(tmp_path))
    four = RankPool(4)
    try:
        assert [first for first, _ in four.run(go_on, recipe, str(tmp_path), 0)] == [2] * 4
    finally:
        four.close()
    found = newest(tmp_path)
    assert found.world_size == 4
    assert same(before, everything(found)) == []


def lose_a_rank_at_start(recipe: Recipe, folder: str) -> bool:
    """Go on with other ranks; the second is interrupted when all have published. Returns whether this one started."""
    whole = infinity.PagedOptimizer.save_checkpoint

    def interrupted(*arguments: Any) -> None:
        whole(*arguments)
        raise LostRankError("the connection was lost")

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(infinity.PagedOptimizer, "save_checkpoint", interrupted)
        try:
            go_on(recipe, folder, 0)
        except LostRankError:
            return False
    return True


def test_a_start_that_ends_when_others_know_a_checkpoint_leaves_it(pair: RankPool, tmp_path: Path) -> None:
    """The first rank has seen the checkpoint of all; the second, which has not, keeps its part of it."""
    recipe = Recipe(model="toy", steps=2)
    begin(recipe, str(tmp_path))
    assert pair.run(lose_a_rank_at_start, recipe, str(tmp_path)) == [True, False]
    assert newest(tmp_path).world_size == 2
    assert pair.run(go_on, recipe, str(tmp_path), 0) == [(2, {"note": "mine"})] * 2


CHANGES: dict[str, dict[str, dict[str, Any]]] = {
    "page size": {"memory": {"page_bytes": 128 * KIB, "host_bytes": 64 * MIB}},
    "more paths": {"storage": {"paths": ["nvme0", "nvme1"]}},
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_pages_and_paths_change_no_bit(change: str, tmp_path: Path) -> None:
    """The losses are those of a run that nobody disturbed, random states included."""
    (tmp_path / "undisturbed").mkdir()
    undisturbed = reference(tmp_path / "undisturbed")
    with Session(tmp_path) as session:
        session.run(EVERY)
    (tmp_path / "nvme1").mkdir()
    sections = {name: dict(values) for name, values in CHANGES[change].items()}
    if "storage" in sections:
        sections["storage"]["paths"] = [str(tmp_path / path) for path in sections["storage"]["paths"]]
    with Session(tmp_path, run=LATEST, **sections) as session:
        assert session.optimizer.steps == EVERY
        assert session.run() == undisturbed[EVERY:]
    with Session(tmp_path, run=LATEST, **sections) as session:
        assert session.optimizer.steps == STEPS


def test_the_pages_of_a_checkpoint_keep_their_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is free at a start says how large pages of a new run are, not that a checkpoint is to be written anew."""
    sections = {"memory": {"page_bytes": 0, "host_bytes": 0}}
    found = []
    for host_cache, run in ((64 * MIB, {}), (8 * MIB, LATEST), (64 * MIB, LATEST)):
        monkeypatch.setattr(inspection, "default_host_cache", lambda ranks, host_cache=host_cache: host_cache)
        with Session(tmp_path, run=run, **sections) as session:
            session.run(session.optimizer.steps + 1, every=1)
            found.append((session.optimizer.run.folder.run_id, session.optimizer.run.layout.page_bytes))
    assert found == [found[0]] * 3
    monkeypatch.setattr(inspection, "default_host_cache", lambda ranks: 8 * MIB)
    (tmp_path / "new").mkdir()
    with Session(tmp_path / "new", **sections) as session:
        assert session.optimizer.run.layout.page_bytes < found[0][1], "a new run would have other pages"


def test_fewer_and_other_paths_change_no_bit(tmp_path: Path) -> None:
    """A run on two folders goes on in a third one; a live run is not taken from."""
    (tmp_path / "undisturbed").mkdir()
    undisturbed = reference(tmp_path / "undisturbed")
    (tmp_path / "nvme1").mkdir()
    (tmp_path / "elsewhere").mkdir()
    two = {"paths": [str(tmp_path / "nvme0"), str(tmp_path / "nvme1")]}
    elsewhere = {"storage": {"paths": [str(tmp_path / "elsewhere")]}, "run": {**LATEST, "resume_paths": two["paths"]}}
    with Session(tmp_path, storage=two) as session:
        session.run(EVERY)
        with pytest.raises(FolderBusyError, match="in use by"):
            Session(tmp_path, **elsewhere)
    lacking = {"run": {**LATEST, "resume_paths": two["paths"][:1]}, "storage": elsewhere["storage"]}
    with pytest.raises(CheckpointError, match=r"\b2 paths\b.*\b1\b"):
        Session(tmp_path, **lacking)
    assert list((tmp_path / "elsewhere").iterdir()) == []
    with Session(tmp_path, **elsewhere) as session:
        assert session.optimizer.steps == EVERY
        assert session.run() == undisturbed[EVERY:]
    with Session(tmp_path, storage=two, run=LATEST) as session:
        assert session.optimizer.steps == EVERY, "the old run stays as it was"


def test_a_rank_reads_the_pages_of_its_rows(pair: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any rows of any parameter, across the slices of two ranks; pages that hold none of them are not read."""
    pair.run(begin, Recipe(model="toy", steps=1), str(tmp_path))
    reader = newest(tmp_path)
    read: list[int] = []
    monkeypatch.setattr(reader, "_page", lambda rank, page: read.append(page) or reader._read_page(rank, page))
    for index, spec in enumerate(reader.tensors):
        whole, rows = reader.read(index), spec.shape[0]
        every = len(read)
        for low, high in ((0, rows), (0, 1), (rows // 2, rows), (rows - 1, rows), (rows, rows)):
            read.clear()
            assert torch.equal(reader.read(index, rows=(low, high)), whole[low:high]), spec.names
            assert len(read) <= (every if high > low + 1 else high - low)
        read.clear()


def test_a_resharded_run_is_durable_at_once(tmp_path: Path) -> None:
    """The new run has a checkpoint before it takes a step; the old one is untouched."""
    (tmp_path / "undisturbed").mkdir()
    undisturbed = reference(tmp_path / "undisturbed")
    with Session(tmp_path) as session:
        session.run(EVERY)
        old = session.optimizer.run.folder.run_id
    pages = {"page_bytes": 128 * KIB, "host_bytes": 64 * MIB}
    with Session(tmp_path, run=LATEST, memory=pages) as session:
        assert session.optimizer.run.folder.run_id != old
        assert holders(tmp_path / "nvme0")[0].run_id == session.optimizer.run.folder.run_id
    with Session(tmp_path, run=LATEST, memory=pages) as session:
        assert session.run() == undisturbed[EVERY:]
    with Session(tmp_path, run={"resume": old}) as session:
        assert session.run() == undisturbed[EVERY:]
