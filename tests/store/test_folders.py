"""Which folders are runs, who may have them, and that whoever plants something there gets nothing."""

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

import pytest

import infinity
from infinity.checkpoint.manifest import complete_checkpoints, published_in
from infinity.errors import BudgetError, CheckpointError, ConfigError, FolderBusyError, InfinityError, StorageError
from infinity.sources.reshard import folders_of
from infinity.store import folder as folders
from infinity.store.folder import (
    FolderLock,
    RunFolder,
    holder_of,
    holders,
    no_starts,
    remove_stale_lock,
    reserve,
    stale_locks,
)
from infinity.store.marker import MARKER_NAME, look_for_runs, new_run_id, read_marker
from infinity.untrusted_files import open_own, own_folder, read_own, replacing, write_own
from support import models
from support.session import EVERY, RECIPE, STEPS, Session, reference
from support.train import MIB, Paging, make_optimizer, settings

OTHER_USER = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user, or mount")


@contextmanager
def read_only(folder: Path) -> Iterator[Path]:
    """Have a folder a second time, on a read-only mount; skip where mounting is not allowed."""
    place = folder.with_name(f"{folder.name}-read-only")
    place.mkdir()
    done = subprocess.run(["mount", "--bind", str(folder), str(place)], capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount: {done.stderr.decode().strip()}")
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(place)], check=True)
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def make_run(*paths: Path) -> RunFolder:
    """Make the folders of a run without a checkpoint."""
    for path in paths:
        path.mkdir(exist_ok=True)
    run = RunFolder.of(paths, new_run_id())
    run.create()
    return run


def tree(folder: Path) -> dict[str, bytes | None]:
    """Return everything in a folder, with the content of files."""
    return {
        str(entry.relative_to(folder)): entry.read_bytes() if entry.is_file() else None for entry in folder.rglob("*")
    }


# What is a run #


def test_a_run_is_a_name_and_a_marker(tmp_path: Path) -> None:
    """Everything else is passed over: with a reason where it is named as a run."""
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
    assert [run.run_id for run in runs] == [run.run_id for run in [run]]
    assert passed == {
        odd: "it has no infinity.run",
        renamed: f"its infinity.run belongs to run {run.run_id}",
        link: "it is a link",
        tmp_path / "20260104-000000-aaaaaa": "it is not a folder",
    }


def test_a_folder_that_may_not_be_listed_hides_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Anybody can make one where many store their runs."""
    run, odd = make_run(tmp_path), tmp_path / "20260101-000000-aaaaaa"
    odd.mkdir(mode=0o711)
    listdir = os.listdir

    def refusing(path: Path) -> list[str]:
        if path == odd:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return listdir(path)

    monkeypatch.setattr(os, "listdir", refusing)
    runs, passed = look_for_runs([tmp_path])
    assert ([found.run_id for found in runs], passed) == ([run.run_id], {odd: "Permission denied"})


def test_a_path_may_be_a_link_and_a_new_one_may_lie_below_it(tmp_path: Path) -> None:
    """As /scratch is on many nodes: a run begins there, goes on and is removed."""
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


def test_a_flipped_bit_does_not_hide_a_run(tmp_path: Path) -> None:
    """The marker is there twice; a start that resumes the run makes it whole again."""
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


def test_folders_are_found_in_any_order(tmp_path: Path) -> None:
    """They know their numbers; a part of them is known to be one."""
    paths = [tmp_path / name for name in "abc"]
    run = make_run(*paths)
    for order in (paths, paths[::-1], [*paths[1:], paths[0], paths[1]]):
        (found,) = look_for_runs(order)[0]
        assert (found.in_order, found.complete) == (run.roots, True)
    (part,) = look_for_runs(paths[1:])[0]
    assert (part.roots, part.complete) == ({1: run.roots[1], 2: run.roots[2]}, False)


@as_root
def test_a_folder_of_another_user_is_not_written_to(tmp_path: Path) -> None:
    """Whoever owns it could put links to files of ours into it."""
    run = make_run(tmp_path)
    os.chown(run.roots[0], OTHER_USER, -1)
    with pytest.raises(ConfigError, match=f"it belongs to user {OTHER_USER}"):
        run.create()
    os.chown(run.roots[0], 0, -1)
    run.roots[0].chmod(0o777)
    with pytest.raises(ConfigError, match="mode 0777"):
        run.create()


def test_removal_leaves_a_run_until_the_last_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it is cut off anywhere, what is left is still known to be a run, so that it can be removed again."""
    steps = 0
    while True:
        run = make_run(tmp_path / "a", tmp_path / "b")
        (run.checkpoints / "step").touch()
        for root in run.roots:
            (root / "rank00000.pages").touch()
        count = 0

        def stop(name: str, original: Any, limit: int = steps) -> Any:
            def wrapped(*arguments: Any, **keywords: Any) -> Any:
                nonlocal count
                count += 1
                if count > limit:
                    raise OSError(errno.EIO, "cut off")
                return original(*arguments, **keywords)

            return wrapped

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
            root.rmdir()  # what is no run any more is empty
        steps += 1
    assert steps > 5
    assert not list(tmp_path.glob("*/*"))


def test_nothing_is_removed_through_a_link(tmp_path: Path) -> None:
    """Not where the folder of the checkpoints is one, nor where the run's own is: also if it was put there just now."""
    victim = tmp_path / "victim"
    (victim / "checkpoints").mkdir(parents=True)
    for name in ("precious", "rank00000.pages", "checkpoints/precious"):
        (victim / name).touch()
    before = tree(victim)
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
        assert tree(victim) == before
    assert look_for_runs([path]) == (
        [],
        {linked.roots[0]: "its checkpoints entry is a link", swapped.roots[0]: "it is a link"},
    )


def test_links_in_a_run_are_removed_and_not_followed(tmp_path: Path) -> None:
    """At any depth, with folders that others have put there."""
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


@pytest.mark.parametrize("function", ["scandir", "listdir"])
def test_checkpoints_that_another_rank_removes_meanwhile_are_none(
    function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank of a node removes them for all, the others look whether theirs are there."""
    run = make_run(tmp_path)
    original = getattr(os, function)

    def late(path: Any) -> Any:
        if Path(path) == run.checkpoints:
            shutil.rmtree(run.checkpoints)
        return original(path)

    monkeypatch.setattr(os, function, late)
    assert published_in(run.checkpoints) == []


def test_a_rank_removes_its_manifests_before_its_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever comes of the others: there is no checkpoint of all of which pages are missing."""
    run = make_run(tmp_path)
    manifests = [run.checkpoints / f"step000000000001.rank{rank:05d}-of-00002.{'a' * 24}.json" for rank in range(2)]
    for file in (*manifests, run.data_file(0, 0), run.data_file(0, 1)):
        file.touch()

    def refuse(file: Path, **_: Any) -> None:
        assert file.name != "rank00001.pages" or [name.rank for name in published_in(run.checkpoints)] == [0]
        os.unlink(file)

    monkeypatch.setattr(Path, "unlink", refuse)
    run.remove_rank(1, checkpoints=False)
    assert not run.data_file(0, 1).exists()
    assert [name.rank for name in published_in(run.checkpoints)] == [0]
    assert run.data_file(0, 0).exists()


# Locks #


def test_a_planted_lock_is_refused(tmp_path: Path) -> None:
    """A link is not followed, a pipe not waited for, a second name not overwritten: nothing is written anywhere."""
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
def test_a_lock_of_another_user_is_named(tmp_path: Path) -> None:
    """It is not taken over; its owner or root removes it."""
    lock = tmp_path / "infinity.lock.0"
    lock.touch()
    os.chown(lock, OTHER_USER, -1)
    with pytest.raises(ConfigError, match=rf"it belongs to user {OTHER_USER}.*infinity store gc"):
        FolderLock.acquire([tmp_path], new_run_id(), 0)
    assert stale_locks(tmp_path) == [lock]
    assert remove_stale_lock(lock)


@contextmanager
def held_lock(path: Path, name: str, run_id: str, uid: int) -> Iterator[None]:
    """Hold a lock file that a user has made and written."""
    file = path / name
    file.write_text(json.dumps({"run_id": run_id, "pid": 1, "host": "h", "since": 0.0}))
    os.chown(file, uid, -1)
    with open(file) as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
    file.unlink()


@as_root
def test_a_lock_of_another_user_hides_and_blocks_nothing(tmp_path: Path) -> None:
    """Its run is not believed; who has no name counts only for folders of his own."""
    run, other = make_run(tmp_path), new_run_id()
    with held_lock(tmp_path, "infinity.lock.!", other, OTHER_USER):
        assert holders(tmp_path) == [], "no name of ours"
    with held_lock(tmp_path, "infinity.lock.1", run.run_id, OTHER_USER):
        assert holder_of(run) is None
        assert [holder.uid for holder in holders(tmp_path)] == [OTHER_USER]
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


def test_a_run_is_taken_up_elsewhere_unless_it_is_live(tmp_path: Path) -> None:
    """Other runs on its paths do not matter, as nothing is written there."""
    run, other = make_run(tmp_path), make_run(tmp_path)
    lock = FolderLock.acquire([tmp_path], other.run_id, 0)
    try:
        assert folders_of([tmp_path], run.run_id, []) == run
        with pytest.raises(FolderBusyError, match=rf"in use by run {other.run_id}.*resume"):
            folders_of([tmp_path], other.run_id, [])
        assert folders_of([tmp_path], other.run_id, [tmp_path]) == other, "this process holds it"
    finally:
        lock.release()


@as_root
def test_a_lock_of_another_user_keeps_no_run_from_being_taken_up(tmp_path: Path) -> None:
    """Whatever it says, and if it says nothing."""
    run = make_run(tmp_path)
    for claimed in (run.run_id, new_run_id(), "\x1b"):
        with held_lock(tmp_path, "infinity.lock.0", claimed, OTHER_USER):
            assert folders_of([tmp_path], run.run_id, []) == run


def test_two_runs_on_one_path_do_not_hide_each_other(tmp_path: Path) -> None:
    """They are of different local ranks, as started one by one."""
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


def test_a_lock_that_cannot_be_opened_counts_as_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has no descriptors left must not remove what is live."""
    run = make_run(tmp_path)
    lock = FolderLock.acquire([tmp_path], run.run_id, 0)

    def none_left(*_: Any) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(folders, "open_regular", none_left)
    assert holder_of(run) is not None
    monkeypatch.undo()
    lock.release()
    assert holder_of(run) is None


# Paths that are made #


def test_a_missing_path_is_made_in_a_folder_that_is_there(tmp_path: Path) -> None:
    """With all that lies in it; it stays if the run does."""
    missing = tmp_path / "missing"
    storage = {"paths": [str(missing)]}
    with Session(tmp_path, "all", storage=storage) as session:
        assert stat.S_IMODE(missing.stat().st_mode) == 0o700
        session.step()
    assert not missing.exists(), "nothing is left of a run without a checkpoint"
    with Session(tmp_path, "all", storage=storage) as session:
        session.run(1, every=1)
    assert len(look_for_runs([missing])[0]) == 1
    with Session(tmp_path, "all", storage=storage, run={"resume": "latest"}) as session:
        assert session.optimizer.steps == 1


@pytest.mark.parametrize("wrong", ["host_cache", "resume", "second path", "attach"])
def test_a_start_that_fails_removes_the_path_that_it_has_made(
    wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At whatever stage; and nothing that was there before."""
    empty = tmp_path / "empty"
    empty.mkdir()
    paths = [str(empty), str(tmp_path / "missing")]
    sections: dict[str, Any] = {"run": {"resume": "latest" if wrong == "resume" else ""}}
    if wrong == "second path":
        paths.append("/proc/infinity")  # where nobody can make anything

    def fails(*_: Any, **__: Any) -> None:
        raise ConfigError("it fails")

    if wrong == "host_cache":
        monkeypatch.setattr("infinity.run.run.HostCache", fails)
    elif wrong == "attach":
        monkeypatch.setattr("infinity.run.run.UpdateWorker", fails)
    with pytest.raises(InfinityError):
        Session(tmp_path, "all", storage={"paths": paths}, **sections)
    assert empty.is_dir()
    assert not (tmp_path / "missing").exists()


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("none/below", ".*none' is not a folder"),
        ("file", "is not a folder"),
        ("link", "is not a folder"),
    ],
)
def test_a_path_that_cannot_be_made_is_refused(path: str, why: str, tmp_path: Path) -> None:
    """Parents are not made: a drive that is not mounted would be filled in another's place."""
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(ConfigError, match=rf"storage\.paths: '{tmp_path / path}' {why}"):
        Session(tmp_path, "all", storage={"paths": [str(tmp_path / path)]})
    assert not (tmp_path / "none").exists()


# Children #

FORKED = """
import contextlib, hashlib, multiprocessing, os, sys
from pathlib import Path
import torch
from support.models import Toy, build, loss_of
from support.session import RECIPE
from support.train import MIB, Paging, make_optimizer, settings
import infinity
from infinity.store.folder import holders

torch.set_num_threads(1)  # a child has no OpenMP threads, and torch would wait for them for ever
place = Path(sys.argv[1])
nvme = place / "nvme0"

# One whose process group nothing but torch itself refers to.
infinity.mesh("cpu")
if not (child := os.fork()):
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0

model = build(RECIPE.model)
optimizer = infinity.offload(model, make_optimizer(RECIPE, model), settings(place, Paging(), 64 * MIB))

def tokens():
    return torch.randint(0, Toy.vocabulary, (2, 8))

def train():
    loss_of(model, tokens()).backward()
    optimizer.step()
    optimizer.zero_grad()

def content():
    return {file: file.is_file() and hashlib.md5(file.read_bytes()).digest() for file in place.rglob("*")}

def wait(child, what=""):
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, what
    assert content() == before
    assert holders(nvme)

train()
param, name = next(model.parameters()), next(iter(dict(model.named_parameters())))
loss = loss_of(model, tokens())
optimizer.run.pager.flush()
before = content()
refused = {
    "step": optimizer.step, "checkpoint": optimizer.save_checkpoint, "zero_grad": optimizer.zero_grad,
    "drain": optimizer.drain,
    "forward": lambda: loss_of(model, tokens()), "backward": loss.backward, "read": lambda: param.full_tensor().sum(),
    "write": lambda: param.data.zero_(), "state": lambda: optimizer.state[param], "save": lambda: torch.save(
        model.state_dict(), os.devnull), "read_state": lambda: optimizer.read_state(name),
}
for what, action in refused.items():
    if not (child := os.fork()):
        try:
            action()
        except infinity.InfinityError as error:
            os._exit(0 if "forked from the training process" in str(error) else 3)
        os._exit(2)
    wait(child, what)

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

loss.backward()
optimizer.step()
optimizer.zero_grad()
try:
    list(torch.utils.data.DataLoader(Weights(), num_workers=1, multiprocessing_context="fork"))
except infinity.InfinityError as error:
    assert "forked from the training process" in str(error)
else:
    raise SystemExit("a worker has read weights")
loader = torch.utils.data.DataLoader(
    Data(), num_workers=2, persistent_workers=True, pin_memory=True, multiprocessing_context="fork")
for has in loader:
    assert float(has) == 0.0, "a worker would keep the lock"
    train()
assert holders(nvme)
optimizer.close()
assert not holders(nvme), "though the worker lives"
assert list(nvme.iterdir()) == [], "a run without a checkpoint goes when it ends"
print("ended in order")
"""


def test_children_end_nothing_of_their_parents(tmp_path: Path) -> None:
    """Whatever they do, and however they end: they neither wait for ever nor touch anything; workers keep no lock."""
    done = subprocess.run(
        [sys.executable, "-c", FORKED, str(tmp_path)],
        capture_output=True, text=True, timeout=600, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.stdout == "ended in order\n", done.stderr


def test_a_lock_is_its_owner_s_alone(tmp_path: Path) -> None:
    """A child that releases it does not remove the file, and one that lives on does not hold it."""
    lock = FolderLock.acquire([tmp_path], new_run_id(), 0)
    ended, end = os.pipe()
    released, release = os.pipe()
    child = os.fork()
    if not child:
        try:
            lock.release()
            os.write(release, b".")
            os.close(end)
            os.read(ended, 1)
        finally:
            os._exit(0)
    try:
        assert os.read(released, 1) == b"."
        (owner,) = holders(tmp_path)
        assert owner.pid == os.getpid()
        for descriptor, _ in zip(list(lock._descriptors), "x", strict=True):
            os.close(descriptor)  # as the kernel does when the parent is killed
        assert not holders(tmp_path)
    finally:
        os.close(end)
        os.waitpid(child, 0)
        for descriptor in (ended, released, release):
            os.close(descriptor)
        lock._descriptors, lock._files = [], []
        folders._held.discard(lock)


# Space #


def test_holes_in_a_file_are_filled(tmp_path: Path) -> None:
    """A copy of a run may be sparse: it has the size, but not the space."""
    file = tmp_path / "rank00000.pages"
    file.write_bytes(b"x" * 4096)
    os.truncate(file, MIB)
    assert file.stat().st_blocks * 512 < MIB
    reserve(file, MIB)
    assert file.stat().st_blocks * 512 >= MIB
    assert file.read_bytes() == b"x" * 4096 + bytes(MIB - 4096)


def test_holes_count_as_space_that_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused before anything is filled."""
    file = tmp_path / "rank00000.pages"
    file.write_bytes(b"x" * 4096)
    os.truncate(file, MIB)
    used = shutil.disk_usage(tmp_path)._replace(free=MIB // 2)
    monkeypatch.setattr(folders.shutil, "disk_usage", lambda _: used)
    with pytest.raises(BudgetError, match="needs 1 MiB"):
        reserve(file, MIB)
    assert file.stat().st_blocks * 512 < MIB


def test_a_drive_that_fails_is_not_one_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever frees space then would be none the wiser."""

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(folders.os, "posix_fallocate", fail)
    with pytest.raises(StorageError, match="EIO"):
        reserve(tmp_path / "rank00000.pages", MIB)
    assert not list(tmp_path.iterdir())


def test_other_errors_of_a_lock_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without locks is not "in use by another run"."""

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


def test_who_only_looks_does_not_keep_a_run_from_starting(tmp_path: Path) -> None:
    """Not even if somebody looks at a stale lock all the time."""
    ended = threading.Event()
    asked = 0

    def look() -> None:
        nonlocal asked
        while not ended.is_set():
            (tmp_path / "infinity.lock.0").touch()
            holders(tmp_path)
            asked += 1

    threads = [threading.Thread(target=look) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        starts = 0
        while starts < 30 or asked <= 100:
            lock = FolderLock.acquire([tmp_path], new_run_id(), 0)
            lock.release()
            starts += 1
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def test_nothing_starts_while_runs_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start waits for it, and then says what it waits for; and the other way round."""
    monkeypatch.setattr(folders, "_START_SECONDS", 0.1)
    monkeypatch.setattr(folders, "_REMOVE_SECONDS", 0.1)
    with no_starts([tmp_path, tmp_path]):
        # Whoever may read the folder can lock it, so no more is said than is known, and how to find out.
        reasons = rf"{tmp_path} .*for 0.1 s.*`infinity store gc` or `rm`.*`fuser -v {tmp_path}`"
        with pytest.raises(FolderBusyError, match=reasons):
            FolderLock.acquire([tmp_path], new_run_id(), 0)
        assert list(tmp_path.iterdir()) == []
        with pytest.raises(FolderBusyError, match=f"{tmp_path} is locked"), no_starts([tmp_path]):
            pass
    lock = FolderLock.acquire([tmp_path], new_run_id(), 0)
    with no_starts([tmp_path]):
        assert holders(tmp_path), "a live run goes on, and is seen"
    lock.release()
    descriptor = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    reasons = rf"{tmp_path} is locked.*`lsof {tmp_path}`"
    with pytest.raises(FolderBusyError, match=reasons), no_starts([tmp_path]):
        pass
    os.close(descriptor)


def test_who_looks_for_too_long_is_not_called_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock that is shared is held by no run."""
    monkeypatch.setattr(folders, "_START_SECONDS", 0.1)
    file = tmp_path / "infinity.lock.0"
    file.touch()
    with open(file) as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        with pytest.raises(FolderBusyError, match=rf"{file} has been locked .*`fuser -v {file}`"):
            FolderLock.acquire([tmp_path], new_run_id(), 0)


def test_what_a_lock_file_says_is_not_trusted(tmp_path: Path) -> None:
    """Any content: a holder without a name."""
    lock = tmp_path / "infinity.lock.0"
    for content in ('{"run_id": 1, "pid": 1, "host": "x", "since": 1e999}', "[" * 9999, "x" * 100_000, '{"pid": 1}'):
        lock.write_text(content)
        with open(lock) as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            assert "a run of user" in str(holders(tmp_path)[0])
            with pytest.raises(FolderBusyError, match="another run"):
                FolderLock.acquire([tmp_path], new_run_id(), 0)


def test_a_lock_that_cannot_be_removed_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lock = FolderLock.acquire([tmp_path], new_run_id(), 0)
    monkeypatch.setattr(Path, "unlink", _fails)
    lock.release()
    monkeypatch.undo()
    assert "could not be removed: Input/output error" in caplog.text
    assert not holders(tmp_path)


def _fails(*_: Any, **__: Any) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


# Files of one's own #


def test_files_of_ones_own(tmp_path: Path) -> None:
    """Made, replaced and read; nothing that was planted is touched, and nothing is waited for."""
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
    with pytest.raises(ZeroDivisionError), replacing(file, 0o600) as half:
        half.write(bytes(1 // len("")))
    assert file.read_bytes() == b"three"
    file.unlink()
    os.mkfifo(file)
    for flags in (os.O_RDONLY, os.O_RDWR | os.O_CREAT):
        with pytest.raises(PermissionError, match="not a regular file"):
            open_own(file, flags)
    assert {entry.name for entry in tmp_path.iterdir()} == {"cache", "victim"}


def test_a_folder_of_ones_own(tmp_path: Path) -> None:
    """Made private; a link, and a folder that others may write to, are refused."""
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


# Starts and ends #


def steps_of(folder: Path) -> list[int]:
    """Return the steps that the run in a session's folder has checkpointed."""
    (found,) = look_for_runs([folder / "nvme0"])[0]
    return [checkpoint.step for checkpoint in complete_checkpoints(published_in(found.in_order[0] / "checkpoints"))]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of a run that nobody disturbs."""
    return reference(tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.parametrize(
    "where",
    [
        "space_reservation.reserve",
        "initial_state.restore",
        "run.open_engine",
        "checkpointing.checkpoint_bytes",
        "run.Peers",
    ],
)
def test_a_start_that_fails_removes_nothing_that_was_there(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: list[float]
) -> None:
    """Neither the run, with `keep = "never"`, nor checkpoints later than the one that was to be resumed from."""
    kept = {"retained_checkpoints": 3}
    with Session(tmp_path, run=kept) as session:
        session.run(STEPS)
    before, files = steps_of(tmp_path), tree(tmp_path / "nvme0")
    assert before == [EVERY, 2 * EVERY, STEPS]
    with monkeypatch.context() as patch:
        patch.setattr(f"infinity.run.{where}", _fails)
        with pytest.raises(OSError, match="Input/output error"):
            Session(tmp_path, run={"resume": "latest", "resume_step": EVERY, "keep": "never", **kept})
    assert tree(tmp_path / "nvme0") == files
    assert not holders(tmp_path / "nvme0")
    with Session(tmp_path, run={"resume": "latest", "resume_step": EVERY, **kept}) as session:
        assert steps_of(tmp_path) == [EVERY], "it has begun: later ones are gone now"
        assert session.run() == undisturbed[EVERY:]


@pytest.mark.parametrize(
    "where",
    ["space_reservation.reserve", "run.PageStore", "run.open_engine", "checkpointing.checkpoint_bytes", "run.Peers"],
)
def test_a_new_run_that_does_not_start_leaves_nothing(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvme0").mkdir()
    (tmp_path / "nvme0" / "precious").write_text("not ours")
    monkeypatch.setattr(f"infinity.run.{where}", _fails)
    with pytest.raises(OSError, match="Input/output error"):
        Session(tmp_path, host_cache="all", run={"keep": "always"})
    assert tree(tmp_path / "nvme0") == {"precious": b"not ours"}


def test_a_process_of_few_files_leaves_nothing(tmp_path: Path) -> None:
    """Wherever the limit strikes, the start is refused with the limit's name or goes through, and cleans up."""
    with Session(tmp_path, host_cache="all") as session:  # everything that is loaded on demand is loaded now
        session.step()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    refused: list[str] = []
    started = 0
    for more in range(1, 40):
        model = models.build(RECIPE.model)
        optimizer = make_optimizer(RECIPE, model)
        config = settings(tmp_path, Paging(), 64 * MIB)
        taken = {int(name) for name in os.listdir("/proc/self/fd")}
        free = [number for number in range(soft) if number not in taken]
        resource.setrlimit(resource.RLIMIT_NOFILE, (free[more], hard))
        try:
            infinity.offload(model, optimizer, config).close()
            started += 1
        except (InfinityError, OSError) as error:
            refused.append(str(error))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert tree(tmp_path / "nvme0") == {}, more
        if started > 2:
            break
    assert len(refused) >= 3
    assert all("open" in reason for reason in refused), refused
    assert started


def test_the_first_cause_is_what_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the file system is gone at the end, too: what cannot be closed is logged, and everything is given back."""
    monkeypatch.setattr("infinity.run.run.PageStore.close", _fails)
    session = Session(tmp_path)
    session.run(EVERY)
    monkeypatch.setattr(Path, "unlink", _fails)
    with pytest.raises(StorageError, match="read of 1 bytes"), session:
        raise StorageError("read", "somewhere", 0, 1, errno.EIO)
    monkeypatch.undo()
    assert "cleanup: OSError: [Errno 5] Input/output error" in caplog.text
    assert not holders(tmp_path / "nvme0")
    monkeypatch.setattr("infinity.run.run.PageStore.close", _fails)
    with Session(tmp_path, run={"resume": "latest"}) as session:
        assert session.optimizer.steps == EVERY
        with pytest.raises(OSError, match="Input/output error"):
            session.optimizer.close()
    assert not holders(tmp_path / "nvme0")


def test_paths_in_another_order_are_the_same_run(tmp_path: Path, undisturbed: list[float]) -> None:
    """It is resumed where it lies, bit for bit."""
    (tmp_path / "nvme1").mkdir()
    paths = [str(tmp_path / "nvme0"), str(tmp_path / "nvme1")]
    with Session(tmp_path, storage={"paths": paths}) as session:
        session.run(EVERY)
    copies = subprocess.run(f"cd {paths[0]} && for run in 2*; do cp -r $run $run.bak; done", shell=True, check=True)
    assert copies.returncode == 0
    with Session(tmp_path, storage={"paths": paths[::-1]}, run={"resume": "latest"}) as session:
        assert session.run() == undisturbed[EVERY:]
    runs, passed = look_for_runs(paths)
    assert (len(runs), passed) == (1, {})


def test_a_marker_that_is_gone_is_said(tmp_path: Path) -> None:
    with Session(tmp_path) as session:
        session.run(EVERY)
    (root,) = look_for_runs([tmp_path / "nvme0"])[0][0].in_order
    (root / MARKER_NAME).unlink()
    with pytest.raises(CheckpointError, match=rf"{root} is ignored: it has no infinity\.run"):
        Session(tmp_path, run={"resume": "latest"})


@as_root
def test_a_run_on_a_read_only_mount_goes_on_elsewhere(tmp_path: Path, undisturbed: list[float]) -> None:
    """What a drive that fails looks like; nothing is opened for writing there, and a stale lock is no obstacle."""
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
