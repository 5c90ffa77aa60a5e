"""Handlers for requests over the Unix socket.

A request is a JSON object on one line. So is the response: ``{"ok": true, …}`` or ``{"error": "…"}``.

    {"op": "state"}                                                  current state of the node, see `node_state.py`
    {"op": "bandwidth", "paths": ["…"]}                              bandwidth profile (or null) and wear, by path
    {"op": "record_bandwidth", "rates": {"…": {"read": 1e9}}, "source": "run"}       measured together
    {"op": "reserve", "path": "…", "bytes": 1, "run_id": "…"}        until released, or until the client exits
    {"op": "release", "path": "…", "run_id": "…"}
    {"op": "pace", "paths": ["…"], "run_id": "…"}                    bandwidth limits in bytes per second, by path
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Final

from infinity.errors import BudgetError, ConfigError, InfinityError
from infinity.io.block_devices import Drive, Place, locate, space
from infinity.schema import Mismatch, Rule, at, integer, one_of, printable, record, sequence, table
from infinity.untrusted_files import trusted
from infinity_daemon.drive_bandwidth import LOADS, Measured, Profile, Profiles, Rates, rates
from infinity_daemon.drive_wear import DriveWear
from infinity_daemon.log import event
from infinity_daemon.reservations import Owner, Reservations
from infinity_daemon.stats_files import StatsFiles
from infinity_daemon.users import opened

Answer = Mapping[str, object]

_MAX_PATHS: Final = 64
_MAX_BYTES: Final = (1 << 60) - 1
_STATE_SECONDS, _PAUSE_SECONDS = 1.0, 0.1
"""Time limit and interval, in seconds, of waiting for the first state. Clients wait for two seconds."""


class Requests:
    """Handles requests.

    `state` returns the ``state`` response, or an empty one before the first state. `rates_of` returns the bandwidth
    limits of a run. `used` is called with the names of drives that a run is about to use. `more` has the rules and
    handlers of further requests, see `copy_service.py`.
    """

    def __init__(
        self,
        *,
        stats_files: StatsFiles,
        profile: Profiles,
        reservations: Reservations,
        is_alive: Callable[[Owner], bool],
        used: Callable[[Iterable[str]], None],
        wear: Callable[[Drive], DriveWear],
        rates_of: Callable[[str], Mapping[str, float]],
        state: Callable[[], Mapping[str, object]],
        more: Mapping[str, tuple[Rule, Callable[..., Awaitable[Answer]]]],
    ) -> None:
        self._stats_files, self._profile, self._reservations = stats_files, profile, reservations
        self._is_alive, self._used, self._rates_of = is_alive, used, rates_of
        self._wear, self._state = wear, state
        # For each op: the rule that validates its keys, and its handler.
        self._ops: dict[str, tuple[Rule, Callable[..., Awaitable[Answer]]]] = {
            "state": (record(), self._current),
            "bandwidth": (record(paths=sequence(absolute_path, least=1, most=_MAX_PATHS)), self._bandwidth),
            "record_bandwidth": (
                record(rates=table(absolute_path, rates), source=one_of("probe", "run")),
                self._record_bandwidth,
            ),
            "reserve": (record(path=absolute_path, bytes=integer(1, _MAX_BYTES), run_id=_RUN_ID), self._reserve),
            "release": (record(path=_TEXT, run_id=_RUN_ID), self._release),
            "pace": (record(paths=sequence(absolute_path, least=1, most=_MAX_PATHS), run_id=_RUN_ID), self._pace),
            **more,
        }

    async def answer(self, line: bytes, owner: Owner) -> Answer:
        """Return the response to a request. Errors of any kind are returned, not raised."""
        try:
            tree = _parse(line)
            rule, act = self._ops[at("op", one_of(*self._ops), tree.pop("op", None))]
            return {"ok": True, **await act(owner, **rule(tree))}
        except BudgetError as error:
            return {"error": str(error), "no_room": True}
        except (Mismatch, InfinityError) as error:
            return {"error": str(error)}
        except OSError as error:
            return {"error": f"{error.strerror or error}: {error.filename!r}" if error.filename else str(error)}
        except Exception as error:  # a bug in a handler must not stop the daemon or leave the client waiting
            event(logging.ERROR, "request.defect", reason=f"{type(error).__name__}: {error}")
            return {"error": f"internal error: {type(error).__name__}"}

    async def _current(self, _: Owner) -> Answer:
        end = time.monotonic() + _STATE_SECONDS
        while not (state := await asyncio.to_thread(self._state)):
            if time.monotonic() > end:
                raise InfinityError("infinityd has no state yet; try again in a few seconds")
            await asyncio.sleep(_PAUSE_SECONDS)
        return state

    async def _bandwidth(self, owner: Owner, paths: Sequence[str]) -> Answer:
        drives = {path: (await asyncio.to_thread(_place, owner, path)).drive for path in paths}
        self._used(drive.name for drive in drives.values())
        identities = {drive.identity for drive in drives.values()}
        together = self._profile.together(identities) if len(identities) > 1 else None
        return {
            "bandwidth": {path: _described(self._profile.of(drive), drive) for path, drive in drives.items()},
            "together": together
            and {path: _described(together[drive.identity], drive) for path, drive in drives.items()},
            "wear": {path: self._worn(drive) for path, drive in drives.items()},
        }

    def _worn(self, drive: Drive) -> Mapping[str, object]:
        return {"device": drive.name, "left_bytes": self._wear(drive).left}

    async def _record_bandwidth(self, owner: Owner, rates: Mapping[str, Rates], source: str) -> Answer:
        if not trusted(owner.uid):  # the profile of a drive affects the runs of all users
            raise ConfigError("only root may record bandwidth in a daemon that serves several users")
        if not 0 < len(rates) <= _MAX_PATHS:
            raise ConfigError(f"the request contains rates for {len(rates)} paths; send 1 to {_MAX_PATHS}")
        drives = {path: (await asyncio.to_thread(locate, path)).drive for path in rates}
        by_drive: dict[str, Rates] = {}
        for path, drive in drives.items():  # paths on the same drive share its bandwidth
            by_drive[drive.identity] = _sum(by_drive.get(drive.identity), rates[path])
        found = Measured(rates=by_drive, source=source, measured=time.time())
        await asyncio.to_thread(self._profile.record, found)
        return {"devices": sorted({drive.name for drive in drives.values()})}

    async def _reserve(self, owner: Owner, path: str, bytes: int, run_id: str) -> Answer:
        place, free = await asyncio.to_thread(_own_place, owner, path)
        self._used([place.drive.name])
        self._reservations.expire(self._is_alive)
        remaining = self._reservations.reserve(owner, run_id, place, bytes, free)
        event(logging.INFO, "space.reserved", run=run_id, device=place.drive.name, bytes=bytes, pid=owner.pid)
        return {"device": place.drive.name, "remaining_bytes": remaining}

    async def _pace(self, owner: Owner, paths: Sequence[str], run_id: str) -> Answer:
        rates = self._rates_of(self._stats_files.shown_id(run_id, owner.uid))
        if not rates:  # the usual case; the drives of the paths need not be looked up
            return {"rates": {}}
        drives = {path: (await asyncio.to_thread(_place, owner, path)).drive.name for path in paths}
        together = Counter(drives.values())  # paths on the same drive share its rate
        return {"rates": {path: rates[drive] / together[drive] for path, drive in drives.items() if drive in rates}}

    async def _release(self, owner: Owner, path: str, run_id: str) -> Answer:
        return {"released_bytes": self._reservations.release(owner, run_id, path)}


_TEXT = printable(1, 4096)
_RUN_ID = printable(1, 128)


def absolute_path(value: Any) -> str:
    """Rule for an absolute path."""
    path: str = _TEXT(value)
    if not path.startswith("/"):
        raise Mismatch(value, "must be an absolute path, because the daemon has a different working directory")
    return path


def _place(owner: Owner, path: str) -> Place:
    """Return the location of a path that the client may name. Raises `ConfigError` or `OSError`."""
    with opened(path, owner.uid) as folder:
        return replace(locate(folder), path=path)


def _own_place(owner: Owner, path: str) -> tuple[Place, int]:
    """Return the location and the free space of a folder that belongs to the client's user.

    Otherwise, a user could keep others off a drive to which the user has no access.
    """
    with opened(path, owner.uid, own=True) as folder:
        return replace(locate(folder), path=path), space(folder).free


def _parse(line: bytes) -> dict[str, Any]:
    try:
        tree = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise ConfigError("the message is not UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the message is not JSON: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError('the message must be an object such as {"op": "state"}')
    return tree


def _described(profile: Profile | None, drive: Drive) -> Mapping[str, object] | None:
    return None if profile is None else {"device": drive.name, **asdict(profile)}


def _sum(first: Rates | None, second: Rates) -> Rates:
    """Return the sum of two rates. A load that was not measured in both is unknown (None) in the sum."""
    if first is None:
        return second
    both = {load: (getattr(first, load), getattr(second, load)) for load in LOADS}
    return Rates(**{load: sum(pair) if None not in pair else None for load, pair in both.items()})
