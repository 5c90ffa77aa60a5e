"""Tests of daemon access control: listeners, slow clients, planted files, and sockets and files of other users."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from infinity import config
from infinity.config import TelemetryConfig, runtime_dir
from infinity.daemon_client import SOCKET_NAME
from infinity.errors import ConfigError
from infinity.store import path_bandwidth
from infinity.telemetry import read_stats_file
from infinity.telemetry.exporter import serve
from infinity.telemetry.stats_file import StatsFileError
from infinity_daemon.drive_bandwidth import FILE_NAME
from support.counted_rank import make_stats
from support.daemon_process import as_user, daemon, get, rejected, state, talk, until

OTHER_USER = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="requires root to switch to another user")


def listeners(port: int) -> list[str]:
    """Return the addresses on which a TCP port is open, in the format of /proc/net/tcp."""
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    return [line[1] for line in lines if line[1].endswith(f":{port:04X}") and line[3] == "0A"]


def test_servers_listen_on_loopback_only(tmp_path):
    """By default, the metrics of the daemon and of a run need no authentication, so no other host may connect."""
    with daemon(tmp_path) as process:
        assert listeners(process.port) == [f"0100007F:{process.port:04X}"]
    with serve(0, lambda: []) as server:
        assert listeners(server.port) == [f"0100007F:{server.port:04X}"]


def test_slow_clients_do_not_block_others(tmp_path):
    """Metrics are served while 40 clients send their request one byte at a time and reconnect repeatedly."""
    with daemon(tmp_path) as process:
        ended = threading.Event()
        connected = set()

        def send_slowly_forever():
            while not ended.is_set():
                try:
                    with socket.create_connection(("127.0.0.1", process.port), timeout=60) as peer:
                        peer.sendall(b"GET /metrics HTTP/1.0\r\n")
                        connected.add(threading.get_ident())
                        while not ended.wait(0.3):
                            peer.sendall(b"x")
                except OSError:
                    ended.wait(0.2)

        threads = [threading.Thread(target=send_slowly_forever) for _ in range(40)]
        for thread in threads:
            thread.start()
        try:
            until(lambda: len(connected) == len(threads))
            answers = 0
            for _ in range(50):  # on a busy machine, a request may be dropped before it arrives
                with suppress(OSError):
                    answers += "infinity_daemon" in get(process.port, "/metrics")
                if answers == 5:
                    break
            assert answers == 5
        finally:
            ended.set()
            for thread in threads:
                thread.join()


def send_slowly(peer, seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        peer.sendall(b"G")
        time.sleep(0.05)


def test_requests_and_responses_time_out(monkeypatch):
    """The time limit applies to the entire request, not to each byte, and to sending the response."""
    monkeypatch.setattr("infinity.telemetry.http_server._REQUEST_SECONDS", 0.5)
    monkeypatch.setattr("infinity.telemetry.http_server._ANSWER_SECONDS", 1.0)
    with (
        serve(0, lambda: []) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=60) as peer,
        pytest.raises(OSError, match=r"Broken pipe|reset"),
    ):
        send_slowly(peer, 300)
    blocked = threading.Event()
    with serve(0, lambda: blocked.wait(300) and []) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=200) as peer:
            peer.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            assert peer.recv(10) == b""
        blocked.set()


def test_clients_that_never_read_do_not_block_others():
    """If all connection slots are in use, the oldest connection is closed."""
    blocked = threading.Event()
    asked = []

    def snapshots():
        asked.append(True)
        if len(asked) <= 16:
            blocked.wait(300)
        return []

    with serve(0, snapshots) as server, ExitStack() as stack:
        for _ in range(16):
            peer = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=60))
            peer.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        until(lambda: len(asked) == 16)
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=60) as answer:
            assert answer.status == 200
        blocked.set()


def plant_pipe(file: Path, victim: Path) -> None:
    os.mkfifo(file)


def plant_link(file: Path, victim: Path) -> None:
    file.symlink_to(victim)


def plant_file_of_another_user(file: Path, victim: Path) -> None:
    if os.geteuid():
        pytest.skip("requires root to change the owner of a file")
    file.write_text(json.dumps({"/a|/b": [9.0, 1.0], "drives": {}}))
    os.chown(file, OTHER_USER, -1)


def test_planted_files_in_the_runtime_folder_are_ignored(subtests):
    """Daemon and ranks neither block on planted files nor read them, and do not overwrite the target of a link."""
    for plant in [plant_pipe, plant_link, plant_file_of_another_user]:
        with subtests.test(plant.__name__), TemporaryDirectory() as folder:
            tmp_path = Path(folder)
            victim = tmp_path / "victim"
            victim.write_text(json.dumps({"/a|/b": [9.0, 1.0], "drives": {}}))
            precious = victim.read_bytes()
            runtime = tmp_path / "runtime"
            runtime.mkdir(mode=0o700)
            for name in (path_bandwidth.CACHE_NAME, FILE_NAME, "x.rank0.stats"):
                plant(runtime / name, victim)
            names = ["/a", "/b"]
            assert path_bandwidth._from_cache(names, runtime) is None
            path_bandwidth.remember(runtime, names, [1.0, 3.0])
            assert path_bandwidth._from_cache(names, runtime) == [1.0, 3.0]
            with daemon(runtime):
                found = talk(
                    runtime, {"op": "record_bandwidth", "rates": {str(tmp_path): {"read": 1e9}}, "source": "run"}
                )
                assert found[0]["ok"]
                assert json.loads((runtime / FILE_NAME).read_text())["measurements"]
                assert state(runtime)["node"]["broken_stats_files"] == 1
            assert victim.read_bytes() == precious


def listen(folder: Path, uid: int, answer: str) -> subprocess.Popen[bytes]:
    """Start a process of user `uid` that listens on the daemon's socket path and sends `answer` one byte at a time."""
    code = (
        "import os, socket, sys, time\n"
        "server = socket.socket(socket.AF_UNIX); os.umask(0)\n"
        f"os.setuid({uid}); server.bind(sys.argv[1]); server.listen()\n"
        "print('ready', flush=True)\n"
        "while True:\n"
        "    peer, _ = server.accept()\n"
        "    try:\n"
        "        asked = peer.recv(999)\n"
        "        for byte in sys.argv[2].encode(): peer.sendall(bytes([byte])); time.sleep(0.2 if asked else 0)\n"
        "    except OSError: pass\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(folder / SOCKET_NAME), answer], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    return process


@as_root
def test_a_socket_of_another_user_is_not_used(tmp_path, caplog):
    """A client checks the owner of the socket's peer, which the operating system reports."""
    shared = Path(tempfile.mkdtemp(dir="/tmp"))
    shared.chmod(0o1777)
    process = listen(shared, OTHER_USER, "{}\n")
    try:
        assert path_bandwidth._from_daemon(["/a", "/b"], shared) is None
        assert f"belongs to user {OTHER_USER}" in caplog.text
        assert "is in use by another process" in rejected(shared, "--port", "0")
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        for file in shared.iterdir():
            file.unlink()
        shared.rmdir()


def test_a_slow_daemon_response_times_out(tmp_path, monkeypatch):
    monkeypatch.setattr("infinity.daemon_client._ANSWER_SECONDS", 0.3)
    process = listen(tmp_path, os.getuid(), "x" * 1000)
    try:
        began = time.monotonic()
        assert path_bandwidth._from_daemon(["/a", "/b"], tmp_path) is None
        assert time.monotonic() - began < 100, "the complete response takes 200 s"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_runtime_folder_of_another_user_is_rejected(tmp_path):
    """Neither the daemon nor a rank uses a runtime folder that is a link, is world-writable or has another owner."""
    shared = tmp_path / "shared"
    shared.mkdir()
    link = tmp_path / "link"
    link.symlink_to(shared)
    (tmp_path / "private").mkdir(mode=0o700)
    shared.chmod(0o777)
    for folder, reason in ((shared, "mode 0777"), (link, "it is a link")):
        assert reason in rejected(folder, "--port", "0")
        with pytest.raises(ConfigError, match=reason):
            make_stats(folder)
    assert list(shared.iterdir()) == []
    if os.geteuid() == 0:
        os.chown(tmp_path / "private", OTHER_USER, -1)
        assert f"belongs to user {OTHER_USER}" in rejected(tmp_path / "private", "--port", "0")


@as_root
def test_only_root_reads_stats_files_of_other_users(tmp_path):
    stats = make_stats(tmp_path)
    os.chown(stats.path, OTHER_USER, -1)
    assert read_stats_file(stats.path).alive
    os.chown(stats.path, OTHER_USER - 1, -1)
    stats.path.chmod(0o644)
    tmp_path.chmod(0o755)
    for above in tmp_path.parents:
        if "pytest" in str(above):
            above.chmod(0o755)

    def read() -> str:
        with pytest.raises(StatsFileError) as caught:
            read_stats_file(stats.path)
        return str(caught.value)

    assert "belongs to user" in as_user(OTHER_USER, read)


def test_runtime_folder_precedence(tmp_path, monkeypatch):
    """Use NODE_FOLDER or XDG_RUNTIME_DIR if only the user has access, and a temporary folder otherwise."""
    node = tmp_path / "node"
    monkeypatch.setattr(config, "NODE_FOLDER", node)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    own = tmp_path / f"infinity-{os.geteuid()}"
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    assert runtime_dir(TelemetryConfig()) == own
    session = tmp_path / "session"
    for wrong in ("relative", str(session), ""):
        monkeypatch.setenv("XDG_RUNTIME_DIR", wrong)
        assert runtime_dir(TelemetryConfig()) == own
    session.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(session))
    assert runtime_dir(TelemetryConfig()) == session / "infinity"
    assert runtime_dir(TelemetryConfig(runtime_dir="/named")) == Path("/named")
    session.chmod(0o777)
    assert runtime_dir(TelemetryConfig()) == own
    make_stats(own)
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    session.chmod(0o700)
    node.mkdir(mode=0o700)
    assert runtime_dir(TelemetryConfig()) == node
    (node / str(os.geteuid())).mkdir(mode=0o700)
    assert runtime_dir(TelemetryConfig()) == node / str(os.geteuid())
    node.chmod(0o777)
    (node / str(os.geteuid())).rmdir()
    assert runtime_dir(TelemetryConfig()) == session / "infinity"
