"""Drives are measured by the daemon itself: only while nobody uses them, within bounds, and nothing is left."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from infinity.io.block_devices import Drive, DriveCounters, Place
from infinity.io.probe.points import ProbeStoppedError
from infinity.telemetry import Stats
from infinity_daemon import drive_measurement
from infinity_daemon.background import Background
from infinity_daemon.daemon_config import MeasureConfig
from infinity_daemon.drive_bandwidth import FILE_NAME, Profiles
from infinity_daemon.drive_measurement import Measuring
from infinity_daemon.reservations import Owner, Reservations
from support.daemon_process import daemon, get, talk, until

MIB = 1 << 20
DRIVE = Drive(name="a", identity="wwid-a")
SMALL = MeasureConfig(idle_seconds=0, most_bytes=96 * MIB)
"""16 MiB at a time."""


def own_bytes(side: str) -> int:
    """Return what this process has read from drives or written to them, past the page cache."""
    found = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(found[f"{side}_bytes"])


def counted(read: int, written: int) -> DriveCounters:
    """Return counters of a drive."""
    return DriveCounters(read=read, written=written, reads=0, writes=0, read_seconds=0, write_seconds=0, busy_seconds=0)


class Node:
    """A node with a drive for every folder, which nobody uses but this process."""

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
        self.counters: Callable[[Drive], DriveCounters | None] = lambda drive: counted(
            own_bytes("read"), own_bytes("write")
        )
        monkeypatch.setattr(drive_measurement, "locate", self.locate)
        monkeypatch.setattr(drive_measurement, "counters", lambda drive, sysfs: self.counters(drive))

    def locate(self, path: str, _: Path) -> Place:
        """Each folder is on a drive of its name."""
        number = os.stat(path).st_dev
        name = Path(path).name
        return Place(
            path=path, drive=Drive(name=name, identity=f"wwid-{name}"), file_system=number, in_memory=self.in_memory
        )

    def look(self, times: int = 1) -> None:
        """As the daemon does every second."""
        for _ in range(times):
            self.measuring.look()
        assert [os.listdir(path) for path in self.paths] == [[]] * len(self.paths)
        assert self.reservations.entries() == ()

    def measured(self, drives: str) -> float:
        """When the daemon measured these drives together, 0 if never."""
        return self.profiles.measured({f"wwid-{name}" for name in drives}, "daemon")


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    """A node with one drive."""
    return Node(tmp_path, "a", monkeypatch)


def test_an_idle_drive_is_measured_within_bounds_and_not_again(node: Node) -> None:
    """Of one drive alone, half of the bytes are written: the other half is for all together."""
    before = own_bytes("write")
    node.look()
    written = own_bytes("write") - before
    assert 16 * MIB <= written <= 48 * MIB + 4 * MIB  # the file system's own records beside
    profile = node.profiles.of(DRIVE)
    assert profile is not None
    assert all(speed is not None and speed > 0 for speed in (profile.read, profile.write, profile.mixed))
    assert node.measured("a") == profile.measured
    node.look(3)
    assert node.measured("a") == profile.measured


def test_it_is_measured_again_when_that_is_old(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the clock of the wall, since it has to outlast restarts."""
    node.look()
    first = node.measured("a")
    node.profiles = Profiles(node.state)
    node.profiles.load()
    node.measuring = Measuring(node.profiles, node.reservations)
    node.measuring.settings, node.measuring.paths = SMALL, tuple(map(str, node.paths))
    node.look()
    assert node.measured("a") == first
    with monkeypatch.context() as patch:
        patch.setattr(drive_measurement.time, "time", lambda: first + SMALL.every_seconds + 1)
        node.look()
    assert node.measured("a") == first + SMALL.every_seconds + 1


def test_several_drives_are_measured_alone_and_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other."""
    node = Node(tmp_path, "ab", monkeypatch)
    node.look(2)
    assert all(map(node.measured, ("a", "b")))
    assert not node.measured("ab")
    # Each has half of what this process moves.
    node.counters = lambda drive: counted(own_bytes("read") // 2, own_bytes("write") // 2)
    node.look(3)
    assert node.measured("ab")
    together = node.profiles.together({"wwid-a", "wwid-b"})
    assert together is not None
    assert all(profile.mixed for profile in together.values())


def busy(node: Node) -> None:
    """Somebody reads from the drive, as much as counts."""
    read = 0

    def grow(_: Drive) -> DriveCounters:
        nonlocal read
        read += 5 * MIB
        return counted(read, 0)

    node.counters = grow


def test_noise_is_no_use_and_more_is(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """A measurement comes when nobody has used the drive for as long as is set."""
    begun: list[Any] = []
    monkeypatch.setattr(node.measuring, "_measure", lambda target, settings: begun.append(target))
    node.measuring.settings = MeasureConfig(idle_seconds=5)
    now, read = 1000.0, 0
    monkeypatch.setattr(drive_measurement.time, "monotonic", lambda: now)
    node.counters = lambda drive: counted(read, 0)
    for second in range(20):
        node.measuring.look()
        assert bool(begun) == (second >= 15), second
        now += 1
        read += 5 * MIB if second < 10 else MIB


@pytest.mark.parametrize("use", ["rank", "disabled", "memory", "uncounted", "busy", "gone"])
def test_what_is_used_or_cannot_be_known_is_left_alone(node: Node, use: str) -> None:
    """Nothing is written."""
    node.measuring.settings = MeasureConfig(idle_seconds=1, most_bytes=96 * MIB, enabled=use != "disabled")
    node.in_memory = use == "memory"
    if use == "uncounted":
        node.counters = lambda drive: None
    elif use == "busy":
        busy(node)
    elif use == "gone":
        node.measuring.paths = (str(node.paths[0] / "gone"),)
    before = own_bytes("write")
    for _ in range(15):
        if use == "rank":
            node.measuring.used(["a"])
        node.look()
        time.sleep(0.1)
    assert own_bytes("write") - before < 16 * MIB
    assert node.profiles.of(DRIVE) is None


def test_a_run_that_comes_ends_a_measurement(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    """And its space is free for the run."""
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


def test_the_end_of_the_daemon_ends_a_measurement(node: Node) -> None:
    """And none begins after it."""
    node.measuring.settings = MeasureConfig(idle_seconds=0)
    thread = Background("measure", node.measuring.look, 0.01)
    thread.start()
    until(lambda: bool(node.reservations.entries()))
    node.measuring.end()
    thread.close()
    assert not thread._thread.is_alive()
    node.look()
    assert node.profiles.of(DRIVE) is None


def test_one_that_others_have_disturbed_is_thrown_away(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    """Its result would be theirs."""
    caplog.set_level(logging.INFO)
    node.counters = lambda drive: counted(2 * own_bytes("read"), 2 * own_bytes("write"))
    node.look()
    assert re.search(r'measure\.disturbed devices=a by=".* a"', caplog.text)
    assert node.profiles.of(DRIVE) is None


def test_what_does_not_reach_the_drive_is_no_bandwidth(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    """It is said, and not tried again at once."""
    node.counters = lambda drive: counted(0, 0)
    node.look(5)
    assert caplog.text.count("measure.failed") == 1
    assert "cached" in caplog.text
    assert node.profiles.of(DRIVE) is None


def test_what_comes_to_nothing_is_tried_ever_more_rarely(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time writes to the drive: after ten minutes, twice as long each time, and once a day in the end."""
    passed, tried, ends = 0.0, list[float](), [True]
    monotonic = time.monotonic
    monkeypatch.setattr(drive_measurement.time, "monotonic", lambda: monotonic() + passed)

    def results(*_: Any) -> Any:
        tried.append(passed)
        raise RuntimeError("a defect") if ends[0] else ProbeStoppedError("a run has come")

    monkeypatch.setattr(node.measuring, "_results", results)
    for _ in range(4 * 24 * 12):  # four days, every five minutes
        with suppress(RuntimeError):
            node.look()
        ends[0] = not ends[0]
        passed += 300
    pauses = [round(later - before) for before, later in pairwise(tried)]
    assert pauses == [600, 1200, 2400, 4800, 9600, 19200, 38400, 76800, 86400, 86400]


def test_there_must_be_room_beside_what_runs_have_reserved(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    """A measurement is refused as a run is."""
    place = node.locate(str(node.paths[0]), Path())
    owner, free = Owner(pid=1, process_started=1), os.statvfs(place.path).f_bavail * os.statvfs(place.path).f_frsize
    node.reservations.reserve(owner, "r", place, free - 20 * MIB, free)
    node.measuring.look()
    assert "reserved by run r" in caplog.text
    assert [entry.run_id for entry in node.reservations.entries()] == ["r"]
    assert node.profiles.of(DRIVE) is None


def test_what_a_killed_daemon_left_is_removed_at_the_next_start(node: Node) -> None:
    """Nothing else is."""
    node.measuring.settings = MeasureConfig(idle_seconds=1000)
    old, young, other = (node.paths[0] / name for name in (".infinity-probe-x", ".infinity-probe-y", "infinity-probe"))
    for file in (old, young, other):
        file.write_text("")
    for file in (old, other):
        os.utime(file, (0, 0))
    node.measuring.look()
    assert sorted(os.listdir(node.paths[0])) == [young.name, other.name]


@pytest.fixture
def drive_of_its_own(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A drive that nobody else uses, by name, and a folder on it; skip where none can be made."""
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


def test_a_daemon_measures_by_the_counters_of_the_kernel(drive_of_its_own: tuple[str, Path], tmp_path: Path) -> None:
    """It answers meanwhile, ends in order, leaves the drive of a live rank alone, and serves what it has found."""
    name, folder = drive_of_its_own
    runtime, config = tmp_path / "run", tmp_path / "infinityd.toml"
    runtime.mkdir(mode=0o700)
    config.write_text(f'[drives]\npaths = ["{folder}"]\n[measure]\nidle_seconds = 1\nmost_bytes = "96MiB"\n')
    with daemon(runtime, "--config", str(config)) as process:
        until(lambda: "I/O engine" in process.log.read_text())
        assert f'infinity_device_free_bytes{{device="{name}"}}' in get(process.port, "/metrics")
    assert os.listdir(folder) == ["lost+found"]
    (runtime / FILE_NAME).unlink(missing_ok=True)  # it may have come to its end
    info = {"paths": json.dumps([str(folder)])}
    rank = Stats.create(runtime, run_id="r", rank=0, local_rank=0, world_size=1, devices=["nvme0"], info=info)
    with daemon(runtime, "--config", str(config)) as process:
        for _ in range(40):  # four times as long as an idle drive has to wait
            time.sleep(0.1)
            # Looks at ranks come a little later on a busy machine: one that has begun is ended then.
            assert "measure.done" not in process.log.read_text()
    rank.close()
    with daemon(runtime, "--config", str(config)) as process:
        until(lambda: f'infinity_device_free_bytes{{device="{name}"}}' in get(process.port, "/metrics")
              and "measure.done" in process.log.read_text())  # fmt: skip
        text = get(process.port, "/metrics")
        (answer,) = talk(runtime, {"op": "bandwidth", "paths": [str(folder)]})
    assert os.listdir(folder) == ["lost+found"]
    for load in ("read", "write", "mixed"):
        assert f'infinity_device_bandwidth_bytes_per_second{{device="{name}",op="{load}"}}' in text
        assert answer["bandwidth"][str(folder)][load] > 0
