"""Run infinityd in a process, and communicate with it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parents[2]


ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "daemon"), *filter(None, sys.path)]),
}


def start(folder, *options):
    """Start a daemon; return its process, with the attributes `port` and `log` (path of its stderr)."""
    command = [sys.executable, "-m", "infinity_daemon.main", "--runtime-dir", str(folder), "--port", "0", *options]
    log = Path(folder) / "daemon.log"
    with log.open("w") as stderr:
        process = subprocess.Popen(command, env=ENVIRONMENT, stderr=stderr)
    until(lambda: " started " in log.read_text() or process.poll() is not None)
    assert process.poll() is None, log.read_text()
    process.port = int(re.search(r"port=(\d+)", log.read_text())[1])
    process.log = log
    return process


@contextlib.contextmanager
def daemon(folder, *options):
    """Yield a running daemon, and stop it with SIGTERM. Its exit status must be 0."""
    process = start(folder, *options)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(300) == 0, process.log.read_text()


def until(condition, seconds=300):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.01)


def client(folder):
    peer = socket.socket(socket.AF_UNIX)
    peer.settimeout(60)
    peer.connect(str(folder / "infinityd.sock"))
    return peer


def talk(folder, *messages):
    """Send each message (an object or raw bytes) over one connection; return the responses."""
    with client(folder) as peer, peer.makefile("rb") as answers:
        found = []
        for message in messages:
            peer.sendall(message if isinstance(message, bytes) else json.dumps(message).encode() + b"\n")
            found.append(json.loads(answers.readline()))
        return found


def get(port, path):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
        return answer.read().decode()


def start_second(folder, *options):
    command = [sys.executable, "-m", "infinity_daemon.main", "--runtime-dir", str(folder), *options]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
