"""Tests of a daemon that runs as root and serves several users, among them malicious ones."""

from __future__ import annotations

import json
import os
import re
import resource
import select
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from infinity import config
from infinity.config import TelemetryConfig, runtime_dir
from infinity.daemon_client import SOCKET_NAME
from infinity.errors import ConfigError, FolderBusyError
from infinity.io.block_devices import locate
from infinity_daemon import reservations, server
from infinity_daemon.daemon_config import load_daemon_config
from infinity_daemon.stats_files import StatsFiles
from infinity_daemon.users import ALL, Users, may_name, opened
from support.counted_rank import make_stats
from support.daemon_process import as_user, client, daemon, get, rejected, state, talk, until

ALICE, BOB, GROUP = 65_001, 65_002, 65_003
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="requires root to act as several users")


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder that all users can enter. Its subfolder `run` takes the place of /run/infinity."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o1777)
    (folder / "run").mkdir(mode=0o755)
    monkeypatch.setattr(config, "NODE_FOLDER", folder / "run")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    for name, uid in (("alice", ALICE), ("bob", BOB)):
        (folder / name).mkdir(mode=0o700)
        os.chown(folder / name, uid, uid)
    yield folder
    shutil.rmtree(folder)


def start_rank(run_id: str, *paths: Path, close: bool = False, **info: str) -> str:
    """Create the stats file of a rank, as this user's runs do, and return its path. The process stays its owner."""
    stats = make_stats(runtime_dir(TelemetryConfig()), run_id, paths=paths, **info)
    stats.counter("steps_total").add(7)
    if close:
        stats.close()
    return str(stats.path)


def ask(op: str, **values: object) -> dict[str, Any]:
    """Return the daemon's response, also if it is an error."""
    (answer,) = talk(runtime_dir(TelemetryConfig()), {"op": op, **values})
    return answer


def test_status_shows_the_runs_and_reservations_of_all_users(node: Path) -> None:
    """Each user's ranks find root's daemon and get a private folder, and every user sees all runs."""
    with daemon(node / "run", "--group", ALL) as process:
        users = (("alice", ALICE), ("bob", BOB))
        for name, uid in users:
            path = as_user(uid, lambda name=name: start_rank(f"run-of-{name}", node / name, name=f"model of {name}"))
            assert path == str(node / f"run/{uid}/run-of-{name}.rank0.stats")
            about = (node / f"run/{uid}").stat()
            assert (about.st_uid, stat.S_IMODE(about.st_mode)) == (uid, 0o700)
        for uid in (ALICE, BOB, 0):

            def runs() -> list[list[object]]:
                found = ask("state")["runs"]
                return sorted([run["id"], run["name"], run["user"], run["steps"]] for run in found)

            expected = [[f"run-of-{name}", f"model of {name}", str(uid), 7] for name, uid in users]
            until(lambda uid=uid, runs=runs, expected=expected: as_user(uid, runs) == expected)
        assert f'user="{BOB}"' in get(process.port, "/metrics")

        def reserve() -> list[object]:
            answer = ask("reserve", path=str(node / "bob"), bytes=4096, run_id="run-of-bob")
            return [answer.get("ok"), ask("state")["reservations"][0]["user"]]

        assert as_user(BOB, reserve) == [True, str(BOB)]
        until(lambda: not state(node / "run")["reservations"])  # its process has ended


def test_a_user_can_only_change_own_reservations_and_reads_nothing_of_others(node: Path) -> None:
    """Otherwise, a user could keep the runs of others off a drive, or find out which files exist."""
    (node / "bob/secret").mkdir()
    os.chown(node / "bob/secret", BOB, BOB)

    def probe() -> list[object]:
        found = []
        for name in ("secret", "missing"):
            path = str(node / "bob" / name)
            found.append(ask("bandwidth", paths=[path])["error"].replace(name, ""))
            found.append(ask("reserve", path=path, bytes=1, run_id="r")["error"].replace(name, ""))
        start_rank("spy", node / "bob/secret", node / "bob/missing")
        until(lambda: [run["id"] for run in ask("state")["runs"]] == ["spy"])
        return [found, [path for drive in ask("state")["drives"] for path in drive["paths"]]]

    with daemon(node / "run", "--group", ALL), client(node / "run") as peer, peer.makefile("rb") as answers:
        request = {"path": str(node / "alice"), "run_id": "mine"}
        peer.sendall(json.dumps({"op": "reserve", "bytes": 4096, **request}).encode() + b"\n")
        assert json.loads(answers.readline())["ok"]
        for uid in (ALICE, BOB):
            assert as_user(uid, lambda: ask("release", **request)) == {"ok": True, "released_bytes": 0}
        for path in (node, node / "bob", "/root"):
            answer = as_user(ALICE, lambda path=path: ask("reserve", path=str(path), bytes=1, run_id="r"))
            assert "belong" in answer["error"]
        rates = {str(node / "alice"): {"read": 1.0, "write": 1.0, "mixed": 1.0}}  # which affect all runs on the drive
        answer = as_user(ALICE, lambda: ask("record_bandwidth", rates=rates, source="probe"))
        assert answer["error"].startswith("only root may record bandwidth")
        assert talk(node / "run", {"op": "record_bandwidth", "rates": rates, "source": "probe"})[0]["ok"]
        (left,) = state(node / "run")["reservations"]
        assert (left["pid"], left["user"]) == (os.getpid(), "root")
        found, paths = as_user(ALICE, probe)
    assert len(set(found)) == 1, found
    assert "is not a folder that belongs to user" in found[0]
    assert paths == []


def test_a_folder_counts_as_it_is_when_the_daemon_accesses_it(node: Path) -> None:
    """Links to folders that a user may name are followed, but not in or into private folders of others."""
    for path in (node / "bob/secret", node / "bob/of-root", node / "team/alice"):
        path.mkdir(parents=True)
    os.chown(node / "bob/secret", BOB, BOB)
    os.chown(node / "team/alice", ALICE, ALICE)
    (node / "team").chmod(0o770)  # a folder of a group
    (node / "bob/link").symlink_to(node / "alice")
    (node / "alice/runs").mkdir()
    os.chown(node / "alice/runs", ALICE, ALICE)
    (node / "alice/link").symlink_to("../alice/runs")
    (node / "alice/loop").symlink_to("loop")
    for name in ("alice", "alice/link", "team", "team/alice"):
        assert may_name(f"{node}/{name}", ALICE), name
    for name in ("alice/loop", "bob/secret", "bob/of-root", "bob/link", "bob/secret/../../alice"):
        assert not may_name(f"{node}/{name}", ALICE), name
    assert not may_name("alice", ALICE)

    users = Users(node / "run", ALL)
    users.admit(ALICE)
    stats_files = StatsFiles(node / "run", 900, 900, users)
    as_user(ALICE, lambda: start_rank("r", node / "alice/runs", close=True))
    assert stats_files.scan().snapshots[0].header.paths == (str(node / "alice/runs"),)
    (node / "alice/runs").rmdir()
    (node / "alice/runs").symlink_to(node / "bob/secret")
    assert stats_files.scan().snapshots[0].header.paths == ("",)

    with opened(str(node / "alice"), ALICE, own=True) as folder:
        (node / "alice").rename(node / "moved")
        (node / "alice").symlink_to("/proc")
        assert locate(folder).file_system == (node / "moved").stat().st_dev
    with pytest.raises(ConfigError, match="is not a folder"), opened(str(node / "alice/missing"), ALICE):
        pass


def test_an_inaccessible_folder_of_a_user_does_not_hide_other_users(
    node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root cannot access a FUSE file system that a user has mounted."""
    users = Users(node / "run", ALL)
    for uid in (ALICE, BOB):
        users.admit(uid)
    original = Path.lstat

    def lstat(path: Path) -> os.stat_result:
        if path.name == str(ALICE):
            raise PermissionError(path)
        return original(path)

    monkeypatch.setattr(Path, "lstat", lstat)
    assert [uid for _, uid in users.folders()] == [BOB]


def test_a_user_without_a_folder_is_logged_and_gets_an_error(node: Path) -> None:
    (node / "run" / str(ALICE)).write_text("")
    with daemon(node / "run", "--group", ALL) as process:

        def connect() -> str:
            with socket.socket(socket.AF_UNIX) as peer:
                peer.connect(str(node / "run" / SOCKET_NAME))
                return peer.recv(1 << 16).decode()

        assert f"cannot create the folder of user id {ALICE}" in as_user(ALICE, connect)
        assert re.search(f"WARNING client.folder uid={ALICE} reason=.*Not a directory", process.log.read_text())


def plant(folder: Path, victim: Path) -> None:
    """Fill the folder of a user with links, pipes, foreign files and names that the daemon looks for."""
    name = "x{}.rank0.stats".format
    (folder / name(1)).symlink_to(victim)
    (folder / name(2)).symlink_to(victim.parent)
    os.mkfifo(folder / name(3))
    (folder / name(4)).mkdir()
    (folder / name(5)).write_bytes(b"INFSTATS" + b"\xff" * 99)
    (folder / ".x8.rank0.stats.1").write_bytes(b"")
    (folder / ".x6.rank0.stats.1").symlink_to(victim)
    (folder / ".x7.rank0.stats.1").symlink_to(victim.parent)
    (folder / "nested").symlink_to(victim.parent)
    for file in set(folder.iterdir()) - {folder / SOCKET_NAME}:
        os.utime(file, (0, 0), follow_symlinks=False)


def test_planted_links_make_root_neither_read_nor_remove_files(node: Path) -> None:
    """Neither the files in a user's folder nor a planted folder lead the daemon to files of other users."""
    victim = Path(as_user(BOB, lambda: start_rank("victim", close=True)))  # in bob's own folder, without a daemon
    assert victim.parent == node / f"infinity-{BOB}"
    content = victim.read_bytes()
    with daemon(node / "run", "--group", ALL, "--keep-dead-seconds", "0") as process:
        folder = Path(as_user(ALICE, lambda: str(runtime_dir(TelemetryConfig()))))
        as_user(ALICE, lambda: plant(folder, victim))
        shutil.copy(victim, folder / victim.name)  # a file of root in alice's folder
        until(lambda: state(node / "run")["node"]["broken_stats_files"] == 6)
        foreign = folder / ".x9.rank0.stats.1"  # a temporary file of root in alice's folder
        foreign.write_bytes(b"")
        os.utime(foreign, (0, 0))
        until(lambda: not (folder / ".x8.rank0.stats.1").exists())
        assert state(node / "run")["runs"] == []
        assert foreign.exists()
        assert "victim" not in get(process.port, "/metrics")
        assert as_user(BOB, lambda: bool(ask("state")["ok"]))
        assert "Traceback" not in process.log.read_text()
    assert victim.read_bytes() == content
    assert sorted(path.name for path in victim.parent.iterdir()) == [victim.name]


def test_users_cannot_take_the_place_of_another_folder_or_of_the_socket(node: Path) -> None:
    """The runtime folder is writable only by root, and a folder with a wrong owner or a link is not read."""

    def attack() -> list[str]:
        ask("state")
        failed = []
        for act in (
            lambda: os.mkdir(node / f"run/{BOB}"),
            lambda: os.rename(node / f"run/{ALICE}", node / f"run/{BOB}"),
            lambda: os.symlink(node / "alice", node / f"run/{BOB}"),
            lambda: os.unlink(node / "run" / SOCKET_NAME),
            lambda: os.rmdir(node / f"run/{ALICE}"),
        ):
            try:
                act()
            except OSError as error:
                failed.append(type(error).__name__)
        return failed

    with daemon(node / "run", "--group", ALL):
        found = as_user(ALICE, attack)
        assert found[:4] == ["PermissionError"] * 4
        assert len(found) == 5
        os.symlink(node / f"run/{ALICE}", node / f"run/{BOB}")
        assert list(Users(node / "run", ALL).folders()) == [(node / f"run/{ALICE}", ALICE)]
        assert as_user(BOB, lambda: str(runtime_dir(TelemetryConfig()))) == str(node / f"infinity-{BOB}")


def test_a_run_with_the_id_of_another_users_run_stays_apart(node: Path) -> None:
    """The later one gets a different id. Metrics and bandwidth limits of the two runs are separate."""
    users = Users(node / "run", ALL)
    for uid in (BOB, ALICE):
        users.admit(uid)
    stats_files = StatsFiles(node / "run", 900, 900, users)
    as_user(BOB, lambda: start_rank("same", node / "bob", close=True))
    assert [one.header.run_id for one in stats_files.scan().snapshots] == ["same"]
    as_user(ALICE, lambda: start_rank("same", node / "alice", close=True))
    found = {one.uid: one.header.run_id for one in stats_files.scan().snapshots}
    assert found == {BOB: "same", ALICE: f"same@{ALICE}"}
    assert (stats_files.shown_id("same", BOB), stats_files.shown_id("same", ALICE)) == ("same", f"same@{ALICE}")
    (node / f"run/{BOB}/same.rank0.stats").unlink()
    assert [one.header.run_id for one in stats_files.scan().snapshots] == ["same"]


def test_one_user_cannot_exhaust_the_limits_of_others(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stats files, texts, paths and reservations are limited per user."""
    monkeypatch.setattr("infinity_daemon.stats_files._MAX_USER_FILES", 3)
    users = Users(node / "run", ALL)
    for uid in (ALICE, BOB):
        users.admit(uid)
    texts = {"name": "n" * 20_000, "hosts": json.dumps([f"node{number}" for number in range(200)])}
    for number in range(5):
        as_user(ALICE, lambda n=number: start_rank(f"r{n}", *[node / "alice"] * 64, close=True, **texts))
    as_user(BOB, lambda: start_rank("bobs", node / "bob", close=True))
    found = StatsFiles(node / "run", 900, 900, users).scan().snapshots
    assert [one.header.run_id for one in found] == ["r0", "r1", "r2", "bobs"]
    assert {len(one.header.paths) for one in found[:3]} == {16}
    assert {len(one.header.hosts) for one in found[:3]} == {64}
    monkeypatch.setattr("infinity_daemon.stats_files._MAX_USER_PATHS", 1)
    (node / "alice/other").mkdir()
    os.chown(node / "alice/other", ALICE, ALICE)
    as_user(ALICE, lambda: start_rank("r0", node / "alice", node / "alice/other", node / "alice", close=True))
    limited = StatsFiles(node / "run", 900, 900, users).scan().snapshots
    assert limited[0].header.paths == (str(node / "alice"), "", str(node / "alice"))
    assert {len(one.header.name) for one in found[:3]} == {128}
    monkeypatch.setattr(reservations, "_MAX_RESERVATIONS", 1)
    held, place = reservations.Reservations(), locate(str(node))
    for uid in (ALICE, BOB):
        held.reserve(reservations.Owner(uid=uid, pid=1, process_started=1), "r", place, 1, 10)
    with pytest.raises(ConfigError, match="limit of 1 reservations per user"):
        held.reserve(reservations.Owner(uid=BOB, pid=1, process_started=1), "s", place, 1, 10)


def test_connections_of_one_user_do_not_keep_out_another_user(node: Path) -> None:
    def occupy() -> bool:
        folder = runtime_dir(TelemetryConfig())
        peers = [client(folder) for _ in range(server.MAX_CLIENTS + 1)]
        try:
            return b"too many clients" in peers[-1].recv(1 << 16)
        finally:  # keep the connections while the test connects as another user
            os.write(occupied, b"x")
            os.read(released, 1)

    waiting, occupied = os.pipe()
    released, releasing = os.pipe()
    with daemon(node / "run", "--group", ALL), ThreadPoolExecutor(1) as pool:
        found = pool.submit(as_user, ALICE, occupy)
        try:
            assert select.select([waiting], [], [], 300)[0]
            assert as_user(BOB, lambda: ask("state")["ok"])
        finally:
            os.write(releasing, b"x")
        assert found.result(300)
    for descriptor in (waiting, occupied, released, releasing):
        os.close(descriptor)


def test_a_daemon_for_several_users_raises_its_limit_of_open_files(node: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard - 1, hard))
    try:
        with daemon(node / "run", "--group", ALL) as process:
            assert resource.prlimit(process.pid, resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_group_restricts_who_may_connect(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel checks the mode of the socket, so users outside of the group use a folder of their own."""
    with pytest.raises(ConfigError, match="does not exist"):
        Users(node / "run", "no-such-group")
    users = Users(node / "run", ALL)
    users._group = GROUP
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(node / "run" / SOCKET_NAME))
        users.open_socket(node / "run" / SOCKET_NAME)
        listener.listen()
        about = (node / "run" / SOCKET_NAME).stat()
        assert (about.st_gid, stat.S_IMODE(about.st_mode)) == (GROUP, 0o660)

        def connects() -> bool:
            with socket.socket(socket.AF_UNIX) as peer:
                return peer.connect_ex(str(node / "run" / SOCKET_NAME)) == 0

        assert as_user(ALICE, connects, GROUP)
        assert not as_user(BOB, connects)
        assert as_user(BOB, lambda: str(runtime_dir(TelemetryConfig()))) == str(node / f"infinity-{BOB}")


def test_a_daemon_for_several_users_needs_root_and_a_private_runtime_folder(node: Path) -> None:
    def start() -> str:
        try:
            Users(node / "run", ALL)
        except ConfigError as error:
            return str(error)
        return ""

    assert "requires that infinityd runs as root" in as_user(ALICE, start)
    (node / "run").chmod(0o1777)
    assert "must be writable only by root" in rejected(node / "run", "--port", "0", "--group", ALL)
    assert load_daemon_config(None, {"server.group": ALL}).runtime_dir == Path("/run/infinity")
    with pytest.raises(ConfigError, match="users would not find the socket"):
        load_daemon_config(None, {"server.group": ALL, "server.socket": "/run/other.sock"})


def test_the_own_daemon_of_a_user_does_not_replace_the_daemon_of_root(node: Path) -> None:
    with daemon(node / "run", "--group", ALL):

        def start() -> str:
            try:
                server._claim(runtime_dir(TelemetryConfig()) / SOCKET_NAME)
            except FolderBusyError as error:
                return str(error)
            return ""

        assert "the infinityd of root" in as_user(ALICE, start)
    socket_path = node / f"run/{ALICE}" / SOCKET_NAME
    assert socket_path.is_symlink()
    assert as_user(ALICE, start) == ""  # root's daemon has stopped
    assert not socket_path.is_symlink()
    with daemon(node / "run", "--group", ALL):
        assert as_user(ALICE, lambda: bool(ask("state")["ok"]))  # root's daemon is back


def test_users_without_a_daemon_for_several_users_keep_their_folder(node: Path) -> None:
    """A daemon of root that serves only root creates no folders."""
    with daemon(node / "run"):
        assert as_user(ALICE, lambda: str(runtime_dir(TelemetryConfig()))) == str(node / f"infinity-{ALICE}")
        assert not (node / f"run/{ALICE}").exists()
    (node / "run").chmod(0o700)
    assert as_user(ALICE, lambda: str(runtime_dir(TelemetryConfig()))) == str(node / f"infinity-{ALICE}")
