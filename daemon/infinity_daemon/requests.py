"""What can be asked over the Unix socket, and the answers.

A request is one JSON object in a line, an answer too: ``{"ok": true, …}`` or ``{"error": "…"}``.

    {"op": "status"}
    {"op": "bandwidth", "paths": ["…"]}                              bytes per second, or null
    {"op": "record_bandwidth", "path": "…", "read": 1e9, "write": 1e9}
    {"op": "reserve", "path": "…", "bytes": 1, "run_id": "…"}        until released or the caller is gone
    {"op": "release", "path": "…", "run_id": "…"}
"""

from __future__ import annotations

import asyncio
import difflib
import json
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from typing import Any, Final

from infinity.errors import ConfigError, InfinityError
from infinity.io.drives import Place, locate, space
from infinity_daemon.bandwidth import BandwidthProfile
from infinity_daemon.log import event
from infinity_daemon.pages import Pages
from infinity_daemon.reservations import Ledger, Owner

Answer = Mapping[str, object]

_MAX_PATHS: Final = 64
_MAX_TEXT: Final = 4096
_MAX_BYTES: Final = 1 << 60


class Requests:
    """Answers requests. `about` gives what ``status`` tells about the daemon itself."""

    def __init__(
        self,
        *,
        pages: Pages,
        profile: BandwidthProfile,
        ledger: Ledger,
        known_paths: Callable[[], tuple[str, ...]],
        is_alive: Callable[[Owner], bool],
        about: Callable[[], Mapping[str, object]],
    ) -> None:
        self._pages, self._profile, self._ledger = pages, profile, ledger
        self._known_paths, self._is_alive, self._about = known_paths, is_alive, about
        self._ops: dict[str, tuple[frozenset[str], Callable[[Any, Owner], Awaitable[Answer]]]] = {
            "status": (frozenset(), self._status),
            "bandwidth": (frozenset({"paths"}), self._bandwidth),
            "record_bandwidth": (frozenset({"path", "read", "write"}), self._record_bandwidth),
            "reserve": (frozenset({"path", "bytes", "run_id"}), self._reserve),
            "release": (frozenset({"path", "run_id"}), self._release),
        }

    async def answer(self, line: bytes, owner: Owner) -> Answer:
        """Return the answer to one line; never raises for what a client may send."""
        try:
            tree = _parse(line)
            keys, act = self._ops[_choice(tree.get("op"), self._ops)]
            for key in set(tree) - keys - {"op"}:
                raise ConfigError(f"unknown key {key!r:.80}; {tree['op']} takes {', '.join(sorted(keys)) or 'none'}")
            for key in sorted(keys - set(tree)):
                raise ConfigError(f"{tree['op']} needs the key {key!r}")
            return {"ok": True, **await act(tree, owner)}
        except InfinityError as error:
            return {"error": str(error)}
        except OSError as error:
            return {"error": f"{error.strerror or error}: {error.filename!r}" if error.filename else str(error)}
        except Exception as error:  # a defect of ours must not end the daemon or hang the client
            event(logging.ERROR, "request.defect", reason=f"{type(error).__name__}: {error}")
            return {"error": f"internal error: {type(error).__name__}"}

    async def _status(self, _: Any, __: Owner) -> Answer:
        found = await asyncio.to_thread(self._pages.scan)
        paths = await asyncio.to_thread(self._known_paths)
        return {
            **self._about(),
            "ranks": [
                {
                    "run_id": page.header.run_id,
                    "rank": page.header.rank,
                    "world_size": page.header.world_size,
                    "pid": page.header.pid,
                    "status": page.status,
                    "steps": page.value("steps_total"),
                }
                for page in found.pages
            ],
            "broken_pages": found.broken,
            "paths": [await asyncio.to_thread(_describe, path) for path in paths],
            "reservations": [
                {
                    "run_id": entry.run_id,
                    "path": entry.place.path,
                    "device": entry.place.drive.name,
                    "bytes": entry.size,
                    "pid": entry.owner.pid,
                }
                for entry in self._ledger.entries()
            ],
        }

    async def _bandwidth(self, tree: Any, _: Owner) -> Answer:
        paths = tree["paths"]
        if not isinstance(paths, list) or not 0 < len(paths) <= _MAX_PATHS:
            raise ConfigError(f"paths must be a list of 1 to {_MAX_PATHS} folders")
        answers: dict[str, object] = {}
        for path in paths:
            place = await _locate(path)
            found = self._profile.of(place.drive)
            answers[path] = asdict(found) if found else None
        return {"bandwidth": answers}

    async def _record_bandwidth(self, tree: Any, _: Owner) -> Answer:
        read, write = _rate(tree, "read"), _rate(tree, "write")
        place = await _locate(tree["path"])
        await self._profile.record(place.drive, read=read, write=write)
        return {"device": place.drive.name}

    async def _reserve(self, tree: Any, owner: Owner) -> Answer:
        size, run_id = tree["bytes"], _text(tree, "run_id")
        if type(size) is not int or not 0 < size < _MAX_BYTES:
            raise ConfigError(f"bytes = {size!r:.80} must be a whole number above 0")
        place = await _locate(tree["path"])
        free = (await asyncio.to_thread(space, place.path)).free
        self._ledger.expire(self._is_alive)
        remaining = self._ledger.reserve(owner, run_id, place, size, free)
        event(logging.INFO, "space.reserved", run=run_id, device=place.drive.name, bytes=size, pid=owner.pid)
        return {"device": place.drive.name, "remaining_bytes": remaining}

    async def _release(self, tree: Any, owner: Owner) -> Answer:
        run_id, path = _text(tree, "run_id"), _text(tree, "path")
        return {"released_bytes": self._ledger.release(owner, run_id, path)}


def _parse(line: bytes) -> dict[str, Any]:
    try:
        tree = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise ConfigError("the message is not UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the message is not JSON: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError('the message must be an object such as {"op": "status"}')
    return tree


def _choice(op: object, known: Mapping[str, object]) -> str:
    if isinstance(op, str) and op in known:
        return op
    near = difflib.get_close_matches(str(op)[:80], known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"unknown op {op!r:.80}{hint} (known: {', '.join(known)})")


def _text(tree: Mapping[str, Any], key: str) -> str:
    value = tree[key]
    # Printable excludes lone surrogates, which no log and no answer could carry.
    if not isinstance(value, str) or not 0 < len(value) <= _MAX_TEXT or not value.isprintable():
        raise ConfigError(f"{key} = {value!r:.80} must be printable text of 1 to {_MAX_TEXT} characters")
    return value


def _rate(tree: Mapping[str, Any], key: str) -> float:
    value = tree[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigError(f"{key} = {value!r:.80} must be bytes per second above 0")
    return float(value)


async def _locate(path: object) -> Place:
    text = _text({"path": path}, "path")
    if not text.startswith("/"):
        raise ConfigError(f"path {text!r:.80} must be absolute: the daemon has another working folder")
    return await asyncio.to_thread(locate, text)


def _describe(path: str) -> Mapping[str, object]:
    try:
        place, found = locate(path), space(path)
    except OSError as error:
        return {"path": path, "error": error.strerror}
    return {"path": path, "device": place.drive.name, **asdict(found)}
