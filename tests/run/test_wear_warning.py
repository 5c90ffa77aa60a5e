"""Tests of the warning about drive wear, which is logged once with its cost and the settings to change."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from infinity.daemon_client import NodeDaemon
from infinity.io.block_devices import locate
from infinity.run import wear_warning
from infinity.run.wear_warning import WearWarning
from infinity.telemetry import Stats
from support.daemon_process import daemon, until
from support.session import Session

TB = 10**12
PATHS = ["/drive/0", "/drive/1"]


class Answer:
    """Fake daemon with a fixed answer; `asked` is set by the first request."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.asked = threading.Event()

    def ask(self, op: str, **values: object) -> Any:
        assert (op, values) == ("bandwidth", {"paths": PATHS})
        self.asked.set()
        return self.answer


def drive_wear(device: str = "d", rated: Any = 1000 * TB, left: Any = 500 * TB, share: Any = 0.001) -> dict[str, Any]:
    """Return the daemon's answer about the drive of one path."""
    return {"device": device, "rated_bytes": rated, "left_bytes": left, "daily_share": share}


def warning(answer: Any, *written: float) -> str:
    """Return the warning for the bytes written per day to each path."""
    stats = Stats.create(None, run_id="r", rank=0, local_rank=0, world_size=1, devices=["nvme0", "nvme1"], info={})
    it = WearWarning(Answer(answer), stats, PATHS, 1)  # type: ignore[arg-type]
    try:
        return it._warning(dict(zip(PATHS, written, strict=True)))
    finally:
        it.close()
        stats.close()


def test_warning_reports_bytes_lifetime_and_settings() -> None:
    """The warning describes the drive that wears out fastest relative to its rating."""
    found = warning(
        {"wear": {PATHS[0]: drive_wear("d"), PATHS[1]: drive_wear("e", rated=10 * TB, left=5 * TB)}}, 3 * TB, 2 * TB
    )
    assert "writes 2 TB per day to drive e: 20 % of its" in found
    assert "0.1 %" in found
    assert "2.5 more days" in found
    assert "state.format" in found
    assert "memory.host_bytes" in found


def test_paths_on_one_drive_are_added() -> None:
    """The bytes of each path alone are below the limit."""
    drive = {path: drive_wear() for path in PATHS}
    assert warning({"wear": drive}, 0.9 * TB, 0.0) == ""
    assert "writes 1.8 TB per day to drive d" in warning({"wear": drive}, 0.9 * TB, 0.9 * TB)


INVALID: list[Any] = [
    None, {}, {"wear": None}, {"wear": []}, {"wear": {PATHS[0]: None}}, {"wear": {PATHS[0]: drive_wear(rated=None)}},
    {"wear": {PATHS[0]: drive_wear(rated=0)}}, {"wear": {PATHS[0]: drive_wear(left=-1)}},
    {"wear": {PATHS[0]: drive_wear(share=0)}},
    {"wear": {PATHS[0]: drive_wear(share=float("nan"))}}, {"wear": {PATHS[0]: drive_wear(rated=10**400)}},
    {"wear": {PATHS[0]: drive_wear(device="\n")}}, {"wear": {PATHS[0]: drive_wear(share="1")}},
    {"wear": {PATHS[0]: drive_wear(share=1)}},
]  # fmt: skip


def test_invalid_ratings_give_no_warning() -> None:
    for answer in INVALID:
        assert warning(answer, 900 * TB, 0.0) == "", answer


def test_writes_are_measured_from_the_second_step(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Bytes are extrapolated to all ranks of the node, and the thread ends after it has asked the daemon."""
    monkeypatch.setattr(wear_warning, "_LOOK_SECONDS", 0.001)
    first, many = 500.0 * TB, 0.5 * TB  # bytes of initialization and recording, and bytes per later step
    moments = [
        wear_warning._Moment(time=seconds, steps=steps, written=[written, 0.0])
        for seconds, steps, written in (
            (0, 0, 0.0), (3600, 1, first), (7200, 2, first), (7210, 9, first + 7 * many),
            (7200 + 86_400, 4, first + many), (7200 + 5 * 86_400, 12, first + 10 * many), (9e9, 99, 9e30),
        )
    ]  # fmt: skip
    monkeypatch.setattr(WearWarning, "_now", lambda self: moments.pop(0))
    stats = Stats.create(None, run_id="r", rank=0, local_rank=0, world_size=2, devices=["nvme0", "nvme1"], info={})
    it = WearWarning(Answer({"wear": {PATHS[0]: drive_wear()}}), stats, PATHS, 2)  # type: ignore[arg-type]
    it._thread.join(300)
    assert not it._thread.is_alive()
    assert len(moments) == 1
    assert "this run writes 2 TB per day to drive d" in caplog.text  # ten steps of 0.5 TB by two ranks in five days
    it.close()


def test_warning_uses_the_endurance_configured_in_the_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The warning names the drive, not the path."""
    for name, value in {"_LOOK_SECONDS": 0.001, "_STEPS": 1, "_SECONDS": 0.0}.items():
        monkeypatch.setattr(wear_warning, name, value)
    runtime, nvme = tmp_path / "run", tmp_path / "nvme"
    for folder in (runtime, nvme):
        folder.mkdir(mode=0o700)
    config = tmp_path / "infinityd.toml"
    config.write_text(f'[drives]\nendurance = {{"{nvme}" = "1GB"}}\n')
    with (
        daemon(runtime, "--config", str(config)),
        Session(nvme, telemetry={"runtime_dir": str(runtime)}) as session,
    ):
        until(lambda: session.step() > 0 and "per day to drive" in caplog.text)
        for _ in range(3):
            session.step()
    warnings = [record.getMessage() for record in caplog.records if "per day to drive" in record.getMessage()]
    assert len(warnings) == 1
    assert f"to drive {locate(str(nvme)).drive.name}: " in warnings[0]
    assert "drives.daily_share" in warnings[0]


def test_no_warning_without_a_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The run asks only once."""
    for name, value in {"_LOOK_SECONDS": 0.001, "_STEPS": 1, "_SECONDS": 0.0}.items():
        monkeypatch.setattr(wear_warning, name, value)
    asked = []
    original = NodeDaemon.ask

    def ask(self: NodeDaemon, op: str, **values: object) -> dict[str, Any] | None:
        asked.append(op)
        return original(self, op, **values)

    monkeypatch.setattr(NodeDaemon, "ask", ask)
    with Session(tmp_path, telemetry={"runtime_dir": str(tmp_path / "none")}) as session:
        session.run(until=6, every=100)
        until(lambda: session.step() > 0 and "bandwidth" in asked)
    assert asked.count("bandwidth") == 1
    assert "per day" not in caplog.text
