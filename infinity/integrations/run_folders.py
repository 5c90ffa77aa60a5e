"""Folders that a framework writes again under the same name: what was there stays beside until it is replaced.

[Note: a folder that is written again] It is renamed to `.NAME.before`, a new one is written in its place, and only when
that holds (its checkpoint is published, its weights are durable) is the one before taken apart: what the new one lacks
is
moved there, since a framework would have left it, and the rest is removed. Cut off before, both are there.
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
"""Files of an export: those of one before are no part of it."""


def before(folder: Path) -> Path:
    """Return where a folder is while it is written again."""
    place = Path(os.path.realpath(folder))
    return place.with_name(f".{place.name}.before")


def made_beside(folder: Path) -> Path:
    """Return where weights are written that are to replace those in a folder."""
    place = Path(os.path.realpath(folder))
    return place.with_name(f".{place.name}.new")


def remove(folder: Path) -> None:
    """Remove a folder, if it is there. Raises `OSError`."""
    if folder.exists():
        shutil.rmtree(folder)


def make_durable(folder: Path) -> None:
    """Flush the files of a folder, whoever has written them, and what is in it. Raises `OSError`."""
    for file in folder.iterdir():
        if file.is_file():
            sync_file(file)
    sync_folder(folder)
    sync_folder(folder.resolve().parent)


def set_aside(folder: Path) -> None:
    """Begin to write a folder again. Raises `OSError`."""
    place = Path(os.path.realpath(folder))
    os.rename(place, before(folder))
    place.mkdir()
    sync_folder(place.parent)


def put_back(folder: Path) -> None:
    """Take up what was set aside in place of what is there. Raises `OSError`."""
    place = Path(os.path.realpath(folder))
    remove(place)
    os.rename(before(folder), place)
    sync_folder(place.parent)


def finish(folder: Path, drop: Sequence[str] = ()) -> None:
    """End writing a folder again: move what it lacks from the one before, except files like `drop`; remove the rest.

    Raises:
        OSError: the file system refused; what was not moved is in the one before still.
    """
    place, old = Path(os.path.realpath(folder)), before(folder)
    for entry in old.iterdir():
        if not (place / entry.name).exists() and not any(fnmatch(entry.name, pattern) for pattern in drop):
            os.rename(entry, place / entry.name)
    sync_folder(place)
    shutil.rmtree(old)
    sync_folder(place.parent)


def exchange(folder: Path, made: Path) -> None:
    """Put a folder with weights that was made beside in the place of one with others. Raises `OSError`."""
    place = Path(os.path.realpath(folder))
    os.rename(place, before(folder))
    try:
        os.rename(made, place)
    except OSError:
        put_back(folder)
        raise
    finish(folder, drop=WEIGHTS)
