"""Questions to the node's daemon. Training goes on without it: whatever it does, no answer is the worst that comes."""

from __future__ import annotations

import json
import logging
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from infinity.errors import BudgetError
from infinity.untrusted_files import trusted

SOCKET_NAME = "infinityd.sock"
_ANSWER_SECONDS = 2.0
_PATIENCE_SECONDS, _PAUSE_SECONDS = 3.0, 0.2
"""How long space is asked for again, and how often."""
_MOST_BYTES = 1 << 20
"""Of an answer: what a daemon says of a thousand ranks is shorter."""
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
_log = logging.getLogger("infinity")


class NodeDaemon:
    """The daemon of a runtime folder, there or not. Threads may share it: each question has its own connection."""

    def __init__(self, runtime: Path) -> None:
        self._socket = runtime / SOCKET_NAME
        self._warned = False  # whether it was said that somebody else listens there

    def ask(self, op: str, **values: object) -> dict[str, Any] | None:
        """Return the answer, or None: there is no daemon of this user or root, it does not answer within two seconds,
        or it refuses.

        What is in an answer is nothing to rely on: whoever uses a value checks it.
        """
        answer = self._answer(op, values)
        return answer if answer.get("ok") is True else None

    @contextmanager
    def space_reserved(self, path: str, size: int, run_id: str) -> Iterator[None]:
        """Have `size` bytes of the file system of a folder kept free from other runs, until they have been allocated.

        Without a daemon nothing is kept: then the file system says who came too late.

        Raises:
            BudgetError: they do not fit beside what others have reserved; it says who.
        """
        answer = self._answer("reserve", {"path": path, "bytes": size, "run_id": run_id}) if size > 0 else {}
        end = time.monotonic() + _PATIENCE_SECONDS
        while answer.get("no_room") is True:
            # Who is allocating right now counts twice, by what is reserved and by what is not free any more.
            if time.monotonic() > end:
                raise BudgetError(f"{answer.get('error')}")
            time.sleep(_PAUSE_SECONDS)
            answer = self._answer("reserve", {"path": path, "bytes": size, "run_id": run_id})
        try:
            yield
        finally:
            if answer.get("ok") is True:
                self._answer("release", {"path": path, "run_id": run_id})

    def _answer(self, op: str, values: Mapping[str, object]) -> dict[str, Any]:
        """Return what is answered, an empty object if nothing is."""
        try:
            answer = json.loads(self._exchange(json.dumps({"op": op, **values}).encode() + b"\n"))
        except (OSError, ValueError, RecursionError):
            return {}
        return answer if isinstance(answer, dict) else {}

    def _exchange(self, message: bytes) -> bytes:
        """Return one line of answer. Raises OSError: nobody answers in time, or who does is not to be trusted."""
        end = time.monotonic() + _ANSWER_SECONDS

        def left() -> float:
            if (seconds := end - time.monotonic()) <= 0:
                raise TimeoutError(f"{self._socket}: no complete answer in time")
            return seconds

        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(left())
            connection.connect(str(self._socket))
            # Who listens, as the kernel knows it: whatever name or link led there, and whoever replaced it meanwhile.
            peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            _, uid, _ = _CREDENTIALS.unpack(peer)
            if not trusted(uid):
                if not self._warned:
                    self._warned = True
                    _log.warning("%s is of user %d and is not asked", self._socket, uid)
                raise PermissionError(f"{self._socket} is of user {uid}")
            connection.sendall(message)
            answer = b""
            while not answer.endswith(b"\n") and len(answer) <= _MOST_BYTES:
                connection.settimeout(left())
                if not (part := connection.recv(_MOST_BYTES)):
                    break
                answer += part
            return answer
