"""Tests of drive measurements by the daemon: only idle drives are measured, within limits, and no files remain."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from infinity.io.block_devices import Drive, DriveCounters, Place
from infinity.io.probe.points import ProbeStoppedError
from infinity_daemon import drive_measurement
from infinity_daemon.background import Background
from infinity_daemon.daemon_config import MeasureConfig
from infinity_daemon.drive_bandwidth import FILE_NAME, Profiles
from infinity_daemon.drive_measurement import Measuring
from infinity_daemon.reservations import Owner, Reservations
from support.daemon_process import daemon, get, talk, until

MIB = 1 << 20
DRIVE = Drive(name="a", identity="wwid-a")
SMALL = MeasureConfig(idle_seconds=0, most_bytes=96 * MIB, load_seconds=0.05)  # type: ignore[arg-type]
"""Settings for short measurements, with chunks of 16 MiB."""


def own_bytes(side: str) -> int:
    """Return the number of bytes that this process has read from or written to drives, bypassing the page cache."""
    found = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(found[f"{side}_bytes"])


def make_counters(read: int, written: int) -> DriveCounters:
    return DriveCounters(read=read, written=written, reads=0, writes=0, read_seconds=0, write_seconds=0, busy_seconds=0)


class Node:
    """Node with one drive per folder, used only by this process."""

    def __init__(self, folder: Path, names: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.paths = [folder / name for name in names]
        for path in self.paths:
            path.mkdir()
        self.state = folder / "state"
        self.state.mkdir()
        self.profiles, self.reservations = Profiles(self.state), Reservations()
        self.measuring = Measuring(self.profiles, self.reservations)
        self.measuring.settings = SMALL
        self.measuring.paths = tuple(map(str, self.paths))
        self.in_memory = False
        self.counters: Callable[[Drive], DriveCounters | None] = lambda drive: make_counters(
            own_bytes("read"), own_bytes("write")
        )
        monkeypatch.setattr(drive_measurement, "locate", self.locate)
        monkeypatch.setattr(drive_measurement, "counters", lambda drive, sysfs: self.counters(drive))

    def locate(self, path: str, _: Path) -> Place:
        """Place each folder on a drive of the same name."""
        number = os.stat(path).st_dev
        name = Path(path).name
        return Place(
            path=path, drive=Drive(name=name, identity=f"wwid-{name}"), file_system=number, in_memory=self.in_memory
        )

    def look(self, times: int = 1) -> None:
        """Run the daemon's periodic check; no files or reservations may remain."""
        for _ in range(times):
            self.measuring.look()
        assert [os.listdir(path) for path in self.paths] == [[]] * len(self.paths)
        assert self.reservations.entries() == ()

    def last_measured(self, drives: str) -> float:
        """Return the time at which the daemon last measured these drives together, or 0."""
        return self.profiles.measured({f"wwid-{name}" for name in drives}, "daemon")


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    """Node with one drive."""
    return Node(tmp_path, "a", monkeypatch)


def test_an_idle_drive_is_measured_once_within_limits(node: Node) -> None:
    """A single drive gets half of the write budget; the other half is for measuring all drives together."""
    before = own_bytes("write")
    node.look()
    written = own_bytes("write") - before
    assert 16 * MIB <= written <= 48 * MIB + 4 * MIB  # plus the file system's metadata
    profile = node.profiles.of(DRIVE)
    assert profile is not None
    assert all(speed is not None and speed > 0 for speed in (profile.read, profile.write, profile.mixed))
    assert node.last_measured("a") == profile.measured
    node.look(3)
    assert node.last_measured("a") == profile.measured


def test_an_old_measurement_is_repeated(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wall clock decides, because the age must survive restarts."""
    node.look()
    first = node.last_measured("a")
    node.profiles = Profiles(node.state)
    node.profiles.load()
    node.measuring = Measuring(node.profiles, node.reservations)
    node.measuring.settings, node.measuring.paths = SMALL, tuple(map(str, node.paths))
    node.look()
    assert node.last_measured("a") == first
    with monkeypatch.context() as patch:
        patch.setattr(drive_measurement.time, "time", lambda: first + SMALL.every_seconds + 1)
        node.look()
    assert node.last_measured("a") == first + SMALL.every_seconds + 1


def test_drives_are_measured_separately_then_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(tmp_path, "ab", monkeypatch)
    node.look(2)
    assert all(map(node.last_measured, ("a", "b")))
    assert not node.last_measured("ab")
    # Attribute half of this process's traffic to each drive.
    node.counters = lambda drive: make_counters(own_bytes("read") // 2, own_bytes("write") // 2)
    node.look(3)
    assert node.last_measured("ab")
    together = node.profiles.together({"wwid-a", "wwid-b"})
    assert together is not None
    assert all(profile.mixed for profile in together.values())


def test_only_traffic_above_the_noise_counts_as_use(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drive is measured when it has been unused for `idle_seconds`."""
    started: list[Any] = []
    monkeypatch.setattr(node.measuring, "_measure", lambda target, settings: started.append(target))
    node.measuring.settings = MeasureConfig(idle_seconds=5)
    now, read = 1000.0, 0
    monkeypatch.setattr(drive_measurement.time, "monotonic", lambda: now)
    node.counters = lambda drive: make_counters(read, 0)
    for second in range(20):
        node.measuring.look()
        assert bool(started) == (second >= 15), second
        now += 1
        read += 5 * MIB if second < 10 else MIB


def test_busy_or_unobservable_drives_are_not_measured(
    subtests: pytest.Subtests, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(drive_measurement.time, "monotonic", lambda: now)
    for use in ("idle", "rank", "disabled", "memory", "uncounted", "gone"):
        (tmp_path / use).mkdir()
        node, started = Node(tmp_path / use, "a", monkeypatch), list[Any]()
        monkeypatch.setattr(node.measuring, "_measure", lambda *target: started.append(target))
        node.measuring.settings = MeasureConfig(idle_seconds=1, enabled=use != "disabled")
        node.in_memory = use == "memory"
        node.counters = lambda drive: None if use == "uncounted" else make_counters(0, 0)
        if use == "gone":
            node.measuring.paths = (str(node.paths[0] / "gone"),)
        for _ in range(15):
            if use == "rank":
                node.measuring.used(["a"])
            node.look()
            now += 0.1
        with subtests.test(use):
            assert bool(started) == (use == "idle")


def test_a_starting_run_stops_a_measurement(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    """The space reserved for the measurement is released for the run."""
    node.measuring.settings = MeasureConfig(idle_seconds=0)
    caplog.set_level(logging.INFO)
    thread = threading.Thread(target=node.measuring.look)
    thread.start()
    until(lambda: bool(node.reservations.entries()))
    node.measuring.used(["b"])
    node.measuring.used(["a"])
    thread.join(300)
    assert "measure.stopped devices=a" in caplog.text
    assert node.profiles.of(DRIVE) is None
    node.measuring.settings = MeasureConfig(idle_seconds=1000)
    node.look()
    assert node.profiles.of(DRIVE) is None


def test_shutdown_stops_a_measurement(node: Node) -> None:
    """No measurement starts afterward."""
    node.measuring.settings = MeasureConfig(idle_seconds=0)
    thread = Background("measure", node.measuring.look, 0.01)
    thread.start()
    until(lambda: bool(node.reservations.entries()))
    node.measuring.end()
    thread.close()
    assert not thread._thread.is_alive()
    node.look()
    assert node.profiles.of(DRIVE) is None


def test_a_disturbed_measurement_is_discarded(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    node.counters = lambda drive: make_counters(2 * own_bytes("read"), 2 * own_bytes("write"))
    node.look()
    assert re.search(r'measure\.disturbed devices=a by=".* a"', caplog.text)
    assert node.profiles.of(DRIVE) is None


def test_cached_io_is_not_recorded_as_bandwidth(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    """The failure is logged, and the measurement is not retried immediately."""
    node.counters = lambda drive: make_counters(0, 0)
    node.look(5)
    assert caplog.text.count("measure.failed") == 1
    assert "cached" in caplog.text
    assert node.profiles.of(DRIVE) is None


def test_failed_measurements_are_retried_with_backoff(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Because each attempt writes to the drive, the pause grows from ten minutes to one day."""
    elapsed, attempts, raise_defect = 0.0, list[float](), [True]
    monotonic = time.monotonic
    monkeypatch.setattr(drive_measurement.time, "monotonic", lambda: monotonic() + elapsed)

    def results(*_: Any) -> Any:
        attempts.append(elapsed)
        raise RuntimeError("a defect") if raise_defect[0] else ProbeStoppedError("a run has started")

    monkeypatch.setattr(node.measuring, "_results", results)
    for _ in range(4 * 24 * 12):  # four days, every five minutes
        with suppress(RuntimeError):
            node.look()
        raise_defect[0] = not raise_defect[0]
        elapsed += 300
    pauses = [round(later - before) for before, later in pairwise(attempts)]
    assert pauses == [600, 1200, 2400, 4800, 9600, 19200, 38400, 76800, 86400, 86400]


def test_measurements_respect_the_reservations_of_runs(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    """A measurement is rejected in the same way as a run if space is insufficient."""
    place = node.locate(str(node.paths[0]), Path())
    owner = Owner(uid=0, pid=1, process_started=1)
    free = os.statvfs(place.path).f_bavail * os.statvfs(place.path).f_frsize
    node.reservations.reserve(owner, "r", place, free - 20 * MIB, free)
    node.measuring.look()
    assert "reserved by run r" in caplog.text
    assert [entry.run_id for entry in node.reservations.entries()] == ["r"]
    assert node.profiles.of(DRIVE) is None


def test_files_of_a_killed_daemon_are_removed_at_startup(node: Node) -> None:
    """Recent files and files with other names are kept."""
    node.measuring.settings = MeasureConfig(idle_seconds=1000)
    old, young, other = (node.paths[0] / name for name in (".infinity-probe-x", ".infinity-probe-y", "infinity-probe"))
    for file in (old, young, other):
        file.write_text("")
    for file in (old, other):
        os.utime(file, (0, 0))
    node.measuring.look()
    assert sorted(os.listdir(node.paths[0])) == [young.name, other.name]


def measure_briefly(measure: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Measure each load for a tenth of a second; the minimum of `measure.load_seconds` is one second."""
    return measure(*arguments, **{**options, "seconds": 0.1})


@pytest.fixture
def loop_drive(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """Yield the name of a loop device and a folder on it, or skip if none can be created."""
    image, folder = tmp_path / "image", tmp_path / "drive"
    with image.open("wb") as file:
        file.truncate(400 * MIB)
    folder.mkdir()
    with ExitStack() as stack:
        try:
            subprocess.run(["mkfs.ext4", "-q", str(image)], capture_output=True, check=True)
            made = subprocess.run(["losetup", "-f", "--show", str(image)], capture_output=True, check=True, text=True)
            device = made.stdout.strip()
            stack.callback(subprocess.run, ["losetup", "-d", device], check=True)
            subprocess.run(["mount", device, str(folder)], capture_output=True, check=True)
            stack.callback(subprocess.run, ["umount", str(folder)], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"cannot make a loop device: {error}")
        yield Path(device).name, folder


def test_the_daemon_measures_a_real_drive(
    loop_drive: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers requests meanwhile, exits cleanly, and serves the results."""
    monkeypatch.setattr(drive_measurement, "measure_paths", partial(measure_briefly, drive_measurement.measure_paths))
    name, folder = loop_drive
    runtime, config = tmp_path / "run", tmp_path / "infinityd.toml"
    runtime.mkdir(mode=0o700)
    config.write_text(f'[drives]\npaths = ["{folder}"]\n[measure]\nidle_seconds = 1\nmost_bytes = "96MiB"\n')
    with daemon(runtime, "--config", str(config)) as process:
        until(lambda: "I/O engine" in process.log.read_text())
        assert f'infinity_device_free_bytes{{device="{name}"}}' in get(process.port, "/metrics")
    assert os.listdir(folder) == ["lost+found"]
    (runtime / FILE_NAME).unlink(missing_ok=True)  # the first measurement may have completed
    with daemon(runtime, "--config", str(config)) as process:
        until(lambda: f'infinity_device_free_bytes{{device="{name}"}}' in get(process.port, "/metrics")
              and 'op="mixed"' in get(process.port, "/metrics"))  # fmt: skip
        text = get(process.port, "/metrics")
        (answer,) = talk(runtime, {"op": "bandwidth", "paths": [str(folder)]})
    assert os.listdir(folder) == ["lost+found"]
    for load in ("read", "write", "mixed"):
        assert f'infinity_device_bandwidth_bytes_per_second{{device="{name}",op="{load}"}}' in text
        assert answer["bandwidth"][str(folder)][load] > 0
