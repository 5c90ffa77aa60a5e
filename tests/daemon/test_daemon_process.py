"""Tests of the daemon as a process: end to end, and with malformed messages on its socket."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys

import pytest

from infinity.io.block_devices import locate
from support.daemon_process import ENVIRONMENT, client, daemon, get, start_second, talk, until


@pytest.fixture(scope="module")
def shared_daemon(tmp_path_factory):
    """One daemon and its runtime folder, for tests that only communicate with it."""
    folder = tmp_path_factory.mktemp("runtime")
    with daemon(folder) as process:
        yield process, folder


RANK = """
import json, sys, time
from infinity.io.block_devices import locate
from infinity.telemetry import Stats
rank, info = int(sys.argv[2]), {"version": "1", "paths": json.dumps([sys.argv[1]])}
stats = Stats.create(
    sys.argv[1], run_id="e2e", rank=rank, local_rank=rank, world_size=2, devices=["nvme0"], info=info
)
stats.counter("steps_total").add(5 + rank)
print("ready", flush=True)
time.sleep(3600)
"""


def test_two_ranks_end_to_end_with_one_killed(tmp_path):
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(tmp_path), str(rank)], env=ENVIRONMENT, stdout=subprocess.PIPE
        )
        for rank in range(2)
    ]
    try:
        assert [rank.stdout.readline() for rank in ranks] == [b"ready\n"] * 2
        with daemon(tmp_path) as process:
            text = get(process.port, "/metrics")
            assert 'infinity_steps_total{rank="0",run="e2e"} 5.0' in text
            assert 'infinity_steps_total{rank="1",run="e2e"} 6.0' in text
            assert 'infinity_daemon_ranks{status="live"} 2.0' in text
            assert re.search(r"infinity_device_capacity_bytes{device=.*} [1-9]", text)
            ranks[1].kill()
            ranks[1].wait()
            text = get(process.port, "/metrics")
            assert 'infinity_steps_total{rank="1",run="e2e"} 6.0' in text  # a killed rank keeps its counters
            assert 'infinity_daemon_ranks{status="dead"} 1.0' in text
            health = json.loads(get(process.port, "/healthz"))
            assert health["status"] == "ok"
            assert health["collectors"] == {"build": True, "devices": True, "ranks": True, "stale": True}
            (status,) = talk(tmp_path, {"op": "status"})
            assert [rank["status"] for rank in status["ranks"]] == ["live", "dead"]
            assert status["metrics_port"] == process.port
            assert status["paths"][0]["path"] == str(tmp_path)
        assert not (tmp_path / "infinityd.sock").exists()
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
            rank.stdout.close()


def test_bandwidth_is_null_until_measured(shared_daemon):
    _, folder = shared_daemon
    ask = {"op": "bandwidth", "paths": [str(folder)]}
    before, done, after = talk(
        folder,
        ask,
        {"op": "record_bandwidth", "rates": {str(folder): {"read": 3e9, "write": 2e9}}, "source": "run"},
        ask,
    )
    drive = locate(str(folder)).drive.name
    unrated = {"device": drive, "rated_bytes": None, "left_bytes": None, "daily_share": 0.001}
    assert before == {
        "ok": True, "bandwidth": {str(folder): None}, "together": None, "wear": {str(folder): unrated},
    }  # fmt: skip
    assert done["ok"]
    assert after["bandwidth"][str(folder)]["read"] == 3e9
    assert (folder / "bandwidth.json").exists()
    (status,) = talk(folder, {"op": "status"})
    assert status["ok"]


def test_space_is_reserved_rejected_and_released(shared_daemon):
    _, folder = shared_daemon
    free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    half = {"op": "reserve", "path": str(folder), "bytes": free // 2, "run_id": "r"}
    more = {**half, "bytes": free * 2 // 3, "run_id": "other"}
    release = {"op": "release", "path": str(folder), "run_id": "r"}
    first, rejected, status, released, again, last = talk(
        folder, half, more, {"op": "status"}, release, more, {**release, "run_id": "other"}
    )
    assert first["ok"]
    assert first["remaining_bytes"] > 0
    assert "storage.paths" in rejected["error"]
    assert rejected["no_room"] is True
    assert [entry["bytes"] for entry in status["reservations"]] == [free // 2]
    assert released == {"ok": True, "released_bytes": free // 2}
    assert again["ok"]
    assert last["released_bytes"] == free * 2 // 3


def test_a_reservation_ends_with_its_process(shared_daemon):
    process, folder = shared_daemon
    code = (
        "import json, socket, sys\n"
        "peer = socket.socket(socket.AF_UNIX); peer.connect(sys.argv[1] + '/infinityd.sock')\n"
        "ask = {'op': 'reserve', 'path': sys.argv[1], 'bytes': 4096, 'run_id': 'short'}\n"
        "peer.sendall(json.dumps(ask).encode() + b'\\n'); assert b'ok' in peer.recv(999); peer.close()\n"
        "print('ready', flush=True); sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", code, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as rank:
        assert rank.stdout.readline() == b"ready\n"
        (status,) = talk(folder, {"op": "status"})
        assert [entry["run_id"] for entry in status["reservations"]] == ["short"]  # it outlives the connection
        assert re.search(r"infinity_device_reserved_bytes{device=.*} 4096\.0", get(process.port, "/metrics"))
        rank.kill()
    until(lambda: talk(folder, {"op": "status"})[0]["reservations"] == [])


def test_invalid_messages_are_answered_on_an_open_connection(subtests, shared_daemon):
    for message, error in [
        (b"garbage\n", "not JSON"),
        (b"\xff\xfe\n", "not UTF-8"),
        (b"[1]\n", "must be an object"),
        (b"[" * 60000 + b"\n", "not JSON"),
        ({"op": "reserv"}, "did you mean reserve?"),
        ({"op": ["x"]}, "op = ['x'] is not one of 'status'"),
        ({"op": "status", "paths": []}, "unknown key 'paths'"),
        ({"op": "bandwidth"}, "lacks the key 'paths'"),
        ({"op": "bandwidth", "paths": []}, "list of 1 to 64"),
        ({"op": "bandwidth", "paths": ["/no/such/folder"]}, "No such file"),
        ({"op": "bandwidth", "paths": ["relative"]}, "absolute"),
        ({"op": "bandwidth", "paths": ["/\ud800"]}, "printable"),
        ({"op": "record_bandwidth", "rates": {"/": {"read": float("nan")}}, "source": "run"}, "rates./.read = nan"),
        ({"op": "record_bandwidth", "rates": {"/": {}}, "source": "run"}, "read, write, mixed"),
        ({"op": "record_bandwidth", "rates": {}, "source": "run"}, "0 paths; send 1 to 64"),
        ({"op": "record_bandwidth", "rates": {"/": {"read": 1}}, "source": "daemon"}, "'probe', 'run'"),
        ({"op": "reserve", "path": "/", "bytes": -1, "run_id": "r"}, "bytes = -1 is below the minimum of 1"),
    ]:
        with subtests.test(error):
            _, folder = shared_daemon
            answer, status = talk(folder, message, {"op": "status"})
            assert error in answer["error"]
            assert status["ok"]


def test_oversized_and_partial_messages_are_rejected(shared_daemon):
    _, folder = shared_daemon
    for message, error in ((b"x" * (68 << 10), b"65536 bytes"), (b'{"op": "sta', b"newline")):
        with client(folder) as peer:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                peer.sendall(message)
                peer.shutdown(socket.SHUT_WR)
            assert error in peer.recv(4096)
    assert talk(folder, {"op": "status"})[0]["ok"]


def test_too_many_clients_are_rejected_until_some_disconnect(shared_daemon):
    _, folder = shared_daemon
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(client(folder)) for _ in range(80)]
        for peer in peers[-10:]:
            assert b"too many clients" in peer.recv(4096)
    until(lambda: talk(folder, {"op": "status"})[0].get("ok"))


def test_a_second_daemon_reports_what_is_in_use(shared_daemon, tmp_path):
    """The error names the process that uses the socket, or the port, and no socket file remains."""
    process, folder = shared_daemon
    for runtime, port, message in (
        (folder, 0, f"another infinityd (pid {process.pid})"),
        (tmp_path, process.port, f"port {process.port}"),
    ):
        second = start_second(runtime, "--port", str(port))
        assert (second.returncode, message in second.stderr) == (2, True), second.stderr
        assert "Traceback" not in second.stderr
    assert talk(folder, {"op": "status"})[0]["ok"]
    assert not (tmp_path / "infinityd.sock").exists()


def test_a_socket_of_another_process_is_not_replaced(tmp_path):
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "infinityd.sock"))
        other.listen()
        second = start_second(tmp_path, "--port", "0")
        assert second.returncode == 2
        assert f"another process (pid {os.getpid()})" in second.stderr
        assert (tmp_path / "infinityd.sock").exists()
    (tmp_path / "file").write_text("precious")
    assert "not a socket" in start_second(tmp_path, "--port", "0", "--socket", str(tmp_path / "file")).stderr
    assert (tmp_path / "file").read_text() == "precious"


def test_a_stale_socket_is_replaced(tmp_path):
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(tmp_path / "infinityd.sock"))
    with daemon(tmp_path):
        assert talk(tmp_path, {"op": "status"})[0]["ok"]


def test_sigint_with_a_connected_client_exits_cleanly(tmp_path):
    with daemon(tmp_path) as process, client(tmp_path) as peer:
        peer.sendall(b'{"op": ')
        process.send_signal(signal.SIGINT)
        assert process.wait(300) == 0
        assert "Traceback" not in process.log.read_text()
        assert not (tmp_path / "infinityd.sock").exists()
