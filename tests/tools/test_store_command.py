"""`infinity store` on runs that exist."""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path

import pytest
from tools_command import SMALL, run_here
from typer.testing import CliRunner

from infinity_tools.cli import app
from infinity_tools.runs import stored_runs


@pytest.fixture
def committed(tmp_path) -> tuple[Path, Path, str]:
    """A run with a commit, spread over two folders."""
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    paths = ["--nvme", str(first), "--nvme", str(second)]
    done = run_here(*SMALL, *paths, "--steps", "1", "--commit-every", "1", "--json", "--out", "o")
    return first, second, done.summary["run_id"]


def _command(*arguments: object, answer: str | None = None) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["store", *map(str, arguments)], input=answer)
    return result.exit_code, result.output


def test_list_verify_remove(committed):
    first, second, run_id = committed
    status, output = _command("ls", first, second, "--json")
    (listed,) = json.loads(output)
    assert (status, listed["run_id"], listed["live"], listed["ranks"]) == (0, run_id, False, 1)
    assert [commit["step"] for commit in listed["commits"]] == [1]
    assert listed["bytes"] > 2_000_000
    assert run_id in _command("ls", first, second)[1]

    # The order in which the folders are named does not matter as long as the first is known by its commits.
    for order in ((first, second), (second, first)):
        status, output = _command("verify", *order, "--json")
        assert status == 0
        assert json.loads(output)["bad"] == []
    status, output = _command("verify", first)
    assert status == 2
    assert "lies on 2 folders" in output

    victim = first / run_id / "rank00000.pages"
    (manifest,) = (first / run_id / "commits").glob("step*.json")
    pages = json.loads(json.loads(manifest.read_text())["body"])["pages"]
    page, (_, offset, length, _) = next((page, entry) for page, entry in pages.items() if entry[0] == 0)
    _flip(victim, offset + length // 2)
    status, output = _command("verify", first, second, "--json")
    assert status == 1
    (bad,) = json.loads(output)["bad"]
    assert (bad["page"], bad["path"], bad["offset"]) == (int(page), str(victim), offset)
    status, output = _command("verify", first, second)
    assert status == 1
    assert f"page {page}: {victim}, offset {offset}" in output.replace("\n", "")

    assert _command("rm", first, second)[0] == 2  # no run named
    assert _command("rm", first, second, run_id, answer="n\n")[0] == 1
    assert len(stored_runs([first, second])) == 1
    assert _command("rm", first, second, run_id, "--yes")[0] == 0
    assert stored_runs([first, second]) == []
    assert not (second / run_id).exists()
    assert "no runs" in _command("ls", first, second)[1]


def test_live_run_is_neither_removed_nor_verified(tmp_path):
    for run_id in ("20260101-000000-aaaaaa", "20260102-000000-bbbbbb"):
        (tmp_path / run_id / "commits").mkdir(parents=True)
    lock = tmp_path / "infinity.lock.0"
    owner = {"run_id": "20260102-000000-bbbbbb", "pid": os.getpid(), "host": "here", "since": time.time()}
    lock.write_text(json.dumps(owner))
    with open(lock) as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert [run.owner is not None for run in stored_runs([tmp_path])] == [False, True]
        status, output = _command("rm", tmp_path, owner["run_id"], "--yes")
        assert status == 2
        assert f"process {os.getpid()} on here" in output
        status, output = _command("verify", tmp_path, "--run", owner["run_id"])
        assert status == 2
        assert _command("rm", tmp_path, "--dead", "--yes")[0] == 0
        assert [run.run_id for run in stored_runs([tmp_path])] == [owner["run_id"]]
    assert [run.owner for run in stored_runs([tmp_path])] == [None]


def test_missing_folder_and_missing_run(tmp_path):
    assert "is not a folder" in _command("ls", tmp_path / "none")[1]
    status, output = _command("verify", tmp_path, "--run", "x")
    assert status == 2
    assert "there is no run 'x'" in output


def _flip(file: Path, offset: int) -> None:
    with open(file, "r+b") as opened:
        opened.seek(offset)
        byte = opened.read(1)
        opened.seek(offset)
        opened.write(bytes([byte[0] ^ 1]))
