"""Run infinityd in a process, and communicate with it.

The process is forked, because importing the modules of the daemon takes a second. `test_daemon_process.py` starts it
from the command line, too.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import logging
import os
import re
import signal
import socket
import sys
import tempfile
import time
import traceback
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parents[2]


ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "daemon"), *filter(None, sys.path)]),
}
LOOK_SECONDS = 0.1
"""Interval at which the daemon looks at stats files and drives. Its default is one second."""


class Daemon:
    """A process that runs infinityd; `port` and `log` (path of its stderr) are set once it has started."""

    port, log = 0, Path()

    def __init__(self, folder, options, stderr):
        importlib.import_module("infinity_daemon.main")  # before the fork, so that it is imported once
        self._status = None
        self.pid = os.fork()
        if not self.pid:
            run(["infinityd", "--runtime-dir", str(folder), *options], stderr)

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def poll(self):
        """Return the exit status, or None while the process is running."""
        if self._status is None and (found := os.waitpid(self.pid, os.WNOHANG))[0]:
            self._status = os.waitstatus_to_exitcode(found[1])
        return self._status

    def wait(self, seconds=300):
        until(lambda: self.poll() is not None, seconds)
        return self._status


def run(command, stderr):
    """Run a command line of infinityd in a forked process, as a new process would."""
    from infinity_daemon import configured_drives, drive_measurement, requests, service
    from infinity_daemon.main import main

    status = 1
    try:
        gc.freeze()  # objects of the parent process must not close descriptors that the daemon opens
        os.dup2(stderr, 2)
        os.closerange(3, 1 << 20)
        sys.argv = command
        sys.stdout = sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        logging.root.handlers.clear()
        service._SWEEP_SECONDS = configured_drives.LOOK_SECONDS = drive_measurement.LOOK_SECONDS = LOOK_SECONDS
        requests._STATE_SECONDS = 60.0  # on a slow machine, the first state takes a while
        main()
    except SystemExit as end:
        status = end.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def start(folder, *options):
    """Start a daemon."""
    log = Path(folder) / "daemon.log"
    with log.open("w") as stderr:
        process = Daemon(folder, ["--port", "0", *options], stderr.fileno())
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
        assert process.wait() == 0, process.log.read_text()


def rejected(folder, *options):
    """Start a daemon that must exit with status 2, and return its stderr."""
    with tempfile.TemporaryFile() as stderr:
        status = Daemon(folder, options, stderr.fileno()).wait()
        stderr.seek(0)
        said = stderr.read().decode()
    assert (status, "Traceback" in said) == (2, False), said
    return said


@contextlib.contextmanager
def forked(act):
    """Call a function in a forked process, which lives until it is killed, at the latest at the end of the block."""
    child = os.fork()
    if not child:
        try:
            act()
            signal.pause()
        finally:
            os._exit(1)

    def kill():
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)

    with contextlib.ExitStack() as stack:
        stack.callback(kill)
        yield stack.close


def as_user(uid, act, *groups):
    """Return the result of `act`, run in a process of a user. It must be serializable as JSON."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(reader)
            os.setgroups(groups)
            os.setgid(uid)
            os.setuid(uid)
            os.write(writer, json.dumps(act()).encode())
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        result = file.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    return json.loads(result)


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


def state(folder):
    """Return the state of the node."""
    return talk(folder, {"op": "state"})[0]


def get(port, path):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
        return answer.read().decode()
