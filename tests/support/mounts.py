"""Mount file systems in a test, which is skipped if mounting is not permitted."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(place: Path, *options: object) -> Iterator[Path]:
    """Mount a file system at `place`, a folder that is created if it is missing. `options` are arguments of `mount`."""
    place.mkdir(exist_ok=True)
    try:
        subprocess.run(["mount", *map(str, options), str(place)], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"cannot mount a file system: {error}")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


@contextmanager
def read_only(folder: Path) -> Iterator[Path]:
    """Mount a folder a second time, read-only."""
    with mounted(folder.with_name(f"{folder.name}-read-only"), "--bind", folder) as place:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(place)], check=True)
        yield place
