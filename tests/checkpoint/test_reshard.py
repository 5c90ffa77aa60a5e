"""Tests of resuming with a different number of ranks, page size or paths, with bitwise equal results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import infinity
from infinity.content.spans import full_spans
from infinity.errors import CheckpointError, FolderBusyError, LostRankError
from infinity.run import inspection
from infinity.store.folder import holders
from support.ranks import RankPool
from support.resharding import LATEST, all_tensors, newest_checkpoint, resume_and_train, train_and_save, unequal_names
from support.session import EVERY, STEPS, Session
from support.tables import all_but
from support.train import KIB, MIB, Recipe


@pytest.mark.parametrize("name", all_but(["gpt2", "toy", "frozen", "spare"], "gpt2", "toy"))
def test_resume_from_one_rank_to_two_and_back(name: str, pair: RankPool, tmp_path: Path) -> None:
    """Weights, moments and step counts are equal for each number of ranks, and training continues."""
    recipe = Recipe(model=name, steps=2)
    train_and_save(recipe, str(tmp_path))
    states = [all_tensors(newest_checkpoint(tmp_path))]
    assert [first for first, _ in pair.run(resume_and_train, recipe, str(tmp_path), 0)] == [2, 2]
    two = newest_checkpoint(tmp_path)
    assert (two.world_size, two.step, two.extra["note"]) == (2, 2, "mine")
    assert unequal_names(states[0], all_tensors(two)) == []

    assert pair.run(resume_and_train, recipe, str(tmp_path), 1)[0][0] == 2
    trained = all_tensors(newest_checkpoint(tmp_path))
    assert unequal_names(states[0], trained) != []
    assert resume_and_train(recipe, str(tmp_path), 0)[0] == 3
    one = newest_checkpoint(tmp_path)
    assert (one.world_size, one.step) == (1, 3)
    assert unequal_names(trained, all_tensors(one)) == []


@pytest.mark.wide
def test_resume_from_two_ranks_to_four(pair: RankPool, tmp_path: Path) -> None:
    """Some of the four ranks have no part of the smallest parameters."""
    recipe = Recipe(model="toy", steps=2)
    pair.run(train_and_save, recipe, str(tmp_path))
    before = all_tensors(newest_checkpoint(tmp_path))
    four = RankPool(4)
    try:
        assert [first for first, _ in four.run(resume_and_train, recipe, str(tmp_path), 0)] == [2] * 4
    finally:
        four.close()
    found = newest_checkpoint(tmp_path)
    assert found.world_size == 4
    assert unequal_names(before, all_tensors(found)) == []


def lose_a_rank_at_start(recipe: Recipe, folder: str) -> bool:
    """Resume on other ranks, and fail rank 1 after all have published; return whether this rank started."""
    original = infinity.PagedOptimizer.save_checkpoint

    def interrupted(*arguments: Any) -> None:
        original(*arguments)
        raise LostRankError("the connection was lost")

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(infinity.PagedOptimizer, "save_checkpoint", interrupted)
        try:
            resume_and_train(recipe, folder, 0)
        except LostRankError:
            return False
    return True


def test_failed_startup_keeps_a_published_checkpoint(pair: RankPool, tmp_path: Path) -> None:
    """Rank 0 knows that the checkpoint is complete, so rank 1 must keep its files even though it does not know."""
    recipe = Recipe(model="toy", steps=2)
    train_and_save(recipe, str(tmp_path))
    assert pair.run(lose_a_rank_at_start, recipe, str(tmp_path)) == [True, False]
    assert newest_checkpoint(tmp_path).world_size == 2
    assert pair.run(resume_and_train, recipe, str(tmp_path), 0) == [(2, {"note": "mine"})] * 2


def test_resume_with_more_paths_is_exact(undisturbed: list[float], tmp_path: Path) -> None:
    """Losses, including the effect of random states, equal those of an uninterrupted run."""
    with Session(tmp_path) as session:
        session.run(EVERY)
    storage = {"paths": [str(tmp_path / "nvme0"), str(tmp_path / "nvme1")]}
    (tmp_path / "nvme1").mkdir()
    with Session(tmp_path, run=LATEST, storage=storage) as session:
        assert session.optimizer.steps == EVERY
        assert session.run() == undisturbed[EVERY:]
    with Session(tmp_path, run=LATEST, storage=storage) as session:
        assert session.optimizer.steps == STEPS


def test_resume_keeps_the_page_size_of_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The free memory at startup determines the page size of new runs only."""
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
        assert session.optimizer.run.layout.page_bytes < found[0][1], "a new run would have smaller pages"


def test_resume_on_fewer_different_paths_is_exact(undisturbed: list[float], tmp_path: Path) -> None:
    """A run on two paths resumes on a third one, unless the run is still active."""
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
        assert session.optimizer.steps == EVERY, "the old run is unchanged"


def test_reader_reads_only_pages_of_the_requested_rows(
    pair: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows may span the shards of two ranks."""
    pair.run(train_and_save, Recipe(model="toy", steps=1), str(tmp_path))
    reader = newest_checkpoint(tmp_path)
    read: list[int] = []
    monkeypatch.setattr(reader, "_page", lambda rank, page: read.append(page) or reader._read_page(rank, page))
    for index, spec in enumerate(reader.tensors):
        full, rows = reader.read(index), spec.shape[0]
        every = len(read)
        for low, high in ((0, rows), (0, 1), (rows // 2, rows), (rows - 1, rows), (rows, rows)):
            read.clear()
            spans = (((low, high),), *full_spans(spec.shape)[1:])
            assert torch.equal(reader.read(index, spans=spans), full[low:high]), spec.names
            assert len(read) <= (every if high > low + 1 else high - low)
        read.clear()


def test_resharded_run_has_a_checkpoint_before_its_first_step(undisturbed: list[float], tmp_path: Path) -> None:
    """The old run is unchanged."""
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
