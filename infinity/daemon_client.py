"""Client of the node daemon.

The daemon is optional: if it fails in any way, requests remain unanswered and training continues.
"""

from __future__ import annotations

import json
import logging
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from infinity.errors import BudgetError
from infinity.untrusted_files import trusted

SOCKET_NAME = "infinityd.sock"
_ANSWER_SECONDS = 2.0
_PATIENCE_SECONDS, _PAUSE_SECONDS = 3.0, 0.2
"""Time limit and interval, in seconds, for retrying a space reservation."""
_MOST_BYTES = 4 << 20
"""Maximum size of a response. The state of a node with a thousand ranks is shorter."""
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
_log = logging.getLogger("infinity")


class NodeDaemon:
    """Client of the daemon in a runtime folder, which may not be running.

    Thread-safe: each request uses its own connection.
    """

    def __init__(self, runtime: Path) -> None:
        self._socket = runtime / SOCKET_NAME
        self._warned = False  # set after a warning that the daemon belongs to another user

    def ask(self, op: str, **values: object) -> dict[str, Any] | None:
        """Return the response to a request, or None.

        The result is None if no daemon of this user or of root is running, if it does not respond within two seconds,
        or if it rejects the request. The content of a response is untrusted, so callers must validate it.
        """
        answer = self.answer(op, **values)
        return answer if answer.get("ok") is True else None

    @contextmanager
    def space_reserved(self, path: str, size: int, run_id: str) -> Iterator[None]:
        """Protect `size` bytes on the file system of folder `path` from other runs until the end of the block.

        The block allocates the space. Without a daemon nothing is reserved, so the allocation fails if another run
        uses the space first.

        Raises:
            BudgetError: if the free space does not suffice for this and all other reservations. The message lists the
                owners of the other reservations.
        """
        answer = self.answer("reserve", path=path, bytes=size, run_id=run_id) if size > 0 else {}
        end = time.monotonic() + _PATIENCE_SECONDS
        while answer.get("no_room") is True:
            # A run that is allocating counts twice: through its reservation, and through the decrease in free space.
            if time.monotonic() > end:
                raise BudgetError(f"{answer.get('error')}")
            time.sleep(_PAUSE_SECONDS)
            answer = self.answer("reserve", path=path, bytes=size, run_id=run_id)
        try:
            yield
        finally:
            if answer.get("ok") is True:
                self.answer("release", path=path, run_id=run_id)

    def answer(self, op: str, **values: object) -> dict[str, Any]:
        """Return the response to a request, which may be an error, or an empty dictionary without a response.

        The content of a response is untrusted, so callers must validate it.
        """
        try:
            answer = json.loads(self._exchange(json.dumps({"op": op, **values}).encode() + b"\n"))
        except (OSError, ValueError, RecursionError):
            return {}
        return answer if isinstance(answer, dict) else {}

    def _exchange(self, message: bytes) -> bytes:
        """Return one line of response.

        Raises:
            OSError: if there is no complete response in time, or if the daemon belongs to another user.
        """
        end = time.monotonic() + _ANSWER_SECONDS

        def left() -> float:
            if (seconds := end - time.monotonic()) <= 0:
                raise TimeoutError(f"{self._socket}: no complete answer in time")
            return seconds

        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(left())
            connection.connect(str(self._socket))
            # The kernel reports the owner of the listening process, even if the socket file is a link or was replaced.
            peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            _, uid, _ = _CREDENTIALS.unpack(peer)
            if not trusted(uid):
                if not self._warned:
                    self._warned = True
                    _log.warning("ignoring %s because it belongs to user %d", self._socket, uid)
                raise PermissionError(f"{self._socket} belongs to user {uid}")
            connection.sendall(message)
            answer = b""
            while not answer.endswith(b"\n") and len(answer) <= _MOST_BYTES:
                connection.settimeout(left())
                if not (part := connection.recv(_MOST_BYTES)):
                    break
                answer += part
            return answer
