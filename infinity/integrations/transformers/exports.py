"""Export into a folder with existing files, so that the folder always contains one complete export or none."""

from __future__ import annotations

import re
from pathlib import Path

from infinity.formats.weight_files import INDEX, SINGLE

_PART = re.compile(r"model-\d{5,}-of-\d{5,}\.safetensors")


def move_export(export: Path, folder: Path) -> None:
    """Move the files of an export into a folder, replacing its weights; the export folder is removed.

    The index of the old weights is removed first, and the file that makes the new ones loadable is moved last. If the
    move is interrupted, the folder contains complete weights, or cannot be loaded.

    Args:
        export: folder on the same file system.
        folder: target folder, whose other files stay.

    Raises:
        OSError: if a file cannot be moved or removed.
    """
    new = {file.name for file in export.iterdir()}
    (folder / INDEX).unlink(missing_ok=True)
    for file in folder.iterdir():
        if file.name not in new and (file.name == SINGLE or _PART.fullmatch(file.name)):
            file.unlink()
    for name in sorted(new, key=lambda name: (name in (SINGLE, INDEX), name)):
        (export / name).replace(folder / name)
    export.rmdir()
