"""Tests that `infinity store` removes only unused runs, even during concurrent changes."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from infinity.errors import ConfigError, FolderBusyError
from infinity.store import folder as folders
from infinity.store.folder import FolderLock, RunFolder
from infinity_tools.stored_runs import Check, stored_runs, waste
from support.command import run_here
from support.daemon_process import as_user
from support.mounts import read_only

OTHER_USER = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount or become another user")


@pytest.fixture
def nvme(trained: Path, tmp_path: Path) -> Path:
    """Return a copy of the trained run's folder."""
    return Path(shutil.copytree(trained / "nvme", tmp_path / "nvme"))


def listed(folder: Path) -> list[Path]:
    """Return all paths below a folder."""
    return sorted(folder.rglob("*"))


def plant_run_lookalikes(nvme: Path, run: Path) -> None:
    """Create entries next to a run that only resemble runs."""
    for name in (".git", "project", "20260101-000000-aaaaaa"):
        (nvme / name / "checkpoints").mkdir(parents=True)
        (nvme / name / "checkpoints" / "precious").touch()
        (nvme / name / "rank00000.pages").touch()
    shutil.copytree(run, f"{run}.bak")
    (nvme / "20260102-000000-aaaaaa").symlink_to(run)


def test_run_lookalikes_are_never_removed(nvme: Path) -> None:
    """This holds for `gc`, `rm --ended` and `rm` with a run id."""
    (run,) = stored_runs([nvme])
    (root,) = run.folder.roots
    plant_run_lookalikes(nvme, root)
    mine = {root, *root.rglob("*")}
    others = [entry for entry in listed(nvme) if entry not in mine]
    assert run_here("store", "gc", nvme, "--yes").status == 0
    assert run_here("store", "rm", nvme, "20260101-000000-aaaaaa", "--yes").status == 2
    assert run_here("store", "rm", nvme, "20260102-000000-aaaaaa", "--yes").status == 2
    done = run_here("store", "ls", nvme)
    assert "20260101-000000-aaaaaa is ignored: it has no infinity.run" in done.errors
    assert "20260102-000000-aaaaaa is ignored: it is a link" in done.errors
    assert [found.run_id for found in stored_runs([nvme])] == [run.run_id]
    assert run_here("store", "rm", nvme, "--ended", "--yes").status == 0
    assert listed(nvme) == others


def test_link_created_after_listing_is_not_followed(nvme: Path, tmp_path: Path) -> None:
    (run,) = stored_runs([nvme])
    (run.folder.checkpoints / "draft.tmp").touch()
    empty = RunFolder.of([nvme], "20260101-000000-aaaaaa")
    empty.create()
    found = waste([nvme])
    assert sorted(item.what for item in found) == ["run without a checkpoint", "temporary file"]
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "draft.tmp").touch()
    for folder in (run.folder, empty):
        folder.checkpoints.rename(tmp_path / folder.run_id)
        folder.checkpoints.symlink_to(elsewhere)
    for item in found:
        with pytest.raises(ConfigError, match="cannot be removed: it is a link"):
            item.remove()
    assert listed(elsewhere) == [elsewhere / "draft.tmp"]


@as_root
def test_planted_lock_does_not_hide_live_run(nvme: Path) -> None:
    """A lock of another user is listed without a run id and protects no run."""
    (run,) = stored_runs([nvme])
    planted = [nvme / "infinity.lock.!", nvme / "infinity.lock.1"]
    for file in planted:
        file.write_text(json.dumps({"run_id": run.run_id, "pid": 1, "host": "h", "since": 0.0}))
        os.chown(file, OTHER_USER, -1)
    with open(planted[0]) as first, open(planted[1]) as second:
        fcntl.flock(first, fcntl.LOCK_EX)
        fcntl.flock(second, fcntl.LOCK_EX)
        done = run_here("store", "ls", nvme, "--json")
        assert not json.loads(done.output)[0]["live"]
        assert re.search(rf"{nvme} is held by a run of user \S+$", done.errors, re.MULTILINE)
        planted[1].write_text(json.dumps({"run_id": "another", "pid": 1, "host": "h", "since": 0.0}))
        lock = FolderLock.acquire([nvme], run.run_id, 2)
        try:
            assert json.loads(run_here("store", "ls", nvme, "--json").output)[0]["live"]
            assert run_here("store", "rm", nvme, "--ended", "--yes").status == 0
            assert run_here("store", "rm", nvme, run.run_id, "--yes").status == 2
            assert len(stored_runs([nvme])) == 1
        finally:
            lock.release()
        assert run_here("store", "rm", nvme, run.run_id, "--yes").status == 0
    assert stored_runs([nvme]) == []


def test_gc_removes_run_without_checkpoints_folder(tmp_path: Path) -> None:
    """The run's first path must be given, because it may contain the checkpoints."""
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    run = RunFolder.of([first, second], "20260101-000000-aaaaaa")
    run.create()
    run.checkpoints.rmdir()
    assert run_here("store", "gc", second, "--yes").status == 0
    assert len(stored_runs([first, second])) == 1
    assert json.loads(run_here("store", "gc", second, first, "--yes", "--json").output)["removed"]
    assert listed(first) == listed(second) == []


def test_gc_removes_temporary_companion_files(nvme: Path, tmp_path: Path) -> None:
    """A killed run may have written them; links are not followed."""
    (run,) = stored_runs([nvme])
    kept = run.folder.checkpoints / "model"
    kept.mkdir(exist_ok=True)
    draft = kept / "config.json.0a1b2c3d.tmp"
    draft.touch()
    precious = tmp_path / "elsewhere" / "precious.tmp"
    precious.parent.mkdir()
    precious.touch()
    (run.folder.checkpoints / "link").symlink_to(precious.parent)
    before = listed(nvme)
    done = run_here("store", "gc", nvme, "--yes")
    assert (done.status, done.output.count("temporary file")) == (0, 1)
    assert listed(nvme) == [entry for entry in before if entry != draft]
    assert precious.exists()


def test_gc_removes_empty_run_folder(nvme: Path) -> None:
    """A run that is interrupted before it writes its marker creates one; the folder of a starting run is kept."""
    before = listed(nvme)
    left, starting, full = (nvme / f"20260101-000000-{name}" for name in ("aaaaaa", "bbbbbb", "cccccc"))
    foreign, named = nvme / "20260101-000000-dddddd", nvme / "20260101"
    for folder in (left, starting, full, foreign, named):
        folder.mkdir()
    (full / "precious").touch()
    (left / ".infinity.run.0a1b2c3d").touch()
    if os.geteuid() == 0:
        os.chown(foreign, OTHER_USER, -1)
    else:
        foreign.rmdir()
    (nvme / "20260101-000000-eeeeee").symlink_to(named)
    kept = [entry for entry in listed(nvme) if left not in (entry, *entry.parents)]
    lock = FolderLock.acquire([nvme], starting.name, 0)
    try:
        found = json.loads(run_here("store", "gc", nvme, "--dry-run", "--json").output)["waste"]
        assert [(item["what"], item["paths"]) for item in found] == [("empty run folder", [str(left)])]
        (item,) = waste([nvme])
        (left / "late").touch()
        with pytest.raises(ConfigError, match="cannot be removed: Directory not empty"):
            item.remove()
        (left / "late").unlink()
        done = run_here("store", "gc", nvme, "--yes")
        assert (done.status, f"{left}  " in done.output) == (0, True)
    finally:
        lock.release()
    assert listed(nvme) == kept
    assert run_here("store", "gc", nvme, "--yes").status == 0
    assert listed(nvme) == [entry for entry in kept if entry != starting]
    assert set(before) <= set(kept)


@pytest.mark.parametrize("command", [("gc",), ("rm", "--ended")])
def test_runs_cannot_start_or_be_removed_during_prompt(
    nvme: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    """A run created after the listing is not removed."""
    dead, late = (RunFolder.of([nvme], f"2026010{day}-000000-aaaaaa") for day in (1, 3))
    dead.create()
    monkeypatch.setattr(folders, "_START_SECONDS", 0)
    monkeypatch.setattr(folders, "_REMOVE_SECONDS", 0)

    def confirm(question: str, *, abort: bool) -> bool:
        late.create()
        with pytest.raises(FolderBusyError, match=f"{nvme} has been locked"):
            FolderLock.acquire([nvme], dead.run_id, 0)
        second = run_here("store", "gc", nvme, "--yes")
        assert (second.status, f"{nvme} is locked" in second.errors) == (2, True)
        return True

    monkeypatch.setattr("typer.confirm", confirm)
    assert run_here("store", command[0], nvme, *command[1:]).status == 0
    FolderLock.acquire([nvme], late.run_id, 0).release()
    left = {run.run_id for run in stored_runs([nvme])}
    assert dead.run_id not in left
    assert late.run_id in left


@pytest.fixture
def read_only_mount(nvme: Path) -> Iterator[Path]:
    """Return a read-only mount of the run's folder, which contains a stale lock."""
    (nvme / "infinity.lock.0").write_text("{}")
    with read_only(nvme) as place:
        yield place


@as_root
def test_read_only_mount_supports_read_commands(trained: Path, read_only_mount: Path, tmp_path: Path) -> None:
    """The operating system remounts a failing drive read-only. A resume moves the run to another drive."""
    place = read_only_mount
    (run,) = json.loads(run_here("store", "ls", place, "--json").output)
    assert (run["live"], len(run["checkpoints"])) == (False, 2)
    for command in ("verify", "scrub"):
        done = run_here("store", command, place, "--json")
        assert (done.status, done.summary["bad"]) == (0, [])
    for to in ("safetensors", "dcp"):
        assert run_here("export", place, "--out", tmp_path / to, "--to", to).status == 0
    assert run_here("store", "gc", place, "--dry-run").status == 0
    done = run_here("store", "rm", place, "--ended", "--yes")
    assert done.status == 2
    assert "cannot be removed: Read-only file system" in done.errors
    train = ["train", "--out", shutil.copytree(trained / "out", tmp_path / "out"), "--resume", "--json"]
    moved = ["--offload.run.resume_paths", place, "--nvme", tmp_path / "new"]
    assert run_here(*train, *moved, "--max_steps", "3").summary["first_step"] == 3
    assert run_here(*train, "--max_steps", "4").summary["first_step"] == 4


@as_root
def test_run_of_another_user_does_not_hide_own_run(nvme: Path) -> None:
    """The other user's private folder and unreadable lock are skipped."""
    foreign = RunFolder.of([nvme], "20260101-000000-aaaaaa")
    foreign.create()
    (nvme / "infinity.lock.1").write_text("{}")
    (nvme / "infinity.lock.1").chmod(0o600)
    (mine,) = (run for run in stored_runs([nvme]) if run.run_id != foreign.run_id)
    for entry in [nvme, mine.folder.roots[0], *mine.folder.roots[0].rglob("*")]:
        os.chown(entry, OTHER_USER, OTHER_USER)
    nvme.parent.chmod(0o711)
    for above in nvme.parent.parents:
        if above.owner() == "root" and "pytest" in str(above):
            above.chmod(0o711)

    def look() -> bool:
        ignored: dict[Path, str] = {}
        (run,) = stored_runs([nvme], ignored)
        assert run.run_id == mine.run_id
        assert run.owner is None, "the owner of the lock cannot have opened this run"
        assert ignored == {foreign.roots[0]: "Permission denied"}
        return Check(run).run(lambda _: None) == []

    assert as_user(OTHER_USER, look)
