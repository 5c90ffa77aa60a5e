"""Replace the weights in a folder with an export, so that an interruption never leaves a mixture of both."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from infinity.formats.weight_files import INDEX, SINGLE

_PART = re.compile(r"model-\d{5,}-of-\d{5,}\.safetensors")


def move_export(export: Path, folder: Path) -> None:
    """Move the files of an export to a folder, replace the weights there, and remove the export folder.

    The index of the old weights is removed first, and the file that makes the new weights loadable is moved last. If
    the move is interrupted, the folder therefore contains complete weights or cannot be loaded.

    Args:
        export: folder of the export, on the same file system.
        folder: target folder. Its other files are kept.

    Raises:
        OSError: if a file cannot be moved or removed.
    """
    new = {file.name for file in export.iterdir()}
    (folder / INDEX).unlink(missing_ok=True)
    for file in folder.iterdir():
        if file.name not in new and (file.name == SINGLE or _PART.fullmatch(file.name)):
            file.unlink()
    for name in sorted(new, key=lambda name: (name in (SINGLE, INDEX), name)):
        if (folder / name).is_dir():  # a non-empty folder cannot be replaced
            shutil.rmtree(folder / name)
        (export / name).replace(folder / name)
    export.rmdir()
