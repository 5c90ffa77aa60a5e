"""What was measured, kept in the runtime folder for later runs: files of JSON that anybody may damage or remove."""

from __future__ import annotations

import contextlib
import json
import logging
from pathlib import Path
from typing import Any

from infinity.untrusted_files import own_folder, read_own, write_own

UNUSABLE = (OSError, ValueError, KeyError, TypeError, ArithmeticError, RecursionError)
"""What reading such a file, and making something of its values, may raise: then it is as if there were none."""
_MOST_BYTES = 1 << 16
_log = logging.getLogger("infinity")


def recall(file: Path) -> dict[str, Any]:
    """Return what a file says, by key; the values are nothing to rely on. Raises one of `UNUSABLE`."""
    tree = json.loads(read_own(file, _MOST_BYTES))
    if not isinstance(tree, dict):
        raise ValueError(f"{file.name} is no object")
    return tree


def remember(file: Path, key: str, value: object, what: str) -> None:
    """Add a value to a file, or replace it. That it cannot be kept is logged, as `what`."""
    known: dict[str, Any] = {}
    with contextlib.suppress(*UNUSABLE):  # there is none, or it is worth nothing
        known = recall(file)
    try:
        own_folder(file.parent, parents=True)
        write_own(file, json.dumps({**known, key: value}).encode())
    except OSError as error:
        _log.warning("%s could not be kept in %s: %s", what, file, error.strerror)
