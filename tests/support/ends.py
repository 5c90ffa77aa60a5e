"""How a process ends at a system call, killed or without power, and what the drive then has lost."""

from __future__ import annotations

import contextlib
import importlib
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infinity.config import StorageConfig
from support.volatile_engine import VolatileEngine

_CALLS = ("fsync", "rename", "unlink", "mkdir", "rmdir", "posix_fallocate", "truncate", "ftruncate")
"""System calls before or after which a life may end: the named points of the publish protocol, and of start and end."""
_NOT_LOST = ("log", "trace", "store", "undo", "runtime")
"""Beginnings of names of what belongs to the trial itself, or is made anew at every start."""


@dataclass(frozen=True, kw_only=True)
class End:
    """How a life ends: after so many seconds, or at the so-manieth of `_CALLS`, or not at all."""

    seconds: float | None = None
    call: int | None = None
    after: bool = False
    power: bool = False
    """At that call the power goes as well."""

    def __str__(self) -> str:
        if self.seconds is not None:
            return f"SIGKILL after {self.seconds:.3f} s"
        if self.call is None:
            return "no end"
        what = "loss of power" if self.power else "SIGKILL"
        return f"{what} {'after' if self.after else 'before'} call {self.call}"


class Drive:
    """Renames, removals and new files below a folder, which a loss of power undoes as long as they are not synced."""

    def __init__(self, folder: Path, keep: Path, mine: str) -> None:
        self._folder, self._keep, self._mine = folder, keep, mine
        self._undo: list[tuple[Path, Callable[[], None]]] = []
        self._durable = {self._key(file) for file in self._files()}

    @staticmethod
    def _key(file: Path) -> tuple[int, int]:
        about = file.lstat()
        return about.st_dev, about.st_ino

    def _files(self) -> list[Path]:
        """Return the files whose content may be lost: not those of pages, which an engine keeps."""
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
        """Undo the latest changes, as many as chance wants: file systems keep the order of changes to a folder.

        Of a file that was not synced, any part may be zero, or not there.
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
def ended(end: End, seed: int, folder: Path, mine: str = "") -> Iterator[Callable[[], int]]:
    """Let the process end at a system call; yields what tells how many there were.

    Files whose names have `mine` are on the drive that loses power with it.
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

    def open_engine(config: StorageConfig, why: str) -> tuple[Any, str]:
        inner, reason = original_open(config, why)
        engines.append(VolatileEngine(inner))
        return engines[-1], reason

    for name in _CALLS:
        setattr(os, name, wrapped(name))
    if end.power:
        module.open_engine = open_engine
    yield lambda: count  # nothing is put back: the process ends
