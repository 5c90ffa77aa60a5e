"""Attacks on the channel between daemons, and its limits, over real sockets."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import os
import random
import shutil
import struct
import subprocess
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from infinity.errors import ConfigError
from infinity_daemon import copy_channel, copy_pull, copy_server
from infinity_daemon.copy_channel import MAX_REQUEST_BYTES, ChannelError, Ends, open_channel
from support.copies import IDENTITY, RUN, TOKEN, Node, Rank, check_copy

ENDS = Ends(RUN, 0, 1)
HEADER = struct.Struct("!QBI")
"""Number, kind and length of a message between daemons."""
SIZES = json.dumps({"identity": IDENTITY, "op": "sizes"}).encode()


def run(work):
    """Run a coroutine, which must end within minutes."""
    return asyncio.run(asyncio.wait_for(work, 300))


@asynccontextmanager
async def serving(place):
    """Yield the host and port of a daemon that serves the checkpoint of rank 1. It must still do so at the end."""
    async with Node(1) as node:
        host, _, port = (await node.join()).rpartition(":")
        await node.ask("start", **Rank(place, 1, 3).job([(0, "127.0.0.1:1")]))
        while node.copies._ranks[(RUN, 1)].source is None:
            await asyncio.sleep(0.005)
        yield host, int(port)
        assert "pages" in json.loads((await exchanged(host, port, SIZES))[1])


async def exchanged(host, port, *requests, token=TOKEN, ends=ENDS):
    """Send requests over an authentic channel, and return the last response."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        channel = await open_channel(reader, writer, ends, bytes.fromhex(token), None)
        for request in requests:
            await channel.send(0, request)
            answer = await channel.receive(1 << 20)
        return answer
    finally:
        writer.transport.abort()


def hello(**changed):
    """Return the first message of a client."""
    values = {"version": 1, "run_id": RUN, "rank": 0, "peer": 1, "nonce": "00" * 32, **changed}
    text = json.dumps(values).encode()
    return len(text).to_bytes(2, "big") + text


async def everything(host, port, *parts):
    """Send bytes, and return everything that the server sends until it disconnects."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        for part in parts:
            writer.write(part)
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.transport.abort()


def test_strangers_learn_nothing(tmp_path):
    """An unknown run, an unknown rank and a known one look alike to a client without the token."""

    async def main():
        async with serving(tmp_path) as place:
            for changed in ({}, {"run_id": "other"}, {"peer": 9}):
                first, second = [await everything(*place, hello(**changed), bytes(32)) for _ in range(2)]
                assert len(first) == len(second) == 64
                assert first != second
            with pytest.raises(ChannelError, match="has another token"):
                await exchanged(*place, SIZES, token="cd" * 32)
            with pytest.raises(ChannelError, match="does not serve rank 2"):
                await exchanged(*place, SIZES, ends=Ends(RUN, 0, 2))

    run(main())


def test_garbage_is_not_answered(tmp_path):
    chance = random.Random(3)

    async def main():
        async with serving(tmp_path) as place:
            for garbage in [
                *(chance.randbytes(chance.randrange(2, 3000)) + bytes(5000) for _ in range(30)),
                hello(version=2),
                hello(nonce="00"),
                hello(run_id=""),
                hello(rank=-1),
                hello(more=1),
                b"\xff\xff" + bytes(70_000),
                b"\x00\x02[]",
                b"\x0f\x00" + b"[" * 3840,
                b"GET /metrics HTTP/1.1\r\n\r\n" * 2000,
            ]:
                assert await everything(*place, garbage) == b"", garbage[:99]

    run(main())


def keys_of(text, answer):
    """Return the key of the client's messages."""
    secret = bytes.fromhex(TOKEN)

    def derived(purpose):
        return hmac.digest(secret, b"infinity copies: " + purpose + b"\0" + text + answer[:32], "sha256")

    assert answer[32:] == derived(b"server proof")
    return derived(b"client proof"), derived(b"client key"), derived(b"server key")


def message(key, number, content, length=None):
    header = HEADER.pack(number, 0, len(content) if length is None else length)
    return header + hmac.digest(key, header + content, hashlib.sha256) + content


async def session(place, *build):
    """Authenticate by hand, send messages, and return the number of responses and the bytes of the session."""
    reader, writer = await asyncio.open_connection(*place)
    try:
        first = hello()
        writer.write(first)
        answer = await reader.readexactly(64)
        proof, key, _ = keys_of(first[2:], answer)
        sent = [first, proof, *(make(key) for make in build)]
        for part in sent[1:]:
            writer.write(part)
        writer.write_eof()
        found = 0
        try:
            while True:
                header = await reader.readexactly(HEADER.size + 32)
                await reader.readexactly(HEADER.unpack(header[: HEADER.size])[2])
                found += 1
        except (asyncio.IncompleteReadError, ConnectionError):
            return found, b"".join(sent)
    finally:
        writer.transport.abort()


def test_messages_cannot_be_forged_replayed_or_reordered(tmp_path):
    def good(number):
        return lambda key: message(key, number, SIZES)

    def flipped(key):
        sent = bytearray(message(key, 1, SIZES))
        sent[-1] ^= 1
        return bytes(sent)

    async def main():
        async with serving(tmp_path) as place:
            assert (await session(place, good(0), good(1)))[0] == 2
            assert (await session(place, good(0), good(0), good(1)))[0] == 1
            assert (await session(place, good(1), good(0)))[0] == 0
            assert (await session(place, good(0), good(2)))[0] == 1
            assert (await session(place, good(0), flipped, good(1)))[0] == 1
            assert (await session(place, good(0), lambda key: message(b"x" * 32, 1, SIZES)))[0] == 1
            _, recorded = await session(place, good(0))
            assert len(await everything(*place, recorded)) == 64  # the server chose another number

    run(main())


def test_long_and_invalid_requests_end_the_connection(tmp_path):
    """The length is checked before the content arrives."""

    async def main():
        async with serving(tmp_path) as place:
            limit = MAX_REQUEST_BYTES
            assert (await session(place, lambda key: message(key, 0, b"", limit + 1)))[0] == 0
            assert (await session(place, lambda key: message(key, 0, b"", (1 << 32) - 1)))[0] == 0
            for text in (
                "", "[]", "{}", '{"identity": "x", "op": "sizes"}',
                f'{{"identity": "{IDENTITY}", "op": "read"}}',
                f'{{"identity": "{IDENTITY}", "op": "read", "file": "/etc/passwd", "offset": 0, "length": 9}}',
                f'{{"identity": "{IDENTITY}", "op": "read", "file": "pages", "offset": -1, "length": 9}}',
                f'{{"identity": "{IDENTITY}", "op": "read", "file": "pages", "offset": 0, "length": 99999999}}',
                f'{{"identity": "{IDENTITY}", "op": "verify", "file": "manifest", "offset": 0, "length": 1}}',
            ):  # fmt: skip
                assert (await session(place, lambda key: message(key, 0, text.encode())))[0] == 0, text
            beyond = {"identity": IDENTITY, "op": "read", "file": "pages", "offset": 1 << 40, "length": 9}
            kind, answer = await exchanged(*place, json.dumps(beyond).encode())
            assert kind == copy_channel.FAILED
            assert b"exceed the" in answer

    run(main())


def test_long_responses_are_rejected(tmp_path):
    """A client does not wait for more bytes than it asked for."""

    async def main():
        async with serving(tmp_path) as (host, port):
            reader, writer = await asyncio.open_connection(host, port)
            channel = await open_channel(reader, writer, ENDS, bytes.fromhex(TOKEN), None)
            await channel.send(0, SIZES)
            with pytest.raises(ChannelError, match="exceeds the limit of 10 bytes"):
                await channel.receive(10)
            channel.close()

    run(main())


def test_silent_clients_are_disconnected_and_limited(tmp_path, monkeypatch):
    """A client that does not authenticate is disconnected, and an address cannot have many of them."""

    async def main():
        async with serving(tmp_path) as place:
            silent = [await asyncio.open_connection(*place) for _ in range(40)]
            ended = [asyncio.create_task(reader.read()) for reader, _ in silent]
            done, waiting = await asyncio.wait(ended, return_when=asyncio.FIRST_COMPLETED)
            while len(done) < 40 - copy_server._MAX_STRANGERS_PER_ADDRESS:
                done, waiting = await asyncio.wait(ended, timeout=0.01)
            assert len(waiting) <= copy_server._MAX_STRANGERS_PER_ADDRESS
            for _, writer in silent:
                writer.transport.abort()
            await asyncio.gather(*ended, return_exceptions=True)
            while True:  # until the daemon has noticed
                try:
                    await exchanged(*place, SIZES)
                    break
                except ChannelError:
                    await asyncio.sleep(0.01)
            monkeypatch.setattr(copy_server, "_CONNECT_SECONDS", 0.1)
            assert await everything(*place, b"\x00") == b""
            monkeypatch.undo()

    run(main())


def test_idle_and_slow_clients_are_disconnected(tmp_path, monkeypatch):
    async def main():
        async with serving(tmp_path) as place:
            monkeypatch.setattr(copy_server, "_IDLE_SECONDS", 0.2)
            reader, writer = await asyncio.open_connection(*place)
            await open_channel(reader, writer, ENDS, bytes.fromhex(TOKEN), None)
            assert await reader.read() == b""
            monkeypatch.undo()

    run(main())


def test_a_client_that_does_not_read_is_disconnected(tmp_path, monkeypatch):
    async def main():
        async with Node(1) as node:
            host, _, port = (await node.join()).rpartition(":")
            rank = Rank(tmp_path, 1, 32, page_bytes=1 << 18)
            await node.ask("start", **rank.job([(0, "127.0.0.1:1")]))
            while node.copies._ranks[(RUN, 1)].source is None:
                await asyncio.sleep(0.005)
            reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
            channel = await open_channel(reader, writer, ENDS, bytes.fromhex(TOKEN), None)
            monkeypatch.setattr(copy_channel, "_MESSAGE_SECONDS", 0.5)
            read = {"identity": IDENTITY, "op": "read", "file": "pages", "offset": 0, "length": 4 << 20}
            server = node.copies._server
            while not server._channels:
                await asyncio.sleep(0.01)
            with suppress(ChannelError):
                for _ in range(8):  # more than the buffers of both sockets
                    await channel.send(0, json.dumps(read).encode())
            while server._channels:
                await asyncio.sleep(0.01)
            writer.transport.abort()

    run(main())


@pytest.fixture
def authority(tmp_path):
    """Function that makes an authority, and a certificate that it has signed, with openssl."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")

    def make(name):
        folder = tmp_path / name
        folder.mkdir()

        def openssl(*arguments):
            subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

        new = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
        openssl("req", "-x509", *new, "-keyout", "ca.key", "-out", "ca.pem", "-subj", f"/CN={name}", "-days", "2")
        openssl("req", *new, "-keyout", "node.key", "-out", "node.csr", "-subj", "/CN=node")
        signing = ["-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2"]
        openssl("x509", "-req", "-in", "node.csr", *signing, "-out", "node.pem")
        os.chmod(folder / "node.key", 0o600)
        return {
            "certificate": str(folder / "node.pem"),
            "key": str(folder / "node.key"),
            "authority": str(folder / "ca.pem"),
        }

    return make


def test_both_sides_verify_certificates(tmp_path, authority, monkeypatch):
    monkeypatch.setattr(copy_pull, "_PAUSE_SECONDS", 0.01)
    ours, foreign = authority("ours"), authority("foreign")
    ranks = [Rank(tmp_path / str(rank), rank, 5) for rank in range(2)]

    async def copy(holder, server):
        async with Node(0, **holder) as first, Node(1, **server) as second:
            await first.join()
            address = await second.join()
            await second.ask("start", **ranks[1].job([(0, "127.0.0.1:1")]))
            await first.ask("start", **ranks[0].job([(1, address)]))
            return {**await first.ended(), "address": address}

    assert run(copy(ours, ours))["copied"] == IDENTITY
    check_copy(ranks, ranks[0], 2)
    ranks[0].target.with_name(f"{ranks[0].target.name}.d").joinpath("index.json").unlink()
    monkeypatch.setattr(copy_pull, "_PATIENCE_SECONDS", 0.2)
    accepts_both = {**foreign, "authority": str(tmp_path / "both.pem")}
    (tmp_path / "both.pem").write_text("".join(Path(each["authority"]).read_text() for each in (ours, foreign)))
    for name, holder, server in [
        ("the holder rejects the certificate of the server", ours, accepts_both),
        ("the server rejects the certificate of the holder", accepts_both, ours),
        ("the holder has no TLS", {}, ours),
        ("the server has no TLS", ours, {}),
    ]:
        progress = run(copy(holder, server))
        assert progress["error"].startswith("no progress"), name
        assert f"rank 1 at {progress['address']}" in progress["error"], name
        assert "copies.certificate" in progress["error"], name
        assert (progress["copied"], progress["bytes"]) == ("", 0), name


def test_invalid_tls_settings_are_rejected(tmp_path, authority):
    async def error(**settings):
        with pytest.raises(ConfigError) as caught:
            async with Node(0, **settings):
                pass
        return str(caught.value)

    ours = authority("ours")
    (tmp_path / "text").write_text("none")
    assert "copies.key is not set" in run(error(**{**ours, "key": ""}))
    assert "No such file" in run(error(**{**ours, "key": "/no/such/file"}))
    assert "cannot be used" in run(error(**{**ours, "authority": str(tmp_path / "text")}))
    os.chmod(ours["key"], 0o640)
    assert "chmod 600" in run(error(**ours))
    assert "all interfaces" in run(error(host="0.0.0.0"))
