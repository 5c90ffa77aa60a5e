"""Measurements stored in the runtime folder for later runs, in JSON files that may be damaged or missing."""

from __future__ import annotations

import contextlib
import json
import logging
from pathlib import Path
from typing import Any

from infinity.untrusted_files import own_folder, read_own, write_own

UNUSABLE = (OSError, ValueError, KeyError, TypeError, ArithmeticError, RecursionError)
"""Exceptions that can occur when such a file is read and its values are interpreted. The file then counts as missing.
"""
_MOST_BYTES = 1 << 16
_log = logging.getLogger("infinity")


def recall(file: Path) -> dict[str, Any]:
    """Return the contents of a file by key. Values are not validated. Raises one of the exceptions in `UNUSABLE`."""
    tree = json.loads(read_own(file, _MOST_BYTES))
    if not isinstance(tree, dict):
        raise ValueError(f"{file.name} is not a JSON object")
    return tree


def remember(file: Path, key: str, value: object, what: str) -> None:
    """Store a value in a file under `key`. If this fails, log a warning that contains the description `what`."""
    known: dict[str, Any] = {}
    with contextlib.suppress(*UNUSABLE):  # missing or damaged
        known = recall(file)
    try:
        own_folder(file.parent, parents=True)
        write_own(file, json.dumps({**known, key: value}).encode())
    except OSError as error:
        _log.warning("could not store %s in %s: %s", what, file, error.strerror)
