"""Tests of mirrors: copies of checkpoints at an address of fsspec, from which a run resumes."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import fsspec
import pytest
import torch
import torch.distributed as dist

from infinity.checkpoint.mirror import Mirror
from infinity.checkpoint.mirror_writer import MirrorWriter
from infinity.checkpoint.reader import CheckpointReader
from infinity.content.format import Role
from infinity.errors import CheckpointError, ConfigError, CorruptPageError, StorageError
from infinity.io.pace import Pace
from support.command import run_here
from support.processes import fork_server
from support.ranks import RankPool
from support.resharding import all_tensors, newest_checkpoint, unequal_names
from support.session import Session, reference
from support.train import Outcome, Paging, Recipe, offloaded, train


@pytest.fixture(params=["folder", "memory"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Address of a mirror in a folder, or in fsspec's file system in memory."""
    if request.param == "folder":
        yield f"file://{tmp_path}/mirror"
        return
    yield "memory://bucket/mirror"
    files = fsspec.filesystem("memory")
    if files.exists("/bucket"):
        files.rm("/bucket", recursive=True)


def pages_there(address: str) -> list[str]:
    """Return the names of all page files of a mirror."""
    files, root = fsspec.core.url_to_fs(address)
    files.invalidate_cache()
    return sorted(name for name in files.find(root) if "/pages/" in name)


def newest_in(address: str) -> CheckpointReader:
    """Return a reader of the newest checkpoint in a mirror."""
    found = Mirror(address).newest()
    assert found is not None
    return Mirror(address).reader(*found)


def steps_there(address: str) -> list[int]:
    """Return the steps of the complete checkpoints of the newest run in a mirror."""
    found = Mirror(address).newest()
    assert found is not None
    published = Mirror(address).published(found[0])
    return sorted(
        {name.step for name in published if sum(other.step == name.step for other in published) == name.world_size}
    )


def lose_drives(folder: Path) -> None:
    """Remove the NVMe path of a run."""
    shutil.rmtree(folder / "nvme0")


def test_run_whose_drives_are_lost_resumes_from_the_mirror(address: str, tmp_path: Path) -> None:
    """All later losses equal those of an uninterrupted run."""
    (tmp_path / "reference").mkdir()
    losses = reference(tmp_path / "reference")
    with Session(tmp_path, run={"mirror": address}) as session:
        assert session.run(until=6) == losses[:6]
    expected = all_tensors(newest_checkpoint(tmp_path))
    assert unequal_names(all_tensors(newest_in(address)), expected) == []
    run_id = session.optimizer.run.folder.run_id

    lose_drives(tmp_path)
    with Session(tmp_path, run={"resume": address, "mirror": address}) as session:
        assert session.optimizer.steps == 6
        assert session.run() == losses[6:]
        resumed = session.optimizer.run.folder.run_id
    assert resumed > run_id
    assert Mirror(address).newest()[0] == resumed  # type: ignore[index]


@pytest.mark.parametrize("wanted", ["latest", "auto"])
def test_latest_and_auto_use_the_mirror_only_without_a_local_checkpoint(wanted: str, tmp_path: Path) -> None:
    """A first start with `auto` finds neither."""
    sections = {"run": {"resume": "auto", "mirror": f"file://{tmp_path}/mirror"}}
    with Session(tmp_path, **sections) as session:
        assert session.optimizer.steps == 0
        session.run(until=3)
    sections["run"]["resume"] = wanted
    with Session(tmp_path, **sections) as session:
        run_id = session.optimizer.run.folder.run_id
        session.run(until=6)
    with Session(tmp_path, **sections) as session:
        assert session.optimizer.run.folder.run_id == run_id  # continues in place
    lose_drives(tmp_path)
    with Session(tmp_path, **sections) as session:
        assert session.optimizer.steps == 6
        assert session.optimizer.run.folder.run_id != run_id


def test_incomplete_local_run_is_replaced_by_the_mirror(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The reason is logged."""
    sections = {"run": {"resume": "auto", "mirror": f"file://{tmp_path}/mirror"}}
    with Session(tmp_path, **sections) as session:
        session.run(until=3)
    (manifest,) = tmp_path.glob("nvme0/*/checkpoints/*.json")
    manifest.rename(manifest.with_name(manifest.name.replace("of-00001", "of-00002")))  # as of a lost node
    with caplog.at_level(logging.WARNING), Session(tmp_path, **sections) as session:
        assert session.optimizer.steps == 3
    assert "resuming from the mirror, because" in caplog.text


def test_two_ranks_copy_and_one_resumes(pair: RankPool, tmp_path: Path) -> None:
    """Every rank copies its own pages, and a rank reads the pages of all ranks."""
    address = f"file://{tmp_path}/mirror"
    pair.run(save_with_mirror, str(tmp_path), address)
    before = all_tensors(newest_checkpoint(tmp_path))
    lose_drives(tmp_path)
    with Session(tmp_path, run={"resume": address}) as session:
        assert session.optimizer.steps == 2
        session.save_checkpoint()
    assert unequal_names(before, all_tensors(newest_checkpoint(tmp_path))) == []


def save_with_mirror(folder: str, address: str) -> None:
    """Train two steps and save a checkpoint. Called on every rank."""
    with Session(Path(folder), run={"mirror": address}) as session:
        session.run(until=2, every=2)


def test_older_checkpoints_are_removed_and_shared_pages_are_copied_once(tmp_path: Path) -> None:
    """Pages of frozen parameters have the same version in all checkpoints."""
    address, recipe = f"file://{tmp_path}/mirror", Recipe(model="frozen", steps=1)
    seen: list[set[str]] = []
    with offloaded(recipe, Paging(host_cache="least"), tmp_path, run={"mirror": address}) as (model, optimizer):
        for step in range(3):
            train(replace(recipe, steps=step + 1), model, optimizer, Outcome(), first=step)
            optimizer.save_checkpoint()
            optimizer._checkpointer.finish()
            seen.append(set(pages_there(address)))
        pages = optimizer.run.layout.pages
    assert len(seen[-1]) == sum(page.role is not Role.GRAD for page in pages)  # the pages of one checkpoint
    fixed = sum(page.fixed for page in pages)
    assert fixed
    assert len(seen[0] & seen[1] & seen[2]) == fixed
    assert [name.step for name in Mirror(address).published(optimizer.run.folder.run_id)] == [3]


def test_checkpoint_stays_readable_while_it_is_copied(tmp_path: Path) -> None:
    """Further checkpoints replace it in the meantime, of which `close` copies only the newest one."""
    address = f"file://{tmp_path}/mirror"
    begun, goes_on = threading.Event(), threading.Event()
    copied: list[int] = []
    original = MirrorWriter._copy

    def late(self: Any, manifest: Any, *files: Any) -> None:
        begun.set()
        assert goes_on.wait(600)
        original(self, manifest, *files)
        copied.append(manifest.step)

    with patch.object(MirrorWriter, "_copy", late), Session(tmp_path, run={"mirror": address}) as session:
        session.run(until=1, every=1)
        assert begun.wait(600)
        session.run(until=6, every=1)
        goes_on.set()
    assert copied == [1, 6]
    assert steps_there(address) == [6]
    reader = newest_in(address)
    assert unequal_names(all_tensors(reader), all_tensors(newest_checkpoint(tmp_path))) == []


def test_ranks_of_different_speed_copy_the_same_checkpoints(pair: RankPool, tmp_path: Path) -> None:
    """No rank begins to copy while another one is copying, so a complete checkpoint is always present."""
    address = f"file://{tmp_path}/mirror"
    copied = pair.run(save_with_a_slow_rank, str(tmp_path), address)
    assert copied[0] == copied[1] == [1, 4, 5]
    assert steps_there(address) == [4, 5]


def save_with_a_slow_rank(folder: str, address: str) -> list[int]:
    """Save five checkpoints, while rank 1 copies the first one until the fourth; return the steps that were copied."""
    copied: list[int] = []
    original, goes_on = MirrorWriter._copy, threading.Event()

    def slow(self: Any, manifest: Any, *files: Any) -> None:
        assert dist.get_rank() == 0 or goes_on.wait(600)
        original(self, manifest, *files)
        copied.append(manifest.step)

    with patch.object(MirrorWriter, "_copy", slow), Session(Path(folder), run={"mirror": address}) as session:
        session.run(until=3, every=1)
        goes_on.set()
        for until in (4, 5):
            session.optimizer._checkpointer._checkpoint_writer._copiers[0]._thread.join()
            dist.barrier()
            session.run(until=until, every=1)
            if dist.get_rank() == 0 and until == 4:
                assert Mirror(address).newest() is not None
    return copied


def test_failed_copy_is_repeated(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The run continues, and `close` copies the checkpoint."""
    address = f"file://{tmp_path}/mirror"
    original = Mirror.write
    failing = iter([True])

    def write(self: Mirror, name: str, data: Any) -> None:
        if "/pages/" in name and next(failing, False):
            raise ConnectionResetError("network is down")
        original(self, name, data)

    with patch.object(Mirror, "write", write), Session(tmp_path, run={"mirror": address}) as session:
        session.run(until=3)
        session.optimizer._checkpointer._checkpoint_writer._copiers[0]._thread.join()
        assert "step 3 could not be copied to" in caplog.text
        assert "network is down" in caplog.text
        assert Mirror(address).newest() is None
    assert steps_there(address) == [3]


def test_abandoned_branch_is_removed(tmp_path: Path) -> None:
    """After resuming from an earlier step, the mirror does not resume from the later step of the other branch."""
    address = f"file://{tmp_path}/mirror"
    with Session(tmp_path, run={"mirror": address, "retained_checkpoints": 2}) as session:
        session.run(until=6)
    with Session(
        tmp_path, run={"mirror": address, "retained_checkpoints": 2, "resume": "latest", "resume_step": 3}
    ) as session:
        session.run(until=5, every=1)
    assert max(steps_there(address)) == 5
    lose_drives(tmp_path)
    with Session(tmp_path, run={"mirror": address, "resume": "auto"}) as session:
        assert session.optimizer.steps == 5


def test_newer_checkpoint_of_the_mirror_is_preferred(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The drives have an older complete run, and the newest run is incomplete there."""
    sections = {"run": {"mirror": f"file://{tmp_path}/mirror"}}
    for until in (3, 6):
        with Session(tmp_path, **sections) as session:
            session.run(until=until)
    (manifest,) = (tmp_path / "nvme0" / session.optimizer.run.folder.run_id).glob("checkpoints/*.json")
    manifest.unlink()
    sections["run"]["resume"] = "auto"
    with caplog.at_level(logging.WARNING), Session(tmp_path, **sections) as session:
        assert session.optimizer.steps == 6
    assert "the checkpoint of step 6 in the mirror is newer" in caplog.text


def test_run_that_lacks_a_path_resumes_from_the_mirror(tmp_path: Path) -> None:
    """One of two drives is lost."""
    storage = {"paths": [str(tmp_path / name) for name in ("nvme0", "nvme1")]}
    sections = {"run": {"mirror": f"file://{tmp_path}/mirror", "resume": "auto"}, "storage": storage}
    with Session(tmp_path, **sections) as session:
        session.run(until=3)
    shutil.rmtree(tmp_path / "nvme1")
    with Session(tmp_path, **sections) as session:
        assert session.optimizer.steps == 3


def test_run_that_was_resumed_from_the_mirror_is_removed_from_it(tmp_path: Path) -> None:
    """Otherwise, the mirror would grow with each loss of the drives."""
    sections = {"run": {"mirror": f"file://{tmp_path}/mirror", "resume": "auto"}}
    for until in (3, 6, 9):
        with Session(tmp_path, **sections) as session:
            session.run(until=until)
        lose_drives(tmp_path)
    assert [path.name for path in (tmp_path / "mirror").iterdir()] == [session.optimizer.run.folder.run_id]
    assert (tmp_path / "mirror").stat().st_mode & 0o777 == 0o700


def test_leftovers_of_interrupted_copies_are_removed(tmp_path: Path) -> None:
    """Files of this rank without a manifest, and incomplete manifests."""
    address = f"file://{tmp_path}/mirror"
    with Session(tmp_path, run={"mirror": address}) as session:
        session.run(until=3)
        session.optimizer._checkpointer.finish()
        (folder,) = (tmp_path / "mirror").glob("*/checkpoints")
        names = (".aaaa.safetensors", "-of-00001.aaaa.json.tmp")
        stray = [folder / f"step000000000002.rank00000{name}" for name in names]
        other = folder / "step000000000002.rank00001.aaaa.safetensors"
        for file in (*stray, other):
            file.touch()
        session.run(until=6)
    assert [file.exists() for file in (*stray, other)] == [False, False, True]


def test_mirror_that_does_not_respond_does_not_delay_a_failure(tmp_path: Path) -> None:
    """`close` waits for a limited time, and the threads do not keep the process alive."""
    begun, hangs = threading.Event(), threading.Event()

    def hang(*_: Any) -> None:
        begun.set()
        hangs.wait(600)

    with (
        patch.object(Mirror, "write_from", hang),
        patch("infinity.checkpoint.mirror_writer._END_SECONDS", 0.1),
    ):
        session = Session(tmp_path, run={"mirror": f"file://{tmp_path}/mirror"})
        session.run(until=3)
        thread = session.optimizer._checkpointer._checkpoint_writer._copiers[0]._thread
        assert begun.wait(600)
        session.optimizer.close(RuntimeError("failed"))
        assert thread.is_alive()
        assert thread.daemon
        hangs.set()
        thread.join()


def _die_while_copying(folder: str, address: str) -> None:
    torch.set_num_threads(1)
    original, written = Mirror.write, iter(range(8))

    def write(self: Mirror, name: str, data: Any) -> None:
        if next(written, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        original(self, name, data)

    with patch.object(Mirror, "write", write), Session(Path(folder), run={"mirror": address}) as session:
        session.run(until=3)


def test_killed_copy_is_continued_by_the_next_start(tmp_path: Path) -> None:
    """Pages that are there already are not copied again, unless their files are incomplete."""
    address = f"file://{tmp_path}/mirror"
    process = fork_server().Process(target=_die_while_copying, args=(str(tmp_path), address))
    process.start()
    process.join(900)
    assert process.exitcode == -signal.SIGKILL
    assert Mirror(address).newest() is None
    there = pages_there(address)
    assert there
    Path(there[0]).write_bytes(b"incomplete")
    before = {name: os.stat(name) for name in there}  # others may be incomplete, too, because several threads copied
    with Session(tmp_path, run={"resume": "latest", "mirror": address}) as session:
        assert session.optimizer.steps == 3
        session.optimizer._checkpointer.finish()
        assert unequal_names(all_tensors(newest_in(address)), all_tensors(newest_checkpoint(tmp_path))) == []
    for name, found in before.items():
        now = os.stat(name)
        assert (now.st_mtime_ns == found.st_mtime_ns) == (now.st_size == found.st_size), name


def test_damage_is_reported(tmp_path: Path) -> None:
    """A flipped bit in a page, a damaged manifest and a missing page raise errors that name the file."""
    address = f"file://{tmp_path}/mirror"
    with Session(tmp_path, run={"mirror": address}) as session:
        session.run(until=3)
    lose_drives(tmp_path)
    resume, pages = {"run": {"resume": address}}, [Path(name) for name in pages_there(address)]
    for page in pages:
        content = bytearray(page.read_bytes())
        content[0] ^= 1
        page.write_bytes(content)
    with pytest.raises(CorruptPageError, match=r"mirror/.*/pages/rank00000/"):
        Session(tmp_path, **resume)
    for page in pages:
        page.unlink()
    with pytest.raises(StorageError, match=r"mirror/.*/pages/rank00000/"):
        Session(tmp_path, **resume)
    (manifest,) = tmp_path.glob("mirror/*/checkpoints/*.json")
    manifest.write_bytes(manifest.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="malformed"):
        Session(tmp_path, **resume)
    manifest.unlink()
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        Session(tmp_path, **resume)


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        ({"mirror": "nosuch://bucket"}, "nosuch"),
        ({"mirror": "/backup"}, "file:///backup"),
        ({"mirror": "memory://x", "retained_checkpoints": 0}, "no checkpoints to copy"),
        ({"mirror": "s3://key:se/cret@bucket/run"}, r"run\.mirror contains a password"),
        ({"resume": "https://user:secret@host/run"}, r"run\.resume contains a password"),
        ({"resume": "memory://nothing"}, "memory://nothing contains no complete checkpoint"),
        ({"resume": "memory://nothing", "resume_paths": ("/tmp",)}, "resume_paths"),
    ],
)
def test_wrong_settings_raise_errors(run: dict[str, Any], reason: str, tmp_path: Path) -> None:
    """The error is raised before training, and no files remain."""
    with pytest.raises((ConfigError, CheckpointError), match=reason):
        Session(tmp_path, run=run)
    assert not list(tmp_path.glob("nvme0/*/*.pages"))


def test_credentials_are_not_shown() -> None:
    """An address with a password is not supported, also on the command line."""
    with pytest.raises(ConfigError, match="contains a password") as caught:
        Mirror("nosuch://user:secret@host/folder")
    assert "secret" not in str(caught.value)


def test_mirror_on_the_drives_of_the_run_raises_an_error(tmp_path: Path) -> None:
    """The copies would replace the files of the run."""
    for name in ("nvme0", "nvme0/mirror"):
        with pytest.raises(ConfigError, match=r"storage\.paths"):
            Session(tmp_path, run={"mirror": f"file://{tmp_path}/{name}"})


def test_mirror_that_cannot_be_written_raises_an_error_at_start(tmp_path: Path) -> None:
    """The message contains the reason."""
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot be written: .*file"):
        Session(tmp_path, run={"mirror": f"file://{tmp_path}/file/mirror"})


def test_mirror_needs_space_for_one_more_checkpoint(tmp_path: Path) -> None:
    """The pages of a checkpoint that is being copied are not reused."""
    sizes = []
    for name, run in (("without", {}), ("with", {"mirror": f"file://{tmp_path}/mirror"})):
        (tmp_path / name).mkdir()
        with Session(tmp_path / name, run=run) as session:
            sizes.append(sum(file.stat().st_size for file in (tmp_path / name).glob("nvme0/*/*.pages")))
            state = sum(page.nbytes for page in session.optimizer.run.layout.pages if page.role is not Role.GRAD)
    assert sizes[1] - sizes[0] >= state


def test_rate_limits_copies() -> None:
    """The waits add up to the bytes divided by the rate. The first transfer does not wait."""
    waits: list[float] = []
    pace = Pace(1000.0)
    with patch.object(pace.stopped, "wait", waits.append), patch("infinity.io.pace.time.monotonic", lambda: 5.0):
        for _ in range(3):
            pace.wait(500)
    assert waits == [0.5, 1.0]


def test_export_from_a_mirror_equals_an_export_from_the_drives(tmp_path: Path) -> None:
    """The command reads the pages of the mirror."""
    address = f"file://{tmp_path}/mirror"
    with Session(tmp_path, run={"mirror": address}) as session:
        session.run(until=3)
    assert run_here("export", tmp_path / "nvme0", "--out", tmp_path / "one").status == 0
    lose_drives(tmp_path)
    assert run_here("export", address, "--step", 3, "--out", tmp_path / "other").status == 0
    assert sorted(file.name for file in (tmp_path / "one").iterdir())
    for file in (tmp_path / "one").iterdir():
        assert file.read_bytes() == (tmp_path / "other" / file.name).read_bytes(), file.name
    missing = run_here("export", f"{address}/none", "--out", tmp_path / "third")
    assert (missing.status, "contains no complete checkpoint" in missing.errors) == (2, True)
