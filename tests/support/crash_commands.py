"""Exports, `store gc` and `store rm` that are interrupted at a system call, and checks of the remaining files."""

from __future__ import annotations

import hashlib
import os
import shutil
import traceback
from collections.abc import Callable
from pathlib import Path

from safetensors import safe_open
from torch.distributed.checkpoint import FileSystemReader
from typer.testing import CliRunner

from infinity.checkpoint.manifest import published_in
from infinity.checkpoint.reader import CheckpointReader
from infinity.formats.dcp import export_dcp
from infinity.formats.safetensors import export_safetensors
from infinity.store.folder import RunFolder
from infinity.store.marker import Marker, write_marker
from infinity_tools.cli import app
from infinity_tools.stored_runs import waste
from support.ends import End, ending
from support.published import complete_checkpoints

_FILE_BYTES = 128 << 10
_OTHER, _DEAD = "20200101-000000-aaaaaa", "20200102-000000-bbbbbb"


def _safetensors(place: Path) -> None:
    export_safetensors(_reader(place), place.parent / "out", config={"a": 1}, file_bytes=_FILE_BYTES)


def _dcp(place: Path) -> None:
    export_dcp(_reader(place), place.parent / "out")


def _gc(place: Path) -> None:
    _store("gc", place)


def _rm(place: Path) -> None:
    _store("rm", place, _OTHER)


def _store(*arguments: object) -> None:
    result = CliRunner().invoke(app, ["store", *map(str, arguments), "--yes"])
    if result.exit_code:
        raise RuntimeError(f"status {result.exit_code}: {result.output}")


COMMANDS: dict[str, Callable[[Path], None]] = {"safetensors": _safetensors, "dcp": _dcp, "gc": _gc, "rm": _rm}


def _run(place: Path) -> RunFolder:
    (root,) = (entry for entry in place.iterdir() if entry.is_dir() and entry.name not in (_OTHER, _DEAD))
    return RunFolder(root.name, (root,))


def _reader(place: Path) -> CheckpointReader:
    return CheckpointReader(_run(place))


def _content(out: Path) -> str:
    """Return a digest of an export's contents, read with the libraries of its format."""
    found = hashlib.sha256()
    for file in sorted(out.iterdir()):
        if file.name == ".metadata":  # contains a random id and the name of the partial folder
            found.update(repr(sorted(FileSystemReader(out).read_metadata().storage_data.items(), key=str)).encode())
            continue
        found.update(file.name.encode() + file.read_bytes())
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as opened:
                assert opened.keys()
    return found.hexdigest()


class Commands:
    """Run commands on copies of a run folder, which also contains a removable run and obsolete files."""

    def __init__(self, run: Path, place: Path) -> None:
        """Copy the folder of the run, and run every command once without interruption.

        Raises:
            RuntimeError: if a command fails without interruption.
        """
        self._good, self.directory = place / "good" / "nvme0", place / "now" / "nvme0"
        shutil.copytree(run, self._good)
        self._add_others()
        self._names = sorted(name.file_name for name in published_in(_run(self._good).checkpoints))
        self._expected: dict[str, str] = {}
        self.calls: dict[str, int] = {}
        for name in COMMANDS:
            status, output = self._attempt(name, End(call=1 << 30), 0)
            if status:
                raise RuntimeError(f"{name} exited with status {status}: {output}")
            self.calls[name] = int(output)
            if (self.directory.parent / "out").exists():
                self._expected[name] = _content(self.directory.parent / "out")

    def _add_others(self) -> None:
        root = _run(self._good).roots[0]
        for name, checkpoints in ((_OTHER, True), (_DEAD, False)):
            other = root.with_name(name)
            shutil.copytree(root, other)
            write_marker(other, Marker(run_id=name, path=0, paths=1))
            if not checkpoints:
                shutil.rmtree(other / "checkpoints")
                (other / "checkpoints").mkdir()
        (root / "checkpoints" / "step000000000009.json.tmp").write_bytes(b"x")
        (root / "checkpoints" / f"step000000000009.rank00000.{0:024x}.safetensors").write_bytes(b"x")

    def trial(self, name: str, end: End, seed: int) -> tuple[int, list[str]]:
        """Interrupt a command; return its status and the problems with the remaining files."""
        status, output = self._attempt(name, end, seed)
        problems = [f"exited with status {status}: {output}"] if status not in (0, -9) else []
        try:
            problems += self._export_problems(name) if name in self._expected else self._store_problems(name)
        except Exception:
            problems.append(f"the remaining files cannot be used: {traceback.format_exc()}")
        kept = sorted(file.name for file in _run(self.directory).checkpoints.glob("step*.json"))
        return status, problems + (
            [f"of the checkpoints {self._names}, only {kept} remain"] if kept != self._names else []
        )

    def _attempt(self, name: str, end: End, seed: int) -> tuple[int, str]:
        """Run a command in a new process on a new copy; return its status, and its number of calls or its error."""
        top = self.directory.parent
        shutil.rmtree(top, ignore_errors=True)
        shutil.copytree(self._good, self.directory)
        child = os.fork()
        if not child:
            status = 1
            try:
                with ending(end, seed, top) as calls:
                    COMMANDS[name](self.directory)
                    (top / "log").write_text(str(calls()))
                status = 0
            except BaseException:
                (top / "log").write_text(traceback.format_exc())
            finally:
                os._exit(status)
        _, waited = os.waitpid(child, 0)
        log = top / "log"
        return os.waitstatus_to_exitcode(waited), log.read_text() if log.exists() else ""

    def _export_problems(self, name: str) -> list[str]:
        """Check that the export is missing or complete, and that the next export succeeds."""
        out = self.directory.parent / "out"
        if out.exists() and _content(out) != self._expected[name]:
            return ["an incomplete export looks like a complete one"]
        if not out.exists():
            COMMANDS[name](self.directory)
        return [] if _content(out) == self._expected[name] else ["the next export differs"]

    def _store_problems(self, name: str) -> list[str]:
        """Check that the next command completes the interrupted one, and that the other run is unchanged."""
        if name == "gc":
            _gc(self.directory)
            left = [item.name for item in waste([self.directory])]
            roots = (self.directory / _OTHER, *_run(self.directory).roots)
            complete = [len(complete_checkpoints(root)) for root in roots]
            lost = ["the other run lost a checkpoint"] if complete[0] != complete[1] else []
            return lost + ([f"gc does not remove {left}"] if left else [])
        if (self.directory / _OTHER / "infinity.run").exists():
            _rm(self.directory)
        _gc(self.directory)
        return ["files of the removed run remain"] if any((self.directory / _OTHER).glob("*")) else []
