"""Whatever is sent to the daemon, or lies in its folder: it answers, and neither memory nor descriptors grow."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import struct
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from infinity.telemetry import Stats
from support.daemon_process import client, daemon, get, talk, until

MIB = 1 << 20


def valid(place: str) -> list[dict[str, Any]]:
    """Return one message of every operation."""
    return [
        {"op": "status"},
        {"op": "state"},
        {"op": "bandwidth", "paths": [place]},
        {"op": "record_bandwidth", "rates": {place: {"read": 1e9, "write": 2e9, "mixed": None}}, "source": "run"},
        {"op": "reserve", "path": place, "bytes": 1, "run_id": "r"},
        {"op": "release", "path": place, "run_id": "r"},
        {"op": "pace", "paths": [place], "run_id": "r"},
    ]


ODD = [
    None, True, False, 0, -1, 1 << 62, 1 << 70, 0.5, -0.0, 1e308, float("nan"), float("inf"), "", "\0", "\ud800",
    "x" * 5000, "/", "/proc/self", "../..", [], [[]], {}, {"op": "status"}, ["/"] * 100, "💾", "%s%n",
]  # fmt: skip


def changed(chance: random.Random, message: Any) -> Any:
    """Return a message of which something is something else."""
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
        message["op"] = chance.choice([*ODD, "reserv", "STATUS"])
    return message


def line_of(chance: random.Random, messages: list[dict[str, Any]]) -> bytes:
    """Return a line: a message that is valid, changed, cut, or has other bytes; or anything at all."""
    kind = chance.randrange(5)
    if kind == 4:
        return chance.randbytes(chance.randrange(200)).replace(b"\n", b"") + b"\n"
    text = json.dumps(changed(chance, chance.choice(messages)) if kind else chance.choice(messages)).encode()
    if kind == 2:
        text = text[: chance.randrange(len(text) + 1)]
    elif kind == 3:
        at = chance.randrange(len(text))
        text = text[:at] + chance.randbytes(1).replace(b"\n", b"\r") + text[at + 1 :]
    return text + b"\n"


def used(process: psutil.Process) -> tuple[int, int]:
    """Return resident bytes and descriptors."""
    return process.memory_info().rss, process.num_fds()


@pytest.mark.parametrize("number", [3_000, pytest.param(100_000, marks=pytest.mark.wide)])
def test_every_line_has_an_answer(number: int, tmp_path: Path) -> None:
    """One JSON object in a line, on the same connection; nothing is left behind."""
    chance = random.Random(number)
    messages = valid(str(tmp_path))
    with daemon(tmp_path) as process:
        it = psutil.Process(process.pid)
        before = used(it)
        for start in range(0, number, 500):
            with client(tmp_path) as peer, peer.makefile("rb") as answers:
                for _ in range(min(500, number - start)):
                    line = line_of(chance, messages)
                    peer.sendall(line)
                    answer = json.loads(answers.readline())
                    assert isinstance(answer, dict), line
                    assert (answer.get("ok") is True) != ("error" in answer), line
                    assert "internal error" not in answer.get("error", ""), line
            if start == 500:
                before = used(it)  # everything has been imported and cached once
            assert "infinity_daemon_build_info" in get(process.port, "/metrics")
        until(lambda: used(it)[1] <= before[1] + 2)
        assert used(it)[0] < before[0] + 32 * MIB
        assert "Traceback" not in process.log.read_text()


def test_clients_that_leave_or_say_nothing_keep_nobody_out(tmp_path: Path) -> None:
    """A thousand connections, of which some are silent, some half a message, some reset; metrics are served."""
    chance = random.Random(1)
    with daemon(tmp_path) as process, ExitStack() as held:
        it = psutil.Process(process.pid)
        assert talk(tmp_path, {"op": "status"})[0]["ok"]
        before = used(it)
        for number in range(1000):
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
                    peer.sendall(b'{"op": "status"}\n')
            if number % 50 == 0:
                held.callback(peer.close)
            else:
                peer.close()
            if number % 100 == 0:
                assert "infinity_daemon_build_info" in get(process.port, "/metrics")
        held.close()
        until(lambda: used(it)[1] <= before[1] + 2)
        assert used(it)[0] < before[0] + 64 * MIB
        assert talk(tmp_path, {"op": "status"})[0]["ok"]
        assert "Traceback" not in process.log.read_text()


def test_whatever_lies_in_the_folder_is_passed_over(tmp_path: Path) -> None:
    """Garbage, huge and sparse files, links, pipes, folders, files that nobody may read, and changes while it reads."""
    chance = random.Random(2)
    stats = Stats.create(tmp_path, run_id="good", rank=0, local_rank=0, world_size=1, devices=[], info={})
    content = stats.path.read_bytes()
    name = "run{}.rank0.stats".format
    (tmp_path / name("garbage")).write_bytes(chance.randbytes(len(content)))
    (tmp_path / name("empty")).write_bytes(b"")
    (tmp_path / name("cut")).write_bytes(content[: len(content) // 2])
    for number in range(40):
        at = chance.randrange(len(content))
        (tmp_path / name(f"flipped{number}")).write_bytes(content[:at] + chance.randbytes(4) + content[at + 4 :])
    with (tmp_path / name("huge")).open("wb") as file:
        file.truncate(1 << 40)
    (tmp_path / name("link")).symlink_to(stats.path)
    (tmp_path / name("dangling")).symlink_to(tmp_path / "nothing")
    (tmp_path / name("device")).symlink_to("/dev/zero")
    os.link(stats.path, tmp_path / name("second"))
    os.mkfifo(tmp_path / name("pipe"))
    (tmp_path / name("folder")).mkdir()
    (tmp_path / name("closed")).write_bytes(content)
    (tmp_path / name("closed")).chmod(0)
    with daemon(tmp_path) as process:
        it = psutil.Process(process.pid)
        text = get(process.port, "/metrics")
        before = used(it)
        for _ in range(20):
            assert 'run="good"' in text
            assert 'infinity_daemon_collector_success{collector="ranks"} 1.0' in text
            (tmp_path / name("changing")).write_bytes(content[: chance.randrange(len(content))])
            text = get(process.port, "/metrics")
        assert used(it)[1] <= before[1] + 2
        assert used(it)[0] < before[0] + 32 * MIB
        assert "Traceback" not in process.log.read_text()
    stats.close()
