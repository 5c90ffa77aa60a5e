"""A checkpoint is one of all its ranks:

files of another checkpoint of the same step are never taken for a part of it.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from infinity.checkpoint import manifest as manifests
from infinity.checkpoint import publish as checkpoints
from infinity.checkpoint.manifest import complete_checkpoints, new_identity, published_in
from infinity.checkpoint.reader import CheckpointReader
from infinity.checkpoint.reserved_space import CheckpointSpace
from infinity.errors import CheckpointError, LostRankError, StorageError
from infinity.ranks import Ranks
from infinity.store.folder import RunFolder
from infinity.store.page_store import PageStore
from support.ranks import RankPool
from support.session import Session, reference
from support.tables import alternate

LATEST = {"resume": "latest", "retained_checkpoints": 2}


def checkpoint_twice(folder: str) -> None:
    """Checkpoint step 3, keep a copy of its files, checkpoint it again. Runs on every rank."""
    with Session(Path(folder)) as session:
        session.run(3, every=0)
        session.optimizer.save_checkpoint({"scheduler": session.scheduler.state_dict(), "note": "first"})
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.copytree(session.optimizer.run.folder.checkpoints, Path(folder) / "first")
        dist.barrier()
        session.optimizer.save_checkpoint({"scheduler": session.scheduler.state_dict(), "note": "second"})


def resumed(folder: str) -> tuple[int, Any]:
    """Resume; return step and note. Runs on every rank."""
    with Session(Path(folder), run=LATEST) as session:
        return session.optimizer.steps, session.optimizer.resumed_extra.get("note")


def run_folder(folder: Path) -> RunFolder:
    """Return the folder of the only run."""
    (found,) = [entry for entry in (folder / "nvme0").iterdir() if entry.is_dir()]
    return RunFolder(found.name, (found,))


@pytest.mark.parametrize("published", [0, 1, 2])
def test_a_step_that_is_checkpointed_again_is_one_checkpoint_of_all_ranks(
    published: int, pair: RankPool, tmp_path: Path
) -> None:
    """Cut off when none, one or both of two ranks had published the second: all take the first, or all the second."""
    pair.run(checkpoint_twice, str(tmp_path))
    folder = run_folder(tmp_path)
    second = sorted(folder.checkpoints.glob("step*"))
    for file in second:
        if not published or f"rank{published:05d}" in file.name:
            file.unlink()
    for file in (tmp_path / "first").glob("step*"):
        shutil.copy2(file, folder.checkpoints)
    expected = "second" if published == 2 else "first"
    assert CheckpointReader(folder).extra["note"] == expected, "export"
    assert pair.run(resumed, str(tmp_path)) == [(3, expected)] * 2
    assert len(complete_checkpoints(published_in(folder.checkpoints))) == 1, "what was passed over is removed"


def branch(folder: str, note: str) -> None:
    """Train to step 6, from step 3 if there is one, checkpointing both. Runs on every rank."""
    begun = any((Path(folder) / "nvme0").glob("*/checkpoints"))
    run: dict[str, Any] = {"retained_checkpoints": 2}
    if dist.is_initialized():
        dist.barrier()
    with Session(Path(folder), run={**LATEST, "resume_step": 3} if begun else run) as session:
        while session.optimizer.steps < 6:
            session.step()
            if session.optimizer.steps % 3 == 0:
                session.optimizer.save_checkpoint({"scheduler": session.scheduler.state_dict(), "note": note})


def test_branches_of_a_run_do_not_mix(pair: RankPool, tmp_path: Path) -> None:
    """Rank 1 has its files of the branch before, of the same run and step: that step is no checkpoint."""
    pair.run(branch, str(tmp_path), "before")
    shutil.copytree(run_folder(tmp_path).checkpoints, tmp_path / "before")
    pair.run(branch, str(tmp_path), "after")
    folder = run_folder(tmp_path)
    for file in folder.checkpoints.glob("step*06.rank00001*"):
        file.unlink()
    for file in (tmp_path / "before").glob("step*06.rank00001*"):
        shutil.copy2(file, folder.checkpoints)
    assert CheckpointReader(folder).step == 3
    with pytest.raises(CheckpointError, match=r"checkpoint of step 6 .*: 3\)"):
        CheckpointReader(folder, 6)
    assert pair.run(resumed, str(tmp_path)) == [(3, "before")] * 2


def test_identities_are_unique_and_in_order() -> None:
    """Even where the clock is set back."""
    found = [new_identity("")]
    for _ in range(100):
        found.append(new_identity(found[-1]))
    assert sorted(set(found)) == found
    later = "f" * 11 + "0" * 13
    assert new_identity(later) > later


def test_what_no_reader_would_take_is_not_published(tmp_path: Path) -> None:
    """The checkpoint before stays, and the next one is good."""
    with Session(tmp_path) as session:
        session.run(3)
        publish = session.optimizer._checkpointer._checkpoint_writer
        good, publish._stripe_weights = publish._stripe_weights, [float("inf")]
        with pytest.raises(CheckpointError, match=r"weights\.0 = inf must be a number"):
            session.run(4, every=1)
        folder = run_folder(tmp_path)
        assert [name.step for name in published_in(folder.checkpoints)] == [3]
        assert not list(folder.checkpoints.glob("step*.tmp"))
        publish._stripe_weights = good
        session.save_checkpoint()
    assert CheckpointReader(folder).step == 4


def test_a_withdrawn_checkpoint_never_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was published is removed for good; where it cannot be, its pages are not written over."""
    synced: list[Path] = []
    with Session(tmp_path) as session:
        session.run(3)
        original = manifests.write_manifest

        def fail(folder: Path, manifest: manifests.Manifest) -> None:
            original(folder, manifest)
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(manifests, "write_manifest", fail)
        sync = checkpoints.sync_folder
        monkeypatch.setattr(checkpoints, "sync_folder", lambda folder: synced.append(folder) or sync(folder))
        with pytest.raises(StorageError):
            session.run(4, every=1)
        folder = run_folder(tmp_path)
        assert synced == [folder.checkpoints]
        assert [name.step for name in published_in(folder.checkpoints)] == [3]
        monkeypatch.setattr(checkpoints, "sync_folder", _refuse)
        with pytest.raises(StorageError):
            session.run(5, every=1)
        store = session.optimizer.run.store
        pinned = {version for version in store._current.values() if store._named[version]}
        assert pinned == {store._current[page] for page in session.optimizer._checkpointer._checkpoint_writer._pages}


INTERRUPTIONS: dict[str, type[BaseException]] = {
    "exit": SystemExit, "interrupt": KeyboardInterrupt, "lost": LostRankError,
}  # fmt: skip


def interrupted(folder: str, what: str, checkpointed: bool) -> None:
    """Checkpoint steps 3 (if `checkpointed`) and 6;

    rank 0 does not get to hear how the last ended. Runs on every rank.
    """
    original = Ranks.collect

    def collect(ranks: Ranks, value: Any) -> list[Any]:
        original(ranks, value)
        raise INTERRUPTIONS[what]("injected")

    try:
        with pytest.MonkeyPatch.context() as patch, Session(Path(folder)) as session:
            session.run(3, every=3 if checkpointed else 0)
            session.run(6, every=0)
            if dist.get_rank() == 0:
                once_published(patch, partial(patch.setattr, Ranks, "collect", collect))
            session.save_checkpoint()
    except INTERRUPTIONS[what]:
        assert dist.get_rank() == 0


def once_published(patch: pytest.MonkeyPatch, action: Callable[[], None]) -> None:
    """Call `action` when this rank has published its files, before it exchanges with the others how that went."""
    took = CheckpointSpace.took

    def then(room: CheckpointSpace, size: int) -> None:
        took(room, size)
        action()

    patch.setattr(CheckpointSpace, "took", then)


@pytest.mark.parametrize(("what", "checkpointed"), alternate(INTERRUPTIONS, [True, False]))
def test_a_rank_that_does_not_know_how_a_checkpoint_ended_removes_nothing(
    what: str, checkpointed: bool, pair: RankPool, tmp_path: Path
) -> None:
    """The others may have gone on, and removed the checkpoint before: the new one is what all resume from."""
    pair.run(interrupted, str(tmp_path), what, checkpointed)
    assert pair.run(resumed, str(tmp_path)) == [(6, None)] * 2


def test_a_checkpoint_that_was_interrupted_before_the_exchange_is_withdrawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training may go on then. After the exchange its files stay, and no page of it is used until that is settled."""

    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    with Session(tmp_path) as session:
        session.run(3)
        store, folder = session.optimizer.run.store, run_folder(tmp_path)
        usual = len(store._named)
        for exchanging, left in ((False, [3]), (True, [3, 5])):
            session.run(session.optimizer.steps + 1, every=0)
            with monkeypatch.context() as patch:
                if exchanging:
                    once_published(patch, partial(patch.setattr, Ranks, "collect", interrupt))
                else:
                    patch.setattr(CheckpointSpace, "took", interrupt)
                with pytest.raises(KeyboardInterrupt):
                    session.save_checkpoint()
            assert [found.step for found in published_in(folder.checkpoints)] == left
        assert len(store._named) > usual
        session.save_checkpoint()
        assert [found.step for found in published_in(folder.checkpoints)] == [5]
        assert len(store._named) == usual


@pytest.mark.parametrize(
    ("owner", "name"),
    [(checkpoints, "remove_checkpoints"), (PageStore, "adopt"), (PageStore, "release"), (manifests, "write_manifest")],
)
def test_a_checkpoint_is_whole_whenever_ctrl_c_is_pressed(
    owner: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is heard behind it; else the next step has no slots to write to, where what it replaces was not given up."""
    (tmp_path / "undisturbed").mkdir()
    undisturbed = reference(tmp_path / "undisturbed")
    original, calls = getattr(owner, name), []

    def pressed(*given: Any, **named: Any) -> Any:
        calls.append(given)
        if len(calls) == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return original(*given, **named)

    with Session(tmp_path, storage={"timeout_seconds": 10}) as session:
        losses = session.run(3) + session.run(5, every=0)
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, pressed)
            with pytest.raises(KeyboardInterrupt):
                session.save_checkpoint()
        assert [found.step for found in published_in(run_folder(tmp_path).checkpoints)] == [5]
        assert losses + session.run() == undisturbed


def _refuse(folder: Path) -> None:
    raise OSError(5, "Input/output error", str(folder))
