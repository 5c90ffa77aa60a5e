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
from support.counted_rank import CountedRank
from support.daemon_process import ENVIRONMENT, client, daemon, forked, get, rejected, state, talk, until


@pytest.fixture(scope="module")
def shared_daemon(tmp_path_factory):
    """One daemon and its runtime folder, for tests that only communicate with it."""
    folder = tmp_path_factory.mktemp("runtime")
    with daemon(folder) as process:
        yield process, folder


def test_two_ranks_end_to_end_with_one_killed(tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    live = CountedRank(tmp_path, "e2e", 0, 2, paths=[tmp_path])
    live.stats.counter("steps_total").add(5)

    def train():
        CountedRank(tmp_path, "e2e", 1, 2, paths=[other]).stats.counter("steps_total").add(6)

    with forked(train) as kill, daemon(tmp_path) as process:
        until(lambda: 'infinity_steps_total{rank="1",run="e2e"} 6.0' in get(process.port, "/metrics"))
        text = get(process.port, "/metrics")
        assert 'infinity_steps_total{rank="0",run="e2e"} 5.0' in text
        assert 'infinity_daemon_ranks{status="live"} 2.0' in text
        until(lambda: re.search(r"infinity_device_capacity_bytes{device=.*} [1-9]", get(process.port, "/metrics")))
        kill()
        text = get(process.port, "/metrics")
        assert 'infinity_steps_total{rank="1",run="e2e"} 6.0' in text  # a killed rank keeps its counters
        assert 'infinity_daemon_ranks{status="dead"} 1.0' in text
        health = json.loads(get(process.port, "/healthz"))
        assert health["status"] == "ok"
        assert health["collectors"] == {"build": True, "copies": True, "devices": True, "ranks": True, "stale": True}
        until(lambda: state(tmp_path)["runs"][0]["status"] == "dead")
        node = state(tmp_path)
        assert [rank["status"] for rank in node["runs"][0]["ranks"]] == ["live", "dead"]
        assert node["node"]["metrics_port"] == process.port
        for _ in range(2):  # readings that began after the rank was found dead
            looked = state(tmp_path)["drives_time"]
            until(lambda looked=looked: state(tmp_path)["drives_time"] > looked)
        (drive,) = state(tmp_path)["drives"]
        assert drive["paths"] == [str(tmp_path), str(other)]  # also the path of the killed rank
        assert "counters" not in drive


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
    unrated = {"device": drive, "left_bytes": None}
    assert before == {
        "ok": True, "bandwidth": {str(folder): None}, "together": None, "wear": {str(folder): unrated},
    }  # fmt: skip
    assert done["ok"]
    assert after["bandwidth"][str(folder)]["read"] == 3e9
    assert (folder / "bandwidth.json").exists()


def test_space_is_reserved_rejected_and_released(shared_daemon):
    _, folder = shared_daemon
    free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    half = {"op": "reserve", "path": str(folder), "bytes": free // 2, "run_id": "r"}
    more = {**half, "bytes": free * 2 // 3, "run_id": "other"}
    release = {"op": "release", "path": str(folder), "run_id": "r"}
    first, refused, node, released, again, last = talk(
        folder, half, more, {"op": "state"}, release, more, {**release, "run_id": "other"}
    )
    assert first["ok"]
    assert first["remaining_bytes"] > 0
    assert "storage.paths" in refused["error"]
    assert refused["no_room"] is True
    assert [entry["bytes"] for entry in node["reservations"]] == [free // 2]
    assert released == {"ok": True, "released_bytes": free // 2}
    assert again["ok"]
    assert last["released_bytes"] == free * 2 // 3


def test_a_reservation_ends_with_its_process(shared_daemon):
    process, folder = shared_daemon
    reserve = {"op": "reserve", "path": str(folder), "bytes": 4096, "run_id": "short"}
    with forked(lambda: talk(folder, reserve)):
        until(lambda: state(folder)["reservations"])
        assert [entry["run_id"] for entry in state(folder)["reservations"]] == ["short"]  # it outlives the connection
        assert re.search(r"infinity_device_reserved_bytes{device=.*} 4096\.0", get(process.port, "/metrics"))
    until(lambda: state(folder)["reservations"] == [])


def test_invalid_messages_are_answered_on_an_open_connection(subtests, shared_daemon):
    for message, error in [
        (b"garbage\n", "not JSON"),
        (b"\xff\xfe\n", "not UTF-8"),
        (b"[1]\n", "must be an object"),
        (b"[" * 60000 + b"\n", "not JSON"),
        ({"op": "reserv"}, "did you mean reserve?"),
        ({"op": ["x"]}, "op = ['x'] is not one of 'state'"),
        ({"op": "state", "paths": []}, "unknown key 'paths'"),
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
            answer, node = talk(folder, message, {"op": "state"})
            assert error in answer["error"]
            assert node["ok"]


def test_oversized_and_partial_messages_are_rejected(shared_daemon):
    _, folder = shared_daemon
    for message, error in ((b"x" * (68 << 10), b"65536 bytes"), (b'{"op": "sta', b"newline")):
        with client(folder) as peer:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                peer.sendall(message)
                peer.shutdown(socket.SHUT_WR)
            assert error in peer.recv(4096)


def test_too_many_clients_are_rejected_until_some_disconnect(shared_daemon):
    _, folder = shared_daemon
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(client(folder)) for _ in range(80)]
        for peer in peers[-10:]:
            assert b"too many clients" in peer.recv(4096)
    until(lambda: state(folder).get("ok"))


def test_a_second_daemon_reports_what_is_in_use(shared_daemon, tmp_path):
    """The error names the process that uses the socket, or the port, and no socket file remains."""
    process, folder = shared_daemon
    for runtime, port, message in (
        (folder, 0, f"another infinityd (pid {process.pid})"),
        (tmp_path, process.port, f"port {process.port}"),
    ):
        assert message in rejected(runtime, "--port", str(port))
    assert state(folder)["ok"]
    assert not (tmp_path / "infinityd.sock").exists()


def test_a_socket_of_another_process_is_not_replaced(tmp_path):
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "infinityd.sock"))
        other.listen()
        assert f"another process (pid {os.getpid()})" in rejected(tmp_path, "--port", "0")
        assert (tmp_path / "infinityd.sock").exists()
    (tmp_path / "file").write_text("precious")
    assert "not a socket" in rejected(tmp_path, "--port", "0", "--socket", str(tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "precious"


def test_a_stale_socket_is_replaced(tmp_path):
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(tmp_path / "infinityd.sock"))
    with daemon(tmp_path):
        assert state(tmp_path)["ok"]


def test_sigint_with_a_connected_client_exits_cleanly(tmp_path):
    """The daemon is started from the command line."""
    command = [sys.executable, "-m", "infinity_daemon", "--runtime-dir", str(tmp_path), "--port", "0"]
    with subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True) as process:
        while " started " not in process.stderr.readline():
            assert process.poll() is None
        with client(tmp_path) as peer:
            peer.sendall(b'{"op": ')
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=300)
    assert (process.returncode, "Traceback" in errors) == (0, False), errors
    assert not (tmp_path / "infinityd.sock").exists()
