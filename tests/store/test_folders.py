"""Tests of run folders: discovery, ownership, locks, removal, and protection against planted files."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import resource
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import infinity
from infinity.checkpoint.manifest import published_in
from infinity.errors import BudgetError, ConfigError, FolderBusyError, InfinityError, StorageError
from infinity.sources.reshard import folders_of
from infinity.store import folder as folders
from infinity.store.folder import (
    FolderLock,
    RunFolder,
    allocated_bytes,
    extend,
    holder_of,
    holders,
    no_starts,
    remove_stale_lock,
    reserve,
    stale_locks,
)
from infinity.store.marker import MARKER_NAME, is_run_id, look_for_runs, new_run_id, read_marker, run_ids
from infinity.untrusted_files import open_own, own_folder, read_own, replacing, write_own
from support import models
from support.mounts import read_only
from support.published import complete_checkpoints
from support.session import EVERY, RECIPE, STEPS, Session
from support.train import MIB, Paging, make_optimizer, settings

OTHER_USER = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can change the owner of files or mount")


def make_run(*paths: Path) -> RunFolder:
    """Create the folders of a run without a checkpoint."""
    for path in paths:
        path.mkdir(exist_ok=True)
    run = RunFolder.of(paths, new_run_id())
    run.create()
    return run


def folder_content(folder: Path) -> dict[str, bytes | None]:
    """Return the paths in a folder, with the content of files."""
    return {
        str(entry.relative_to(folder)): entry.read_bytes() if entry.is_file() else None for entry in folder.rglob("*")
    }


# Discovery #


def test_run_is_found_by_folder_name_and_marker(tmp_path: Path) -> None:
    """Other entries are ignored, with a reason if the folder name is the name of a run."""
    run = make_run(tmp_path)
    (root,) = run.roots
    (tmp_path / ".git" / "checkpoints").mkdir(parents=True)
    (tmp_path / "photos" / "checkpoints").mkdir(parents=True)
    (tmp_path / "photos" / "rank00000.pages").touch()
    subprocess.run(["cp", "-r", root, f"{root}.bak"], check=True)
    odd = tmp_path / "20260101-000000-aaaaaa"
    (odd / "checkpoints").mkdir(parents=True)
    renamed = tmp_path / "20260102-000000-aaaaaa"
    subprocess.run(["cp", "-r", root, renamed], check=True)
    link = tmp_path / "20260103-000000-aaaaaa"
    link.symlink_to(root)
    (tmp_path / "20260104-000000-aaaaaa").touch()
    runs, passed = look_for_runs([tmp_path])
    assert [found.run_id for found in runs] == [run.run_id]
    assert passed == {
        odd: "it has no infinity.run",
        renamed: f"its infinity.run belongs to run {run.run_id}",
        link: "it is a link",
        tmp_path / "20260104-000000-aaaaaa": "it is not a folder",
    }


def test_unreadable_folder_does_not_hide_other_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any user can create such a folder in a shared location."""
    run, odd = make_run(tmp_path), tmp_path / "20260101-000000-aaaaaa"
    odd.mkdir(mode=0o711)
    listdir = os.listdir

    def listdir_without_permission(path: Path) -> list[str]:
        if path == odd:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return listdir(path)

    monkeypatch.setattr(os, "listdir", listdir_without_permission)
    runs, passed = look_for_runs([tmp_path])
    assert ([found.run_id for found in runs], passed) == ([run.run_id], {odd: "Permission denied"})


def test_storage_path_may_be_a_symbolic_link(tmp_path: Path) -> None:
    """/scratch often is a link. A run can start, resume and be removed at the link and in a new folder below it."""
    (tmp_path / "drive").mkdir()
    link = tmp_path / "nvme0"
    link.symlink_to(tmp_path / "drive")
    for storage in ({}, {"paths": [str(link / "new")]}):
        with Session(tmp_path, storage=storage) as session:
            session.run(EVERY)
        with Session(tmp_path, storage=storage, run={"resume": "latest"}) as session:
            assert session.optimizer.steps == EVERY
            folder = session.optimizer.run.folder
        folder.remove()
        assert look_for_runs([link, *storage.get("paths", [])])[0] == []


def test_flipped_bit_in_the_marker_is_tolerated(tmp_path: Path) -> None:
    """The marker contains its record more than once, and resuming the run repairs it."""
    run = make_run(tmp_path)
    file = run.roots[0] / MARKER_NAME
    content = file.read_bytes()
    for index in range(len(content)):
        file.write_bytes(content[:index] + bytes([content[index] ^ 4]) + content[index + 1 :])
        assert read_marker(run.roots[0]).run_id == run.run_id
    run.create()
    assert file.read_bytes() == content
    for damaged in (b"", b"[]\n", b"x" * 100, content.replace(b"checksum", b"checksam"), b"[" * 60000):
        file.write_bytes(damaged)
        assert look_for_runs([tmp_path]) == ([], {run.roots[0]: "its infinity.run is damaged"})


def test_run_folders_are_found_in_any_order(tmp_path: Path) -> None:
    """Markers record the position of each folder, and an incomplete set of folders is reported as incomplete."""
    paths = [tmp_path / name for name in "abc"]
    run = make_run(*paths)
    for order in (paths, paths[::-1], [*paths[1:], paths[0], paths[1]]):
        (found,) = look_for_runs(order)[0]
        assert (found.in_order, found.complete) == (run.roots, True)
    (part,) = look_for_runs(paths[1:])[0]
    assert (part.roots, part.complete) == ({1: run.roots[1], 2: run.roots[2]}, False)


@as_root
def test_folder_of_another_user_is_rejected(tmp_path: Path) -> None:
    """The owner of the folder could plant links to files of ours."""
    run = make_run(tmp_path)
    os.chown(run.roots[0], OTHER_USER, -1)
    with pytest.raises(ConfigError, match=f"it belongs to user {OTHER_USER}"):
        run.create()
    os.chown(run.roots[0], 0, -1)
    run.roots[0].chmod(0o777)
    with pytest.raises(ConfigError, match="mode 0777"):
        run.create()


def test_interrupted_removal_can_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an interruption at any point, the remaining folders are still recognized as a run."""
    steps = 0
    while True:
        run = make_run(tmp_path / "a", tmp_path / "b")
        (run.checkpoints / "step").touch()
        for root in run.roots:
            (root / "rank00000.pages").touch()
        count = 0

        def stop(name: str, original: Any, limit: int = steps) -> Any:
            def limited(*arguments: Any, **keywords: Any) -> Any:
                nonlocal count
                count += 1
                if count > limit:
                    raise OSError(errno.EIO, "cut off")
                return original(*arguments, **keywords)

            return limited

        with monkeypatch.context() as patch:
            for name in ("unlink", "rmdir"):
                patch.setattr(os, name, stop(name, getattr(os, name)))
            try:
                run.remove()
                break
            except OSError:
                pass
        runs, passed = look_for_runs([tmp_path / "a", tmp_path / "b"])
        assert passed == {}
        for found in runs:
            RunFolder(found.run_id, found.in_order).remove()
        for root in tmp_path.glob("*/*"):
            root.rmdir()  # a folder that is no longer a run must be empty
        steps += 1
    assert steps > 5
    assert not list(tmp_path.glob("*/*"))


def test_removal_does_not_follow_links(tmp_path: Path) -> None:
    """This holds for a linked checkpoint folder and for a run folder that was replaced by a link."""
    victim = tmp_path / "victim"
    (victim / "checkpoints").mkdir(parents=True)
    for name in ("precious", "rank00000.pages", "checkpoints/precious"):
        (victim / name).touch()
    before = folder_content(victim)
    path = tmp_path / "nvme"
    linked, swapped = make_run(path), make_run(path)
    linked.checkpoints.rmdir()
    linked.checkpoints.symlink_to(victim)
    swapped.roots[0].rename(tmp_path / "aside")
    swapped.roots[0].symlink_to(victim)
    for run in (linked, swapped):
        with pytest.raises(NotADirectoryError, match="it is a link") as caught:
            run.remove()
        assert caught.value.filename in (str(run.checkpoints), str(run.roots[0]))
        with suppress(OSError):
            run.remove_rank(0, checkpoints=True)
        with suppress(OSError):
            run.remove_file(run.checkpoints / "precious")
        assert folder_content(victim) == before
    assert look_for_runs([path]) == (
        [],
        {linked.roots[0]: "its checkpoints entry is a link", swapped.roots[0]: "it is a link"},
    )


def test_links_inside_a_run_are_removed_and_not_followed(tmp_path: Path) -> None:
    """This holds at any depth."""
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "precious").touch()
    run = make_run(tmp_path / "nvme")
    (run.checkpoints / "deep" / "er").mkdir(parents=True)
    for place in (run.roots[0], run.checkpoints, run.checkpoints / "deep" / "er"):
        (place / "link").symlink_to(victim)
    run.remove()
    assert list((tmp_path / "nvme").iterdir()) == []
    assert (victim / "precious").exists()


def test_concurrently_removed_checkpoints_are_not_listed(subtests: pytest.Subtests, tmp_path: Path) -> None:
    """The first rank of a node removes checkpoints while the other ranks look for theirs."""
    for function in ("scandir", "listdir"):
        run, original = make_run(tmp_path), getattr(os, function)

        def late(path: Any) -> Any:
            if Path(path) == run.checkpoints:
                shutil.rmtree(run.checkpoints)
            return original(path)

        with subtests.test(function), mock.patch.object(os, function, late):
            assert published_in(run.checkpoints) == []


def test_rank_removes_its_manifests_before_its_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A complete set of manifests therefore never refers to missing pages."""
    run = make_run(tmp_path)
    manifests = [run.checkpoints / f"step000000000001.rank{rank:05d}-of-00002.{'a' * 24}.json" for rank in range(2)]
    for file in (*manifests, run.data_file(0, 0), run.data_file(0, 1)):
        file.touch()

    def unlink(file: Path, **_: Any) -> None:
        assert file.name != "rank00001.pages" or [name.rank for name in published_in(run.checkpoints)] == [0]
        os.unlink(file)

    monkeypatch.setattr(Path, "unlink", unlink)
    run.remove_rank(1, checkpoints=False)
    assert not run.data_file(0, 1).exists()
    assert [name.rank for name in published_in(run.checkpoints)] == [0]
    assert run.data_file(0, 0).exists()


def test_run_ids_sort_after_existing_runs_regardless_of_the_clock(tmp_path: Path) -> None:
    """Incomplete runs count as well, and names without a valid time do not."""
    last = "29991231-235959-fff000"
    for name in (last, "20260101-000000-000000", "20269999-000000-000000", "30000101-000000.bak"):
        (tmp_path / name).mkdir()
    known = run_ids([tmp_path, tmp_path / "missing"])
    assert last in known
    assert len(known) == 3
    found = [new_run_id(known)]
    for _ in range(3):
        found.append(new_run_id(found))
    assert [run_id[:19] for run_id in found] == [f"30000101-000000-00{number}" for number in range(4)]
    assert all(map(is_run_id, found))
    assert is_run_id(new_run_id(["99991231-235959-ffffff"]))
    assert new_run_id(["20269999-000000-000000"]) < last


# Locks #


def test_planted_lock_file_is_rejected(tmp_path: Path) -> None:
    """Links are not followed, pipes do not block, and no file is overwritten."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    path = tmp_path / "nvme"
    path.mkdir()
    lock = path / "infinity.lock.0"
    plants = {
        "it is a link": lambda: lock.symlink_to(victim),
        "it is not a regular file": lambda: os.mkfifo(lock),
        "it has a second hard link": lambda: os.link(victim, lock),
        "Is a directory": lock.mkdir,
    }
    for reason, plant in plants.items():
        plant()
        with pytest.raises(ConfigError, match=reason):
            FolderLock.acquire([path], new_run_id(), 0)
        assert not holders(path)
        lock.rmdir() if lock.is_dir() else lock.unlink()
    lock.symlink_to(tmp_path / "new")
    with pytest.raises(ConfigError, match="it is a link"):
        FolderLock.acquire([path], new_run_id(), 0)
    assert not (tmp_path / "new").exists()
    assert victim.read_text() == "precious"


@as_root
def test_lock_file_of_another_user_is_reported(tmp_path: Path) -> None:
    """The lock file is not taken over; only its owner or root can remove it."""
    lock = tmp_path / "infinity.lock.0"
    lock.touch()
    os.chown(lock, OTHER_USER, -1)
    with pytest.raises(ConfigError, match=rf"it belongs to user {OTHER_USER}.*infinity store gc"):
        FolderLock.acquire([tmp_path], new_run_id(), 0)
    assert stale_locks(tmp_path) == [lock]
    assert remove_stale_lock(lock)


@contextmanager
def held_lock(path: Path, name: str, run_id: str, uid: int) -> Iterator[None]:
    """Hold a lock file that the user `uid` has created."""
    file = path / name
    file.write_text(json.dumps({"run_id": run_id, "pid": 1, "host": "h", "since": 0.0}))
    os.chown(file, uid, -1)
    with open(file) as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
    file.unlink()


@as_root
def test_lock_of_another_user_neither_hides_nor_blocks_a_run(tmp_path: Path) -> None:
    """Its run ID is not trusted; a holder without a valid run ID counts only for folders of the same user."""
    run, other = make_run(tmp_path), new_run_id()
    with held_lock(tmp_path, "infinity.lock.!", other, OTHER_USER):
        assert holders(tmp_path) == [], "the file name is not a lock name"
    with held_lock(tmp_path, "infinity.lock.1", run.run_id, OTHER_USER):
        assert holder_of(run) is None
        assert [holder.uid for holder in holders(tmp_path)] == [OTHER_USER]
        assert folders_of([tmp_path], run.run_id, []) == run, "the run can be resumed"
    for own, foreign in (("2", "1"), ("1", "2")):
        with (
            held_lock(tmp_path, f"infinity.lock.{foreign}", other, OTHER_USER),
            held_lock(tmp_path, f"infinity.lock.{own}", run.run_id, 0),
        ):
            found = holder_of(run)
            assert found is not None
            assert found.uid == 0
    for uid, user, blocks in (
        (0, 0, True),
        (OTHER_USER, 0, False),
        (0, OTHER_USER, False),
        (OTHER_USER, OTHER_USER, True),
    ):
        os.chown(run.roots[0], user, -1)
        with held_lock(tmp_path, "infinity.lock.0", "\x1b[2J", uid):
            found = holder_of(run)
            assert (found is not None) is blocks
            assert [holder.known for holder in holders(tmp_path)] == [False]


def test_run_is_resumed_from_other_paths_unless_live(tmp_path: Path) -> None:
    """Other live runs on the same paths do not matter, because the original paths are only read."""
    run, other = make_run(tmp_path), make_run(tmp_path)
    lock = FolderLock.acquire([tmp_path], other.run_id, 0)
    try:
        assert folders_of([tmp_path], run.run_id, []) == run
        with pytest.raises(FolderBusyError, match=rf"in use by run {other.run_id}.*resume"):
            folders_of([tmp_path], other.run_id, [])
        assert folders_of([tmp_path], other.run_id, [tmp_path]) == other, "this process holds the lock"
    finally:
        lock.release()


def test_two_runs_on_one_path_are_both_reported(tmp_path: Path) -> None:
    """The runs have different local ranks, as if they had been started separately."""
    runs = [make_run(tmp_path), make_run(tmp_path)]
    locks = [FolderLock.acquire([tmp_path], run.run_id, number) for number, run in enumerate(runs)]
    try:
        assert [holder.run_id for holder in holders(tmp_path)] == [run.run_id for run in runs]
        for run in runs:
            owner = holder_of(run)
            assert owner is not None
            assert owner.run_id == run.run_id
    finally:
        for lock in locks:
            lock.release()


def test_lock_that_cannot_be_opened_counts_as_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process without free file descriptors must not remove a live run."""
    run = make_run(tmp_path)
    lock = FolderLock.acquire([tmp_path], run.run_id, 0)

    error = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    monkeypatch.setattr(folders, "open_regular", mock.Mock(side_effect=error))
    assert holder_of(run) is not None
    monkeypatch.undo()
    lock.release()
    assert holder_of(run) is None


# Creation of paths #


def test_missing_path_is_created_in_an_existing_folder(tmp_path: Path) -> None:
    """The folder is removed with the run, unless the run keeps a checkpoint."""
    missing = tmp_path / "missing"
    storage = {"paths": [str(missing)]}
    with Session(tmp_path, "all", storage=storage) as session:
        assert stat.S_IMODE(missing.stat().st_mode) == 0o700
        session.step()
    assert not missing.exists(), "a run without a checkpoint must remove its folders"
    with Session(tmp_path, "all", storage=storage) as session:
        session.run(1, every=1)
    assert len(look_for_runs([missing])[0]) == 1
    with Session(tmp_path, "all", storage=storage, run={"resume": "latest"}) as session:
        assert session.optimizer.steps == 1


def test_failed_startup_removes_only_the_paths_it_created(subtests: pytest.Subtests, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    paths = [str(empty), str(tmp_path / "missing")]
    proc = [*paths, "/proc/infinity"]  # where no process can create a folder
    for failing, where, resume in (
        ("infinity.run.run.HostCache", paths, ""),
        ("infinity.run.run.UpdateWorker", paths, ""),
        ("", paths, "latest"),
        ("", proc, ""),
    ):
        with subtests.test(failing, paths=where, resume=resume), pytest.MonkeyPatch.context() as patch:
            if failing:
                patch.setattr(failing, mock.Mock(side_effect=ConfigError("startup failed")))
            with pytest.raises(InfinityError):
                Session(tmp_path, "all", storage={"paths": where}, run={"resume": resume})
            assert empty.is_dir()
            assert not (tmp_path / "missing").exists()


def test_path_that_cannot_be_created_is_rejected(tmp_path: Path) -> None:
    """Parent folders are not created, because a run could fill another drive if the intended one is not mounted."""
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    for path, place in (("none/below", ".*none'"), ("file", ""), ("link", "")):
        with pytest.raises(ConfigError, match=rf"storage\.paths: '{tmp_path / path}' {place} ?is not a folder"):
            Session(tmp_path, "all", storage={"paths": [str(tmp_path / path)]})
        assert not (tmp_path / "none").exists()


# Forked processes #

FORKED = """
import contextlib, hashlib, multiprocessing, os, sys
from pathlib import Path
import torch
from torch.distributed.fsdp import fully_shard
import infinity
from infinity.store.folder import holders

torch.set_num_threads(1)  # a forked child has no OpenMP threads, so torch would wait for them forever
place = Path(sys.argv[1])
nvme = place / "nvme0"

# A child whose process group is referenced by torch only.
infinity.mesh("cpu")
if not (child := os.fork()):
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0

nvme.mkdir()
model = torch.nn.Sequential(*(fully_shard(torch.nn.Linear(64, 64), mesh=infinity.mesh("cpu")) for _ in range(2)))
fully_shard(model, mesh=infinity.mesh("cpu"))
config = {"storage": {"paths": [str(nvme)]}, "memory": {"host_bytes": "64MiB", "page_bytes": "64KiB"}}
config["telemetry"] = {"runtime_dir": str(place / "runtime")}
optimizer = infinity.offload(model, torch.optim.AdamW(model.parameters()), config)

def loss():
    return model(torch.randn(2, 64)).square().mean()

def train():
    loss().backward()
    optimizer.step()
    optimizer.zero_grad()

def content():
    return {file: file.is_file() and hashlib.md5(file.read_bytes()).digest() for file in place.rglob("*")}

def wait(child, call=""):
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, call
    assert content() == before
    assert holders(nvme)

train()
param, name = next(model.parameters()), next(iter(dict(model.named_parameters())))
pending = loss()
optimizer.run.pager.flush()
before = content()
unsupported = {
    "step": optimizer.step, "checkpoint": optimizer.save_checkpoint, "zero_grad": optimizer.zero_grad,
    "drain": optimizer.drain,
    "forward": loss, "backward": pending.backward, "read": lambda: param.full_tensor().sum(),
    "write": lambda: param.data.zero_(), "state": lambda: optimizer.state[param], "save": lambda: torch.save(
        model.state_dict(), os.devnull), "read_state": lambda: optimizer.read_state(name),
}
for call, action in unsupported.items():
    if not (child := os.fork()):
        try:
            action()
        except infinity.InfinityError as error:
            os._exit(0 if "forked from the training process" in str(error) else 3)
        os._exit(2)
    wait(child, call)

context = multiprocessing.get_context("fork")
def fail():
    sys.stderr.close()
    raise ValueError
for target, status in ((optimizer.close, 0), (infinity.close_all, 0), (sys.exit, 0), (fail, 1)):
    process = context.Process(target=target)
    process.start()
    process.join()
    assert process.exitcode == status
    assert content() == before

if not (child := os.fork()):
    sys.exit(0)
wait(child)
if not (child := os.fork()):
    optimizer.close()
    with contextlib.suppress(infinity.InfinityError):
        optimizer.step()
        sys.exit(1)
    sys.exit(0)
wait(child)

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        opened = [os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if int(name) > 2
                  and os.path.lexists(f"/proc/self/fd/{name}")]
        return float(any("infinity.lock" in name for name in opened))

class Weights(Data):
    def __getitem__(self, index):
        return param.full_tensor().sum()

pending.backward()
optimizer.step()
optimizer.zero_grad()
try:
    list(torch.utils.data.DataLoader(Weights(), num_workers=1, multiprocessing_context="fork"))
except infinity.InfinityError as error:
    assert "forked from the training process" in str(error)
else:
    raise SystemExit("a data loader worker read weights")
loader = torch.utils.data.DataLoader(
    Data(), num_workers=2, persistent_workers=True, pin_memory=True, multiprocessing_context="fork")
for locked in loader:
    assert float(locked) == 0.0, "a data loader worker must not hold the lock"
    train()
assert holders(nvme)
optimizer.close()
assert not holders(nvme), "a live worker must not hold the lock"
assert list(nvme.iterdir()) == [], "a run without a checkpoint must remove its folders"
print("parent finished normally")
"""


def test_forked_children_do_not_affect_the_parent(tmp_path: Path) -> None:
    """However a child ends, it does not hang, does not change the parent's files, and does not hold its lock."""
    done = subprocess.run(
        [sys.executable, "-c", FORKED, str(tmp_path)],
        capture_output=True, text=True, timeout=600, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.stdout == "parent finished normally\n", done.stderr


# Space #


def test_holes_count_as_required_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is raised before any hole is filled."""
    file = tmp_path / "rank00000.pages"
    file.write_bytes(b"x" * 4096)
    os.truncate(file, MIB)
    used = shutil.disk_usage(tmp_path)._replace(free=MIB // 2)
    monkeypatch.setattr(folders.shutil, "disk_usage", lambda _: used)
    with pytest.raises(BudgetError, match="needs 1 MiB"):
        reserve(file, MIB)
    assert file.stat().st_blocks * 512 < MIB


def test_io_error_is_not_reported_as_a_full_drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Freeing space would not help."""
    monkeypatch.setattr(folders.os, "posix_fallocate", _raise_eio)
    with pytest.raises(StorageError, match="EIO"):
        reserve(tmp_path / "rank00000.pages", MIB)
    assert not list(tmp_path.iterdir())


def test_lock_errors_report_the_errno(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without locks is not reported as in use by another run."""

    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(folders.fcntl, "flock", flock)
    with pytest.raises(ConfigError, match=r"cannot be locked: ENOLCK \(No locks available\)"):
        FolderLock.acquire([tmp_path], new_run_id(), 0)
    monkeypatch.undo()
    (tmp_path / "infinity.lock.0").touch()
    monkeypatch.setattr(folders.fcntl, "flock", flock)
    with pytest.raises(ConfigError, match="ENOLCK"):
        holders(tmp_path)


def test_inspecting_locks_does_not_block_a_startup(tmp_path: Path) -> None:
    """Three threads inspect a stale lock continuously."""
    ended = threading.Event()
    inspections = 0

    def inspect() -> None:
        nonlocal inspections
        while not ended.is_set():
            (tmp_path / "infinity.lock.0").touch()
            holders(tmp_path)
            inspections += 1

    threads = [threading.Thread(target=inspect) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        starts = 0
        while starts < 30 or inspections <= 100:
            lock = FolderLock.acquire([tmp_path], new_run_id(), 0)
            lock.release()
            starts += 1
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def test_startup_and_removal_exclude_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits for the other for a limited time and then reports the lock that it waited for."""
    monkeypatch.setattr(folders, "_START_SECONDS", 0.1)
    monkeypatch.setattr(folders, "_REMOVE_SECONDS", 0.1)
    with no_starts([tmp_path, tmp_path]):
        # Any process that may read the folder can lock it, so the message suggests commands that find the holder.
        reasons = rf"{tmp_path} .*for 0.1 s.*`infinity store gc` or `rm`.*`fuser -v {tmp_path}`"
        with pytest.raises(FolderBusyError, match=reasons):
            FolderLock.acquire([tmp_path], new_run_id(), 0)
        assert list(tmp_path.iterdir()) == []
        with pytest.raises(FolderBusyError, match=f"{tmp_path} is locked"), no_starts([tmp_path]):
            pass
    lock = FolderLock.acquire([tmp_path], new_run_id(), 0)
    with no_starts([tmp_path]):
        assert holders(tmp_path), "a live run must continue and be reported"
    lock.release()
    descriptor = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    reasons = rf"{tmp_path} is locked.*`lsof {tmp_path}`"
    with pytest.raises(FolderBusyError, match=reasons), no_starts([tmp_path]):
        pass
    os.close(descriptor)


def test_shared_lock_is_not_reported_as_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run never holds a shared lock."""
    monkeypatch.setattr(folders, "_START_SECONDS", 0.1)
    file = tmp_path / "infinity.lock.0"
    file.touch()
    with open(file) as reader:
        fcntl.flock(reader, fcntl.LOCK_SH)
        with pytest.raises(FolderBusyError, match=rf"{file} has been locked .*`fuser -v {file}`"):
            FolderLock.acquire([tmp_path], new_run_id(), 0)


def test_invalid_lock_content_is_not_trusted(tmp_path: Path) -> None:
    """With invalid content, the holder is reported without a name."""
    lock = tmp_path / "infinity.lock.0"
    for content in ('{"run_id": 1, "pid": 1, "host": "x", "since": 1e999}', "[" * 9999, "x" * 100_000, '{"pid": 1}'):
        lock.write_text(content)
        with open(lock) as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            assert "a run of user" in str(holders(tmp_path)[0])
            with pytest.raises(FolderBusyError, match="another run"):
                FolderLock.acquire([tmp_path], new_run_id(), 0)


def test_lock_is_released_even_if_its_file_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lock = FolderLock.acquire([tmp_path], new_run_id(), 0)
    monkeypatch.setattr(Path, "unlink", _raise_eio)
    lock.release()
    monkeypatch.undo()
    assert "could not be removed: Input/output error" in caplog.text
    assert not holders(tmp_path)


def _raise_eio(*_: Any, **__: Any) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_reserve_counts_the_space_that_the_run_already_occupies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error compares the totals, although a file grows in several steps and other files are complete."""
    drive, real, unlinked = 8 * MIB, os.posix_fallocate, [0]
    roots = [tmp_path / "nvme0" / "run", tmp_path / "nvme1" / "run"]
    for root in roots:
        root.mkdir(parents=True)
    files = [roots[0] / "rank00000.pages", roots[0] / "rank00001.pages", roots[1] / "rank00000.pages"]

    def disk_usage(_: object) -> Any:
        return type(usage)(drive, 0, drive - sum(map(allocated_bytes, files)) - unlinked[0])

    def allocate(descriptor: int, begin: int, length: int) -> None:
        if length > disk_usage("").free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor, begin, length)

    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(folders.shutil, "disk_usage", disk_usage)
    monkeypatch.setattr(folders.os, "posix_fallocate", allocate)
    with pytest.raises(BudgetError, match="run has 8 MiB free, but this run needs 9 MiB there"):
        reserve(files[0], 9 * MIB, roots)
    reserve(files[0], 3 * MIB, roots)
    with pytest.raises(BudgetError, match=r"has 8 MiB free, including 3 MiB that this run occupies, .* needs 9 MiB"):
        reserve(files[0], 9 * MIB, roots)
    reserve(files[1], 2 * MIB, roots)
    with pytest.raises(BudgetError, match=r"has 8 MiB free, including 5 MiB that this run occupies, .* needs 9 MiB"):
        reserve(files[2], 4 * MIB, roots)
    with open(files[2], "wb") as file:
        extend(file.fileno(), files[2], 0, MIB, roots)
        files[2].unlink()  # as for activations
        unlinked[0] = MIB
        with pytest.raises(
            BudgetError, match=r"has 8 MiB free, including 6 MiB that this run occupies, .* needs 10 MiB"
        ):
            extend(file.fileno(), files[2], MIB, 5 * MIB, roots)


# Private files #


def test_private_files_are_written_and_read_safely(tmp_path: Path) -> None:
    """Planted links are replaced and never followed, and planted pipes do not block."""
    file, victim = tmp_path / "cache", tmp_path / "victim"
    write_own(file, b"one")
    write_own(file, b"two")
    assert (read_own(file, 3), file.stat().st_mode & 0o777) == (b"two", 0o600)
    with pytest.raises(OSError, match="longer than 2 bytes"):
        read_own(file, 2)
    file.unlink()
    victim.write_text("precious")
    file.symlink_to(victim)
    with pytest.raises(PermissionError, match="it is a link"):
        read_own(file, 100)
    write_own(file, b"three")
    assert (victim.read_text(), file.is_symlink()) == ("precious", False)
    with pytest.raises(ZeroDivisionError), replacing(file, 0o600) as partial:
        partial.write(bytes(1 // len("")))
    assert file.read_bytes() == b"three"
    file.unlink()
    os.mkfifo(file)
    for flags in (os.O_RDONLY, os.O_RDWR | os.O_CREAT):
        with pytest.raises(PermissionError, match="not a regular file"):
            open_own(file, flags)
    assert {entry.name for entry in tmp_path.iterdir()} == {"cache", "victim"}


def test_private_folder_is_created_and_checked(tmp_path: Path) -> None:
    """A link, a folder that other users may write to, and a folder of another user are rejected."""
    own_folder(tmp_path / "a" / "b", parents=True)
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
    (tmp_path / "link").symlink_to(tmp_path / "a")
    with pytest.raises(PermissionError, match="it is a link"):
        own_folder(tmp_path / "link", parents=False)
    (tmp_path / "a").chmod(0o770)
    with pytest.raises(PermissionError, match="mode 0770"):
        own_folder(tmp_path / "a", parents=False)
    if os.geteuid() == 0:
        (tmp_path / "a").chmod(0o700)
        os.chown(tmp_path / "a", OTHER_USER, -1)
        with pytest.raises(PermissionError, match="belongs to user"):
            own_folder(tmp_path / "a", parents=False)


# Startup and cleanup #


def checkpointed_steps(folder: Path) -> list[int]:
    """Return the checkpointed steps of the run in a session's folder."""
    (found,) = look_for_runs([folder / "nvme0"])[0]
    return [checkpoint.step for checkpoint in complete_checkpoints(found.in_order[0])]


def test_failed_resume_removes_no_checkpoint(
    subtests: pytest.Subtests, tmp_path: Path, undisturbed: list[float]
) -> None:
    """Neither the run, with `keep = "never"`, nor checkpoints later than the one to resume from are removed."""
    kept = {"retained_checkpoints": 3}
    with Session(tmp_path, run=kept) as session:
        session.run(STEPS)
    before, files = checkpointed_steps(tmp_path), folder_content(tmp_path / "nvme0")
    assert before == [EVERY, 2 * EVERY, STEPS]
    for where in (
        "space_reservation.reserve", "initial_state.restore", "run.open_engine", "checkpointing.checkpoint_bytes",
        "run.FreedMemory",
    ):  # fmt: skip
        with subtests.test(where), pytest.MonkeyPatch.context() as patch:
            patch.setattr(f"infinity.run.{where}", _raise_eio)
            with pytest.raises(OSError, match="Input/output error"):
                Session(tmp_path, run={"resume": "latest", "resume_step": EVERY, "keep": "never", **kept})
            assert folder_content(tmp_path / "nvme0") == files
            assert not holders(tmp_path / "nvme0")
    with Session(tmp_path, run={"resume": "latest", "resume_step": EVERY, **kept}) as session:
        assert checkpointed_steps(tmp_path) == [EVERY], "a successful resume must remove later checkpoints"
        assert session.run() == undisturbed[EVERY:]


def test_failed_startup_of_a_new_run_removes_its_files(subtests: pytest.Subtests, tmp_path: Path) -> None:
    (tmp_path / "nvme0").mkdir()
    (tmp_path / "nvme0" / "precious").write_text("not ours")
    for where in (
        "space_reservation.reserve", "run.PageStore", "run.open_engine", "checkpointing.checkpoint_bytes",
        "run.FreedMemory",
    ):  # fmt: skip
        with subtests.test(where), pytest.MonkeyPatch.context() as patch:
            patch.setattr(f"infinity.run.{where}", _raise_eio)
            with pytest.raises(OSError, match="Input/output error"):
                Session(tmp_path, host_cache="all", run={"keep": "always"})
            assert folder_content(tmp_path / "nvme0") == {"precious": b"not ours"}


def test_file_descriptor_limit_at_startup_is_reported_and_cleaned_up(tmp_path: Path) -> None:
    """At any limit, startup either succeeds or raises an error that mentions open files, and removes its files."""
    with Session(tmp_path, host_cache="all") as session:  # load all modules that are imported on demand
        session.step()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    errors: list[str] = []
    started = 0
    for more in range(1, 40):
        model = models.build(RECIPE.model)
        optimizer = make_optimizer(RECIPE, model)
        config = settings(tmp_path, Paging(), 64 * MIB)
        used = {int(name) for name in os.listdir("/proc/self/fd")}
        free = [number for number in range(soft) if number not in used]
        resource.setrlimit(resource.RLIMIT_NOFILE, (free[more], hard))
        try:
            infinity.offload(model, optimizer, config).close()
            started += 1
        except (InfinityError, OSError) as error:
            errors.append(str(error))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert folder_content(tmp_path / "nvme0") == {}, more
        if started > 2:
            break
    assert len(errors) >= 3
    assert all("open" in reason for reason in errors), errors
    assert started


def test_first_error_is_raised_and_cleanup_errors_are_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """This holds even if the file system is gone during cleanup, and all resources are released."""
    monkeypatch.setattr("infinity.run.run.PageStore.close", _raise_eio)
    session = Session(tmp_path)
    session.run(EVERY)
    monkeypatch.setattr(Path, "unlink", _raise_eio)
    with pytest.raises(StorageError, match="read of 1 bytes"), session:
        raise StorageError("read", "somewhere", 0, 1, errno.EIO)
    monkeypatch.undo()
    assert "cleanup: OSError: [Errno 5] Input/output error" in caplog.text
    assert not holders(tmp_path / "nvme0")
    monkeypatch.setattr("infinity.run.run.PageStore.close", _raise_eio)
    with Session(tmp_path, run={"resume": "latest"}) as session:
        assert session.optimizer.steps == EVERY
        with pytest.raises(OSError, match="Input/output error"):
            session.optimizer.close()
    assert not holders(tmp_path / "nvme0")


def test_run_is_resumed_with_paths_in_another_order(tmp_path: Path, undisturbed: list[float]) -> None:
    (tmp_path / "nvme1").mkdir()
    paths = [str(tmp_path / "nvme0"), str(tmp_path / "nvme1")]
    with Session(tmp_path, storage={"paths": paths}) as session:
        session.run(EVERY)
    (run,) = (entry for entry in Path(paths[0]).iterdir() if entry.is_dir())
    shutil.copytree(run, f"{run}.bak")
    with Session(tmp_path, storage={"paths": paths[::-1]}, run={"resume": "latest"}) as session:
        assert session.run() == undisturbed[EVERY:]
    runs, passed = look_for_runs(paths)
    assert (len(runs), passed) == (1, {})


@as_root
def test_run_on_a_read_only_mount_is_resumed_on_other_paths(tmp_path: Path, undisturbed: list[float]) -> None:
    """No file is opened for writing on the read-only mount, and a stale lock there is ignored."""
    with Session(tmp_path) as session:
        session.run(EVERY)
    (tmp_path / "nvme0" / "infinity.lock.0").write_text("{}")
    (tmp_path / "elsewhere").mkdir()
    with read_only(tmp_path / "nvme0") as place:
        with pytest.raises(ConfigError, match="not writable"):
            Session(tmp_path, host_cache="all", storage={"paths": [str(place)]}, run={"resume": "latest"})
        run = {"resume": "latest", "resume_paths": [str(place)]}
        with Session(tmp_path, storage={"paths": [str(tmp_path / "elsewhere")]}, run=run) as session:
            assert session.optimizer.steps == EVERY
            assert session.run() == undisturbed[EVERY:]
