"""Fuzz tests of the daemon: it answers any message, ignores any file, and does not leak memory or descriptors."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import struct
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.daemon_process import client, daemon, get, talk, until

MIB = 1 << 20


def valid_messages(path: str) -> list[dict[str, Any]]:
    """Return one valid message for each operation."""
    return [
        {"op": "state"},
        {"op": "bandwidth", "paths": [path]},
        {"op": "record_bandwidth", "rates": {path: {"read": 1e9, "write": 2e9, "mixed": None}}, "source": "run"},
        {"op": "reserve", "path": path, "bytes": 1, "run_id": "r"},
        {"op": "release", "path": path, "run_id": "r"},
        {"op": "pace", "paths": [path], "run_id": "r"},
        {"op": "copies_join", "run_id": "r", "rank": 0, "token": "ab" * 32},
        {"op": "copies_start", "run_id": "r", "rank": 0, "identity": "0" * 24, "manifest": path, "roots": [path],
         "target": path, "peers": [{"rank": 1, "address": "127.0.0.1:1"}], "nodes": 2, "rate": 0},
        {"op": "copies_progress", "run_id": "r", "rank": 0},
        {"op": "copies_stop", "run_id": "r", "rank": 0},
    ]  # fmt: skip


ODD = [
    None, True, False, 0, -1, 1 << 62, 1 << 70, 0.5, -0.0, 1e308, float("nan"), float("inf"), "", "\0", "\ud800",
    "x" * 5000, "/", "/proc/self", "../..", [], [[]], {}, {"op": "state"}, ["/"] * 100, "💾", "%s%n",
]  # fmt: skip


def mutated(chance: random.Random, message: Any) -> Any:
    """Return a copy of a message with one invalid value, missing key, additional key or unknown operation."""
    message = json.loads(json.dumps(message))
    kind = chance.randrange(4)
    keys = list(message)
    if kind == 0:
        message[chance.choice(keys)] = chance.choice(ODD)
    elif kind == 1:
        del message[chance.choice(keys)]
    elif kind == 2:
        message[chance.choice(["x", "", "op ", "paths", "bytes"])] = chance.choice(ODD)
    else:
        message["op"] = chance.choice([*ODD, "reserv", "STATE"])
    return message


def random_line(chance: random.Random, messages: list[dict[str, Any]]) -> bytes:
    """Return a line that is a valid message, a mutated, truncated or corrupted message, or random bytes."""
    kind = chance.randrange(5)
    if kind == 4:
        return chance.randbytes(chance.randrange(200)).replace(b"\n", b"") + b"\n"
    text = json.dumps(mutated(chance, chance.choice(messages)) if kind else chance.choice(messages)).encode()
    if kind == 2:
        text = text[: chance.randrange(len(text) + 1)]
    elif kind == 3:
        at = chance.randrange(len(text))
        text = text[:at] + chance.randbytes(1).replace(b"\n", b"\r") + text[at + 1 :]
    return text + b"\n"


def resources(process: psutil.Process) -> tuple[int, int]:
    """Return the resident memory in bytes and the number of open descriptors."""
    return process.memory_info().rss, process.num_fds()


@pytest.mark.parametrize("number", [1_500, pytest.param(100_000, marks=pytest.mark.wide)])
def test_every_line_is_answered(number: int, tmp_path: Path) -> None:
    """Each line gets one JSON object on the same connection, and resources do not grow."""
    chance = random.Random(number)
    messages = valid_messages(str(tmp_path))
    (tmp_path / "infinityd.toml").write_text('[copies]\nhost = "lo"\nport = 0\n')
    with daemon(tmp_path, "--config", str(tmp_path / "infinityd.toml")) as process:
        daemon_process = psutil.Process(process.pid)
        before = resources(daemon_process)
        for start in range(0, number, 500):
            with client(tmp_path) as peer, peer.makefile("rb") as answers:
                for _ in range(min(500, number - start)):
                    line = random_line(chance, messages)
                    peer.sendall(line)
                    answer = json.loads(answers.readline())
                    assert isinstance(answer, dict), line
                    assert (answer.get("ok") is True) != (answer.keys() <= {"error", "no_room"}), line
                    assert "internal error" not in answer.get("error", ""), line
            if start == 500:
                before = resources(daemon_process)  # by now everything has been imported and cached
            assert "infinity_daemon_build_info" in get(process.port, "/metrics")
        until(lambda: resources(daemon_process)[1] <= before[1] + 2)
        assert resources(daemon_process)[0] < before[0] + 32 * MIB
        assert "Traceback" not in process.log.read_text()


@pytest.mark.parametrize("number", [150, pytest.param(1_000, marks=pytest.mark.wide)])
def test_silent_and_disconnecting_clients_do_not_block_others(number: int, tmp_path: Path) -> None:
    """Some connections are silent, some send half a message and some are reset; metrics are still served."""
    chance = random.Random(1)
    with daemon(tmp_path) as process, ExitStack() as held:
        daemon_process = psutil.Process(process.pid)
        assert talk(tmp_path, {"op": "state"})[0]["ok"]
        before = resources(daemon_process)
        for index in range(number):
            peer = socket.socket(socket.AF_UNIX)
            peer.settimeout(60)
            with contextlib.suppress(OSError):
                peer.connect(str(tmp_path / "infinityd.sock"))
                kind = chance.randrange(4)
                if kind == 1:
                    peer.sendall(b'{"op": "sta')
                elif kind == 2:
                    peer.sendall(b"x" * chance.randrange(100_000) + b"\n")
                elif kind == 3:
                    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    peer.sendall(b'{"op": "state"}\n')
            if index % 50 == 0:
                held.callback(peer.close)
            else:
                peer.close()
            if index % 100 == 0:
                assert "infinity_daemon_build_info" in get(process.port, "/metrics")
        held.close()
        until(lambda: resources(daemon_process)[1] <= before[1] + 2)
        assert resources(daemon_process)[0] < before[0] + 64 * MIB
        assert talk(tmp_path, {"op": "state"})[0]["ok"]
        assert "Traceback" not in process.log.read_text()
