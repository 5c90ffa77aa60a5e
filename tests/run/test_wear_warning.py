"""A run that uses its drives up faster than is wanted is warned once, with what it costs and what to change."""

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
    """A daemon that answers so; `asked` is set when it has been."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.asked = threading.Event()

    def ask(self, op: str, **values: object) -> Any:
        """As `NodeDaemon.ask`."""
        assert (op, values) == ("bandwidth", {"paths": PATHS})
        self.asked.set()
        return self.answer


def told(device: str = "d", rated: Any = 1000 * TB, left: Any = 500 * TB, share: Any = 0.001) -> dict[str, Any]:
    """Return what a daemon says of the drive of a path."""
    return {"device": device, "rated_bytes": rated, "left_bytes": left, "daily_share": share}


def warning(answer: Any, *written: float) -> str:
    """Return the warning for so many bytes per day, by path."""
    stats = Stats.create(None, run_id="r", rank=0, local_rank=0, world_size=1, devices=["nvme0", "nvme1"], info={})
    it = WearWarning(Answer(answer), stats, PATHS, 1)  # type: ignore[arg-type]
    try:
        return it._warning(dict(zip(PATHS, written, strict=True)))
    finally:
        it.close()
        stats.close()


def test_it_says_bytes_share_days_and_what_to_change() -> None:
    """Of the drive that is the worst for what it is rated for."""
    found = warning({"wear": {PATHS[0]: told("d"), PATHS[1]: told("e", rated=10 * TB, left=5 * TB)}}, 3 * TB, 2 * TB)
    assert "writes 2 TB per day to drive e: 20 % of its" in found
    assert "0.1 %" in found
    assert "2.5 more days" in found
    assert "state.format" in found
    assert "memory.host_bytes" in found


def test_paths_on_one_drive_are_added() -> None:
    """Each alone would be little enough."""
    drive = {path: told() for path in PATHS}
    assert warning({"wear": drive}, 0.9 * TB, 0.0) == ""
    assert "writes 1.8 TB per day to drive d" in warning({"wear": drive}, 0.9 * TB, 0.9 * TB)


@pytest.mark.parametrize(
    "answer",
    [None, {}, {"wear": None}, {"wear": []}, {"wear": {PATHS[0]: None}}, {"wear": {PATHS[0]: told(rated=None)}},
     {"wear": {PATHS[0]: told(rated=0)}}, {"wear": {PATHS[0]: told(left=-1)}}, {"wear": {PATHS[0]: told(share=0)}},
     {"wear": {PATHS[0]: told(share=float("nan"))}}, {"wear": {PATHS[0]: told(rated=10**400)}},
     {"wear": {PATHS[0]: told(device="\n")}}, {"wear": {PATHS[0]: told(share="1")}},
     {"wear": {PATHS[0]: told(share=1)}}],
)  # fmt: skip
def test_without_a_rating_there_is_nothing_to_say(answer: Any) -> None:
    """Whatever a daemon answers."""
    assert warning(answer, 900 * TB, 0.0) == ""


def test_steps_are_measured_from_the_second_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """For all ranks of the node, until there are enough; the thread ends when it has asked."""
    monkeypatch.setattr(wear_warning, "_LOOK_SECONDS", 0.001)
    first, many = 500.0 * TB, 0.5 * TB  # what was filled and recorded, and what a step writes from then on
    moments = [
        wear_warning._Moment(time=seconds, steps=steps, written=[written, 0.0])
        for seconds, steps, written in (
            (0, 0, 0.0), (3600, 1, first), (7200, 2, first), (7210, 9, first + 7 * many),
            (7200 + 86_400, 4, first + many), (7200 + 5 * 86_400, 12, first + 10 * many), (9e9, 99, 9e30),
        )
    ]  # fmt: skip
    monkeypatch.setattr(WearWarning, "_now", lambda self: moments.pop(0))
    stats = Stats.create(None, run_id="r", rank=0, local_rank=0, world_size=2, devices=["nvme0", "nvme1"], info={})
    it = WearWarning(Answer({"wear": {PATHS[0]: told()}}), stats, PATHS, 2)  # type: ignore[arg-type]
    it._thread.join(300)
    assert not it._thread.is_alive()
    assert len(moments) == 1
    assert "this run writes 2 TB per day to drive d" in caplog.text  # ten steps of 0.5 TB of two ranks in five days
    it.close()


def test_a_run_is_warned_by_the_daemon_of_its_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By what infinityd was told of the drive; the drive itself is named."""
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


def test_without_a_daemon_a_run_trains_and_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It has asked once."""
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
