"""Tests of drive wear: health reported by drives, and remaining days estimated from the write rate."""

import json
import threading

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from infinity.io.block_devices import Drive, locate
from infinity_daemon.collection import Collection
from infinity_daemon.collectors import DeviceFamilies
from infinity_daemon.configured_drives import Drives
from infinity_daemon.drive_wear import DAY, Health, WearWatch, health_of
from infinity_daemon.stats_files import StatsFiles

DRIVE = Drive(name="nvme9n1", identity="wwid-9")
GIB = 1 << 30


def sysfs_with(root, written=0, drive=DRIVE):
    """Create a sysfs tree in which `written` bytes have been written to a drive."""
    folder = root / "class/block" / drive.name
    (folder / "device").mkdir(parents=True, exist_ok=True)
    (folder / "stat").write_text(f"0 0 0 0 0 0 {written // 512} 0 0 0 0\n")
    return root


@pytest.fixture
def fake_programs(tmp_path, monkeypatch):
    """Function that puts a program on an otherwise empty PATH; it logs its arguments and prints `answer`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def add(name, answer, status=0):
        (folder / f"{name}.answer").write_text(answer if isinstance(answer, str) else json.dumps(answer))
        program = folder / name
        program.write_text(
            f'#!/bin/sh\necho "$@" >> {folder}/{name}.asked\n'
            f'while IFS= read -r line || [ -n "$line" ]; do printf \'%s\\n\' "$line"; done < {folder}/{name}.answer\n'
            f"exit {status}\n"
        )
        program.chmod(0o755)
        return folder / f"{name}.asked"

    return add


def test_health_is_read_with_nvme_cli(tmp_path, fake_programs):
    asked = fake_programs("nvme", {"percent_used": 7, "data_units_written": "2000000"})
    fake_programs("smartctl", {})
    assert health_of(DRIVE, sysfs_with(tmp_path)) == Health(ratio=0.07, written=2_000_000 * 512_000)
    assert asked.read_text() == "smart-log -o json /dev/nvme9n1\n"


def test_smartctl_is_used_if_nvme_cli_is_not_permitted(tmp_path, fake_programs):
    fake_programs("nvme", "Failed to open /dev/nvme9n1: Permission denied\n", status=1)
    log = {"nvme_smart_health_information_log": {"percentage_used": 101, "data_units_written": 3}}
    fake_programs("smartctl", log, status=4)
    assert health_of(DRIVE, sysfs_with(tmp_path)) == Health(ratio=1.01, written=3 * 512_000)
    fake_programs("smartctl", {"endurance_used": {"current_percent": 12}})
    disk = Drive(name="sdz", identity="")
    assert health_of(disk, sysfs_with(tmp_path, drive=disk)) == Health(ratio=0.12)


def test_invalid_program_output_is_ignored(subtests, tmp_path, fake_programs):
    for answer in [
        "",
        "[]",
        "null",
        "{",
        '{"percent_used": -1}',
        '{"percent_used": 256}',
        '{"percent_used": 1.5}',
        '{"percent_used": "x", "data_units_written": []}',
        "[" * 99999,
        '{"percent_used": "' + "9" * 99999 + '"}',
    ]:
        with subtests.test(answer=answer):
            fake_programs("nvme", answer)
            assert health_of(DRIVE, sysfs_with(tmp_path)) == Health()


def test_health_is_unknown_without_programs_or_drive(tmp_path, fake_programs):
    assert health_of(DRIVE, sysfs_with(tmp_path)) == Health()
    asked = fake_programs("smartctl", {"endurance_used": {"current_percent": 12}})
    loop = Drive(name="loop0", identity="loop0")
    assert health_of(loop, tmp_path) == Health()
    assert not asked.exists()


def test_a_hanging_program_times_out_without_blocking(tmp_path, monkeypatch, fake_programs):
    started, resume = threading.Event(), threading.Event()

    def hang(*_, timeout, **__):
        assert timeout < 60
        started.set()
        resume.wait(300)
        raise TimeoutError

    fake_programs("nvme", {})
    monkeypatch.setattr("infinity_daemon.drive_wear.subprocess.run", hang)
    watch = WearWatch({}, sysfs=sysfs_with(tmp_path))
    watch.look([DRIVE])
    assert started.wait(300)
    watch.look([DRIVE])
    assert watch.of(DRIVE).ratio is None
    resume.set()
    watch._asking.join(300)
    assert watch.of(DRIVE).ratio is None


def test_remaining_days_use_the_last_hour(tmp_path, fake_programs, monkeypatch):
    asked = fake_programs("nvme", {"percent_used": 50})
    now = 1e6
    monkeypatch.setattr("infinity_daemon.drive_wear.time.monotonic", lambda: now)
    watch = WearWatch({DRIVE.name: 1000 * GIB}, sysfs=sysfs_with(tmp_path, 10 * GIB))

    def look(seconds, written):
        nonlocal now
        now += seconds
        sysfs_with(tmp_path, written)
        watch.look([DRIVE])
        watch._asking.join(300)
        return watch.of(DRIVE)

    assert look(0, 10 * GIB).days is None
    assert look(30, 99 * GIB).bytes_per_second is None  # the minimum interval is one minute
    assert look(30, 16 * GIB).bytes_per_second == 6 * GIB / 60
    assert watch.of(DRIVE).days == pytest.approx(500 / 0.1 / DAY)  # half of the rated endurance is used
    assert watch.of(DRIVE).left == 500 * GIB
    assert len(asked.read_text().splitlines()) == 1
    for minute in range(1, 121):
        found = look(60, (16 + minute) * GIB)
    assert found.bytes_per_second == pytest.approx(GIB / 60)
    assert len(asked.read_text().splitlines()) == 13  # once in ten minutes
    assert look(60, 5 * GIB).bytes_per_second is None  # a different drive with the same name
    assert look(60, 5 * GIB).days is None  # no writes


def test_remaining_days_of_worn_out_and_unrated_drives(tmp_path, fake_programs, monkeypatch):
    now = 0.0
    monkeypatch.setattr("infinity_daemon.drive_wear.time.monotonic", lambda: now)
    watch, unrated = (WearWatch(rated, sysfs=tmp_path) for rated in ({DRIVE.name: GIB}, {}))
    for written in (GIB, 2 * GIB):
        sysfs_with(tmp_path, written)
        watch.look([DRIVE])
        unrated.look([DRIVE])
        now += 60
    assert watch.of(DRIVE).days == 0
    assert (unrated.of(DRIVE).days, unrated.of(DRIVE).left, watch.of(DRIVE).left) == (None, None, 0)


def test_wear_is_exported_as_metrics(tmp_path, fake_programs, monkeypatch):
    drive = locate(str(tmp_path)).drive
    fake_programs("smartctl", {"endurance_used": {"current_percent": 25}})
    fake_programs("nvme", {"percent_used": 25})
    now = 0.0
    monkeypatch.setattr("infinity_daemon.drive_wear.time.monotonic", lambda: now)
    watch = WearWatch({drive.name: 600 * 10**12}, sysfs=tmp_path / "sys")
    drives = Drives(bandwidth=lambda drive: None, wear=watch)
    drives.paths = (str(tmp_path),)
    devices = DeviceFamilies(stats_files=StatsFiles(tmp_path, 60, 60), drives=drives, reserved=dict)
    registry = CollectorRegistry()
    registry.register(Collection({"devices": devices.collect}))
    for moment, written in ((0.0, 0), (60.0, GIB)):
        now = moment
        sysfs_with(tmp_path / "sys", written, drive)
        drives.look()
        watch._asking.join(300)
    drives.look()
    text = generate_latest(registry).decode()
    assert f'infinity_device_wear_ratio{{device="{drive.name}"}} 0.25' in text
    days = 450 * 10**12 / (GIB / 60) / DAY
    found = next(line for line in text.splitlines() if line.startswith("infinity_device_endurance_days{"))
    assert float(found.split()[1]) == pytest.approx(days)
