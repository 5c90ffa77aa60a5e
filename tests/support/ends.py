"""End a process at a system call, by SIGKILL or a simulated loss of power that undoes unsynced changes."""

from __future__ import annotations

import contextlib
import importlib
import os
import random
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from infinity.config import StorageConfig
from infinity.hugepages import transfer_memory
from infinity.io.engine import DataFile, Engine, Op, Ticket
from infinity.units import align_up
from support.wrapped_engine import WrappedEngine

_SECTOR = 512


class _Written(NamedTuple):
    ticket: Ticket
    before: bytes


class VolatileEngine(WrappedEngine):
    """Forward requests to `inner`, and keep the data that unsynced writes have replaced."""

    kind = "volatile"

    def __init__(self, inner: Engine) -> None:
        super().__init__(inner)
        self._lock = threading.Lock()
        self._unsynced: list[_Written] = []

    def submit(self, op: Op, file: DataFile, offset: int, memory: memoryview) -> Ticket:
        """Start a transfer. Before a write, read the data that it replaces."""
        if op is Op.WRITE:
            length = memory.nbytes
            before = transfer_memory(align_up(length, 4096))[:length]
            self._inner.submit(Op.READ, file, offset, before).wait()
            ticket = self._inner.submit(op, file, offset, memory)
            with self._lock:
                self._unsynced.append(_Written(ticket, bytes(before)))
            return ticket
        return self._inner.submit(op, file, offset, memory)

    def sync(self, file: DataFile) -> None:
        """Make completed writes durable, so that they can no longer be lost."""
        with self._lock:
            durable = {id(w) for w in self._unsynced if w.ticket.done and w.ticket.path == file.path}
        self._inner.sync(file)
        with self._lock:
            self._unsynced = [written for written in self._unsynced if id(written) not in durable]

    def lose_power(self, rng: random.Random) -> int:
        """Undo each unsynced write entirely, partly (by sector) or not at all; return the number of unsynced writes.

        The process must end afterwards.
        """
        with self._lock:
            lost, self._unsynced = self._unsynced, []
        for ticket, _ in lost:
            ended = threading.Event()
            ticket.on_done(lambda _, ended=ended: ended.set())  # type: ignore[misc]
            ended.wait()
        rng.shuffle(lost)
        for ticket, before in lost:
            survives = rng.choice((0.0, 0.5, 1.0))
            descriptor = os.open(ticket.path, os.O_WRONLY)
            try:
                for start in range(0, len(before), _SECTOR):
                    if rng.random() >= survives:
                        os.pwrite(descriptor, before[start : start + _SECTOR], ticket.offset + start)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        return len(lost)


_CALLS = ("fsync", "rename", "unlink", "mkdir", "rmdir", "posix_fallocate", "truncate", "ftruncate")
"""System calls before or after which a process may end. They include all steps of publishing a checkpoint."""
_NOT_LOST = ("log", "trace", "store", "undo", "runtime")
"""Prefixes of the names of files that belong to the test or are created at every start."""


@dataclass(frozen=True, kw_only=True)
class End:
    """End of a process: after a time in seconds, at one of the `_CALLS` (by number), or no end."""

    seconds: float | None = None
    call: int | None = None
    after: bool = False
    power: bool = False
    """Whether a loss of power is simulated at the call."""

    def __str__(self) -> str:
        if self.seconds is not None:
            return f"SIGKILL after {self.seconds:.3f} s"
        if self.call is None:
            return "no end"
        kind = "loss of power" if self.power else "SIGKILL"
        return f"{kind} {'after' if self.after else 'before'} call {self.call}"


class Drive:
    """Unsynced renames, removals and new files in a folder, which a loss of power undoes."""

    def __init__(self, folder: Path, keep: Path, mine: str) -> None:
        self._folder, self._keep, self._mine = folder, keep, mine
        self._undo: list[tuple[Path, Callable[[], None]]] = []
        self._durable = {self._key(file) for file in self._files()}

    @staticmethod
    def _key(file: Path) -> tuple[int, int]:
        about = file.lstat()
        return about.st_dev, about.st_ino

    def _files(self) -> list[Path]:
        """Return the files whose content may be lost, except data files, for which `VolatileEngine` is responsible."""
        found = []
        for place, folders, names in os.walk(self._folder):
            folders[:] = [name for name in folders if not name.startswith(_NOT_LOST)]
            found += [Path(place, name) for name in names if not name.startswith(_NOT_LOST) and ".pages" not in name]
            found = [file for file in found if self._mine in file.name]
        return found

    def renaming(self, source: Path, target: Path) -> None:
        replaced = self._copy(target) if target.is_file() else None

        def undo() -> None:
            os.replace(target, source)
            if replaced is not None:
                os.replace(replaced, target)

        self._undo.append((target.parent, undo))

    def removing(self, file: Path) -> None:
        copy = self._copy(file)
        self._undo.append((file.parent, lambda: os.replace(copy, file)))

    def _copy(self, file: Path) -> Path:
        copy = self._keep / f"{len(self._undo)}-{os.getpid()}-{file.name}"
        shutil.copy2(file, copy)
        return copy

    def synced(self, path: Path) -> None:
        if path.is_dir():
            self._undo = [entry for entry in self._undo if entry[0] != path]
        else:
            self._durable.add(self._key(path))

    def lose_power(self, rng: random.Random) -> None:
        """Undo a random number of the latest changes. File systems preserve the order of changes to a folder.

        A file that was not synced may be truncated, and any block of it may be zero.
        """
        lost = [file for file in self._files() if self._key(file) not in self._durable]
        for file in lost:
            content = bytearray(file.read_bytes())
            for start in range(0, len(content), 4096):
                if rng.random() < 0.5:
                    content[start : start + 4096] = bytes(len(content[start : start + 4096]))
            file.write_bytes(content[: rng.choice((0, len(content) // 2, len(content)))])
        for _ in range(rng.randrange(len(self._undo) + 1)):
            self._undo.pop()[1]()


@contextlib.contextmanager
def ending(end: End, seed: int, folder: Path, mine: str = "") -> Iterator[Callable[[], int]]:
    """Make the process end at a system call; yield a function that returns the number of system calls.

    A loss of power affects files whose names contain `mine`.
    """
    if end.call is None:
        yield lambda: 0
        return
    rng = random.Random(seed)
    keep = folder / "undo"
    keep.mkdir(exist_ok=True)
    drive, engines, count = Drive(folder, keep, mine), list[VolatileEngine](), 0

    def die() -> None:
        if end.power:
            for engine in engines:
                engine.lose_power(rng)
            drive.lose_power(rng)
        os.kill(os.getpid(), signal.SIGKILL)

    def wrapped(name: str) -> Callable[..., Any]:
        original = getattr(os, name)

        def call(*arguments: Any, **keywords: Any) -> Any:
            nonlocal count
            mine, count = count, count + 1
            if mine == end.call and not end.after:
                die()
            if end.power and name == "rename":
                drive.renaming(*map(Path, arguments[:2]))
            elif end.power and name == "unlink" and Path(arguments[0]).parent.name == "checkpoints":
                with contextlib.suppress(FileNotFoundError):
                    drive.removing(Path(arguments[0]))
            try:
                result = original(*arguments, **keywords)
                if end.power and name == "fsync":
                    drive.synced(Path(os.readlink(f"/proc/self/fd/{arguments[0]}")))
            finally:
                if mine == end.call:
                    die()
            return result

        return call

    module = importlib.import_module("infinity.run.run")
    original_open = module.open_engine

    def open_engine(config: StorageConfig) -> Any:
        engines.append(VolatileEngine(original_open(config)))
        return engines[-1]

    for name in _CALLS:
        setattr(os, name, wrapped(name))
    if end.power:
        module.open_engine = open_engine
    yield lambda: count  # the patches are not undone, because the process ends
