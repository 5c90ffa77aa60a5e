"""Unix socket server. It checks the user of each client, and limits message sizes, clients and waiting times."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import json
import logging
import os
import socket
import stat
import struct
from asyncio.trsock import TransportSocket
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from infinity.daemon_client import SOCKET_NAME
from infinity.errors import ConfigError, FolderBusyError
from infinity.telemetry.stats_file import process_start
from infinity.units import KIB
from infinity.untrusted_files import open_own
from infinity_daemon.log import event
from infinity_daemon.requests import Answer
from infinity_daemon.reservations import Owner
from infinity_daemon.users import Users

MAX_MESSAGE_BYTES: Final = 64 * KIB
MAX_CLIENTS: Final = 64
"""Maximum number of connected clients per user, so that a user cannot keep out the others."""
_MAX_SOCKET_PATH: Final = 107  # sun_path without the closing zero
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid


class SocketServer:
    """Server that answers each line with the JSON object that `answer` returns for it.

    A message must be complete within `message_seconds` of its first byte. All code runs on the event loop, so no thread
    lock is needed. `start` locks the lock file, binds the socket and listens. `stop` disconnects all clients, removes
    the socket and then releases the lock.
    """

    def __init__(
        self,
        path: Path,
        answer: Callable[[bytes, Owner], Awaitable[Answer]],
        users: Users | None = None,
        *,
        message_seconds: float = 10.0,
        idle_seconds: float = 300.0,
    ) -> None:
        self._path, self._answer = path, answer
        self._users = Users(path.parent) if users is None else users
        self._message_seconds, self._idle_seconds = message_seconds, idle_seconds
        self._clients: dict[int, asyncio.Task[None]] = {}
        """Tasks of the connected clients, by connection number."""
        self._counts: Counter[int] = Counter()
        """Number of connected clients by user id."""
        self._numbers = itertools.count(1)  # connection numbers; 0 means no connection
        self._server: asyncio.Server | None = None  # not None between `start` and `stop`
        self._lock = -1  # descriptor of the lock file, locked between `start` and `stop`

    async def start(self) -> None:
        """Bind the socket and listen. Replace the socket if no process is listening on it.

        Raises:
            FolderBusyError: if another process uses the socket. The message contains its PID.
            ConfigError: if the socket cannot be created.
        """
        if len(os.fsencode(self._path)) > _MAX_SOCKET_PATH:
            raise ConfigError(
                f"socket path {str(self._path)!r} is longer than {_MAX_SOCKET_PATH} bytes; use a shorter one"
            )
        self._lock = _claim(self._path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(str(self._path))
            self._users.open_socket(self._path)
            self._server = await asyncio.start_unix_server(self._accept, sock=listener, limit=MAX_MESSAGE_BYTES)
        except OSError as error:
            listener.close()
            os.close(self._lock)
            raise ConfigError(f"cannot create socket {str(self._path)!r}: {error.strerror}") from error

    async def stop(self) -> None:
        """Disconnect all clients and remove the socket."""
        if self._server is None:
            return
        self._server.close()
        tasks = list(self._clients.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with contextlib.suppress(OSError):
            self._path.unlink()
        os.close(self._lock)
        self._server = None

    def is_alive(self, owner: Owner) -> bool:
        """Return ``True`` if the owner's process, or the connection that represents it, still exists."""
        if owner.pid:
            return bool(owner.process_started) and process_start(owner.pid) == owner.process_started
        return owner.connection in self._clients

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number, task = next(self._numbers), asyncio.current_task()
        pid, uid = peer_of(writer.get_extra_info("socket"))
        self._counts[uid] += 1
        try:
            if self._counts[uid] > MAX_CLIENTS or task is None:
                await self._send(
                    writer, {"error": f"too many clients; at most {MAX_CLIENTS} may be connected at the same time"}
                )
                return
            self._clients[number] = task
            owner = Owner(uid=uid, pid=pid, process_started=process_start(pid), connection=0 if pid else number)
            await self._serve(reader, writer, owner)
        except (OSError, TimeoutError, asyncio.CancelledError):
            pass  # the client has disconnected or timed out, or the daemon is stopping
        finally:
            self._clients.pop(number, None)
            self._counts[uid] -= 1
            self._counts = +self._counts  # remove users without clients
            if writer.transport.get_write_buffer_size():  # the client does not read, and `close` would wait for it
                writer.transport.abort()
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, owner: Owner) -> None:
        try:
            admitted = self._users.admit(owner.uid)
        except OSError as error:
            event(logging.WARNING, "client.folder", uid=owner.uid, reason=str(error))
            await self._send(writer, {"error": f"cannot create the folder of user id {owner.uid}: {error.strerror}"})
            return
        if not admitted:
            event(logging.WARNING, "client.rejected", uid=owner.uid, pid=owner.pid)
            await self._send(writer, {"error": f"user id {owner.uid} is not permitted to use this daemon"})
            return
        while True:
            try:
                line = await self._read_line(reader, None if owner.connection else self._idle_seconds)
            except ValueError:
                await self._send(writer, {"error": f"the message exceeds the limit of {MAX_MESSAGE_BYTES} bytes"})
                return
            except TimeoutError:
                await self._send(writer, {"error": "timed out before a complete message arrived"})
                return
            if not line:
                return
            if not line.endswith(b"\n"):
                await self._send(writer, {"error": "the message does not end with a newline"})
                return
            await self._send(writer, await self._answer(line, owner))

    async def _read_line(self, reader: asyncio.StreamReader, idle_seconds: float | None) -> bytes:
        """Return one line, or an empty one on disconnection. `idle_seconds` limits the wait for the first byte."""
        try:
            # Before Python 3.12, wait_for loses a cancellation that coincides with the end of the read.
            async with asyncio.timeout(idle_seconds):
                first = await reader.readexactly(1)
        except asyncio.IncompleteReadError:
            return b""
        if first == b"\n":
            return first
        async with asyncio.timeout(self._message_seconds):
            return first + await reader.readline()

    async def _send(self, writer: asyncio.StreamWriter, answer: Answer) -> None:
        writer.write(json.dumps(answer).encode() + b"\n")
        async with asyncio.timeout(self._message_seconds):
            await writer.drain()


def peer_of(connected: socket.socket | TransportSocket) -> tuple[int, int]:
    """Return the PID (0 if not visible to this process) and the user id of the peer."""
    answer = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(answer)
    return pid, uid


def _claim(path: Path) -> int:
    """Lock the path of the socket, and return the descriptor of the lock file.

    The lock ensures that two daemons that start at the same time do not both replace a stale socket. The lock file is
    never removed, because otherwise two processes could lock two different files with this name.
    """
    name = path.with_name(path.name + ".lock")
    try:
        lock = open_own(name, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise ConfigError(f"cannot create socket {str(path)!r}: {name.name}: {error.strerror}") from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(lock, 32, 0).decode(errors="replace").strip() or "unknown"
            raise FolderBusyError(f"socket {str(path)!r} is in use by another infinityd (pid {holder})") from error
        _remove_stale(path)
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    except BaseException:
        os.close(lock)
        raise
    return lock


def _remove_stale(path: Path) -> None:
    """Remove a stale socket. Raises `FolderBusyError` if a process uses it, `ConfigError` if it is a different file."""
    try:
        link = path.is_symlink() and os.readlink(path) == f"../{SOCKET_NAME}"  # to the socket of root's daemon
        if not link and not stat.S_ISSOCK(path.lstat().st_mode):
            raise ConfigError(f"{str(path)!r} exists and is not a socket; remove it or choose another --socket")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        try:
            probe.connect(str(path))
        except OSError as error:
            # The link is stale if root's daemon has stopped, or if it no longer permits this user to connect.
            unserved = link and isinstance(error, FileNotFoundError | PermissionError)
            if unserved or isinstance(error, ConnectionRefusedError):
                path.unlink()
                event(logging.INFO, "socket.stale", path=path)
                return
            raise FolderBusyError(f"cannot determine whether socket {str(path)!r} is in use: {error}") from error
        if link:
            raise FolderBusyError(
                f"the infinityd of root in {str(path.parent.parent)!r} serves this user; for a second one, set "
                "--runtime-dir"
            )
        pid, _ = peer_of(probe)
        raise FolderBusyError(f"socket {str(path)!r} is in use by another process (pid {pid})")
