"""What says that a folder is a run of ours: a name of the form of an id, and the file `infinity.run` in it.

Whatever lists, resumes, checks or removes runs goes by this and nothing else. A folder that only looks like one
(`.git`, a copy `RUN.bak`, somebody's project with a folder `checkpoints`) is passed over.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import stat
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from infinity.untrusted_files import read_regular, replacing, sync_folder

MARKER_NAME = "infinity.run"
_FORMAT = 1
_RUN_ID = re.compile(r"\d{8}-\d{6}-[0-9a-f]{6}", re.ASCII)
_COPIES = 3
"""One more than a flipped bit spoils, which may be that of a line's end."""
_MOST_BYTES = 1 << 16
_MOST_PATHS = 1 << 16


def new_run_id() -> str:
    """Return an id that sorts by time: ``20260131-142530-1a2b3c``.

    The first half of the last part is the time in 1/4096 s, the second half is random.
    """
    now = time.time()
    return time.strftime("%Y%m%d-%H%M%S-", time.gmtime(now)) + f"{int(now % 1 * 4096):03x}{secrets.randbelow(4096):03x}"


def is_run_id(name: str) -> bool:
    """Whether a name has the form of a run's id."""
    return _RUN_ID.fullmatch(name) is not None


@dataclass(frozen=True, kw_only=True)
class Marker:
    """What is in the file: the run, and which of the run's `paths` folders this is, counted from 0."""

    run_id: str
    path: int
    paths: int


def read_marker(root: Path) -> Marker:
    """Return the marker of a folder of a run.

    Raises:
        OSError: there is none, or it cannot be read. ValueError: none of its copies is good, or it is of another run.
    """
    for line in read_regular(root / MARKER_NAME, _MOST_BYTES).splitlines():
        if (found := _decode(line)) is not None:
            if found.run_id != root.name:
                raise ValueError(f"its {MARKER_NAME} is of run {found.run_id}")
            return found
    raise ValueError(f"its {MARKER_NAME} is damaged")


def write_marker(root: Path, marker: Marker) -> None:
    """Mark a folder, durably; nothing happens if that is done already. Raises `OSError`."""
    content = _encode(marker)
    try:
        if read_regular(root / MARKER_NAME, _MOST_BYTES) == content:
            return
    except OSError:
        pass
    with replacing(root / MARKER_NAME, 0o600) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())  # before it has its name: a loss of power must not leave a marker that says nothing
    for name in (root, root.parent):
        sync_folder(name)


def _encode(marker: Marker) -> bytes:
    body = json.dumps({"format": _FORMAT, **asdict(marker)}, sort_keys=True)
    line = json.dumps({"checksum": _checksum(body), "body": body}).encode() + b"\n"
    return _COPIES * line


def _decode(line: bytes) -> Marker | None:
    try:
        outer = json.loads(line)
        if outer["checksum"] != _checksum(outer["body"]):
            return None
        tree: dict[str, Any] = json.loads(outer["body"])
        if tree.pop("format") != _FORMAT:
            return None
        marker = Marker(**tree)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    numbers = type(marker.path) is int and type(marker.paths) is int and isinstance(marker.run_id, str)
    return marker if numbers and 0 <= marker.path < marker.paths <= _MOST_PATHS else None


def _checksum(body: str) -> str:
    return f"{xxhash.xxh3_64_intdigest(body.encode()):016x}"


@dataclass(frozen=True, kw_only=True)
class FoundRun:
    """A run, as far as it lies on the folders that were looked into.

    `roots` are its folders by their numbers in the run's own order; `paths` is how many it has in all.
    """

    run_id: str
    roots: dict[int, Path]
    paths: int

    @property
    def in_order(self) -> tuple[Path, ...]:
        """The folders that are here, in the run's own order."""
        return tuple(self.roots[number] for number in sorted(self.roots))

    @property
    def complete(self) -> bool:
        """Whether all its folders are here."""
        return len(self.roots) == self.paths


def look_for_runs(paths: Sequence[str | Path]) -> tuple[list[FoundRun], dict[Path, str]]:
    """Return the runs on some folders, oldest first, in whatever order the folders are named.

    Also returns the folders that are named as a run is but are passed over, each with the reason.

    Raises:
        OSError: one of `paths` cannot be read.
    """
    found: dict[str, FoundRun] = {}
    passed: dict[Path, str] = {}
    for path in map(Path, paths):
        for name in sorted(name for name in os.listdir(path) if is_run_id(name)):
            root = path / name
            try:
                marker = _marker_of(root)
            except FileNotFoundError:
                try:
                    if os.listdir(root):  # see `empty_folders`
                        passed[root] = f"it has no {MARKER_NAME}"
                except FileNotFoundError:  # it was removed just now
                    pass
                except OSError as error:
                    passed[root] = str(error.strerror)
            except OSError as error:
                passed[root] = str(error.strerror)
            except ValueError as error:
                passed[root] = str(error)
            else:
                run = found.setdefault(name, FoundRun(run_id=name, roots={}, paths=marker.paths))
                first = run.roots.setdefault(marker.path, root)
                if run.paths != marker.paths or (first != root and not first.samefile(root)):
                    passed[root] = f"it is a second folder {marker.path} of that run, beside {first}"
    return [found[run_id] for run_id in sorted(found)], passed


def empty_folders(path: Path) -> list[Path]:
    """Return this user's folders that are named as a run and have nothing in them.

    They are what is left of a start that was cut off before it made its marker, or of a removal before its end.

    Raises:
        OSError: `path` cannot be read.
    """
    found = []
    for name in sorted(name for name in os.listdir(path) if is_run_id(name)):
        root = path / name
        with suppress(OSError):  # gone, no folder, or not to be read
            about = root.lstat()
            if stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid() and not os.listdir(root):
                found.append(root)
    return found


def _marker_of(root: Path) -> Marker:
    if root.is_symlink() or not root.is_dir():
        raise ValueError("it is a link" if root.is_symlink() else "it is not a folder")
    marker = read_marker(root)
    checkpoints = root / "checkpoints"
    with suppress(FileNotFoundError):
        mode = checkpoints.lstat().st_mode
        if not stat.S_ISDIR(mode):  # whoever removes would remove elsewhere
            raise ValueError(f"its checkpoints is {'a link' if stat.S_ISLNK(mode) else 'not a folder'}")
    return marker


def passed_over(passed: dict[Path, str]) -> str:
    """Return words about folders that are named as a run is but are none; empty where there are none."""
    return "; ".join(f"{root} is passed over: {reason}" for root, reason in passed.items())
