"""Exports into a folder that has files already: what is loaded from it is one export, never parts of two."""

from __future__ import annotations

import re
from pathlib import Path

from infinity.formats.weight_files import INDEX, SINGLE

_PART = re.compile(r"model-\d{5,}-of-\d{5,}\.safetensors")


def move_export(export: Path, folder: Path) -> None:
    """Move the files of an export into a folder, in place of the weights that lie there; the export is gone then.

    The index of the old weights goes first, and what makes the new ones loadable comes last: cut off, the folder either
    gives whole weights, or cannot be loaded from.

    Args:
        export: a folder on the same file system.
        folder: may have other files, which stay.

    Raises:
        OSError: a file cannot be moved or removed.
    """
    new = {file.name for file in export.iterdir()}
    (folder / INDEX).unlink(missing_ok=True)
    for file in folder.iterdir():
        if file.name not in new and (file.name == SINGLE or _PART.fullmatch(file.name)):
            file.unlink()
    for name in sorted(new, key=lambda name: (name in (SINGLE, INDEX), name)):
        (export / name).replace(folder / name)
    export.rmdir()
