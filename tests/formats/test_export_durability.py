"""Tests of the durability of exports: they are complete or absent, and equal the checkpoint."""

from __future__ import annotations

import fcntl
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties

import infinity
from infinity.checkpoint import durable
from infinity.checkpoint.reader import CheckpointReader
from infinity.errors import CheckpointError, ConfigError
from infinity.formats import dcp as dcp_module
from infinity.formats import safetensors as export_module
from infinity.formats.dcp import export_dcp
from infinity.formats.dcp_metadata import read_metadata
from infinity.formats.safetensors import export_safetensors
from infinity.formats.weight_files import read_json
from infinity.sources.dcp import DcpFolder
from support import models
from support.mounts import mounted
from support.session import Session
from support.train import MIB, Paging, Recipe, make_optimizer, settings

FILE_BYTES = 200 << 10


def to_safetensors(reader: CheckpointReader, out: Path) -> list[Path]:
    """Export to several files, with a config and an index."""
    return export_safetensors(reader, out, config={"a": 1}, file_bytes=FILE_BYTES)


def to_dcp(reader: CheckpointReader, out: Path) -> list[Path]:
    """Export to one file per tensor."""
    return export_dcp(reader, out)


KINDS = {"safetensors": to_safetensors, "dcp": to_dcp}
Export = Callable[[CheckpointReader, Path], list[Path]]


@pytest.fixture(scope="module")
def checkpointed(tmp_path_factory: pytest.TempPathFactory) -> CheckpointReader:
    """A checkpoint that tests do not modify."""
    place = tmp_path_factory.mktemp("checkpointed")
    with Session(place) as session:
        session.run(3)
        return CheckpointReader(session.optimizer.run.folder)


@pytest.fixture(params=KINDS)
def export(request: pytest.FixtureRequest) -> Export:
    return KINDS[request.param]


def check(reader: CheckpointReader, out: Path) -> None:
    """Check that every parameter equals the checkpoint."""
    found: dict[str, torch.Tensor] = {}
    for file in out.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    if not found:
        found = {spec.names[0]: torch.empty(spec.shape) for spec in reader.tensors}
        dcp.load({"model": found}, checkpoint_id=out)
    for index, spec in enumerate(reader.tensors):
        assert torch.equal(found[spec.names[0]], reader.read(index)), spec.names[0]


class Recorder:
    """Records calls of fsync and rename, and fails the call with the given number."""

    def __init__(self, patch: pytest.MonkeyPatch, fail_at: int = -1) -> None:
        self.calls: list[tuple[str, Path]] = []
        self._fail_at = fail_at
        for name in ("fsync", "rename"):
            patch.setattr(os, name, self._wrapped(name, getattr(os, name)))

    def _wrapped(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            first = arguments[0]
            path = Path(os.readlink(f"/proc/self/fd/{first}") if isinstance(first, int) else first)
            if len(self.calls) == self._fail_at:
                self._fail_at = -1
                raise OSError(28, "No space remains on device", str(path))
            self.calls.append((name, path))
            return original(*arguments, **keywords)

        return call


def test_export_is_flushed_before_it_is_renamed(
    export: Export, checkpointed: CheckpointReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All files and their folder are flushed, then the folder is renamed, then its parent is flushed."""
    out = tmp_path / "new" / "out"
    with monkeypatch.context() as patch:
        recorder = Recorder(patch)
        written = export(checkpointed, out)
    assert sorted(written) == sorted(out.iterdir())
    (published,) = [
        index for index, (name, path) in enumerate(recorder.calls) if path.parent == out.parent and name == "rename"
    ]
    partial = recorder.calls[published][1]
    renamed = [path for name, path in recorder.calls[:published] if name == "rename"]
    flushed = {path for name, path in recorder.calls[:published] if name == "fsync"}
    assert all(partial / file.name in flushed for file in written)
    names = [("rename", path) for path in renamed if path.parent == partial]
    assert recorder.calls.index(("fsync", partial)) > max((recorder.calls.index(one) for one in names), default=-1)
    assert recorder.calls[published + 1 :] == [("fsync", out.parent)]
    assert ("fsync", tmp_path) in recorder.calls, "the parent folder is new as well"
    check(checkpointed, out)


def test_failed_flush_or_rename_removes_the_export(
    export: Export, checkpointed: CheckpointReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        recorder = Recorder(patch)
        export(checkpointed, tmp_path / "counted")
    calls = len(recorder.calls)
    assert calls > 5
    for number in {*range(0, calls - 1, 1 + calls // 8), calls - 2}:  # the last call follows the rename
        out = tmp_path / "out"
        with monkeypatch.context() as patch:
            Recorder(patch, number)
            with pytest.raises(ConfigError, match="No space remains on device"):
                export(checkpointed, out)
        assert [entry.name for entry in tmp_path.iterdir()] == ["counted"], number
    export(checkpointed, tmp_path / "out")


def test_exported_files_are_read_back_and_compared(
    export: Export, checkpointed: CheckpointReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def flipping(file: Path) -> None:
        durable.sync_file(file)
        large = file.stat().st_size > MIB // 64  # the middle of a small file may be padding
        if large and file.suffix in (".safetensors", ".distcp"):
            if len(seen) == number:
                content = bytearray(file.read_bytes())
                content[len(content) // 2] ^= 4
                file.write_bytes(content)
            seen.append(file.name)

    for module in (export_module, dcp_module):
        monkeypatch.setattr(module, "sync_file", flipping)
    for number in range(3):
        seen.clear()
        with pytest.raises(ConfigError, match=rf"{tmp_path.name}.* differs from .*check the drive"):
            export(checkpointed, tmp_path / "out")
        assert len(seen) > number
        assert list(tmp_path.iterdir()) == []


def test_export_works_without_file_locks(
    export: Export, checkpointed: CheckpointReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example, on Lustre without the flock mount option. The lock only serves to detect remains of exports."""

    def unsupported(*_: Any) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    export(checkpointed, tmp_path / "out")
    check(checkpointed, tmp_path / "out")


def test_remains_of_an_interrupted_export_are_reported(
    export: Export, checkpointed: CheckpointReader, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The next export to the same folder logs them, unless the earlier export still runs."""
    remains = tmp_path / ".out.partial-0badf00d"
    remains.mkdir()
    (remains / "model.safetensors").write_bytes(b"half")
    descriptor = os.open(remains, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    export(checkpointed, tmp_path / "out")
    assert str(remains) not in caplog.text
    os.close(descriptor)
    shutil.rmtree(tmp_path / "out")
    export(checkpointed, tmp_path / "out")
    assert str(remains) in caplog.text


def test_export_destination_must_be_empty_or_new(
    export: Export, checkpointed: CheckpointReader, tmp_path: Path
) -> None:
    """An empty folder is replaced, also through a symbolic link."""
    (tmp_path / "empty").mkdir(mode=0o750)
    (tmp_path / "link").symlink_to("empty")
    written = export(checkpointed, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "empty").stat().st_mode & 0o777 == 0o750
    assert sorted(tmp_path / "empty" / file.name for file in written) == sorted((tmp_path / "empty").iterdir())
    check(checkpointed, tmp_path / "empty")
    (tmp_path / "file").touch()
    for taken, why in (("empty", "is not empty"), ("file", "file exists but is not a folder")):
        with pytest.raises(ConfigError, match=why):
            export(checkpointed, tmp_path / taken)
    with pytest.raises(ConfigError, match="file/below cannot be created"):
        export(checkpointed, tmp_path / "file" / "below")


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    with mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=256k", "tmpfs") as place:
        yield place


def test_export_to_a_full_drive_raises(
    export: Export, checkpointed: CheckpointReader, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The required space is checked first; if writing fails nevertheless, no files remain."""
    with pytest.raises(ConfigError, match="256 KiB free, but out needs"):
        export(checkpointed, small / "out")
    with pytest.raises(ConfigError, match="is a mount point"):
        export(checkpointed, small)
    usage = shutil.disk_usage(small)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1 << 40))
    with pytest.raises(ConfigError, match=r"cannot be written|No space remains"):
        export(checkpointed, small / "out")
    assert list(small.iterdir()) == []


# --- Reading folders of torch.distributed.checkpoint.


class Evil:
    """Calls a function when it is unpickled."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._call


def begin(weights: Path, place: Path) -> None:
    """Start a run with the given weights."""
    recipe = Recipe(model="toy", groups=True)
    model = models.build(recipe.model, meta=True)
    with infinity.offload(model, make_optimizer(recipe, model), settings(place, Paging(), 64 * MIB), weights=weights):
        pass


@pytest.mark.parametrize("where", ["alone", "inside the metadata", "by attribute path"])
def test_metadata_cannot_execute_code(where: str, checkpointed: CheckpointReader, tmp_path: Path) -> None:
    """The error names the function, which is not called."""
    out = tmp_path / "dcp"
    to_dcp(checkpointed, out)
    marker = tmp_path / "marker"
    evil = Evil(os.system, f"touch {marker}")
    if where == "alone":
        pickled, name = pickle.dumps(evil), "posix.system"
    elif where == "inside the metadata":
        metadata = dcp.FileSystemReader(out).read_metadata()
        metadata.planner_data = {key: evil for key in metadata.state_dict_metadata}
        pickled, name = pickle.dumps(metadata), "posix.system"
    else:
        pickled, name = b"ctorch\nhub._sys.modules\n.", "torch.hub._sys.modules"
    (out / ".metadata").write_bytes(pickled)
    with pytest.raises(CheckpointError, match=rf"\.metadata cannot be read: .*names {name}, which is not part of"):
        begin(out, tmp_path)
    assert not marker.exists()


@pytest.mark.parametrize(
    "instructions",
    [
        b"Metadata\nN(S'planner_data'\nI7\nd\x86b.",
        b"_MEM_FORMAT_ENCODING\nN(S'value'\nI7\nd\x86b.",
        b"_MEM_FORMAT_ENCODING\n(I0\ntR(S'_value_'\nI7\ndb.",
        b"_MEM_FORMAT_ENCODING\n(I0\ntRN(S'_value_'\nI7\nd\x86b.",
    ],
)
def test_metadata_cannot_modify_classes(instructions: bytes, tmp_path: Path) -> None:
    """Each pickle sets an attribute of a class, or of a member of an enum."""
    (tmp_path / ".metadata").write_bytes(b"ctorch.distributed.checkpoint.metadata\n" + instructions)
    with pytest.raises(CheckpointError, match=r"\.metadata cannot be read: AttributeError"):
        DcpFolder(tmp_path)
    assert Metadata({}).planner_data is None
    assert pickle.loads(pickle.dumps(TensorProperties())) == TensorProperties()


@pytest.mark.parametrize(
    ("changed", "value"), [("transform_descriptors", 7), ("offset", -1), ("index", ""), ("index", [])]
)
def test_metadata_with_values_of_wrong_types_raises(changed: str, value: Any, tmp_path: Path) -> None:
    dcp.save({"a": torch.zeros(6)}, checkpoint_id=tmp_path)
    metadata = dcp.FileSystemReader(tmp_path).read_metadata()
    ((index, stored),) = metadata.storage_data.items()
    object.__setattr__(index if changed == "index" else stored, changed, value)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"\.metadata cannot be read: ValueError: (number|transform) expected"):
        DcpFolder(tmp_path)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/../../secret"])
def test_metadata_cannot_refer_to_outside_files(name: str, checkpointed: CheckpointReader, tmp_path: Path) -> None:
    """A named pipe is also rejected, because opening it would block."""
    out = tmp_path / "dcp"
    to_dcp(checkpointed, out)
    metadata = dcp.FileSystemReader(out).read_metadata()
    stored = next(iter(metadata.storage_data.values()))
    stored.relative_path, kept = name, stored.relative_path
    (out / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="which is outside of the folder"):
        DcpFolder(out)
    stored.relative_path = kept
    (out / ".metadata").write_bytes(pickle.dumps(metadata))
    DcpFolder(out)
    (out / kept).unlink()
    os.mkfifo(out / kept)
    with pytest.raises(CheckpointError, match="which is not a file"):
        DcpFolder(out)


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("read", [read_metadata, read_json])
def test_reading_a_named_pipe_does_not_block(
    read: Callable[[Path], Any], linked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check applies to the opened file, also through symbolic links, so it cannot be raced."""
    pipe, place = tmp_path / "pipe", tmp_path / ("link" if linked else "pipe")
    os.mkfifo(pipe)
    if linked:
        place.symlink_to(pipe)
    monkeypatch.setattr(Path, "is_file", lambda _: True)
    with pytest.raises((OSError, ConfigError), match="it is not a regular file"):
        read(place)


def test_metadata_may_be_a_symbolic_link(checkpointed: CheckpointReader, tmp_path: Path) -> None:
    """Download caches use such links."""
    to_dcp(checkpointed, tmp_path / "dcp")
    (tmp_path / "dcp" / ".metadata").rename(tmp_path / "blob")
    (tmp_path / "dcp" / ".metadata").symlink_to(tmp_path / "blob")
    DcpFolder(tmp_path / "dcp")


def test_metadata_matches_torch(checkpointed: CheckpointReader, tmp_path: Path) -> None:
    """Covers an exported folder and one that `dcp.save` wrote."""
    to_dcp(checkpointed, tmp_path / "ours")
    dcp.save({"a": torch.arange(6.0), "b": {"c": [1, "x"]}}, checkpoint_id=tmp_path / "theirs")
    for folder in (tmp_path / "ours", tmp_path / "theirs"):
        expected, found = dcp.FileSystemReader(folder).read_metadata(), read_metadata(folder / ".metadata")
        assert found.state_dict_metadata == expected.state_dict_metadata
        assert found.planner_data == expected.planner_data
        assert found.storage_data.keys() == expected.storage_data.keys()
        for key, item in expected.storage_data.items():
            mine = found.storage_data[key]
            assert (mine.relative_path, mine.offset, mine.length) == (item.relative_path, item.offset, item.length)
