"""Tests of training while the daemon is running, restarted, or sends garbage."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from infinity import daemon_client
from infinity.run import pacing
from support.daemon_process import daemon, start, until
from support.session import STEPS, Session

Hook = Callable[[int], None]
"""Function that is called before every step."""


@contextmanager
def daemon_restarted(runtime: Path) -> Iterator[Hook]:
    """Kill the daemon before the third step and restart it before the sixth."""
    with contextlib.ExitStack() as stack:
        process = start(runtime)
        stack.callback(process.kill)

        def before(step: int) -> None:
            if step == 2:
                process.kill()
                process.wait(300)
            elif step == 5:
                stack.enter_context(daemon(runtime))

        yield before


def garbage_answer(chance: random.Random, op: str) -> bytes:
    """Return random garbage or a nearly valid answer to a request."""
    values = [None, True, -1, 0, 1e-300, 1e300, float("nan"), "x", [], {}, [[]], {"a": None}, 1 << 70]
    kind = chance.randrange(7)
    if kind == 0:
        return chance.randbytes(chance.randrange(1, 200)) + b"\n"
    if kind == 1:
        return b"[" * 5000 + b"\n"
    if kind == 2:
        return b"x" * (1 << 17)
    if kind == 3:
        return b""
    if kind == 4:
        return json.dumps(chance.choice(values)).encode() + b"\n"
    keys = ("ok", "no_room", "error", "rates", "bandwidth", "device", "remaining_bytes")
    answer = {key: chance.choice(values) for key in keys if chance.random() < 0.7}
    answer |= {"ok": True} if kind == 5 or op == "reserve" else {}
    answer.pop("no_room", None)
    return json.dumps(answer).encode() + b"\n"


@contextmanager
def daemon_sending_garbage(runtime: Path) -> Iterator[Hook]:
    """Listen at the socket of the daemon and send garbage or no answer."""
    chance, ended = random.Random(5), threading.Event()
    answered = 0
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(runtime / daemon_client.SOCKET_NAME))
        listener.listen(64)
        listener.settimeout(0.05)

        def serve() -> None:
            nonlocal answered
            silent: list[socket.socket] = []
            while not ended.is_set():
                with contextlib.suppress(OSError, ValueError):
                    peer, _ = listener.accept()
                    peer.settimeout(5)
                    if chance.random() < 0.1:
                        silent.append(peer)  # until the end
                        continue
                    with peer:
                        op = json.loads(peer.recv(1 << 16))["op"]
                        peer.sendall(garbage_answer(chance, op))
                        answered += 1
            for peer in silent:
                peer.close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield lambda step: until(lambda: answered > 3 * step)
        finally:
            ended.set()
            thread.join()


@pytest.mark.parametrize("daemon_behavior", [daemon_restarted, daemon_sending_garbage])
def test_losses_do_not_depend_on_the_daemon(
    daemon_behavior: Callable[[Path], AbstractContextManager[Hook]],
    tmp_path: Path,
    undisturbed: list[float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pacing, "_EVERY_SECONDS", 0.01)
    monkeypatch.setattr(daemon_client, "_ANSWER_SECONDS", 0.2)
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    paths = [str(tmp_path / name) for name in ("a", "b")]
    with daemon_behavior(runtime) as before, Session(tmp_path, storage={"paths": paths}) as session:
        losses = []
        for step in range(STEPS):
            before(step)
            losses.append(session.step())
            if step % 3 == 2:
                session.save_checkpoint()
    assert losses == undisturbed
