"""Tests of durability: checkpoints survive kills, full drives and corrupt files, and failures are reported."""

from __future__ import annotations

import errno
import gc
import json
import os
import random
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import infinity
from infinity.checkpoint import manifest as manifests
from infinity.checkpoint import publish as checkpoints
from infinity.checkpoint.manifest import published_in, read_manifest
from infinity.errors import (
    CheckpointError,
    ConfigError,
    CorruptPageError,
    FolderBusyError,
    InfinityError,
    StorageError,
)
from infinity.run import run_directory
from infinity.store.folder import FolderLock, holders
from infinity.telemetry import read_stats_file
from support import models
from support.fault_engine import Fault, FaultKind
from support.processes import fork_server
from support.published import flip, root_of
from support.ranks import RankPool
from support.session import EVERY, STEPS, Session
from support.tables import all_but
from support.train import MIB, Paging, Recipe, batch, faulty, make_optimizer, settings

LATEST = {"resume": "latest"}
KILLS = (
    *("forward", "backward", "before step", "checkpoint: pages flushed"),
    *("checkpoint: state written", "checkpoint: published"),
)


def resumed(folder: Path) -> tuple[int, list[float]]:
    """Resume the latest run and train until the next checkpoint; return the first step and the losses."""
    random.seed(99)
    np.random.seed(99)
    with Session(folder, run=LATEST) as session:
        first = session.optimizer.steps
        return first, session.run(min(first + EVERY, STEPS))


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arm(where: str, session: Session) -> None:
    """Make the process kill itself at a point of the next step."""
    middle = session.model.blocks[1]
    if where == "forward":
        middle.register_forward_hook(die)
    elif where == "backward":
        middle.register_full_backward_hook(die)
    elif where == "before step":
        session.optimizer.step = die
    elif where == "checkpoint: pages flushed":
        checkpoints.model_state.save_tensors = die
    elif where == "checkpoint: state written":
        manifests.write_manifest = die
    else:
        checkpoints.remove_checkpoints = die


def run_and_die(folder: Path, where: str, step: int) -> None:
    """Run a session that kills its process in a step, and write the losses before it to a file."""
    torch.set_num_threads(1)
    losses: list[float] = []
    with Session(folder) as session:
        while True:
            if session.optimizer.steps == step - 1:
                (folder / "losses.json").write_text(json.dumps(losses))
                arm(where, session)
            losses.append(session.step())
            if session.optimizer.steps % EVERY == 0:
                session.save_checkpoint()


@pytest.mark.parametrize("where", all_but(KILLS, "forward", "backward", "before step", "checkpoint: pages flushed"))
def test_killed_run_resumes_bit_for_bit(where: str, undisturbed: list[float], tmp_path: Path) -> None:
    """After kill -9 at any point, the run resumes from the last checkpoint."""
    step = 6 if where.startswith("checkpoint") else 8
    process = fork_server().Process(target=run_and_die, args=(tmp_path, where, step))
    process.start()
    process.join(900)
    assert process.exitcode == -signal.SIGKILL, f"ended with {process.exitcode} instead of being killed"
    assert json.loads((tmp_path / "losses.json").read_text()) == undisturbed[: step - 1]
    first, losses = resumed(tmp_path)
    assert first == (3 if where in KILLS[3:5] else 6)
    assert losses == undisturbed[first : first + EVERY]
    leftovers = [file.name for file in (root_of(tmp_path) / "checkpoints").glob("step*")]
    assert len(leftovers) == 2, "one manifest and its state file"


def test_checkpoints_do_not_change_the_losses(undisturbed: list[float], tmp_path: Path) -> None:
    """The run saves no checkpoints, or one after every step. A wrong step or random state would change the losses."""
    assert len(set(undisturbed)) == STEPS
    for every in (0, 1):
        with Session(tmp_path, run={"keep": "never"}) as session:
            assert session.run(every=every) == undisturbed


def test_resume_restores_optimizer_state_scheduler_and_extra(tmp_path: Path) -> None:
    with Session(tmp_path) as session:
        session.run(5, every=5)
        lrs = [group["lr"] for group in session.optimizer.param_groups]
        states = {name: session.optimizer.read_state(name) for name, _ in session.model.named_parameters()}
    with Session(tmp_path, run=LATEST) as again:
        assert again.optimizer.steps == 5
        assert again.scheduler.last_epoch == 5
        assert [group["lr"] for group in again.optimizer.param_groups] == lrs
        assert again.optimizer.resumed_extra["scheduler"]["last_epoch"] == 5
        for name, state in states.items():
            found = again.optimizer.read_state(name)
            assert found.keys() == state.keys()
            assert all(torch.equal(torch.as_tensor(found[kind]), torch.as_tensor(state[kind])) for kind in state), name
            assert int(found["step"]) == 5


def test_resume_by_run_id(undisturbed: list[float], tmp_path: Path) -> None:
    """For an unknown ID, the error lists the existing IDs."""
    with Session(tmp_path) as session:
        session.run(EVERY)
        run_id = session.optimizer.run.folder.run_id
    with pytest.raises(CheckpointError, match=rf"'nothing'.*{run_id}"):
        Session(tmp_path, run={"resume": "nothing"})
    with Session(tmp_path, run={"resume": run_id}) as session:
        assert session.run() == undisturbed[EVERY:]


def test_latest_resumes_the_newest_run_with_a_checkpoint(undisturbed: list[float], tmp_path: Path) -> None:
    """Newer runs without a checkpoint, or with one that is incomplete on one of two ranks, are skipped."""
    with Session(tmp_path) as session:
        session.run(EVERY)
    checkpointed = root_of(tmp_path)
    (manifest,) = (checkpointed / "checkpoints").glob("step*.json")
    for number, names in enumerate([[], [manifest.name.replace("of-00001", "of-00002")]]):
        later = checkpointed.with_name(f"29991231-00000{number}-000000") / "checkpoints"
        later.mkdir(parents=True)
        for name in names:
            (later / name).write_bytes(manifest.read_bytes())
    assert resumed(tmp_path) == (EVERY, undisturbed[EVERY : 2 * EVERY])


def run_with_clock(folder: Path, days: int, sections: dict[str, dict[str, Any]]) -> tuple[str, int]:
    """Start or resume a run while the clock is off by some days, and save a checkpoint after one more step.

    Runs on every rank. Return the run id and the step at which the run started.
    """
    now, now_ns = time.time, time.time_ns
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: now() + 86400 * days)
        patch.setattr(time, "time_ns", lambda: now_ns() + 86400 * days * 10**9)
        with Session(folder, "all", **sections) as session:
            found = session.optimizer.run.folder.run_id, session.optimizer.steps
            session.step()
            session.save_checkpoint()
            return found


def test_latest_resumes_the_last_run_even_if_the_clock_was_set_back(pair: RankPool, tmp_path: Path) -> None:
    """With two ranks and two paths, of which later runs use only the second one, or list it first."""
    paths = [str(tmp_path / f"nvme{number}") for number in range(2)]
    started = []
    for days, chosen in ((0, paths), (-365, paths[1:]), (-400, paths[::-1])):
        ranks = pair.run(run_with_clock, tmp_path, days, {"storage": {"paths": chosen}})
        assert ranks[0] == ranks[1]
        started.append(ranks[0][0])
    assert started == sorted(started)
    # In new folders, because the number of ranks is different.
    resumed_in = {"storage": {"paths": [str(tmp_path / "nvme2")]}, "run": {**LATEST, "resume_paths": paths}}
    copied, step = run_with_clock(tmp_path, -500, resumed_in)
    assert step == 1
    assert copied > started[-1]
    assert (
        pair.run(run_with_clock, tmp_path, -1, {"storage": {"paths": paths}, "run": LATEST}) == [(started[-1], 1)] * 2
    )


def test_resume_looks_for_its_run_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds the path, so that no other run can start there, and uses the page size of the checkpoint."""
    with Session(tmp_path) as session:
        session.run(EVERY)
        expected, page_bytes = session.optimizer.run.folder.run_id, session.optimizer.run.layout.page_bytes
    found: list[str] = []
    choose_run = run_directory.choose_run

    def counted(*arguments: Any) -> str:
        found.append(choose_run(*arguments))
        assert holders(arguments[0][0]), "the path is not locked"
        return found[-1]

    monkeypatch.setattr(run_directory, "choose_run", counted)
    with Session(tmp_path, run=LATEST, memory={"page_bytes": 0, "host_bytes": 64 * MIB}) as session:
        assert session.optimizer.run.folder.run_id == expected
        assert session.optimizer.run.layout.page_bytes == page_bytes
    assert [run_id for run_id in found if run_id] == [expected]


def test_resume_from_an_empty_folder_raises(tmp_path: Path) -> None:
    """The folder remains empty."""
    with pytest.raises(CheckpointError, match="no checkpoint"):
        Session(tmp_path, run=LATEST)
    assert list((tmp_path / "nvme0").iterdir()) == []


def checkpoints_in(folder: Path, rank: int) -> dict[int, Path]:
    """Return the manifests of a rank by step."""
    return {name.step: folder / name.file_name for name in published_in(folder) if name.rank == rank}


def retained_steps(folder: Path) -> list[int]:
    """Return the steps of the existing checkpoints."""
    return sorted(checkpoints_in(root_of(folder) / "checkpoints", 0))


def test_newest_checkpoints_are_retained(undisturbed: list[float], tmp_path: Path) -> None:
    """A run can resume from any of them, which removes the later ones."""
    retained = {"retained_checkpoints": 3}
    with Session(tmp_path, run=retained) as session:
        session.run(6, every=1)
    assert retained_steps(tmp_path) == [4, 5, 6]
    for step in (5, 4):
        with Session(tmp_path, run={**LATEST, **retained, "resume_step": step}) as session:
            assert session.optimizer.steps == step
            assert retained_steps(tmp_path) == list(range(4, step + 1)), "older checkpoints are kept until the next one"
            if step == 4:
                assert session.run(every=1) == undisturbed[4:]
    assert retained_steps(tmp_path) == [STEPS - 2, STEPS - 1, STEPS]
    with pytest.raises(CheckpointError, match=r"checkpoint of step 5 .*: 7, 8, 9\)"):
        Session(tmp_path, run={**LATEST, "resume_step": 5})


def test_resume_from_an_earlier_checkpoint_if_the_newest_is_corrupt(undisturbed: list[float], tmp_path: Path) -> None:
    """The error about the corrupt page recommends an earlier checkpoint."""
    with Session(tmp_path, run={"retained_checkpoints": 2}) as session:
        session.run(6)
    files = checkpoints_in(root_of(tmp_path) / "checkpoints", 0)
    newest, older = (read_manifest(files[step]).pages for step in (6, 3))
    page = next(page for page in newest if newest[page] != older[page])
    flip(root_of(tmp_path) / "rank00000.pages", newest[page].extent.offset)
    with (
        pytest.raises(CorruptPageError, match="resume from an earlier checkpoint"),
        Session(tmp_path, run=LATEST) as session,
    ):
        session.run()
    with Session(tmp_path, run={**LATEST, "resume_step": 3}) as session:
        assert session.run() == undisturbed[3:]


@pytest.mark.parametrize("numbers", [(1, 3), (3, 1)])
def test_resume_can_change_the_number_of_retained_checkpoints(
    numbers: tuple[int, int], undisturbed: list[float], tmp_path: Path
) -> None:
    """The data file grows if necessary, and no checkpoint is lost."""
    before, after = numbers
    with Session(tmp_path, run={"retained_checkpoints": before}) as session:
        session.run(4, every=1)
    with Session(tmp_path, run={**LATEST, "retained_checkpoints": after}) as session:
        assert session.run(7, every=1) == undisturbed[4:7]
    assert retained_steps(tmp_path) == list(range(8 - after, 8))
    with Session(tmp_path, run={**LATEST, "retained_checkpoints": after, "resume_step": 8 - after}) as session:
        assert session.run() == undisturbed[8 - after :]


CHANGES = {
    "model": "a different model",
    "optimizer": "AdamW.*SGD",
    "similar optimizer": "AdamW.*NAdam",
    "groups": "param groups",
}
OPTIMIZER_OF = {"optimizer": "sgd_nesterov", "similar optimizer": "nadam"}


def test_resume_with_a_different_model_or_optimizer_is_rejected(undisturbed: list[float], tmp_path: Path) -> None:
    """The run can still be resumed afterwards."""
    with Session(tmp_path) as session:
        session.run(EVERY)
    for change, message in CHANGES.items():
        model = models.build("repeated" if change == "model" else "toy")
        other = Recipe(groups=change != "groups", optimizer=OPTIMIZER_OF.get(change, "adamw"))
        with pytest.raises((CheckpointError, ConfigError), match=message):
            infinity.offload(model, make_optimizer(other, model), settings(tmp_path, Paging(), 64 * MIB, run=LATEST))
    assert resumed(tmp_path) == (EVERY, undisturbed[EVERY : 2 * EVERY])


def test_flipped_bit_is_reported_with_page_and_offset(tmp_path: Path) -> None:
    """For any page, the error reports the page, the file and the offset."""
    with Session(tmp_path) as session:
        session.run(EVERY)
        names = [
            session.optimizer.run.layout.page_name(index) for index in range(len(session.optimizer.run.layout.pages))
        ]
    versions = read_manifest(checkpoints_in(root_of(tmp_path) / "checkpoints", 0)[EVERY]).pages
    shutil.copytree(tmp_path / "nvme0", tmp_path / "good")
    for page in sorted(versions)[:: max(1, len(versions) // 3)]:
        shutil.rmtree(tmp_path / "nvme0")
        shutil.copytree(tmp_path / "good", tmp_path / "nvme0")
        file, extent = root_of(tmp_path) / "rank00000.pages", versions[page].extent
        flip(file, extent.offset + 100)
        with (
            pytest.raises(CorruptPageError) as caught,
            Session(tmp_path, run=LATEST) as session,
        ):
            session.run()
        assert caught.value.page == names[page]
        assert (caught.value.path, caught.value.offset) == (str(file), extent.offset)
        for word in (names[page], str(file), str(extent.offset)):
            assert word in str(caught.value)


def test_second_run_in_a_folder_is_rejected(tmp_path: Path) -> None:
    """The error names the first run, and its process or variable; the first run continues."""
    with Session(tmp_path) as session:
        run_id = session.optimizer.run.folder.run_id
        with pytest.raises(FolderBusyError, match=rf"{run_id} \(process {os.getpid()}"):
            FolderLock.acquire([tmp_path / "nvme0"], "another", 0)
        with pytest.raises(FolderBusyError, match=rf"{run_id} of this process.*`session` of"):
            Session(tmp_path)
        session.run(2, every=1)
        with pytest.raises(FolderBusyError, match=run_id):
            Session(tmp_path, run=LATEST)
        session.run(4)


def test_failed_flush_keeps_the_previous_checkpoint(undisturbed: list[float], tmp_path: Path) -> None:
    """A checkpoint whose data cannot be flushed is not published."""
    fault = Fault(kind=FaultKind.ENOSPC)
    with faulty(fault, on=False) as engines, Session(tmp_path, host_cache="all") as session:
        session.run(EVERY)
        session.run(EVERY + 2, every=0)
        engines[-1].on = True
        with pytest.raises(StorageError, match="ENOSPC"):
            session.save_checkpoint()
    assert resumed(tmp_path) == (EVERY, undisturbed[EVERY : 2 * EVERY])


@pytest.mark.parametrize("name", ["write_durably", "write_manifest"])
def test_failed_checkpoint_write_keeps_the_previous_checkpoint(
    name: str, undisturbed: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training continues, and the next checkpoint succeeds."""
    with Session(tmp_path) as session:
        session.run(EVERY)
        session.run(EVERY + 1, every=0)
        with monkeypatch.context() as patch:
            patch.setattr(manifests, name, no_space)
            with pytest.raises(StorageError, match="No space left"):
                session.save_checkpoint()
        shutil.copytree(tmp_path, tmp_path / "copy")
        assert resumed(tmp_path / "copy") == (EVERY, undisturbed[EVERY : 2 * EVERY])
        session.run()
    assert resumed(tmp_path) == (STEPS, [])


def no_space(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_failed_second_checkpoint_of_a_step_keeps_the_first(
    undisturbed: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first checkpoint is valid even if random numbers were drawn before the second."""
    with Session(tmp_path) as session:
        session.run(EVERY)
        torch.rand(5)
        monkeypatch.setattr(manifests, "write_manifest", no_space)
        with pytest.raises(StorageError, match="No space left"):
            session.save_checkpoint()
        monkeypatch.undo()
    assert resumed(tmp_path) == (EVERY, undisturbed[EVERY : 2 * EVERY])


def test_resume_from_step_zero_keeps_the_run(undisturbed: list[float], tmp_path: Path) -> None:
    """Resuming and closing does not remove a checkpoint that was saved before the first step."""
    with Session(tmp_path) as session:
        session.save_checkpoint()
    with Session(tmp_path, run=LATEST) as session:
        assert session.optimizer.steps == 0
    assert resumed(tmp_path) == (0, undisturbed[:EVERY])


def test_close_without_a_checkpoint_keeps_the_resumed_one(undisturbed: list[float], tmp_path: Path) -> None:
    """Closing after more steps without a checkpoint removes nothing."""
    with Session(tmp_path) as session:
        session.run(EVERY)
    with Session(tmp_path, run=LATEST) as session:
        session.run(EVERY + 2, every=0)
    assert resumed(tmp_path) == (EVERY, undisturbed[EVERY : 2 * EVERY])


@pytest.mark.parametrize(
    ("keep", "checkpoint", "entries"),
    [("auto", False, 0), ("auto", True, 1), ("never", True, 0), ("always", False, 1), ("always", True, 1)],
)
def test_run_keep_controls_files_after_close(keep: str, checkpoint: bool, entries: int, tmp_path: Path) -> None:
    """Locks are always removed; the stats file is kept for one more scrape."""
    with Session(tmp_path, run={"keep": keep}) as session:
        session.run(2, every=1 if checkpoint else 0)
    assert len(list((tmp_path / "nvme0").iterdir())) == entries
    (page,) = [file for file in (tmp_path / "runtime").rglob("*") if file.is_file()]
    found = read_stats_file(page)
    assert (found.status, found.value("steps_total")) == ("ended", 2)


@pytest.mark.parametrize("runs", [12, pytest.param(100, marks=pytest.mark.wide)])
def test_repeated_runs_leak_no_resources(runs: int, tmp_path: Path) -> None:
    """The test counts descriptors, threads, mappings and files."""

    def once() -> None:
        model = models.build("toy")
        config = settings(tmp_path, Paging(host_cache="all"), 64 * MIB)
        with infinity.offload(model, make_optimizer(Recipe(), model), config) as optimizer:
            models.loss_of(model, batch(model, 0)).backward()
            optimizer.step()

    def census() -> tuple[int, int, int, int, list[Path]]:
        gc.collect()
        descriptors, tasks = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
        mappings = len(Path("/proc/self/maps").read_text().splitlines())
        # Stats files of finished runs are kept for later scrapes, and removed by the next run.
        files = sorted(file for file in tmp_path.rglob("*") if file.is_file() and file.suffix != ".stats")
        return descriptors, threading.active_count(), tasks, mappings, files

    for _ in range(3):
        once()
    before = census()
    for _ in range(runs):
        once()
    after = census()
    # The counts may decrease, because garbage of earlier tests may be collected in between.
    assert all(now <= then for now, then in zip(after[:3], before[:3], strict=True)), (before, after)
    # Python and libc occasionally add a heap mapping (1 MiB each); a leak would add one per run.
    assert after[3] - before[3] < 10, (before, after)
    assert before[4] == after[4] == []


def checkpoint_and_resume_on_ranks(folder: str) -> list[str]:
    """Save on all ranks, fail a checkpoint on one, and resume; return all deviations. Runs on every rank."""
    rank = torch.distributed.get_rank()
    wrong = []
    with Session(Path(folder)) as session:
        session.run(EVERY)
        expected = session.run(EVERY + 2, every=0)
        original = manifests.write_manifest
        if rank == 1:
            manifests.write_manifest = no_space
        try:
            session.save_checkpoint()
            wrong.append("a checkpoint that failed on rank 1 was published")
        except StorageError:
            if rank != 1:
                wrong.append(f"rank {rank} raised the error of rank 1")
        except InfinityError as error:
            if rank != 0 or "rank 1" not in str(error) or "No space" not in str(error):
                wrong.append(f"unexpected error on rank {rank}: {error}")
        finally:
            manifests.write_manifest = original
    with Session(Path(folder), run=LATEST) as session:
        if session.optimizer.steps != EVERY:
            wrong.append(f"resumed from {session.optimizer.steps}")
        found = session.run(EVERY + 2, every=0)
        if found != expected:
            wrong.append(f"{found} != {expected}")
    return wrong


def test_two_ranks_save_and_resume_together(pair: RankPool, tmp_path: Path) -> None:
    """A checkpoint that lacks the files of one rank cannot be resumed, on any number of ranks."""
    assert pair.run(checkpoint_and_resume_on_ranks, str(tmp_path)) == [[], []]
    (manifest,) = checkpoints_in(root_of(tmp_path) / "checkpoints", 1).values()
    manifest.unlink()
    checkpoints_before = sorted((root_of(tmp_path) / "checkpoints").iterdir())
    with pytest.raises(CheckpointError, match="no checkpoint to resume from"):
        Session(tmp_path, run=LATEST)
    assert sorted((root_of(tmp_path) / "checkpoints").iterdir()) == checkpoints_before


def test_data_is_flushed_before_the_manifest_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order is data, state file, manifest; old versions are freed last."""
    order: list[str] = []

    def spy(module: object, name: str, label: str) -> None:
        original = getattr(module, name)

        def called(*arguments: object, **keywords: object) -> object:
            order.append(label)
            return original(*arguments, **keywords)

        monkeypatch.setattr(module, name, called)

    with Session(tmp_path) as session:
        session.run(EVERY)
        spy(checkpoints.PageStore, "sync", "data")
        spy(checkpoints, "write_durably", "file")
        spy(checkpoints.files, "write_durably", "file")
        spy(checkpoints.PageStore, "adopt", "free")
        session.run(EVERY + 1, every=1)
    assert order == ["data", "file", "file", "free"]


def test_close_warns_once_about_discarded_steps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """No warning is logged if a checkpoint contains all steps, or if `run.keep` is "never"."""

    def closed(steps: int, checkpointed: int, keep: str = "auto") -> list[str]:
        folder = tmp_path / f"{steps}-{checkpointed}-{keep}"
        folder.mkdir()
        session = Session(folder, run={"keep": keep})
        for step in range(steps):
            session.step()
            if step + 1 == checkpointed:
                session.save_checkpoint()
        caplog.clear()
        session.optimizer.close()
        session.optimizer.close()
        return [text for text in caplog.messages if "run.keep" in text]

    with caplog.at_level("WARNING", "infinity"):
        (warning,) = closed(2, 0)
        assert warning.startswith("steps 1 to 2 are discarded: ")
        assert "optimizer.save_checkpoint()" in warning
        assert 'run.keep = "never"' in warning
        (warning,) = closed(2, 1)
        assert warning.startswith("step 2 is discarded: ")
        assert not closed(1, 1)
        assert not closed(0, 0)
        assert not closed(1, 0, "never")
