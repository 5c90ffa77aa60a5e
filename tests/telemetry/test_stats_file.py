"""Tests of stats files: readers see a rank's counters, whatever happens to the rank or the file."""

import contextlib
import errno
import json
import os
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.errors import ConfigError, CorruptPageError, StallError, StorageError
from infinity.telemetry import BY_NAME, Stats, StatsFileError, error_reason, find_stats_files, read_stats_file
from infinity.telemetry.stats import KEEP_CLOSED_SECONDS
from infinity.telemetry.stats_cells import CLOSED_CELL
from infinity.telemetry.stats_file import has_exited, is_stopped, process_start

LABELS = {"op": "read", "state": "param", "device": "nvme0"}


def make(folder, rank=0, **changes):
    arguments = dict(run_id="run-a", rank=rank, local_rank=rank, world_size=4, devices=["nvme0", "nvme1"], info={})
    return Stats.create(folder, **{**arguments, **changes})


def test_readers_see_the_increments_of_the_writer(tmp_path):
    stats = make(tmp_path, info={"paths": json.dumps(["/a", "/b"])})
    counter, gauge = stats.counter("io_bytes_total", **LABELS), stats.gauge("cache_slots", status="free")
    histogram = stats.histogram("io_request_duration_seconds", op="write")
    counter.add(4096)
    counter.add()
    gauge.set(7)
    for seconds in (0.0005, 0.0006, 1e9):
        histogram.observe(seconds)
    snapshot = read_stats_file(stats.path)
    assert snapshot.alive
    assert snapshot.header.paths == ("/a", "/b")
    assert snapshot.value("io_bytes_total", **LABELS) == 4097
    assert snapshot.value("cache_slots", status="free") == 7
    seen = snapshot.histogram_at(BY_NAME["io_request_duration_seconds"], ("write",))
    assert (sum(seen.counts), seen.counts[0], seen.counts[1], seen.counts[-1]) == (3, 1, 1, 1)
    assert seen.sum == pytest.approx(1e9)
    assert snapshot.values == stats.snapshot().values
    assert sum(snapshot.values) == pytest.approx(4097 + 7 + 3 + 1e9)  # and every other cell is 0


def test_hosts_are_validated():
    """The list is empty if a name is not a valid host name, and shortened if it is too long."""
    assert make(None).header.hosts == ()
    valid = ["node0", "gpu-12.example.org", "my_host", "x" * 64]
    assert make(None, info={"hosts": json.dumps(valid)}).header.hosts == tuple(valid)
    for odd in ("", "a b", "a/b", "a:1", "a@b", "<b>", "a..b", "a.", ".a", "ä", "a\n", "x" * 65, 7, None, ["a"]):
        assert make(None, info={"hosts": json.dumps(["node0", odd])}).header.hosts == (), odd
    for text in ("", "{}", '"node0"', "[" * 10_000):
        assert make(None, info={"hosts": text}).header.hosts == (), text
    many = [f"node{number}" for number in range(1000)]
    assert make(None, info={"hosts": json.dumps(many)}).header.hosts == tuple(many[:256])


def test_stats_file_has_private_mode_and_final_name(tmp_path):
    stats = make(tmp_path / "new" / "folder", rank=3)
    assert stats.path.name == "run-a.rank3.stats"
    assert stat.S_IMODE(stats.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(stats.path.parent.stat().st_mode) == 0o700
    assert os.listdir(stats.path.parent) == [stats.path.name]
    stats.close(keep=False)
    stats.close(keep=False)
    assert os.listdir(stats.path.parent) == []


def test_close_keeps_the_file_with_status_ended(tmp_path):
    stats = make(tmp_path)
    counter = stats.counter("steps_total")
    counter.add()
    stats.close()
    counter.add()
    snapshot = read_stats_file(stats.path)
    assert snapshot.status == "ended"
    assert snapshot.values[CLOSED_CELL] > 0


def test_close_does_not_remove_the_file_of_a_successor(tmp_path):
    first = make(tmp_path)
    second = make(tmp_path)
    first.close(keep=False)
    assert second.path.exists()
    assert read_stats_file(second.path).alive


def test_creation_removes_old_closed_files_of_other_runs(tmp_path, monkeypatch):
    """Without a daemon, no other process removes them; files of the same run are replaced instead."""
    old, mine, dead = make(tmp_path), make(tmp_path, run_id="run-b", rank=1), make(tmp_path, run_id="run-c")
    old.close()
    mine.close()
    with monkeypatch.context() as patch:
        patch.setattr("infinity.telemetry.stats_file._status", lambda *_: "dead")
        make(tmp_path, run_id="run-b")
    assert len(find_stats_files(tmp_path)) == 4
    later = time.time() + KEEP_CLOSED_SECONDS - 60
    monkeypatch.setattr(time, "time", lambda: later)
    make(tmp_path, run_id="run-b")
    assert old.path.exists()
    later += 120
    make(tmp_path, run_id="run-b")
    assert [old.path.exists(), mine.path.exists(), dead.path.exists()] == [False, True, True]


def test_a_stats_file_with_a_different_name_is_rejected(tmp_path):
    """A copy would add a duplicate sample to a series."""
    stats = make(tmp_path)
    copy = tmp_path / "run-a.rank1.stats"
    copy.write_bytes(stats.path.read_bytes())
    with pytest.raises(StatsFileError, match=r"run-a\.rank0\.stats"):
        read_stats_file(copy)


def test_invalid_arguments_are_rejected(subtests, tmp_path):
    for changes in [
        {"run_id": "../up"},
        {"run_id": ""},
        {"rank": 4},
        {"rank": -1},
        {"devices": ["nvme0", "nvme0"]},
        {"devices": [f"nvme{i}" for i in range(65)]},
        {"info": {"version": "a\nb"}},
        {"info": {"x": "y" * 70000}},
    ]:
        with subtests.test(changes=changes):
            with pytest.raises(ConfigError):
                make(tmp_path, **changes)
            assert os.listdir(tmp_path) == []


def test_an_unwritable_folder_error_names_the_setting(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"telemetry\.runtime_dir"):
        make(tmp_path / "file" / "below")


@contextlib.contextmanager
def rank_process(code, *arguments):
    """Run `code` in a process that has printed ``ready``."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as rank:
        try:
            assert rank.stdout.readline() == "ready\n"
            yield rank
        finally:
            rank.kill()


def test_a_killed_rank_is_dead_and_its_counters_remain(tmp_path):
    code = (
        "import sys, time\n"
        "from infinity.telemetry import Stats\n"
        "s = Stats.create(sys.argv[1], run_id='k', rank=0, local_rank=0, world_size=1, devices=[], info={})\n"
        "s.counter('steps_total').add(11)\n"
        "print('ready', flush=True)\n"
        "time.sleep(3600)\n"
    )
    path = tmp_path / "k.rank0.stats"
    with rank_process(code, tmp_path) as rank:
        assert read_stats_file(path).alive
        os.kill(rank.pid, signal.SIGKILL)
        os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOWAIT)  # a zombie now, still in /proc
        assert read_stats_file(path).status == "dead"
    snapshot = read_stats_file(path)
    assert snapshot.status == "dead"
    assert snapshot.value("steps_total") == 11
    make(tmp_path)
    assert path.exists(), "the file of a dead rank is kept for a while"
    os.utime(path, (0, time.time() - KEEP_CLOSED_SECONDS - 1))
    make(tmp_path, rank=1)
    assert not path.exists()


def test_a_recycled_pid_does_not_count_as_the_rank(tmp_path):
    stats = make(tmp_path)
    data = stats.path.read_bytes()
    at = data.index(b'"process_started": ') + len(b'"process_started": ')
    other = bytes([data[at] % 57 + 1 if data[at] != 57 else 49])
    copy = tmp_path / "copy" / stats.path.name
    copy.parent.mkdir()
    copy.write_bytes(data[:at] + other + data[at + 1 :])
    assert read_stats_file(copy).status == "dead"


def test_a_rank_in_another_pid_namespace_is_identified_by_its_lock(tmp_path, monkeypatch):
    stats = make(tmp_path)
    monkeypatch.setattr("infinity.telemetry.stats_file.pid_namespace", lambda: 1)
    assert read_stats_file(stats.path).status == "live"
    copy = tmp_path / "copy" / stats.path.name
    copy.parent.mkdir()
    copy.write_bytes(stats.path.read_bytes())  # the same content, but without a lock
    assert read_stats_file(copy).status == "dead"


def test_a_process_that_cannot_be_inspected_has_not_exited(monkeypatch):
    pid, started = os.getpid(), process_start(os.getpid())
    assert not has_exited(pid, started)
    assert has_exited(pid, started + 1)  # another process has this process id now
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert has_exited(child, started)  # a zombie
    os.waitpid(child, 0)
    assert has_exited(child, started)
    assert not has_exited(child, 0)

    def fail(path):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(Path, "read_bytes", fail)
    assert not has_exited(pid, started)
    assert not is_stopped(pid)


def test_a_stopped_process_is_recognized():
    child = subprocess.Popen(["sleep", "1000"])
    try:
        assert not is_stopped(child.pid)
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        assert is_stopped(child.pid)
        child.send_signal(signal.SIGCONT)
        os.waitid(os.P_PID, child.pid, os.WCONTINUED | os.WNOWAIT)
        assert not is_stopped(child.pid)
    finally:
        child.kill()
        child.wait()
    assert not is_stopped(child.pid)


def test_irregular_files_are_rejected_without_blocking(tmp_path):
    os.mkfifo(tmp_path / "fifo.stats")
    (tmp_path / "folder.stats").mkdir()
    stats = make(tmp_path)
    (tmp_path / "link.stats").symlink_to(stats.path)
    (tmp_path / "large.stats").touch()
    os.truncate(tmp_path / "large.stats", 1 << 40)  # sparse
    for name in ("fifo.stats", "folder.stats", "link.stats", "large.stats", "missing.stats", "a\0b"):
        with pytest.raises(StatsFileError):
            read_stats_file(tmp_path / name)
    assert len(find_stats_files(tmp_path)) == 5
    assert find_stats_files(tmp_path / "nowhere") == []


@pytest.fixture(scope="module")
def intact():
    with tempfile.TemporaryDirectory() as folder:
        stats = make(folder, info={"version": "1", "paths": '["/a"]'})
        stats.counter("steps_total").add(3)
        yield Path(folder), stats.path.read_bytes()


@given(data=st.data())
def test_random_corruption_is_read_or_rejected(intact, data):
    folder, original = intact
    content = bytearray(original)
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at : at + data.draw(st.integers(0, 9))] = data.draw(st.binary(max_size=9))
        content = content or bytearray(b"\0")
    path = folder / "corrupt" / "run-a.rank0.stats"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content[: data.draw(st.one_of(st.just(len(content)), st.integers(0, len(content))))])
    try:
        found = read_stats_file(path)
    except StatsFileError:
        return
    assert found.value("steps_total") >= 0
    assert isinstance(found.header.paths, tuple)


@given(
    key=st.sampled_from(["run_id", "rank", "pid", "process_started", "started", "devices", "info", "fingerprint"]),
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
        max_leaves=6,
    ),
)
def test_any_json_in_the_header_is_read_or_rejected(intact, key, value):
    folder, original = intact
    length = int.from_bytes(original[12:16], "little")
    tree = json.loads(original[16 : 16 + length])
    body = json.dumps({**tree, key: value}).encode()
    head = original[:12] + len(body).to_bytes(4, "little") + body
    cells = original[-(-(16 + length) // 64) * 64 :]
    path = folder / "header" / "run-a.rank0.stats"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(head.ljust(-(-len(head) // 64) * 64, b"\0") + cells)
    try:
        snapshot = read_stats_file(path)
    except StatsFileError:
        return
    "".join([snapshot.header.run_id, *snapshot.header.devices, *snapshot.header.info.values()]).encode()


def test_impossible_counter_values_are_rejected(tmp_path):
    stats = make(tmp_path)
    for wrong in (-1.0, float("nan"), float("inf")):
        stats.gauge("cache_slots", status="free").set(wrong)  # a gauge may have any value
        read_stats_file(stats.path)
        counter = stats.counter("steps_total")
        counter.add(wrong)
        with pytest.raises(StatsFileError, match="negative"):
            read_stats_file(stats.path)
        counter._cells[counter._index] = 0.0


def test_a_reader_never_sees_a_torn_value(tmp_path):
    """Two bit patterns that differ in every byte alternate; a mixture would be a third value."""
    code = (
        "import sys\n"
        "from infinity.telemetry import Stats\n"
        "s = Stats.create(sys.argv[1], run_id='t', rank=0, local_rank=0, world_size=1, devices=[], info={})\n"
        "gauge, a, b = s.gauge('cache_slots', status='free'), float(sys.argv[2]), float(sys.argv[3])\n"
        "gauge.set(a)\n"
        "print('ready', flush=True)\n"
        "while True:\n"
        "    gauge.set(b)\n"
        "    gauge.set(a)\n"
    )
    both = [struct.unpack("<d", bytes([byte]) * 8)[0] for byte in (0x2A, 0xD4)]
    with rank_process(code, tmp_path, *map(repr, both)) as rank:
        snapshots = (read_stats_file(tmp_path / "t.rank0.stats") for _ in range(1000))
        seen = {snapshot.value("cache_slots", status="free") for snapshot in snapshots}
        rank.kill()
    assert seen == set(both)


def test_error_reasons():
    assert error_reason(StorageError("write", "/x", 0, 1, 28)) == "enospc"
    assert error_reason(StorageError("read", "/x", 0, 1, 5)) == "eio"
    assert error_reason(CorruptPageError("p", "/x", 0, 1, 1, 2)) == "corrupt"
    assert error_reason(StallError("waited")) == "timeout"
    assert error_reason(ValueError()) == "other"
