"""Bandwidth profiles of drives, kept in one JSON file of the runtime folder."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from infinity.access import read_own, write_own
from infinity.errors import ConfigError
from infinity.io.drives import Drive
from infinity.schema import Mismatch, record, table, text
from infinity_daemon.log import event

FILE_NAME: Final = "bandwidth.json"
_MAX_DRIVES: Final = 256
_MAX_FILE: Final = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Bytes per second of a drive, and the Unix time at which a rank measured them."""

    read: float
    write: float
    measured: float


def rate(value: Any) -> float:
    """Bytes per second, or another finite number above 0. Raises `Mismatch`."""
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise Mismatch(value, "must be bytes per second above 0")
    return float(value)


_FILE = record(more=True, drives=table(text(), record(Profile, more=True, read=rate, write=rate, measured=rate)))


class Profiles:
    """The profiles by identity of the drive. Changed only on the event loop, read from any thread."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / FILE_NAME
        self._known: dict[str, Profile] = {}
        """By identity of the drive. Never changed in place but replaced, so that threads read it without a lock."""
        self._writing = asyncio.Lock()  # one write of the file at a time; the last has the newest

    def of(self, drive: Drive) -> Profile | None:
        """Return the profile of a drive, or None if it was never measured."""
        return self._known.get(drive.identity)

    async def load(self) -> None:
        """Read the file; one that is missing or malformed leaves the profile empty, and is said."""
        try:
            tree = json.loads(await asyncio.to_thread(read_own, self._file, _MAX_FILE))
            self._known = _FILE(tree)["drives"]
        except FileNotFoundError:
            return
        except (OSError, ValueError, OverflowError, RecursionError) as error:
            event(logging.WARNING, "bandwidth.unreadable", file=self._file, reason=error)

    async def record(self, drive: Drive, *, read: float, write: float) -> Profile:
        """Keep what a rank measured and write the file.

        Raises:
            ConfigError: too many drives are known.
            OSError: the file cannot be written; the profile is then kept in memory only.
        """
        if drive.identity not in self._known and len(self._known) >= _MAX_DRIVES:
            raise ConfigError(f"profiles of {_MAX_DRIVES} drives are kept already; remove {self._file}")
        found = Profile(read=read, write=write, measured=time.time())
        self._known = {**self._known, drive.identity: found}
        async with self._writing:
            await self._save()
        return found

    async def _save(self) -> None:
        text = json.dumps({"drives": {name: asdict(entry) for name, entry in self._known.items()}}, indent=1)
        await asyncio.to_thread(write_own, self._file, f"{text}\n".encode())
