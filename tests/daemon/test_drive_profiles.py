"""Tests of drive bandwidth profiles: the persistent history of measurements, and profiles derived from it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from infinity.io.block_devices import Drive
from infinity_daemon.drive_bandwidth import FILE_NAME, RECENT, Measured, Profiles, Rates


def drive(identity: str) -> Drive:
    """Return a drive; its device name is arbitrary."""
    return Drive(name="nvme0n1", identity=identity)


def measurement(read: float, when: float, source: str = "daemon", on: str = "a", **others: float) -> Measured:
    """Return a measurement of one drive."""
    return Measured(rates={on: Rates(read=read, **others)}, source=source, measured=when)


def profiles_of(folder: Path, *measurements: Measured) -> Profiles:
    """Return profiles with some recorded measurements."""
    profiles = Profiles(folder)
    for one in measurements:
        profiles.record(one)
    return profiles


def test_profiles_persist_across_restarts(tmp_path: Path) -> None:
    assert Profiles(tmp_path).of(drive("a")) is None
    profiles_of(tmp_path, measurement(2e9, 1.0, write=1e9))
    again = Profiles(tmp_path)
    again.load()
    found = again.of(drive("a"))
    assert found is not None
    assert (found.read, found.write, found.mixed, found.measured) == (2e9, 1e9, None, 1.0)
    assert os.listdir(tmp_path) == [FILE_NAME]


def test_a_profile_is_the_median_of_recent_measurements(tmp_path: Path) -> None:
    """All sources count; one outlier changes nothing, and old measurements are dropped."""
    times = [measurement(speed, when, source) for when, (speed, source) in enumerate(
        [(9e9, "probe"), (9e9, "probe"), (9e9, "run"), (3e9, "daemon"), (1e6, "probe"), (2e9, "run"), (4e9, "daemon"),
         (2.5e9, "daemon")], 1,
    )]  # fmt: skip
    profiles = profiles_of(tmp_path, *times, measurement(1.0, 8.5, on="b"))
    found = profiles.of(drive("a"))
    assert found is not None
    assert found.read == 2.5e9
    assert found.measured == 8
    assert profiles.measured({"a"}, "probe") == 5


def test_each_load_has_its_own_recent_measurements(tmp_path: Path) -> None:
    """A measurement of one load does not displace those of other loads."""
    profiles = profiles_of(
        tmp_path, measurement(1.0, 1, "probe", write=7.0), *(measurement(2.0, 2 + when) for when in range(RECENT))
    )
    found = profiles.of(drive("a"))
    assert found is not None
    assert (found.read, found.write) == (2.0, 7.0)


def test_joint_rates_need_a_measurement_of_the_same_drives(tmp_path: Path) -> None:
    """A drive that was only measured jointly takes its own profile from that measurement."""
    both = Measured(rates={"a": Rates(read=2.0), "b": Rates(read=3.0)}, source="run", measured=5)
    profiles = profiles_of(tmp_path, measurement(4.0, 1), both)
    found = profiles.together({"a", "b"})
    assert found is not None
    assert {name: profile.read for name, profile in found.items()} == {"a": 2.0, "b": 3.0}
    assert profiles.together({"a", "b", "c"}) is None
    assert profiles.together({"b", "c"}) is None
    assert [profile and profile.read for profile in map(profiles.of, map(drive, "abc"))] == [4.0, 3.0, None]


def test_the_history_size_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest measurements are kept."""
    monkeypatch.setattr("infinity_daemon.drive_bandwidth._MAX_FILE", 1 << 16)
    profiles = Profiles(tmp_path)
    for number in range(50):
        rates = {f"{'x' * 600}{index}": Rates(read=1.0) for index in range(3)}
        profiles.record(Measured(rates={f"drive{number}": Rates(read=1.0), **rates}, source="run", measured=1 + number))
    assert (tmp_path / FILE_NAME).stat().st_size <= 1 << 16
    again = Profiles(tmp_path)
    again.load()
    assert again.of(drive("drive49")) is not None
    assert again.of(drive("drive0")) is None
    for number in range(3 * RECENT):
        profiles.record(measurement(1.0, 1000 + number))
    kept = json.loads((tmp_path / FILE_NAME).read_text())["measurements"]
    assert sum(list(one["rates"]) == ["a"] for one in kept) == RECENT


def test_an_invalid_history_is_replaced_with_one_warning(
    subtests: pytest.Subtests, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for content in [
        "", "[]", '{"measurements": [{"rates": {"a": {"read": -1}}, "source": "run", "measured": 1}]}',
        '{"measurements": [{"rates": {"a": {}}, "source": "run", "measured": 1}]}', '{"measurements": 3}',
        '{"measurements": [{"rates": {"a": {"read": 1}}, "source": "me", "measured": 1}]}', "\xff" * 9, "[" * 99999,
        '{"measurements": [' + "1," * 600 + "1]}", " " * (2 << 20),
    ]:  # fmt: skip
        (tmp_path / FILE_NAME).write_text(content)
        caplog.clear()
        with subtests.test(content[:80]):
            profiles, again = Profiles(tmp_path), Profiles(tmp_path)
            profiles.load()
            assert profiles.of(drive("a")) is None
            profiles.record(measurement(1.0, 1))
            again.load()
            assert again.of(drive("a")) is not None
            assert caplog.text.count("bandwidth.unreadable") == 1


def test_an_unwritable_folder_loses_only_the_history(tmp_path: Path) -> None:
    """Measurements stay in memory until the daemon exits."""
    profiles = Profiles(tmp_path / "gone")
    with pytest.raises(FileNotFoundError):
        profiles.record(measurement(5.0, 1))
    found = profiles.of(drive("a"))
    assert found is not None
    assert found.read == 5.0
