"""Tests of the `infinity doctor` checks of folders and drives."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from infinity.io.block_devices import Drive, Place, Space
from infinity.io.engine import DataFile
from infinity.store.folder import FolderLock
from infinity.store.marker import new_run_id
from infinity_tools.doctor import storage
from infinity_tools.doctor import world as worlds
from infinity_tools.doctor.finding import Check, Finding
from infinity_tools.doctor.world import Folder, World
from support.doctor import GIB, Machine, matches

PROBE = "infinity probe"


def look(
    check: Check[Folder], path: str | Path, answer: dict[str, Any] | None = None, root: Path = Path("/")
) -> Finding:
    """Return the finding of `check` for `path`, with a daemon that gives `answer` to every request."""
    at = World.of([str(path)], Path("no-daemon"), root).folders[0]
    at.daemon.__dict__["state"] = answer
    at.daemon._node = SimpleNamespace(ask=lambda op, **values: answer)  # type: ignore[assignment]
    return check.look(at)


def test_existing_or_creatable_folder_is_ok(tmp_path: Path) -> None:
    """The parent folder is unchanged afterwards."""
    assert matches(look(storage.folder, tmp_path), "ok", "writable")
    before = sorted(tmp_path.iterdir())
    assert matches(look(storage.folder, tmp_path / "new"), "ok", "will be created")
    assert sorted(tmp_path.iterdir()) == before


def test_path_that_is_not_a_folder_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    assert matches(look(storage.folder, tmp_path / "file"), "problem", "is not a folder", "another folder")
    assert matches(look(storage.folder, tmp_path / "loop"), "problem", "is not a folder", "another folder")
    found = look(storage.folder, tmp_path / "a b/c")
    assert matches(found, "problem", f"{tmp_path / 'a b'} is not a folder", f"mkdir -p '{tmp_path / 'a b'}'")


def test_read_only_mount_is_a_problem(tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fix names the mount point, even of a bind mount."""
    machine.write(
        "proc/self/mountinfo", f"1 0 8:1 / / rw - ext4 /dev/a rw\n2 1 8:1 /x {tmp_path} ro - ext4 /dev/a rw\n"
    )
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_RDONLY))
    found = look(storage.folder, tmp_path / "run", root=machine.root)
    assert matches(found, "problem", "mounted read-only", f"mount -o remount,rw {tmp_path}")


def test_unwritable_folder_reports_reason_and_fix(
    subtests: pytest.Subtests, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for code, user, fix in [
        (errno.EACCES, 1000, "install -d -o 1000 -g 1000 "),
        (errno.EACCES, 0, "another folder"),
        (errno.ENOSPC, 1000, "infinity store rm"),
        (errno.EIO, 1000, "another folder"),
    ]:
        with subtests.test(fix):
            monkeypatch.setattr(worlds.tempfile, "mkstemp", mock.Mock(side_effect=OSError(code, os.strerror(code))))
            monkeypatch.setattr(os, "geteuid", lambda: user)
            monkeypatch.setattr(os, "getegid", lambda: user)
            assert matches(look(storage.folder, tmp_path), "problem", os.strerror(code), fix)


def test_locked_folder_reports_its_process(tmp_path: Path) -> None:
    """After the lock is released, the folder is reported as unused."""
    lock = FolderLock.acquire([tmp_path], new_run_id(), 0)
    try:
        assert matches(look(storage.in_use, tmp_path), "note", f"process {os.getpid()}", "another folder")
    finally:
        lock.release()
    assert matches(look(storage.in_use, tmp_path), "ok", "by no run")
    assert matches(look(storage.in_use, tmp_path / "new"), "ok", "by no run")


def test_file_system_types(subtests: pytest.Subtests, tmp_path: Path, machine: Machine) -> None:
    """The topmost mount determines the type."""
    for kind, status, says in [
        ("ext4", "ok", "ext4"),
        ("xfs", "ok", "xfs"),
        ("tmpfs", "warning", "in memory"),
        ("nfs4", "warning", "not local"),
        ("fuse.sshfs", "warning", "not local"),
        ("overlay", "warning", "container"),
        ("btrfs", "note", "copy-on-write"),
    ]:
        with subtests.test(kind=kind):
            machine.write(
                "proc/self/mountinfo", f"1 0 8:1 / / rw - none a rw\n2 1 0:9 / {tmp_path} rw - {kind} a:/b rw\n"
            )
            assert matches(look(storage.file_system, tmp_path, root=machine.root), status, says)


def test_file_system_without_size_is_a_problem(
    tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs cannot reserve space on such a file system."""
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_blocks=0))
    assert matches(look(storage.file_system, tmp_path, root=machine.root), "problem", "without a size", "NVMe")


def fails(code: int) -> mock.Mock:
    """Return a function that raises an `OSError`."""
    return mock.Mock(side_effect=OSError(code, os.strerror(code)))


def test_direct_io(subtests: pytest.Subtests, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system may accept O_DIRECT in open() and still fail in pwrite()."""
    for file, functions, status, says, fix in [
        ({}, {}, "ok", "aligned to 512 bytes", ""),
        ({"alignment": 16384}, {}, "problem", "16384", "ext4"),
        ({"direct": False, "alignment": 1}, {}, "warning", "no O_DIRECT", "ext4 or XFS"),
        ({}, {"pwritev": fails(errno.EINVAL)}, "problem", "Invalid argument", "dmesg"),
        ({}, {"pwritev": fails(errno.ENOSPC)}, "note", "no space", "infinity store rm"),
        ({}, {"preadv": lambda *_: 4096}, "problem", "differs", "dmesg"),
    ]:

        def opened(path: str, flags: int, file: dict[str, Any] = file) -> DataFile:
            return DataFile(**{"path": path, "fd": os.open(path, flags), "direct": True, "alignment": 512, **file})

        with subtests.test(says), monkeypatch.context() as patched:
            patched.setattr(worlds, "open_aligned", opened)
            for name, function in functions.items():
                patched.setattr(os, name, function)
            assert matches(look(storage.direct, tmp_path), status, says, fix)
    assert list(tmp_path.glob(".infinity*")) == []


def test_fallocate_errors(subtests: pytest.Subtests, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """fallocate() is called directly, because posix_fallocate() writes data if it is not supported."""
    for code, status, says, fix in [
        (0, "ok", "blocks", ""),
        (errno.EOPNOTSUPP, "warning", "no fallocate", "ext4 or XFS"),
        (errno.ENOSPC, "problem", "No space left", "infinity store rm"),
        (errno.EFBIG, "problem", "File too large", "ulimit -f"),
    ]:
        with subtests.test(says):

            def fallocate(*_: object) -> int:
                ctypes.set_errno(code)
                return -1 if code else 0

            monkeypatch.setattr(storage, "_libc", SimpleNamespace(fallocate=fallocate))
            assert matches(look(storage.allocation, tmp_path), status, says, fix)


def test_free_space_excludes_reservations(
    subtests: pytest.Subtests, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only reservations on the same drive count."""
    for free, status, says in [
        (100, "ok", "97 GiB free of 1 TiB, besides 3 GiB reserved"),
        (5, "warning", "2 GiB free"),
        (3, "problem", "0 B free"),
    ]:
        with subtests.test(says):
            drive = Drive(name="nvme0n1", identity="x")
            monkeypatch.setattr(storage, "locate", lambda path, sysfs: Place(path=path, drive=drive, file_system=1))
            monkeypatch.setattr(storage, "space", lambda path: Space(capacity=1 << 40, free=free * GIB))
            entries = [{"device": "nvme0n1", "bytes": 3 * GIB}, {"device": "nvme1n1", "bytes": 50 * GIB}]
            assert matches(look(storage.free_space, tmp_path, {"reservations": entries}), status, says)


def test_drive_types(
    subtests: pytest.Subtests, tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The type depends on the name, the model and the kernel's rotational flag."""
    for name, rotational, model, status, says, fix in [
        ("nvme0n1", 0, "Samsung  SSD 990", "ok", "nvme0n1 (Samsung SSD 990)", ""),
        ("nvme1n1", 0, "Amazon Elastic Block Store", "note", "network drive", PROBE),
        ("nvme2n1", 0, "Amazon EC2 NVMe Instance Storage", "ok", "Instance Storage", ""),
        ("dm-0", 0, "", "ok", "dm-0", ""),
        ("sdb", 0, "Samsung 870", "note", "sdb (Samsung 870)", PROBE),
        ("sda", 1, "ST4000", "warning", "rotating", "NVMe"),
        ("vda", 1, "", "note", "virtual disk", PROBE),
        ("loop3", 0, "", "note", "a mounted file", "NVMe"),
        ("zram0", 0, "", "warning", "compressed", "NVMe"),
        ("nbd0", 0, "", "note", "network drive", PROBE),
    ]:
        with subtests.test(name=name):
            machine.drive(name, rotational, model)
            drive = Drive(name=name, identity=name)
            monkeypatch.setattr(storage, "locate", lambda path, sysfs: Place(path=path, drive=drive, file_system=1))
            assert matches(look(storage.drive, tmp_path, root=machine.root), status, says, fix)


def test_folder_without_drive_is_a_note(
    subtests: pytest.Subtests, tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for in_memory, says in [(True, "in memory"), (False, "(nfs-5)")]:
        with subtests.test(says):
            place = Place(path="", drive=Drive(name="nfs-5", identity=""), file_system=1, in_memory=in_memory)
            monkeypatch.setattr(storage, "locate", lambda path, sysfs: place)
            assert matches(look(storage.drive, tmp_path, root=machine.root), "note", says)


def test_bandwidth_comes_from_daemon(tmp_path: Path) -> None:
    known = {"read": 3.2e9, "write": 1.5e9, "mixed": None, "device": "nvme0n1"}
    assert matches(
        look(storage.bandwidth, tmp_path, None), "note", "infinityd is not running", "infinityd &, then infinity probe"
    )
    assert matches(
        look(storage.bandwidth, tmp_path, {"bandwidth": {str(tmp_path): None}}), "note", "not measured", PROBE
    )
    found = look(storage.bandwidth, tmp_path, {"bandwidth": {str(tmp_path): known}})
    assert matches(found, "ok", "read 3.20 GB/s, write 1.50 GB/s")
    assert "mixed" not in found.value


def test_drives_and_largest_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unusable folders are ignored, and the space of each file system counts once."""
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
    numbers = {"a": 1, "b": 2, "c": 1}

    def place(path: str, sysfs: Path) -> Place:
        number = numbers[Path(path).name]
        return Place(path=path, drive=Drive(name=f"nvme{number}", identity=f"{number}"), file_system=number)

    monkeypatch.setattr(storage, "locate", place)
    monkeypatch.setattr(storage, "space", lambda path: Space(capacity=1 << 40, free=28 * 10**9))

    def found(check: Check[World], *names: str) -> Finding:
        return check.look(World.of([str(tmp_path / name) for name in names], tmp_path))

    assert matches(found(storage.drives, "a"), "ok", "one")
    assert matches(found(storage.drives, "a", "b", "no/thing"), "ok", "2")
    shared = found(storage.drives, "a", "b", "c")
    assert matches(shared, "warning", f"{tmp_path / 'a'} and {tmp_path / 'c'} (nvme1)", "one folder per drive")
    assert matches(found(storage.largest_model, "a"), "ok", "about 1 billion")
    assert matches(found(storage.largest_model, "a", "b", "c"), "ok", "about 2 billion")
    for check in (storage.drives, storage.largest_model):
        assert matches(found(check, "no/thing"), "note", "no folder", "`folder`")
