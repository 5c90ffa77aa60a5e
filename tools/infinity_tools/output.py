"""The `--out` folder, which is checked before work starts and written to at the end."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from infinity.errors import ConfigError
from infinity.untrusted_files import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def check_out(out: Path) -> None:
    """Check that the folder can be created and written. Raises `ConfigError`."""
    place = out
    while not os.path.lexists(place):
        place = place.parent
    if not place.is_dir():
        raise ConfigError(f"--out {str(out)!r}: {str(place)!r} is not a folder; choose a different one")
    if not os.access(place, os.W_OK | os.X_OK, effective_ids=True):
        raise ConfigError(f"--out {str(out)!r}: {str(place)!r} is not writable by this user; choose a different one")


def make_out(out: Path) -> None:
    """Create the folder. Raises `ConfigError`."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--out {str(out)!r} cannot be created: {error.strerror}; choose a writable folder"
        ) from error


@contextmanager
def without_leftovers(made: Sequence[Path]) -> Iterator[None]:
    """Remove the folders that were created for a command, the innermost first, if they are empty at its end."""
    try:
        yield
    finally:
        for folder in made:
            with suppress(OSError):
                folder.rmdir()


def write_out(out: Path, texts: Mapping[str, str], pictures: Mapping[str, Figure]) -> None:
    """Write files by name, each atomically.

    Raises:
        ConfigError: If a file cannot be written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            with replacing(out / name, 0o666) as file:
                file.write(text.encode())
        for name, picture in pictures.items():
            with replacing(out / name, 0o666) as file:
                picture.savefig(file, format="png", dpi=120)
    except OSError as error:
        raise ConfigError(f"--out {str(out)!r}: {error.strerror}; choose another folder") from error
