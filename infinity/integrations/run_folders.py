"""Rewrite folders under the same name. The previous version is kept until the new one is complete.

[Note: rewriting a folder] The folder is renamed to `.NAME.before`, and a new one is written in its place. Once the new
folder is valid (its checkpoint is published, or its weights are durable), files that exist only in the previous folder
are moved to the new one, because a framework would have left them in place, and the previous folder is removed. If the
process is interrupted before that, both folders exist.
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
"""Patterns of the weight files of an export. Such files of an earlier export are removed."""


def before(folder: Path) -> Path:
    """Return the path of the previous version of a folder."""
    place = Path(os.path.realpath(folder))
    return place.with_name(f".{place.name}.before")


def replacement_path(folder: Path) -> Path:
    """Return the path of the folder to which weights are written before they replace earlier weights."""
    place = Path(os.path.realpath(folder))
    return place.with_name(f".{place.name}.new")


def remove(folder: Path) -> None:
    """Remove a folder if it exists. Raises `OSError`."""
    if folder.exists():
        shutil.rmtree(folder)


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
    remove(place)
    os.rename(before(folder), place)
    sync_folder(place.parent)


def finish(folder: Path, drop: Sequence[str] = ()) -> None:
    """Finish rewriting a folder: move missing files from the previous version, except files that match `drop`.

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
    """Replace a folder with the folder `made`, which contains new weights. Raises `OSError`."""
    place = Path(os.path.realpath(folder))
    os.rename(place, before(folder))
    try:
        os.rename(made, place)
    except OSError:
        put_back(folder)
        raise
    finish(folder, drop=WEIGHTS)
