"""TCP server that serves checkpoints to the daemons of other nodes, and connections to them.

Only the daemons on the nodes of a run know its token, so a daemon serves the checkpoints of a run only to them.
"""

from __future__ import annotations

import asyncio
import fcntl
import ipaddress
import json
import logging
import os
import socket
import ssl
import struct
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Final

from infinity.errors import CheckpointError, ConfigError
from infinity.schema import integer, one_of, record, text
from infinity_daemon.copy_channel import (
    FAILED,
    LATER,
    MAX_DATA_BYTES,
    MAX_REQUEST_BYTES,
    OK,
    Channel,
    ChannelError,
    DisconnectedError,
    Ends,
    accept_channel,
    open_channel,
    parsed,
)
from infinity_daemon.copy_source import Source, SourceReader
from infinity_daemon.daemon_config import CopiesConfig
from infinity_daemon.log import event

_MAX_CHANNELS: Final = 256
_MAX_STRANGERS, _MAX_STRANGERS_PER_ADDRESS = 64, 16
"""Maximum numbers of connections that are not authenticated, in total and per address."""
_CONNECT_SECONDS: Final = 10.0
"""Time limit for connecting, and for the authentication of a client."""
_IDLE_SECONDS: Final = 120.0
"""Time limit for the next request on a connection."""
_TLS_HINT: Final = ". Check that copies.certificate is set on both nodes or on neither, with the same copies.authority"
_SIOCGIFADDR: Final = 0x8915

IDENTITY: Final = text("[0-9a-f]{24}")
SIZE: Final = integer(0, (1 << 60) - 1)
_REQUEST = record(
    lacking=("file", "offset", "length"),
    identity=IDENTITY,
    op=one_of("sizes", "read", "verify"),
    file=one_of("manifest", "state", "pages"),
    offset=SIZE,
    length=integer(1, MAX_DATA_BYTES),
)


@dataclass(eq=False)
class Served:
    """Rank on this node whose checkpoint may be served."""

    token: bytes = field(repr=False)
    source: Source | None = None
    """Checkpoint that is served, or None."""


class CopyServer:
    """Server for the daemons of other nodes. All methods run on the event loop.

    Args:
        settings: Settings of the daemon.
        find: Function that returns a rank on this node by run id and rank, or None.
        threads: Threads that access files and hash messages.
    """

    def __init__(self, settings: CopiesConfig, find: Callable[[str, int], Served | None], threads: Executor) -> None:
        self._settings, self._find, self._threads = settings, find, threads
        self._contexts: tuple[ssl.SSLContext, ssl.SSLContext] | None = None  # of the server and of clients, with TLS
        self._listener: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._strangers: Counter[str] = Counter()
        """Number of connections that are not authenticated, by address."""
        self._channels = 0
        self.address = ""
        """Host and port for other daemons. Empty if `copies.host` is not set, and before `start`."""

    async def start(self) -> None:
        """Listen for the daemons of other nodes, if `copies.host` is set. Raises `ConfigError`."""
        settings = self._settings
        self._contexts = _tls_contexts(settings)
        if not settings.host:
            return
        host = address_of(settings.host)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, settings.port), family=family, backlog=_MAX_STRANGERS)
        except OSError as error:
            raise ConfigError(
                f"copies.port = {settings.port} on {host} cannot be used: {error.strerror}; set a different copies.port"
            ) from error
        self._listener.setblocking(False)
        port = self._listener.getsockname()[1]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        event(logging.INFO, "copies.listening", address=self.address, tls=bool(self._contexts))
        self._keep(self._accept_all(self._listener))

    async def stop(self) -> None:
        """Close all connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def connect(self, address: str, ends: Ends, token: bytes) -> Channel:
        """Return a channel to the daemon at an address. Raises `ChannelError`."""
        host, port = host_and_port(address)
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                reader, writer = await asyncio.open_connection(
                    host, port, limit=MAX_DATA_BYTES, ssl=self._contexts and self._contexts[1]
                )
        except (OSError, TimeoutError) as error:
            why = getattr(error, "strerror", "") or str(error) or "no answer"
            shaking = ssl.SSLError | ConnectionResetError | ConnectionAbortedError  # errors of the TLS handshake
            hint = _TLS_HINT if self._contexts and isinstance(error, shaking) else ""
            raise ChannelError(f"cannot connect to rank {ends.peer} at {address}: {why}{hint}") from error
        try:
            return await open_channel(reader, writer, ends, token, self._threads)
        except BaseException as error:
            writer.transport.abort()
            if isinstance(error, ChannelError):
                hint = _TLS_HINT if error.__cause__ else ""  # not for a wrong token
                raise ChannelError(f"the handshake with rank {ends.peer} at {address} failed: {error}{hint}") from error
            raise

    async def _accept_all(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connected, address = await loop.sock_accept(listener)
            except OSError:  # for example no free descriptor
                await asyncio.sleep(1)
                continue
            host = str(address[0])
            crowded = self._strangers.total() >= _MAX_STRANGERS or self._strangers[host] >= _MAX_STRANGERS_PER_ADDRESS
            if crowded or self._channels >= _MAX_CHANNELS:
                connected.close()
                continue
            self._strangers[host] += 1
            self._keep(self._admit(connected, host))

    async def _admit(self, connected: socket.socket, host: str) -> None:
        """Authenticate a client, and answer its requests until it disconnects."""
        writer, opened = None, None
        try:
            try:
                async with asyncio.timeout(_CONNECT_SECONDS):
                    reader, writer = await _streams(connected, self._contexts and self._contexts[0])
                opened = await accept_channel(reader, writer, self._token_of, self._threads, _CONNECT_SECONDS)
            finally:
                self._strangers[host] -= 1
                self._strangers = +self._strangers  # remove addresses without connections
            await self._serve(*opened)
        except (ChannelError, OSError, TimeoutError) as error:
            # A client disconnects when it has its copy, and strangers could fill the log.
            if opened and not isinstance(error, DisconnectedError):
                event(logging.WARNING, "copies.disconnected", host=host, reason=str(error))
        finally:
            if writer is not None:
                writer.transport.abort()
            else:
                connected.close()

    def _token_of(self, run_id: str, rank: int) -> bytes | None:
        served = self._find(run_id, rank)
        return served.token if served else None

    async def _serve(self, channel: Channel, ends: Ends) -> None:
        served, reader = self._find(ends.run_id, ends.peer), None
        self._channels += 1
        try:
            while True:
                _, content = await channel.receive(MAX_REQUEST_BYTES, _IDLE_SECONDS)
                request = parsed(content, _REQUEST)
                if served is None or self._find(ends.run_id, ends.peer) is not served:
                    return  # its process has ended, or has joined again with another token
                source = served.source
                if source is None or source.manifest.identity != request["identity"]:
                    await channel.send(*_not_served(source, request["identity"]))
                    continue
                if reader is None or reader.source is not source:
                    if reader is not None:
                        await reader.close()
                    reader = SourceReader(source, self._threads)
                kind, answer = await _answered(reader, request)
                if served.source is not source:  # its pages may have been overwritten in the meantime
                    kind, answer = _not_served(served.source, request["identity"])
                await channel.send(kind, answer)
        finally:
            self._channels -= 1
            if reader is not None:
                await reader.close()


async def _answered(reader: SourceReader, request: dict[str, Any]) -> tuple[int, bytes | bytearray]:
    """Return the kind and the content of the response to a request."""
    sizes = reader.source.sizes
    if request["op"] == "sizes":
        return OK, json.dumps(sizes).encode()
    try:
        name, offset, length = request["file"], request["offset"], request["length"]
    except KeyError as error:
        raise ChannelError(f"a request lacks the key {error}") from None
    if request["op"] == "verify" and name != "pages":
        raise ChannelError(f"a request to verify names {name} instead of pages")
    if offset + length > sizes[name]:
        return FAILED, f"{length} bytes at offset {offset} exceed the {sizes[name]} bytes of {name}".encode()
    try:
        if request["op"] == "verify":
            await reader.verify(offset)
            return OK, b""
        return OK, await reader.read(name, offset, length)
    except CheckpointError as error:
        return FAILED, str(error).encode()
    except OSError as error:
        return FAILED, f"{error.filename}: {error.strerror or error}".encode()


def _not_served(source: Source | None, identity: str) -> tuple[int, bytes]:
    if source is not None and source.manifest.identity > identity:  # identities increase, so waiting is useless
        return FAILED, f"it already has the later checkpoint {source.manifest.identity}".encode()
    return LATER, f"it does not serve checkpoint {identity} yet".encode()


async def _streams(
    connected: socket.socket, context: ssl.SSLContext | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Return the streams of an accepted connection, after the TLS handshake."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=MAX_REQUEST_BYTES, loop=loop)
    protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
    transport, _ = await loop.connect_accepted_socket(lambda: protocol, connected, ssl=context)
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


def host_and_port(address: str) -> tuple[str, int]:
    """Return the two parts of an address. Raises `ConfigError`."""
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) >= 1 << 16:
        raise ConfigError(f"{address!r} is not an address with a port, such as 10.0.0.1:9471")
    return host.removeprefix("[").removesuffix("]"), int(port)


def address_of(host: str) -> str:
    """Return the address for a value of `copies.host`: an address, or the first IPv4 address of an interface.

    Raises:
        ConfigError: if it is neither, or if it stands for all interfaces.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        pass
    else:
        if address.is_unspecified:
            raise ConfigError(f"copies.host = {host!r} would listen on all interfaces; set it to one of them")
        return str(address)
    try:
        with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", os.fsencode(host)[:15]))
    except (OSError, ValueError) as error:
        names = ", ".join(name for _, name in socket.if_nameindex())
        raise ConfigError(
            f"copies.host = {host!r} is neither an address nor an interface with an IPv4 address; interfaces: {names}"
        ) from error
    return socket.inet_ntoa(answer[20:24])


def _tls_contexts(settings: CopiesConfig) -> tuple[ssl.SSLContext, ssl.SSLContext] | None:
    """Return the TLS contexts of the server and of clients, or None without TLS. Both sides need a certificate."""
    files = {name: getattr(settings, name) for name in ("certificate", "key", "authority")}
    if not any(files.values()):
        return None
    if missing := [name for name, file in files.items() if not file]:
        raise ConfigError(
            f"copies.{missing[0]} is not set; TLS needs copies.certificate, copies.key and copies.authority"
        )
    contexts = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        if os.stat(settings.key).st_mode & 0o077:
            raise ConfigError(f"copies.key: {settings.key!r} is accessible to other users; run `chmod 600` on it")
        for context in contexts:
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            # Nodes are known by addresses that change, so every certificate of the authority is accepted. The token
            # decides which ranks a daemon may read.
            context.check_hostname, context.verify_mode = False, ssl.CERT_REQUIRED
            context.load_cert_chain(settings.certificate, settings.key)
            context.load_verify_locations(settings.authority)
    except OSError as error:  # including ssl.SSLError
        why = f"{error.strerror}: {error.filename!r}" if error.filename else error.strerror or str(error)
        raise ConfigError(f"copies.certificate, copies.key or copies.authority cannot be used: {why}") from error
    return contexts
