"""Tests of `infinity store` on existing runs."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from infinity.checkpoint.manifest import checksum_of, read_manifest
from infinity.store.folder import FolderLock, RunFolder
from infinity_tools.cli import app, main
from infinity_tools.store import _advice
from infinity_tools.stored_runs import BadPage, Check, good_checkpoint, stored_runs
from support.command import SMALL, run_here
from support.published import flip


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, str]:
    """Return a folder and the id of a run with a checkpoint across two paths; tests must not change it."""
    place = tmp_path_factory.mktemp("trained")
    for name in ("first", "second", "tmp"):
        (place / name).mkdir()
    paths = ["--nvme", str(place / "first"), "--nvme", str(place / "second"), "--out", str(place / "out")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(place / "tmp"))
        done = run_here(*SMALL, *paths, "--max_steps", "1", "--save_steps", "1", "--json")
    return place, done.summary["run_id"]


@pytest.fixture
def checkpointed(trained, tmp_path) -> tuple[Path, Path, str]:
    """Return a copy of the trained run."""
    place, run_id = trained
    first, second = (shutil.copytree(place / name, tmp_path / name) for name in ("first", "second"))
    return first, second, run_id


def _command(*arguments: object, answer: str | None = None) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["store", *map(str, arguments)], input=answer)
    return result.exit_code, result.output


def test_ls_does_not_import_torch(trained):
    """The manifest contains AdamW's step counts, which are tensors."""
    place, run_id = trained
    program = "import sys\nfrom infinity_tools.cli import app\ntry: app()\nfinally: assert 'torch' not in sys.modules"
    words = ["store", "ls", place / "first", place / "second"]
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=True)
    assert run_id in done.stdout
    (manifest,) = (place / "first" / run_id / "checkpoints").glob("step*.json")
    assert '{\\"tensor\\":' in manifest.read_text()


def test_ls_verify_and_rm(checkpointed):
    first, second, run_id = checkpointed
    status, output = _command("ls", first, second, "--json")
    (listed,) = json.loads(output)
    assert (status, listed["run_id"], listed["live"], listed["ranks"]) == (0, run_id, False, 1)
    assert [checkpoint["step"] for checkpoint in listed["checkpoints"]] == [1]
    assert listed["bytes"] > 2_000_000
    assert run_id in _command("ls", first, second)[1]

    # The order in which the folders are named does not matter as long as the first is known by its checkpoints.
    for order in ((first, second), (second, first)):
        status, output = _command("verify", *order, "--json")
        assert status == 0
        assert json.loads(output)["bad"] == []
    for alone, problem in ((first, "over 2 folders"), (second, "2 folders, but 1 of them")):
        status, output = _command("verify", alone)
        assert status == 2
        assert problem in output

    victim = first / run_id / "rank00000.pages"
    (manifest,) = (first / run_id / "checkpoints").glob("step*.json")
    pages = json.loads(json.loads(manifest.read_text())["body"])["pages"]
    page, (_, offset, length, _) = next((page, entry) for page, entry in pages.items() if entry[0] == 0)
    flip(victim, offset + length // 2)
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


def test_damaged_manifest_is_reported_once_as_bad_file(checkpointed):
    first, second, run_id = checkpointed
    (manifest,) = (first / run_id / "checkpoints").glob("step*.json")
    manifest.write_bytes(manifest.read_bytes()[:-5])
    status, output = _command("verify", first, second)
    assert status == 1
    assert f"{run_id}: 1 bad file\n" in output
    assert "bad page" not in output
    assert output.count(str(manifest)) == 1


def test_verify_shows_first_20_bad_pages(checkpointed):
    """`--json` lists all of them."""
    first, second, run_id = checkpointed
    (first / run_id / "rank00000.pages").unlink()
    (second / run_id / "rank00000.pages").unlink()
    status, output = _command("verify", first, second, "--json")
    pages = len(json.loads(output)["bad"])
    assert (status, pages > 20) == (1, True)
    output = _command("verify", first, second)[1]
    assert output.count("No such file or directory") == 20
    assert f"  … and {pages - 20} more; --json lists all\n" in output


def test_live_run_is_neither_removed_nor_verified(tmp_path):
    for run_id in ("20260101-000000-aaaaaa", "20260102-000000-bbbbbb"):
        RunFolder.of([tmp_path], run_id).create()
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
        skipped = f"1 live run: {owner['run_id']}"
        status, output = _command("verify", tmp_path)
        assert (status, f"{skipped}; `infinity store scrub`" in output) == (0, True)
        assert json.loads(_command("verify", tmp_path, "--json")[1])["passed_over"] == [owner["run_id"]]
        status, output = _command("gc", tmp_path, "--dry-run")
        assert output.splitlines()[-1].startswith("found 1 item, ")
        assert output.endswith(f" {skipped}\n")
        status, output = _command("rm", tmp_path, "--ended", "--yes")
        assert (status, output.endswith(f" {skipped}\n")) == (0, True)
        for command in (("rm", tmp_path, "--ended", "--yes"), ("gc", tmp_path, "--yes")):
            status, output = _command(*command)
            assert (status, output.endswith(f", 0 B; skipped {skipped}\n")) == (0, True)
        status, output = _command("verify", tmp_path)
        assert (status, skipped in output, "nothing to do" in output) == (0, True, False)
        assert [run.run_id for run in stored_runs([tmp_path])] == [owner["run_id"]]
    assert [run.owner for run in stored_runs([tmp_path])] == [None]


def test_malformed_run_does_not_hide_other_runs(checkpointed):
    """The malformed run has deep folders, a 100 GB manifest and a named pipe in place of a manifest."""
    first, second, run_id = checkpointed
    malformed = first / "20260101-000000-aaaaaa"
    malformed_second = second / malformed.name
    RunFolder.of((first, second), malformed.name).create()
    (manifest,) = (first / run_id / "checkpoints").glob("step*.json")
    with (malformed / "checkpoints" / manifest.name).open("wb") as file:
        file.truncate(100 * 10**9)
    os.mkfifo(malformed / "checkpoints" / manifest.name.replace("step00", "step10"))
    before = os.open(".", os.O_RDONLY)
    try:
        os.chdir(malformed_second)
        for _ in range(1500):
            os.mkdir("d")
            os.chdir("d")
    finally:
        os.fchdir(before)
        os.close(before)
    try:
        listed = {run.run_id: run for run in stored_runs([first, second])}
    finally:
        subprocess.run(["rm", "-rf", str(malformed_second)], check=True)
    assert listed[run_id].usable
    assert listed[malformed.name].nbytes > 1000
    problems = [checkpoint.problem for checkpoint in listed[malformed.name].checkpoints]
    assert len(problems) == 2
    assert all("cannot be read: it is" in problem for problem in problems)


def test_scrub_checks_live_runs_and_suggests_fix(checkpointed):
    """`--rate` limits the speed, and pages that a live run has replaced since are not bad."""
    first, second, run_id = checkpointed
    folders = (first, second)
    (manifest,) = (first / run_id / "checkpoints").glob("step*.json")
    (found,) = stored_runs(folders)
    with _locked(first, run_id):
        assert _command("scrub", *folders, "--json") == (0, _scrubbed(run_id, found))
    started = time.monotonic()
    assert _command("scrub", *folders, "--rate", str(found.checkpoints[0].nbytes), "--json")[0] == 0
    assert time.monotonic() - started > 0.8, "--rate limits the pages read per second"
    assert _command("scrub", *folders, "--rate", "0")[0] == 2

    page, version = next((page, v) for page, v in read_manifest(manifest).pages.items() if v.extent.path == 0)
    flip(first / run_id / "rank00000.pages", version.extent.offset)
    status, output = _command("scrub", *folders, "--json")
    (bad,) = json.loads(output)["bad"]
    assert (status, bad["page"]) == (1, page)
    assert f"infinity store rm {first} {second} {run_id}" in bad["advice"]
    assert bad["advice"] in _command("scrub", *folders)[1].replace("\n", "")

    check = Check(found)
    content = manifest.read_bytes()
    manifest.unlink()
    assert check.run(lambda _: None) == [], "pages of a removed checkpoint are not bad"
    manifest.write_bytes(content)
    assert len(Check(found).run(lambda _: None)) == 1


def test_advice_names_intact_checkpoint(checkpointed):
    first, second, _ = checkpointed
    (found,) = stored_runs((first, second))
    (checkpoint,) = found.checkpoints
    later = replace(checkpoint.held, name=replace(checkpoint.held.name, step=7))
    two = replace(found, checkpoints=(checkpoint, replace(checkpoint, held=later)))
    bad = BadPage(step=7, rank=0, page=0, path="x", offset=0, length=1, reason="")
    older, newer = two.checkpoints
    assert good_checkpoint(two, []) == newer
    assert good_checkpoint(two, [bad]) == older
    assert "--resume OUT/checkpoint-1 (run.resume_step = 1)" in _advice(two, [bad], older, [first, second])
    assert "(step 7) is intact:" in _advice(two, [replace(bad, step=1)], newer, [first, second])


def test_ls_reports_total_and_own_bytes(checkpointed):
    """Own bytes are those that no other checkpoint references."""
    first, second, run_id = checkpointed
    listed = json.loads(_command("ls", first, second, "--json")[1])[0]
    (checkpoint,) = listed["checkpoints"]
    assert listed["parameters"] > 100_000
    assert checkpoint["bytes"] == checkpoint["own_bytes"] > 8 * listed["parameters"]
    (manifest,) = (first / run_id / "checkpoints").glob("step*.json")
    body = json.loads(json.loads(manifest.read_text())["body"])
    extent = body["pages"]["0"]
    body["step"], body["pages"]["0"] = 2, [extent[0], 1 << 40, *extent[2:]]  # a different version of one page
    later = manifest.with_name(manifest.name.replace("1", "2", 1))
    text = json.dumps(body)
    later.write_text(json.dumps({"checksum": checksum_of(text.encode()), "body": text}))
    older, newer = json.loads(_command("ls", first, second, "--json")[1])[0]["checkpoints"]
    (state_file,) = manifest.parent.glob("*.safetensors")
    assert newer["own_bytes"] == extent[2], "the new manifest has no state file"
    assert older["own_bytes"] == extent[2] + state_file.stat().st_size
    for columns in ("80", "100"):
        lines = CliRunner().invoke(app, ["store", "ls", str(first), str(second)], env={"COLUMNS": columns}).output
        assert max(map(len, lines.splitlines())) <= int(columns)


def test_gc_removes_only_unusable_files(checkpointed):
    """Live runs, checkpoints and files that other nodes may complete are kept."""
    first, second, run_id = checkpointed
    folders = (first, second)
    checkpoints = first / run_id / "checkpoints"
    (manifest,) = checkpoints.glob("step*.json")
    before = sorted(checkpoints.iterdir())
    assert json.loads(_command("gc", *folders, "--yes", "--json")[1])["waste"] == []

    (checkpoints / "step000000000009.rank00000.0badf00d.safetensors").write_bytes(b"x")
    (checkpoints / "layout.rank00000.json.tmp").write_bytes(b"x")
    (checkpoints / manifest.name.replace("of-00001", "of-00002")).write_bytes(b"x")  # rank 1 may be on another node
    dead = first / "20260101-000000-aaaaaa"
    RunFolder.of(folders, dead.name).create()
    (dead / "rank00000.pages").write_bytes(b"x")
    (second / dead.name / "rank00000.pages").write_bytes(b"x")
    (first / "infinity.lock.0").write_text("{}")
    everything = sorted(first.rglob("*"))
    with _locked(first, run_id), _locked(second, run_id):
        assert {item["what"] for item in _waste(folders)} == {"run without a checkpoint"}
    with _locked(first, dead.name):
        assert "run without a checkpoint" not in {item["what"] for item in _waste(folders)}
    (first / "infinity.lock.0").write_text("{}")
    assert _waste([second]) == [], "the folder with the checkpoints was not given"
    found = {item["what"] for item in _waste(folders)}
    assert found == {"run without a checkpoint", "temporary file", "state file without a checkpoint", "stale lock"}
    assert _command("gc", *folders, "--json")[0] == 2
    assert _command("gc", *folders, answer="n\n")[0] == 1
    assert sorted(first.rglob("*")) == everything
    status, output = _command("gc", *folders, answer="y\n")
    assert status == 0
    assert "removed 4 items" in output
    (checkpoints / manifest.name.replace("of-00001", "of-00002")).unlink()
    assert sorted(checkpoints.iterdir()) == before
    assert not dead.exists()
    assert not (second / dead.name).exists()
    assert sorted(first.iterdir()) == [first / run_id]
    assert _command("verify", *folders)[0] == 0


def test_gc_removes_incomplete_checkpoint(checkpointed):
    """This requires the data files of all ranks; the state file is removed too."""
    first, second, run_id = checkpointed
    checkpoints = first / run_id / "checkpoints"
    (manifest,) = checkpoints.glob("step*.json")
    before = sorted(checkpoints.iterdir())
    for step, world_size in ((2, 2), (3, 3)):
        body = json.loads(json.loads(manifest.read_text())["body"])
        state = checkpoints / f"step{step:012d}.rank00000.{body['identity']}.safetensors"
        state.write_bytes(b"x")
        body |= {"step": step, "world_size": world_size}
        body["parts"] = [["here", f"{rank:016x}", "0" * 16, 0] for rank in range(world_size)]
        text = json.dumps(body)
        partial = checkpoints / f"step{step:012d}.rank00000-of-{world_size:05d}.{body['identity']}.json"
        partial.write_text(json.dumps({"checksum": checksum_of(text.encode()), "body": text}))
    other = first / run_id / "rank00001.pages"
    other.touch()
    found = json.loads(_command("gc", first, second, "--yes", "--json")[1])["waste"]
    assert [item["what"] for item in found] == [
        "incomplete checkpoint of step 2 (1 of 2 ranks; rank 1 on here)",
        "state file without a checkpoint",
    ]
    assert sorted(checkpoints.iterdir()) == sorted([*before, state, partial]), "the third rank may be on another node"


def _waste(folders):
    return json.loads(_command("gc", *folders, "--dry-run", "--json")[1])["waste"]


def _scrubbed(run_id, run):
    found = {"runs": [run_id], "pages": Check(run).pages, "bad": [], "copies": [], "incomplete": [], "passed_over": []}
    return json.dumps({**found, "elsewhere": []}) + "\n"


@contextmanager
def _locked(path, run_id):
    """Lock a path as a live run does."""
    lock = FolderLock.acquire([path], run_id, 0)
    yield
    lock.release()


def test_wrong_folder_suggests_run_folder(subtests: pytest.Subtests, trained: tuple[Path, str]) -> None:
    """Neither a parent nor a child of the runs' folder is accepted."""
    for command in ["ls", "verify", "scrub"]:
        with subtests.test(command=command):
            place, run_id = trained
            for wrong, meant in ((place / "first" / run_id, place / "first"), (place, place / "first")):
                status, output = _command(command, wrong)
                assert status == 2
                assert f"{wrong} contains no runs, but {meant} does" in output


def test_rm_without_stdin_requires_yes(checkpointed, monkeypatch, capsys):
    """Nothing is removed."""
    first, second, run_id = checkpointed
    monkeypatch.setattr(sys, "stdin", None)  # as after `<&-`
    monkeypatch.setattr(sys, "argv", ["infinity", "store", "rm", str(first), str(second), run_id])
    with pytest.raises(SystemExit) as ending:
        main()
    errors = capsys.readouterr().err
    assert (ending.value.code, len(errors.splitlines())) == (2, 1)
    assert "stdin is closed; pass --yes" in errors
    assert (first / run_id).is_dir()
