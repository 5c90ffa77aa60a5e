"""Tests of copies of checkpoints between two daemon processes."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from support.copies import IDENTITY, RUN, TOKEN, Rank, check_copy
from support.daemon_process import daemon, forked, get, rejected, talk, until


@pytest.fixture
def runtimes(tmp_path: Path) -> list[Path]:
    """Runtime folders of two daemons, with settings that start the copies."""
    folders = [tmp_path / "runtime0", tmp_path / "runtime1"]
    for folder in folders:
        folder.mkdir(0o700)
        (folder / "infinityd.toml").write_text('[copies]\nhost = "127.0.0.1"\nport = 0\n')
    return folders


def listeners(port: int) -> list[str]:
    """Return the addresses on which a TCP port is open, in the format of /proc/net/tcp."""
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    return [line[1] for line in lines if line[1].endswith(f":{port:04X}") and line[3] == "0A"]


def test_two_daemons_copy_a_checkpoint_each(tmp_path: Path, runtimes: list[Path]) -> None:
    """Each listens on one interface only, exports metrics, and never logs the token. A copy ends with its process."""
    ranks = [Rank(tmp_path / str(rank), rank, 7) for rank in range(2)]
    names = [{"run_id": RUN, "rank": rank} for rank in range(2)]
    first, second = runtimes
    with (
        daemon(first, "--config", str(first / "infinityd.toml")) as process,
        daemon(second, "--config", str(second / "infinityd.toml")) as other,
    ):
        addresses = []
        for folder, name in zip(runtimes, names, strict=True):
            (joined,) = talk(folder, {"op": "copies_join", **name, "token": TOKEN})
            assert joined["ok"], joined
            addresses.append(joined["address"])
            port = int(joined["address"].rpartition(":")[2])
            assert listeners(port) == [f"0100007F:{port:04X}"]
        for folder, name, rank in zip(runtimes, names, ranks, strict=True):
            job = rank.job([(1 - rank.rank, addresses[1 - rank.rank])])
            assert talk(folder, {"op": "copies_start", **name, **job}) == [{"ok": True}]
        for folder, name, rank in zip(runtimes, names, ranks, strict=True):
            until(lambda folder=folder, name=name: not talk(folder, {"op": "copies_progress", **name})[0]["busy"])
            (progress,) = talk(folder, {"op": "copies_progress", **name})
            length = len(ranks[1 - rank.rank].stream)
            assert progress == {
                "ok": True,
                "busy": False,
                "copied": IDENTITY,
                "bytes": length,
                "waited": 0.0,
                "error": "",
            }
            check_copy(ranks, rank, 2)
        text = get(process.port, "/metrics")
        labels = f'rank="0",run="{RUN}"'
        assert f"infinity_copy_received_bytes_total{{{labels}}} {float(len(ranks[1].stream))}" in text
        assert f"infinity_copy_failed{{{labels}}} 0.0" in text
        assert re.search(rf"infinity_copy_last_success_timestamp_seconds{{{labels}}} 1\.\d+e\+09", text)

        def join() -> None:
            talk(second, {"op": "copies_join", "run_id": RUN, "rank": 7, "token": TOKEN})

        with forked(join):
            until(lambda: 'rank="7"' in get(other.port, "/metrics"))
        until(lambda: 'rank="7"' not in get(other.port, "/metrics"))
        for folder, name in zip(runtimes, names, strict=True):
            assert talk(folder, {"op": "copies_stop", **name}) == [{"ok": True}]
        for log in (process.log, other.log):
            assert "copy.done" in log.read_text()
            assert TOKEN not in log.read_text()


def test_failed_copies_are_logged_and_exported(tmp_path: Path, runtimes: list[Path]) -> None:
    rank, name, (folder, _) = Rank(tmp_path / "0", 0, 3), {"run_id": RUN, "rank": 0}, runtimes
    with daemon(folder, "--config", str(folder / "infinityd.toml")) as process:
        job = {**rank.job([(1, "127.0.0.1:1")]), "target": "/no/such/file"}
        messages = {"op": "copies_join", **name, "token": TOKEN}, {"op": "copies_start", **name, **job}
        assert all(answer["ok"] for answer in talk(folder, *messages))
        until(lambda: "copy.failed" in process.log.read_text())
        assert "/no/such/file" in talk(folder, {"op": "copies_progress", **name})[0]["error"]
        assert f'infinity_copy_failed{{rank="0",run="{RUN}"}} 1.0' in get(process.port, "/metrics")


def test_a_daemon_without_a_host_does_not_listen(tmp_path: Path) -> None:
    with daemon(tmp_path) as process:
        (answer,) = talk(tmp_path, {"op": "copies_join", "run_id": RUN, "rank": 0, "token": TOKEN})
        assert "copies.host" in answer["error"]
        assert "copies.listening" not in process.log.read_text()


def test_unusable_settings_end_the_daemon(runtimes: list[Path]) -> None:
    folder, _ = runtimes
    file = folder / "infinityd.toml"
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = used.getsockname()[1]
        for settings, message in [
            ('host = "0.0.0.0"', "would listen on all interfaces"),
            ('host = "nope0"', "neither an address nor an interface"),
            (f'host = "127.0.0.1"\nport = {port}', f"copies.port = {port}"),
            ('host = "127.0.0.1"\ncertificate = "/c"', "copies.key is not set"),
        ]:
            file.write_text(f"[copies]\n{settings}\n")
            assert message in rejected(folder, "--port", "0", "--config", str(file))
