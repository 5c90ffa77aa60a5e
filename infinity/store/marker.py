"""Markers of run folders: a folder is a run if its name is a run id and it contains the file `infinity.run`.

All commands that list, resume, check or remove runs use this rule and no other. A folder that merely resembles a run
is ignored, for example `.git`, a copy `RUN.bak`, or a project with a folder `checkpoints`.
"""

from __future__ import annotations

import calendar
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from infinity.untrusted_files import read_regular, sync_folder, write_own

MARKER_NAME = "infinity.run"
_FORMAT = 1
_RUN_ID = re.compile(r"\d{8}-\d{6}-[0-9a-f]{6}", re.ASCII)
_COPIES = 3
"""Number of copies in a marker. A flipped bit can damage two of them if it is in the newline between them."""
_MOST_BYTES = 1 << 16
_MOST_PATHS = 1 << 16
_TICKS = 1 << 12
"""Units of time per second in a run id."""
_LAST = calendar.timegm((9999, 12, 31, 23, 59, 59)) * _TICKS + _TICKS - 1
"""Last time that a run id can represent, in units of 1/4096 s."""


def new_run_id(after: Iterable[str] = ()) -> str:
    """Return a run id, such as ``20260131-142530-1a2b3c``, that sorts after the given ones.

    The last part consists of the time in units of 1/4096 s (three digits) and a random number (three digits).

    Args:
        after: Ids of the runs that exist. Names that contain no valid time are ignored.
    """
    # Later than `after` even if the clock was set back, because the newest run is the one that sorts last.
    ticks = max(time.time_ns() * _TICKS // 10**9, *(_ticks_of(run_id) + 1 for run_id in after), 0)
    seconds, ticks = divmod(min(ticks, _LAST), _TICKS)
    moment = time.strftime("%Y%m%d-%H%M%S-", time.gmtime(seconds))
    return f"{moment}{ticks:03x}{secrets.randbelow(_TICKS):03x}"


def _ticks_of(run_id: str) -> int:
    """Return the time in a run id in units of 1/4096 s, or -1 if it is not a valid time."""
    moment, _, rest = run_id.rpartition("-")
    try:
        return calendar.timegm(time.strptime(moment, "%Y%m%d-%H%M%S")) * _TICKS + int(rest[:3], 16)
    except ValueError:
        return -1


def run_ids(paths: Iterable[str | Path]) -> set[str]:
    """Return all names of the form of a run id in the given folders, even if the runs are incomplete.

    Raises:
        OSError: if one of `paths` exists and cannot be read.
    """
    found: set[str] = set()
    for path in paths:
        with suppress(FileNotFoundError):
            found.update(name for name in os.listdir(path) if is_run_id(name))
    return found


def is_run_id(name: str) -> bool:
    """Return whether a name has the form of a run id."""
    return _RUN_ID.fullmatch(name) is not None


@dataclass(frozen=True, kw_only=True)
class Marker:
    """Contents of the marker file: the run id, and the index of this folder among the run's `paths` folders."""

    run_id: str
    path: int
    paths: int


def read_marker(root: Path) -> Marker:
    """Return the marker of a run folder.

    Raises:
        OSError: if there is no marker or it cannot be read.
        ValueError: if all copies are damaged, or if the marker belongs to a different run.
    """
    for line in read_regular(root / MARKER_NAME, _MOST_BYTES).splitlines():
        if (found := _decode(line)) is not None:
            if found.run_id != root.name:
                raise ValueError(f"its {MARKER_NAME} belongs to run {found.run_id}")
            return found
    raise ValueError(f"its {MARKER_NAME} is damaged")


def write_marker(root: Path, marker: Marker) -> None:
    """Durably write the marker of a folder, unless it already exists. Raises `OSError`."""
    content = _encode(marker)
    try:
        if read_regular(root / MARKER_NAME, _MOST_BYTES) == content:
            return
    except OSError:
        pass
    # The marker and the folder itself must be durable before the first checkpoint. Without a marker, the folder would
    # not be recognized as a run, and its checkpoints could not be resumed.
    write_own(root / MARKER_NAME, content, durable=True)
    sync_folder(root.parent)


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
    """Run, as far as it was found in the searched folders.

    `roots` contains the run's folders by their index in the order of the run. `paths` is the total number of folders
    of the run.
    """

    run_id: str
    roots: dict[int, Path]
    paths: int

    @property
    def in_order(self) -> tuple[Path, ...]:
        """Folders that were found, in the order of the run."""
        return tuple(self.roots[number] for number in sorted(self.roots))

    @property
    def complete(self) -> bool:
        """``True`` if all folders of the run were found."""
        return len(self.roots) == self.paths


def look_for_runs(paths: Sequence[str | Path]) -> tuple[list[FoundRun], dict[Path, str]]:
    """Return the runs in the given folders, oldest first. The order of the folders does not matter.

    Also return the reason for each folder that has the name of a run but is ignored.

    Args:
        paths: folders to search.

    Raises:
        OSError: if one of `paths` cannot be read.
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
                    if set(os.listdir(root)).difference(drafts_in(root)):  # see `empty_folders`
                        passed[root] = f"it has no {MARKER_NAME}"
                except FileNotFoundError:  # just removed
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
                    passed[root] = f"it is a duplicate of folder {marker.path} of that run, which is {first}"
    return [found[run_id] for run_id in sorted(found)], passed


def empty_folders(path: Path) -> list[Path]:
    """Return this user's folders that have the name of a run and contain at most drafts of a marker.

    They are left by a start that was interrupted before it wrote its marker, or by an interrupted removal.

    Args:
        path: folder to search.

    Raises:
        OSError: if `path` cannot be read.
    """
    found = []
    for name in sorted(name for name in os.listdir(path) if is_run_id(name)):
        root = path / name
        with suppress(OSError):  # removed, not a folder, or not readable
            about = root.lstat()
            mine = stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid()
            if mine and not set(os.listdir(root)).difference(drafts_in(root)):
                found.append(root)
    return found


def drafts_in(root: Path) -> list[str]:
    """Return the names of the markers in a folder that an interrupted start has not finished. Raises `OSError`."""
    return [name for name in os.listdir(root) if name.startswith(f".{MARKER_NAME}.")]


def _marker_of(root: Path) -> Marker:
    if root.is_symlink() or not root.is_dir():
        raise ValueError("it is a link" if root.is_symlink() else "it is not a folder")
    marker = read_marker(root)
    checkpoints = root / "checkpoints"
    with suppress(FileNotFoundError):
        mode = checkpoints.lstat().st_mode
        if not stat.S_ISDIR(mode):  # removing the run would follow the link and remove unrelated files
            raise ValueError(f"its checkpoints entry is {'a link' if stat.S_ISLNK(mode) else 'not a folder'}")
    return marker


def passed_over(passed: dict[Path, str]) -> str:
    """Return a description of the ignored folders that have the name of a run; empty if there are none."""
    return "; ".join(f"{root} is ignored: {reason}" for root, reason in passed.items())
