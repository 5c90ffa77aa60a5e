"""Rewriting of folders under the same name: the previous version is kept until the new one is complete.

[Note: a folder that is written again] The folder is renamed to `.NAME.before`, and a new one is written in its place.
Only when the new one is valid (its checkpoint is published, its weights are durable) is the previous one dissolved:
files that the new one lacks are moved into it, because a framework would have left them, and the rest is removed. If
the process is interrupted earlier, both folders exist.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from infinity.checkpoint.durable import sync_file
from infinity.untrusted_files import sync_folder

WEIGHTS = ("model*.safetensors", "model*.safetensors.index.json", "adapter_model.safetensors")
"""Files of an export; files of an earlier export are removed."""


def before(folder: Path) -> Path:
    """Return the name of the previous version of a folder."""
    place = Path(os.path.realpath(folder))
    return place.with_name(f".{place.name}.before")


def made_beside(folder: Path) -> Path:
    """Return the folder in which weights are written before they replace others."""
    place = Path(os.path.realpath(folder))
    return place.with_name(f".{place.name}.new")


def remove(folder: Path) -> None:
    """Remove a folder if it exists. Raises `OSError`."""
    if folder.exists():
        shutil.rmtree(folder)


def make_durable(folder: Path) -> None:
    """Flush all files of a folder and its directory entries, independent of the process that wrote them. Raises
    `OSError`.
    """
    for file in folder.iterdir():
        if file.is_file():
            sync_file(file)
    sync_folder(folder)
    sync_folder(folder.resolve().parent)


def set_aside(folder: Path) -> None:
    """Start to write a folder again. Raises `OSError`."""
    place = Path(os.path.realpath(folder))
    os.rename(place, before(folder))
    place.mkdir()
    sync_folder(place.parent)


def put_back(folder: Path) -> None:
    """Restore the previous version of a folder. Raises `OSError`."""
    place = Path(os.path.realpath(folder))
    remove(place)
    os.rename(before(folder), place)
    sync_folder(place.parent)


def finish(folder: Path, drop: Sequence[str] = ()) -> None:
    """Finish writing a folder again: move files that it lacks from the previous version, except files matching
    `drop`.

    Raises:
        OSError: if the file system reports an error. Files that were not moved stay in the previous version.
    """
    place, old = Path(os.path.realpath(folder)), before(folder)
    for entry in old.iterdir():
        if not (place / entry.name).exists() and not any(fnmatch(entry.name, pattern) for pattern in drop):
            os.rename(entry, place / entry.name)
    sync_folder(place)
    shutil.rmtree(old)
    sync_folder(place.parent)


def exchange(folder: Path, made: Path) -> None:
    """Replace a folder by another one with new weights. Raises `OSError`."""
    place = Path(os.path.realpath(folder))
    os.rename(place, before(folder))
    try:
        os.rename(made, place)
    except OSError:
        put_back(folder)
        raise
    finish(folder, drop=WEIGHTS)
