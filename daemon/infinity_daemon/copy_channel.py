"""Authenticated connections between the daemons of two nodes.

[Note: channel of copies] Both daemons have the token of a run from its ranks on their nodes. Neither sends it. Instead,
each side proves that it knows the token with an HMAC over everything that was sent so far: the run id, both ranks, and
a new random number from each side.

    client  {"version", "run_id", "rank", "peer", "nonce"}        `peer` is the rank that the client connects to
    server  nonce, HMAC(token, "server proof", transcript)
    client  HMAC(token, "client proof", transcript)

The keys of all later messages are derived in the same way, one for each direction. A message contains its number and an
HMAC, so it cannot be forged, replayed, reordered, or returned to its sender. Its contents are not encrypted, except by
TLS.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import secrets
import struct
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from typing import Any, Final, NamedTuple, TypeVar

from infinity.errors import InfinityError
from infinity.schema import at, integer, printable, record, text
from infinity.units import KIB, MIB

MAX_DATA_BYTES: Final = 4 * MIB
"""Maximum number of bytes of a response."""
MAX_REQUEST_BYTES: Final = 4 * KIB
OK, LATER, FAILED = range(3)
"""Kinds of messages: a request or a successful response; the checkpoint is not served yet; an error."""
_MESSAGE_SECONDS: Final = 60.0
"""Time limit for sending or receiving one message."""
_SMALL: Final = 64 * KIB  # a shorter message is hashed on the event loop
_VERSION: Final = 1
_LENGTH = struct.Struct("!H")
_HEADER = struct.Struct("!QBI")  # number, kind, and length of a message
_NONCE_BYTES, _DIGEST_BYTES = 32, 32

RUN_ID: Final = printable(1, 128)
RANK: Final = integer(0, 1 << 24)
_HELLO = record(
    version=integer(_VERSION, _VERSION),
    run_id=RUN_ID,
    rank=RANK,
    peer=RANK,
    nonce=text(f"[0-9a-f]{{{2 * _NONCE_BYTES}}}"),
)


class ChannelError(InfinityError):
    """Error of a connection to another daemon. A new connection may succeed."""


class DisconnectedError(ChannelError):
    """The peer has closed the connection, or the connection has failed."""


class Ends(NamedTuple):
    """Run and ranks that a channel connects."""

    run_id: str
    rank: int
    """Rank of the client."""
    peer: int
    """Rank of the server."""


class Channel:
    """Connection whose messages are authenticated. One task sends, and one task receives.

    A message has a kind, which is a small number, and a content. Every method raises `ChannelError` if the connection
    fails, times out, or delivers a message that the peer has not sent.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, keys: tuple[bytes, bytes], threads: Executor
    ) -> None:
        """Initialize.

        Args:
            reader: Reader of the connection.
            writer: Writer of the connection.
            keys: Keys of sent and of received messages.
            threads: Threads that hash long messages.
        """
        self._reader, self._writer, self._threads = reader, writer, threads
        self._send_key, self._receive_key = keys
        self._sent = self._received = 0

    async def send(self, kind: int, content: bytes | bytearray) -> None:
        """Send a message."""
        header = _HEADER.pack(self._sent, kind, len(content))
        self._sent += 1
        digest = await self._digest(self._send_key, header, content)
        await _bounded(self._write(header + digest, content), _MESSAGE_SECONDS)

    async def _write(self, *parts: bytes | bytearray) -> None:
        for part in parts:
            self._writer.write(part)
        await self._writer.drain()

    async def receive(self, limit: int, seconds: float = _MESSAGE_SECONDS) -> tuple[int, bytes]:
        """Return the kind and the content of the next message, of at most `limit` bytes."""
        header, digest, content = await _bounded(self._read(limit), seconds)
        if not hmac.compare_digest(digest, await self._digest(self._receive_key, header, content)):
            raise ChannelError("a message has been modified on the network")
        number, kind, _ = _HEADER.unpack(header)
        if number != self._received:
            raise ChannelError(f"message {self._received} was expected, but message {number} arrived")
        self._received += 1
        return kind, content

    async def _read(self, limit: int) -> tuple[bytes, bytes, bytes]:
        start = await self._reader.readexactly(_HEADER.size + _DIGEST_BYTES)
        header, digest = start[: _HEADER.size], start[_HEADER.size :]
        if (length := _HEADER.unpack(header)[2]) > limit:
            raise ChannelError(f"a message of {length} bytes exceeds the limit of {limit} bytes")
        return header, digest, await self._reader.readexactly(length)

    async def _digest(self, key: bytes, header: bytes, content: bytes | bytearray) -> bytes:
        if len(content) < _SMALL:
            return _digest(key, header, content)
        return await asyncio.get_running_loop().run_in_executor(self._threads, _digest, key, header, content)

    def close(self) -> None:
        """Close the connection without waiting for the peer."""
        self._writer.transport.abort()


async def open_channel(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, ends: Ends, token: bytes, threads: Executor
) -> Channel:
    """Authenticate a new connection as its client. Raises `ChannelError`."""

    async def shake() -> Channel:
        nonce = secrets.token_hex(_NONCE_BYTES)
        hello = json.dumps({"version": _VERSION, **ends._asdict(), "nonce": nonce}).encode()
        writer.write(_LENGTH.pack(len(hello)) + hello)
        answer = await reader.readexactly(_NONCE_BYTES + _DIGEST_BYTES)
        transcript = hello + answer[:_NONCE_BYTES]
        if not hmac.compare_digest(answer[_NONCE_BYTES:], _derived(token, b"server proof", transcript)):
            raise ChannelError(f"the daemon does not serve rank {ends.peer} of run {ends.run_id}, or has another token")
        writer.write(_derived(token, b"client proof", transcript))
        keys = _derived(token, b"client key", transcript), _derived(token, b"server key", transcript)
        return Channel(reader, writer, keys, threads)

    return await _bounded(shake(), _MESSAGE_SECONDS)


async def accept_channel(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    token_of: Callable[[str, int], bytes | None],
    threads: Executor,
    seconds: float,
) -> tuple[Channel, Ends]:
    """Authenticate a new connection as its server, and return the channel and its ends.

    Args:
        reader: Reader of the connection.
        writer: Writer of the connection.
        token_of: Function that returns the token of a run and rank, or None if they are unknown.
        threads: Threads that hash long messages.
        seconds: Time limit.

    Raises:
        ChannelError: if the client is not authentic.
    """

    async def shake() -> tuple[Channel, Ends]:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if length > MAX_REQUEST_BYTES:
            raise ChannelError(f"the first message of {length} bytes exceeds the limit of {MAX_REQUEST_BYTES} bytes")
        hello = await reader.readexactly(length)
        ends = _ends(hello)
        # The answer for an unknown rank is the same as for a wrong token, so that strangers cannot list the runs.
        token = token_of(ends.run_id, ends.peer) or secrets.token_bytes(_DIGEST_BYTES)
        nonce = secrets.token_bytes(_NONCE_BYTES)
        transcript = hello + nonce
        writer.write(nonce + _derived(token, b"server proof", transcript))
        proof = await reader.readexactly(_DIGEST_BYTES)
        if not hmac.compare_digest(proof, _derived(token, b"client proof", transcript)):
            raise ChannelError("the client does not know the token")
        keys = _derived(token, b"server key", transcript), _derived(token, b"client key", transcript)
        return Channel(reader, writer, keys, threads), ends

    return await _bounded(shake(), seconds)


def parsed(content: bytes, rule: Callable[[Any], Any]) -> Any:
    """Return the validated contents of a JSON message. Raises `ChannelError`."""
    try:
        return at("the message", rule, json.loads(content))
    except (ValueError, RecursionError) as error:  # includes `Mismatch`
        raise ChannelError(f"a message is invalid: {error}") from error


def _ends(hello: bytes) -> Ends:
    tree = parsed(hello, _HELLO)
    return Ends(tree["run_id"], tree["rank"], tree["peer"])


def _derived(token: bytes, purpose: bytes, transcript: bytes) -> bytes:
    return hmac.digest(token, b"infinity copies: " + purpose + b"\0" + transcript, "sha256")


def _digest(key: bytes, header: bytes, content: bytes | bytearray) -> bytes:
    digest = hmac.new(key, header, hashlib.sha256)
    digest.update(content)  # releases the GIL
    return digest.digest()


_T = TypeVar("_T")


async def _bounded(act: Awaitable[_T], seconds: float) -> _T:
    try:
        async with asyncio.timeout(seconds):
            return await act
    except TimeoutError as error:
        raise ChannelError(f"no complete message within {seconds:.0f} s") from error
    except asyncio.IncompleteReadError as error:
        raise DisconnectedError("the connection was closed") from error
    except OSError as error:
        raise DisconnectedError(f"the connection failed: {error.strerror or error}") from error
