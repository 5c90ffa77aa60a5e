"""Rewrite folders under the same name. The previous version is kept until the new one is complete.

[Note: rewriting a folder] The folder is renamed to `.NAME.before`, and a new one is written in its place. Once the
checkpoint of the new folder is published, files that exist only in the previous folder are moved to the new one,
because a framework would have left them in place, and the previous folder is removed. If the process is interrupted
before that, both folders exist.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from infinity.checkpoint.durable import sync_file
from infinity.formats.adapters import ADAPTER
from infinity.formats.weight_files import INDEX, SINGLE, read_index
from infinity.untrusted_files import sync_folder

APART = "infinity-export"
"""Subfolder that contains an export until the export is complete."""
_WEIGHTS = re.compile(r"model-\d{5,}-of-\d{5,}\.safetensors|(adapter_)?model\.safetensors")


def before(folder: Path) -> Path:
    """Return the path of the previous version of a folder."""
    place = Path(os.path.realpath(folder))
    return place.with_name(f".{place.name}.before")


def make_durable(folder: Path) -> None:
    """Flush a folder, its files and its parent to the drive, whichever process wrote them. Raises `OSError`."""
    for file in folder.iterdir():
        if file.is_file():
            sync_file(file)
    sync_folder(folder)
    sync_folder(folder.resolve().parent)


def set_aside(folder: Path) -> None:
    """Start rewriting a folder: rename it, and create an empty one in its place. Raises `OSError`."""
    place = Path(os.path.realpath(folder))
    os.rename(place, before(folder))
    place.mkdir()
    sync_folder(place.parent)


def put_back(folder: Path) -> None:
    """Restore the previous version of a folder. Raises `OSError`."""
    place = Path(os.path.realpath(folder))
    if place.exists():
        shutil.rmtree(place)
    os.rename(before(folder), place)
    sync_folder(place.parent)


def finish(folder: Path) -> None:
    """Finish rewriting a folder: move missing files from the previous version.

    Raises:
        OSError: if the file system reports an error. Files that were not moved stay in the previous version.
    """
    place, old = Path(os.path.realpath(folder)), before(folder)
    for entry in old.iterdir():
        if not (place / entry.name).exists():
            os.rename(entry, place / entry.name)
    sync_folder(place)
    shutil.rmtree(old)
    sync_folder(place.parent)


def move_export(folder: Path) -> None:
    """Replace the weights in a folder with the export in its subfolder `APART`. Other files are kept.

    The index of the old weights is removed first, and the file that makes the new weights loadable is moved last. If
    the move is interrupted, the folder therefore contains complete weights or cannot be loaded.

    Raises:
        OSError: if a file cannot be moved or removed.
    """
    export = folder / APART
    waiting = {file.name for file in export.iterdir()}
    new = waiting | set(read_index(export / INDEX).values() if INDEX in waiting else ())
    (folder / INDEX).unlink(missing_ok=True)
    for file in folder.iterdir():
        if file.name not in new and _WEIGHTS.fullmatch(file.name):
            file.unlink()
    for name in sorted(waiting, key=lambda name: (name in (SINGLE, INDEX), name)):
        if (folder / name).is_dir():  # a non-empty folder cannot be replaced
            shutil.rmtree(folder / name)
        (export / name).replace(folder / name)
    export.rmdir()
    sync_folder(folder)


def finish_export(folder: Path) -> None:
    """Finish an interrupted `move_export` if the folder contains no other weights. Otherwise, discard the export.

    Raises:
        OSError: if a file cannot be moved or removed.
    """
    if (folder / APART).is_dir() and not any((folder / name).exists() for name in (SINGLE, INDEX, ADAPTER)):
        move_export(folder)
    shutil.rmtree(folder / APART, ignore_errors=True)
