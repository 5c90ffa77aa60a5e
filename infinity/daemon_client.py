"""Client of the node daemon.

The daemon is optional: if it fails in any way, queries are unanswered and training continues.
"""

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
"""Time limit and interval for repeating a space reservation."""
_MOST_BYTES = 1 << 20
"""Maximum size of an answer. The status of a thousand ranks is shorter."""
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
_log = logging.getLogger("infinity")


class NodeDaemon:
    """Client of the daemon of a runtime folder, running or not. Thread-safe: each query has its own connection."""

    def __init__(self, runtime: Path) -> None:
        self._socket = runtime / SOCKET_NAME
        self._warned = False  # set after warning about a daemon of another user

    def ask(self, op: str, **values: object) -> dict[str, Any] | None:
        """Return the answer to a query, or None.

        The result is None if no daemon of this user or root is running, it does not answer within two seconds, or it
        rejects the query. The content of an answer is untrusted, so callers must validate it.
        """
        answer = self._answer(op, values)
        return answer if answer.get("ok") is True else None

    @contextmanager
    def space_reserved(self, path: str, size: int, run_id: str) -> Iterator[None]:
        """Reserve `size` bytes on the file system of a folder against other runs until they have been allocated.

        Without a daemon there is no reservation. If space runs out, an allocation then fails in the file system.

        Raises:
            BudgetError: if the space does not fit next to other reservations. The message names their owners.
        """
        answer = self._answer("reserve", {"path": path, "bytes": size, "run_id": run_id}) if size > 0 else {}
        end = time.monotonic() + _PATIENCE_SECONDS
        while answer.get("no_room") is True:
            # A run that is allocating counts twice, through its reservation and through the decrease in free space.
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
        """Return the answer, or an empty dict without one."""
        try:
            answer = json.loads(self._exchange(json.dumps({"op": op, **values}).encode() + b"\n"))
        except (OSError, ValueError, RecursionError):
            return {}
        return answer if isinstance(answer, dict) else {}

    def _exchange(self, message: bytes) -> bytes:
        """Return one line of answer.

        Raises:
            OSError: if there is no complete answer in time, or the daemon belongs to another user.
        """
        end = time.monotonic() + _ANSWER_SECONDS

        def left() -> float:
            if (seconds := end - time.monotonic()) <= 0:
                raise TimeoutError(f"{self._socket}: no complete answer in time")
            return seconds

        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(left())
            connection.connect(str(self._socket))
            # The kernel reports the owner of the listening process, even if the socket file was linked or replaced.
            peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            _, uid, _ = _CREDENTIALS.unpack(peer)
            if not trusted(uid):
                if not self._warned:
                    self._warned = True
                    _log.warning("%s belongs to user %d and is not used", self._socket, uid)
                raise PermissionError(f"{self._socket} belongs to user {uid}")
            connection.sendall(message)
            answer = b""
            while not answer.endswith(b"\n") and len(answer) <= _MOST_BYTES:
                connection.settimeout(left())
                if not (part := connection.recv(_MOST_BYTES)):
                    break
                answer += part
            return answer
