"""Tests of checkpoint identities: files from different checkpoints of the same step are never combined."""

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
from infinity.checkpoint.manifest import new_identity, published_in
from infinity.checkpoint.reader import CheckpointReader
from infinity.checkpoint.reserved_space import CheckpointSpace
from infinity.errors import CheckpointError, LostRankError, StorageError
from infinity.ranks import Ranks
from infinity.store.folder import RunFolder
from infinity.store.page_store import PageStore
from support.published import complete_checkpoints, root_of
from support.ranks import RankPool
from support.session import Session

LATEST = {"resume": "latest", "retained_checkpoints": 2}


def checkpoint_twice(folder: str) -> None:
    """Save step 1, copy its files, and save it again. Runs on every rank."""
    with Session(Path(folder)) as session:
        session.step()
        session.optimizer.save_checkpoint({"scheduler": session.scheduler.state_dict(), "note": "first"})
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.copytree(session.optimizer.run.folder.checkpoints, Path(folder) / "first")
        dist.barrier()
        session.optimizer.save_checkpoint({"scheduler": session.scheduler.state_dict(), "note": "second"})


def resumed(folder: str) -> tuple[int, Any]:
    """Resume; return the step and the note. Runs on every rank."""
    with Session(Path(folder), run=LATEST) as session:
        return session.optimizer.steps, session.optimizer.resumed_extra.get("note")


def run_folder(folder: Path) -> RunFolder:
    """Return the folder of the only run."""
    root = root_of(folder)
    return RunFolder(root.name, (root,))


def test_all_ranks_resume_from_the_same_of_two_checkpoints(
    subtests: pytest.Subtests, pair: RankPool, tmp_path: Path
) -> None:
    """None, one or both of two ranks published the second checkpoint before the run was stopped."""
    (saved := tmp_path / "saved").mkdir()
    pair.run(checkpoint_twice, str(saved))
    for published in range(3):
        place = shutil.copytree(saved, tmp_path / str(published))
        folder = run_folder(place)
        for file in folder.checkpoints.glob("step*"):
            if not published or f"rank{published:05d}" in file.name:
                file.unlink()
        for file in (place / "first").glob("step*"):
            shutil.copy2(file, folder.checkpoints)
        expected = "second" if published == 2 else "first"
        with subtests.test(published=published):
            assert CheckpointReader(folder).extra["note"] == expected, "export"
            assert pair.run(resumed, str(place)) == [(1, expected)] * 2
            assert len(complete_checkpoints(folder.roots[0])) == 1, "the other one must be removed"


def branch(folder: str, note: str) -> None:
    """Train to step 2, from step 1 if it exists, and save both. Runs on every rank."""
    begun = any((Path(folder) / "nvme0").glob("*/checkpoints"))
    run: dict[str, Any] = {"retained_checkpoints": 2}
    if dist.is_initialized():
        dist.barrier()
    with Session(Path(folder), run={**LATEST, "resume_step": 1} if begun else run) as session:
        while session.optimizer.steps < 2:
            session.step()
            session.optimizer.save_checkpoint({"scheduler": session.scheduler.state_dict(), "note": note})


def test_checkpoints_of_different_branches_are_not_combined(pair: RankPool, tmp_path: Path) -> None:
    """Rank 1 has files of the previous branch at step 2, so step 2 is not a checkpoint."""
    pair.run(branch, str(tmp_path), "before")
    shutil.copytree(run_folder(tmp_path).checkpoints, tmp_path / "before")
    pair.run(branch, str(tmp_path), "after")
    folder = run_folder(tmp_path)
    for file in folder.checkpoints.glob("step*02.rank00001*"):
        file.unlink()
    for file in (tmp_path / "before").glob("step*02.rank00001*"):
        shutil.copy2(file, folder.checkpoints)
    assert CheckpointReader(folder).step == 1
    with pytest.raises(CheckpointError, match=r"checkpoint of step 2 .*: 1\)"):
        CheckpointReader(folder, 2)
    assert pair.run(resumed, str(tmp_path)) == [(1, "before")] * 2


def test_identities_are_unique_and_in_order() -> None:
    """The order does not depend on the clock, which may be set back."""
    found = [new_identity("")]
    for _ in range(100):
        found.append(new_identity(found[-1]))
    assert sorted(set(found)) == found
    later = "f" * 11 + "0" * 13
    assert new_identity(later) > later


def test_invalid_manifest_is_not_published(tmp_path: Path) -> None:
    """The previous checkpoint is kept, and the next one succeeds."""
    with Session(tmp_path) as session:
        session.run(1, every=1)
        publish = session.optimizer._checkpointer._checkpoint_writer
        good, publish._stripe_weights = publish._stripe_weights, [float("inf")]
        with pytest.raises(CheckpointError, match=r"weights\.0 = inf must be a number"):
            session.run(2, every=1)
        folder = run_folder(tmp_path)
        assert [name.step for name in published_in(folder.checkpoints)] == [1]
        assert not list(folder.checkpoints.glob("step*.tmp"))
        publish._stripe_weights = good
        session.save_checkpoint()
    assert CheckpointReader(folder).step == 2


def test_withdrawn_checkpoint_is_removed_durably(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If its files cannot be removed durably, its pages are not overwritten."""
    synced: list[Path] = []
    with Session(tmp_path) as session:
        session.run(1, every=1)
        original = manifests.write_manifest

        def fail(folder: Path, manifest: manifests.Manifest) -> None:
            original(folder, manifest)
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(manifests, "write_manifest", fail)
        sync = checkpoints.sync_folder
        monkeypatch.setattr(checkpoints, "sync_folder", lambda folder: synced.append(folder) or sync(folder))
        with pytest.raises(StorageError):
            session.run(2, every=1)
        folder = run_folder(tmp_path)
        assert synced == [folder.checkpoints]
        assert [name.step for name in published_in(folder.checkpoints)] == [1]
        monkeypatch.setattr(checkpoints, "sync_folder", _io_error)
        with pytest.raises(StorageError):
            session.run(3, every=1)
        store = session.optimizer.run.store
        pinned = {version for version in store._current.values() if store._named[version]}
        assert pinned == {store._current[page] for page in session.optimizer._checkpointer._checkpoint_writer._pages}


@pytest.mark.parametrize("while_publishing", [False, True])
def test_training_continues_if_checkpoint_files_cannot_be_removed(
    while_publishing: bool, undisturbed: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pages stay protected in additional space, instead of blocking the next steps, until a removal succeeds.

    The files are those of the previous checkpoint or, if an error occurs while publishing, those of the failed one.
    """
    with Session(tmp_path) as session:
        losses = session.run(3)
        with monkeypatch.context() as patch:
            patch.setattr(checkpoints, "sync_folder", _io_error)
            if while_publishing:
                patch.setattr(manifests, "write_manifest", lambda *_: _io_error(Path()))
            for until in (6, 8):
                losses += session.run(until, every=0)
                if while_publishing:
                    with pytest.raises(StorageError):
                        session.save_checkpoint()
                else:
                    session.save_checkpoint()
        losses += session.run(9, every=0)
        session.save_checkpoint()
        folder, store = run_folder(tmp_path), session.optimizer.run.store
        assert [name.step for name in published_in(folder.checkpoints)] == [9]
        assert set(store._named) == set(
            store.versions(session.optimizer._checkpointer._checkpoint_writer._pages).values()
        )
    assert losses == undisturbed
    with Session(tmp_path, run=LATEST) as session:
        assert session.optimizer.steps == 9


INTERRUPTIONS: dict[str, type[BaseException]] = {
    "exit": SystemExit, "interrupt": KeyboardInterrupt, "lost": LostRankError,
}  # fmt: skip


def interrupt_rank_0_after_publishing(folder: str, interruption: str, checkpointed: bool) -> tuple[int, Any]:
    """Save steps 1 (if `checkpointed`) and 2, interrupt rank 0 before it knows the result, and resume.

    Runs on every rank.
    """
    original = Ranks.collect

    def collect(ranks: Ranks, value: Any) -> list[Any]:
        original(ranks, value)
        raise INTERRUPTIONS[interruption]("injected")

    try:
        with pytest.MonkeyPatch.context() as patch, Session(Path(folder)) as session:
            session.run(1, every=int(checkpointed))
            session.run(2, every=0)
            if dist.get_rank() == 0:
                once_published(patch, partial(patch.setattr, Ranks, "collect", collect))
            session.save_checkpoint()
    except INTERRUPTIONS[interruption]:
        assert dist.get_rank() == 0
    return resumed(folder)


def once_published(patch: pytest.MonkeyPatch, action: Callable[[], None]) -> None:
    """Call `action` after this rank has published its files and before it exchanges the result with the others."""
    took = CheckpointSpace.took

    def then(room: CheckpointSpace, size: int) -> None:
        took(room, size)
        action()

    patch.setattr(CheckpointSpace, "took", then)


@pytest.mark.parametrize(
    ("interruption", "checkpointed"),
    [("interrupt", False), ("lost", True), pytest.param("exit", True, marks=pytest.mark.wide)],
)
def test_interrupted_rank_keeps_a_checkpoint_with_unknown_result(
    interruption: str, checkpointed: bool, pair: RankPool, tmp_path: Path
) -> None:
    """Other ranks may already have removed the previous checkpoint, so all ranks must resume from the new one."""
    found = pair.run(interrupt_rank_0_after_publishing, str(tmp_path), interruption, checkpointed)
    assert found == [(2, None)] * 2


def test_checkpoint_interrupted_before_the_exchange_is_withdrawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the exchange, its files are kept, and its pages are not reused until the next checkpoint."""

    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    with Session(tmp_path) as session:
        session.run(1, every=1)
        store, folder = session.optimizer.run.store, run_folder(tmp_path)
        usual = len(store._named)
        for exchanging, retained in ((False, [1]), (True, [1, 3])):
            session.run(session.optimizer.steps + 1, every=0)
            with monkeypatch.context() as patch:
                if exchanging:
                    once_published(patch, partial(patch.setattr, Ranks, "collect", interrupt))
                else:
                    patch.setattr(CheckpointSpace, "took", interrupt)
                with pytest.raises(KeyboardInterrupt):
                    session.save_checkpoint()
            assert [found.step for found in published_in(folder.checkpoints)] == retained
        assert len(store._named) > usual
        session.save_checkpoint()
        assert [found.step for found in published_in(folder.checkpoints)] == [3]
        assert len(store._named) == usual


def test_ctrl_c_is_deferred_until_the_checkpoint_is_complete(
    subtests: pytest.Subtests, undisturbed: list[float], tmp_path: Path
) -> None:
    """Otherwise replaced pages might not be freed, and the next step would have no slots to write to."""
    with Session(tmp_path, storage={"timeout_seconds": 10}) as session:
        losses = session.run(1, every=1)
        for owner, name in (
            (checkpoints, "remove_checkpoints"), (PageStore, "adopt"), (PageStore, "release"),
            (manifests, "write_manifest"),
        ):  # fmt: skip
            original, waiting = getattr(owner, name), iter([True])

            def interrupting(*given: Any, original: Any = original, waiting: Any = waiting, **named: Any) -> Any:
                if next(waiting, False):
                    os.kill(os.getpid(), signal.SIGINT)
                return original(*given, **named)

            losses.append(session.step())
            with subtests.test(name), pytest.MonkeyPatch.context() as patch:
                patch.setattr(owner, name, interrupting)
                with pytest.raises(KeyboardInterrupt):
                    session.save_checkpoint()
                saved = [found.step for found in published_in(run_folder(tmp_path).checkpoints)]
                assert saved == [session.optimizer.steps]
        assert losses + session.run() == undisturbed


def _io_error(folder: Path) -> None:
    raise OSError(5, "Input/output error", str(folder))
