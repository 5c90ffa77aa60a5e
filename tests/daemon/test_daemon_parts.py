"""Tests of the daemon's parts in isolation: reservations, collectors, drives, stats files and connections."""

import asyncio
import fcntl
import os
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily

from infinity.errors import BudgetError
from infinity.io.block_devices import SYSFS, Drive, Place, counters, locate, space
from infinity.telemetry import stats_file as stats_file
from infinity_daemon.collection import Collection
from infinity_daemon.collectors import DeviceFamilies, rank_families
from infinity_daemon.configured_drives import Drives
from infinity_daemon.drive_wear import WearWatch
from infinity_daemon.reservations import Owner, Reservations
from infinity_daemon.run_log import RunLog
from infinity_daemon.server import SocketServer
from infinity_daemon.stats_files import StatsFiles
from support.counted_rank import make_stats

DRIVE = Drive(name="nvme0n1", identity="wwid-0")
ALICE, BOB = Owner(uid=0, pid=10, process_started=1), Owner(uid=0, pid=11, process_started=1)


def place(path="/a", file_system=1, drive=DRIVE):
    return Place(path=path, drive=drive, file_system=file_system)


# Reservations


def test_reservations_are_limited_by_the_free_space_of_a_file_system():
    reservations = Reservations()
    assert reservations.reserve(ALICE, "r", place("/a"), 60, free=100) == 40
    with pytest.raises(
        BudgetError, match=r"/b has 100 B free, of which 60 B reserved by run r, but this run needs 50 B"
    ):
        reservations.reserve(BOB, "r", place("/b"), 50, free=100)
    assert reservations.reserve(BOB, "r", place("/b"), 40, free=100) == 0
    assert reservations.reserve(BOB, "r", place("/c", file_system=2), 100, free=100) == 0
    assert reservations.by_drive() == {"nvme0n1": 200}


def test_a_repeated_reservation_replaces_and_only_its_owner_releases_it():
    reservations = Reservations()
    reservations.reserve(ALICE, "r", place(), 60, free=100)
    assert reservations.reserve(ALICE, "r", place(), 90, free=100) == 10
    with pytest.raises(BudgetError):
        reservations.reserve(ALICE, "r", place(), 101, free=100)
    assert reservations.by_drive() == {"nvme0n1": 90}  # a rejected request changes nothing
    assert reservations.release(BOB, "r", "/a") == 0
    assert reservations.release(ALICE, "r", "/a") == 90
    assert reservations.release(ALICE, "r", "/a") == 0
    assert reservations.entries() == ()


@given(
    st.lists(
        st.tuples(st.sampled_from([ALICE, BOB]), st.sampled_from("abc"), st.sampled_from([1, 2]), st.integers(0, 90)),
        max_size=30,
    )
)
def test_reservations_never_exceed_the_free_space(requests):
    reservations = Reservations()
    for owner, run, number, size in requests:
        try:
            if size == 0:
                reservations.release(owner, run, f"/{number}")
            else:
                reservations.reserve(owner, run, place(f"/{number}", number), size, free=100)
        except BudgetError:
            pass
        for number in (1, 2):
            assert sum(e.size for e in reservations.entries() if e.place.file_system == number) <= 100


# Collector isolation


def work():
    yield GaugeMetricFamily("infinity_working", "Working.", value=1)


def fail():
    yield GaugeMetricFamily("infinity_partial", "Partial.", value=1)
    raise OSError("drive gone")


def scrape(**collectors):
    registry = CollectorRegistry()
    collection = Collection(collectors)
    registry.register(collection)
    return collection, lambda: generate_latest(registry).decode()


def test_a_failing_collector_does_not_affect_others():
    collection, text = scrape(failing=fail, working=work)
    found = text()
    assert 'infinity_daemon_collector_success{collector="failing"} 0.0' in found
    assert 'infinity_daemon_collector_success{collector="working"} 1.0' in found
    assert "infinity_working 1.0" in found
    assert "infinity_partial 1.0" in found
    assert 'infinity_daemon_collector_duration_seconds{collector="working"}' in found
    assert collection.health == {"failing": False, "working": True}


# Drives


def fake_sysfs(root, number, partitions=()):
    """Create a sysfs tree with the drive nvme7n1; device `number` (st_dev) is the drive or its last partition."""
    drive = root / "devices/pci/nvme7/nvme7n1"
    drive.mkdir(parents=True)
    (drive / "stat").write_text("5 0 100 7 5 0 2048 9 0 0 0 0 0 0 0 0 0\n")
    (drive / "wwid").write_text("eui.0025\n")
    (root / "class/block").mkdir(parents=True)
    (root / "class/block/nvme7n1").symlink_to(drive)
    target = drive
    for partition in partitions:
        target = drive / partition
        target.mkdir()
        (target / "partition").write_text("1\n")
    (root / "dev/block").mkdir(parents=True)
    (root / f"dev/block/{os.major(number)}:{os.minor(number)}").symlink_to(target)


@pytest.mark.parametrize("partitions", [(), ("nvme7n1p1",)])
def test_locate_finds_the_drive_of_a_folder(tmp_path, partitions):
    number = os.stat(tmp_path).st_dev
    fake_sysfs(tmp_path / "sys", number, partitions)
    found = locate(str(tmp_path), tmp_path / "sys")
    assert found.drive == Drive(name="nvme7n1", identity="eui.0025")
    assert found.file_system == number
    counted = counters(found.drive, tmp_path / "sys")
    assert (counted.read, counted.written) == (100 * 512, 2048 * 512)


def test_device_metrics_match_the_kernel_counters(tmp_path):
    """Each metric reports its own field of the drive's `stat` file, and no counter of another drive."""
    fake_sysfs(tmp_path / "sys", os.stat(tmp_path).st_dev)
    (tmp_path / "sys/devices/pci/nvme7/nvme7n1/stat").write_text("5 0 100 7000 6 0 2048 9000 0 11000 0 0 0 0 0 0 0\n")
    _, text = devices_metrics(tmp_path, [str(tmp_path), "/proc"], sysfs=tmp_path / "sys")
    counted = {
        line.split("{")[0].removeprefix("infinity_device_"): float(line.split()[-1])
        for line in text().splitlines()
        if line.startswith("infinity_device_") and '{device="nvme7n1"}' in line and "_total" in line
    }
    assert counted == {
        "read_bytes_total": 100 * 512, "written_bytes_total": 2048 * 512, "read_operations_total": 5,
        "write_operations_total": 6, "read_seconds_total": 7, "write_seconds_total": 9, "busy_seconds_total": 11,
    }  # fmt: skip


def test_a_folder_without_a_block_device_has_a_drive_name(tmp_path):
    found = locate("/proc")
    assert found.drive.name.startswith("proc-")
    assert counters(found.drive) is None
    with pytest.raises(FileNotFoundError):
        locate(str(tmp_path / "missing"))
    assert 0 < space(str(tmp_path)).free <= space(str(tmp_path)).capacity


def devices_metrics(tmp_path, paths, stats_files=None, sysfs=SYSFS, ranks=()):
    drives = Drives(bandwidth=lambda drive: None, wear=WearWatch({}, sysfs), sysfs=sysfs)
    drives.paths = (*paths, *ranks)
    drives.look()
    devices = DeviceFamilies(
        stats_files=stats_files or StatsFiles(tmp_path / "none", 60, 60), drives=drives, reserved=dict
    )
    devices.paths = tuple(paths)
    collection, text = scrape(devices=devices.collect)
    return collection, text


def test_only_a_missing_configured_path_fails_the_devices_collector(tmp_path):
    used = tmp_path / "used"
    used.mkdir()
    ranks = [str(used), str(tmp_path / "gone")]
    stats = make_stats(tmp_path, "r", 2, 4, ranks)
    stats_files, name = StatsFiles(tmp_path, 60, 60), locate(str(used)).drive.name
    collection, text = devices_metrics(tmp_path, [], stats_files, ranks=ranks)
    assert f'infinity_rank_device_info{{block_device="{name}",device="nvme0",rank="2",run="r"}} 1.0' in text()
    assert collection.health == {"devices": True}  # a missing path of a rank is not the daemon's failure
    collection, text = devices_metrics(tmp_path, [str(tmp_path / "not-here")], stats_files, ranks=ranks)
    assert "infinity_device_capacity_bytes{" in text()
    assert collection.health == {"devices": False}
    stats.close()


def test_a_drive_that_does_not_respond_fails_the_devices_collector(tmp_path, monkeypatch):
    """Its last figures are not served, because they are outdated."""
    collection, text = devices_metrics(tmp_path, [str(tmp_path)])
    assert "infinity_device_capacity_bytes{" in text()
    later = time.time() + 60
    monkeypatch.setattr("infinity_daemon.collectors.time.time", lambda: later)
    assert "infinity_device_capacity_bytes{" not in text()
    assert collection.health == {"devices": False}


# Stats files


def make(folder, rank, run_id="run"):
    return make_stats(folder, run_id, rank, 8)


def test_ranks_are_counted_by_status_across_runs(tmp_path):
    live, ended = make(tmp_path, 0), make(tmp_path, 1)
    other = make(tmp_path, 0, "later")
    ended.close()
    (tmp_path / "broken.stats").write_text("not a stats file")
    (tmp_path / "copy.rank0.stats").write_bytes(live.path.read_bytes())
    _, text = scrape(ranks=lambda: rank_families(StatsFiles(tmp_path, 60, 60)))
    found = text()
    for status, count in {"live": 2, "ended": 1, "dead": 0, "broken": 2}.items():
        assert f'infinity_daemon_ranks{{status="{status}"}} {count}.0' in found
    for run in ("run", "later"):
        assert found.count(f'infinity_run_info{{name="{run}",rank="0",run="{run}",user=') == 1
    for stats in (live, other):
        stats.close()


def test_world_size_is_reported_while_a_rank_is_live(tmp_path):
    first, second = make(tmp_path, 0), make(tmp_path, 1)
    _, text = scrape(ranks=lambda: rank_families(StatsFiles(tmp_path, 60, 60)))
    first.close()
    assert 'infinity_daemon_run_world_size{run="run"} 8.0' in text()
    second.close()
    assert "infinity_daemon_run_world_size{" not in text()
    assert 'infinity_run_info{name="run",rank="0"' in text()


def test_an_ended_stats_file_is_served_until_it_expires(tmp_path, monkeypatch):
    clock = time.monotonic()
    monkeypatch.setattr("infinity_daemon.stats_files.time.monotonic", lambda: clock)
    stats, stats_files = make(tmp_path, 0), StatsFiles(tmp_path, 900, 120)
    steps = stats.counter("steps_total")
    steps.add(57)
    assert [snapshot.value("steps_total") for snapshot in stats_files.scan().snapshots] == [57]
    steps.add(3)
    stats.close()
    for _ in range(3):  # scrapes, 50 s apart
        assert [(snapshot.status, snapshot.value("steps_total")) for snapshot in stats_files.scan().snapshots] == [
            ("ended", 60)
        ]
        clock += 50
    assert stats_files.scan().snapshots == ()
    assert os.listdir(tmp_path) == []


def test_only_stats_files_of_dead_ranks_are_removed(tmp_path, monkeypatch):
    live, dead = make(tmp_path, 0), make(tmp_path, 1)
    with monkeypatch.context() as patch:
        patch.setattr(stats_file, "process_start", lambda pid: 0)
        assert {snapshot.status for snapshot in StatsFiles(tmp_path, 60, 0).scan().snapshots} == {"dead"}
        StatsFiles(tmp_path, 0, 60).scan()  # this process holds the locks of both files
    assert len(os.listdir(tmp_path)) == 2
    fcntl.flock(dead._file, fcntl.LOCK_UN)
    (tmp_path / ".run.rank2.stats.123").write_text("left by a killed rank")
    with monkeypatch.context() as patch:
        patch.setattr(stats_file, "process_start", lambda pid: 0)
        stats_files = StatsFiles(tmp_path, 0, 60)
        stats_files.scan()
        stats_files.remove_expired()
    assert os.listdir(tmp_path) == [live.path.name]
    assert [snapshot.status for snapshot in StatsFiles(tmp_path, 0, 0).scan().snapshots] == ["live"]
    live.close()


def test_a_dead_rank_that_has_moved_to_another_node_is_not_reported_after_the_resume(tmp_path, monkeypatch):
    """Its run has a live rank on this node, whose process is newer than the file of the dead rank."""
    monkeypatch.setattr("infinity.telemetry.stats.pid_namespace", lambda: 0)  # only locks tell which ranks are live
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: 1000.0)
        fcntl.flock(make(tmp_path, 1)._file, fcntl.LOCK_UN)
        fcntl.flock(make(tmp_path, 1, "other")._file, fcntl.LOCK_UN)

    def dead():
        found = StatsFiles(tmp_path, 60, 60).scan().snapshots
        return [(one.header.run_id, one.header.rank) for one in found if one.status == "dead"]

    assert dead() == [("other", 1), ("run", 1)]
    resumed, peer = make(tmp_path, 0), make(tmp_path, 2)
    assert dead() == [("other", 1)]
    fcntl.flock(peer._file, fcntl.LOCK_UN)
    assert dead() == [("other", 1), ("run", 2)]
    resumed.close()


def test_a_dead_rank_is_reported_until_its_run_is_resumed_or_removed(tmp_path, monkeypatch):
    """Its other metrics expire, and neither the daemon nor a starting rank removes its stats file."""
    runtime, drive = tmp_path / "runtime", tmp_path / "drive"
    runtime.mkdir()

    def start(run_id, name="tiny"):
        (drive / run_id).mkdir(parents=True, exist_ok=True)
        return make_stats(runtime, run_id, paths=[drive], name=name)

    def kill(stats):
        fcntl.flock(stats._file, fcntl.LOCK_UN)  # as the operating system does when a process ends

    # As in a different container, only locks tell which ranks are live.
    monkeypatch.setattr("infinity.telemetry.stats.pid_namespace", lambda: 0)
    monkeypatch.setattr("infinity.telemetry.stats.KEEP_CLOSED_SECONDS", 0)
    kill(start("first"))
    kill(start("second"))
    stats_files = StatsFiles(runtime, 0, 0)
    _, text = scrape(ranks=lambda: rank_families(stats_files))

    def dead():
        stats_files.remove_expired()
        start("other").close(keep=False)
        return re.findall(r'infinity_daemon_dead_ranks{name="tiny",run="(.*)"} 1.0', text())

    assert dead() == ["first", "second"]
    assert dead() == ["first", "second"]
    assert "infinity_steps_total{" not in text()
    assert 'infinity_daemon_ranks{status="dead"} 2.0' in text()
    resumed = start("first")
    assert dead() == ["second"]
    (drive / "second").rmdir()
    assert dead() == []
    assert os.listdir(runtime) == [resumed.path.name]
    resumed.close()


def test_starts_ends_and_deaths_of_runs_are_logged(tmp_path, monkeypatch, caplog):
    """The first reading logs the runs that it finds, and later ones only changes."""
    caplog.set_level("INFO")
    monkeypatch.setattr("infinity.telemetry.stats.pid_namespace", lambda: 0)
    log, stats_files = RunLog(), StatsFiles(tmp_path, 900, 120)

    def logged():
        caplog.clear()
        log.observe(stats_files.scan().snapshots)
        log.observe(stats_files.scan().snapshots)
        return [(record.levelname, record.message.replace(f"={os.getpid()}", "=PID")) for record in caplog.records]

    first = make(tmp_path, 0, "first")
    assert logged() == [("INFO", "run.found run=first name=first status=live world_size=8 steps=0")]
    second, third, peer = make(tmp_path, 0, "second"), make(tmp_path, 0, "third"), make(tmp_path, 1, "third")
    assert logged() == [("INFO", f"run.started run={run} name={run} world_size=8") for run in ("second", "third")]
    first.counter("steps_total").add(7)
    first.close()
    second.close(keep=False)
    fcntl.flock(third._file, fcntl.LOCK_UN)
    assert logged() == [
        ("INFO", "run.ended run=first name=first world_size=8 steps=7"),
        ("WARNING", "run.died run=third name=third world_size=8 steps=0 dead_ranks=0 dead_pids=PID"),
        ("INFO", "run.ended run=second steps=0"),
    ]
    resumed = make(tmp_path, 0, "third")
    assert logged() == [("INFO", "run.started run=third name=third world_size=8")]
    for stats in (resumed, peer):
        stats.close()


# Connections


def test_incomplete_messages_and_idle_clients_time_out(tmp_path):
    async def exchange(sent):
        async def answer(line, owner):
            return {}

        server = SocketServer(tmp_path / "s", answer, message_seconds=0.05, idle_seconds=0.05)
        await server.start()
        reader, writer = await asyncio.open_unix_connection(tmp_path / "s")
        writer.write(sent)
        response = await asyncio.wait_for(reader.read(), 60)
        writer.close()
        await server.stop()
        return response

    for sent in (b'{"op"', b""):
        assert b"timed out before a complete message" in asyncio.run(exchange(sent))


def test_a_peer_in_another_container_is_alive_while_connected(tmp_path, monkeypatch):
    monkeypatch.setattr("infinity_daemon.server.peer_of", lambda peer: (0, os.getuid()))

    async def exchange():
        owners = []

        async def answer(line, owner):
            owners.append(owner)
            return {}

        server = SocketServer(tmp_path / "s", answer)
        await server.start()
        reader, writer = await asyncio.open_unix_connection(tmp_path / "s")
        writer.write(b"{}\n")
        await reader.readline()
        before = server.is_alive(owners[0])
        writer.close()
        await writer.wait_closed()
        async with asyncio.timeout(60):
            while server.is_alive(owners[0]):
                await asyncio.sleep(0.01)
        await server.stop()
        return owners[0], before

    owner, before = asyncio.run(exchange())
    assert (owner.pid, before) == (0, True)


def test_a_peer_of_another_user_is_rejected(tmp_path, monkeypatch):
    monkeypatch.setattr("infinity_daemon.server.peer_of", lambda peer: (1, os.getuid() + 1))

    async def exchange():
        server = SocketServer(tmp_path / "s", None)
        await server.start()
        reader, writer = await asyncio.open_unix_connection(tmp_path / "s")
        response = await reader.read()
        writer.close()
        await server.stop()
        return response

    assert f"user id {os.getuid() + 1} is not permitted".encode() in asyncio.run(exchange())
