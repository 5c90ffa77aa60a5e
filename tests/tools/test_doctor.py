"""`infinity doctor` as it is typed: what it prints, and what its exit status says."""

from __future__ import annotations

import getpass
import json
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import infinity
from infinity.daemon_client import NodeDaemon
from infinity.io.block_devices import locate
from infinity_tools.doctor import check_groups, doctor_command, doctor_report, finding
from infinity_tools.doctor.check_groups import GROUPS
from infinity_tools.doctor.finding import Finding, Group, Status, Verdict, check, ok, problem
from infinity_tools.doctor.world import World
from support.command import Finished, run_here
from support.daemon_process import daemon
from support.doctor import is_

OF_FOLDERS = [one.name for group in GROUPS for one in group.of_folders]
OF_THE_MACHINE = [one.name for group in GROUPS for one in group.checks]


def found(done: Finished) -> dict[tuple[str, str | None], dict[str, str]]:
    """What `--json` prints, by check and folder."""
    return {(one["check"], one["folder"]): one for one in json.loads(done.output)}


def finds(monkeypatch: pytest.MonkeyPatch, *findings: Finding) -> None:
    """Let nothing be looked at, and this be found."""
    monkeypatch.setattr(doctor_command, "look", lambda world: iter([("Part", list(findings))]))


def of(status: Status) -> Finding:
    """A finding."""
    return Finding(check="[x]", status=status, value="[red]v[/red] [/]", fix="" if status is Status.OK else "[y]")


def test_all_checks_here(tmp_path: Path) -> None:
    """Each is there once, none fails itself, and nothing but JSON is printed; the folders are left as they were."""
    (tmp_path / "a").mkdir()
    done = run_here("doctor", "a", "new", "missing/deeper", "--json")
    listed = json.loads(done.output)
    expected = [*((name, folder) for folder in ("a", "new") for name in OF_FOLDERS), ("folder", "missing/deeper")]
    expected += [(name, None) for name in OF_THE_MACHINE]
    assert sorted((one["check"], one["folder"] or "") for one in listed) == sorted((a, b or "") for a, b in expected)
    for one in listed:
        assert list(one) == ["check", "status", "value", "fix", "folder"]
        assert one["status"] in list(Status)
        assert one["value"]
        assert bool(one["fix"]) == (one["status"] != "ok"), one
        assert "the check " not in one["value"], one
    assert (done.status, done.errors) == (2, ""), "a folder cannot be made"
    assert list((tmp_path / "a").iterdir()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "tmp"]


def test_names_and_meanings() -> None:
    """Names are short, stay apart, and fit the column; meanings are sentences."""
    names = OF_FOLDERS + OF_THE_MACHINE
    assert len(set(names)) == len(names)
    for group in GROUPS:
        for one in (*group.of_folders, *group.checks):
            assert len(one.name) <= 17
            assert one.meaning.endswith("."), one.name


@pytest.mark.parametrize(
    ("statuses", "exit_status", "says"),
    [
        ([Status.OK, Status.OK], 0, "training works"),
        ([Status.OK, Status.NOTE, Status.NOTE], 0, "2 notes: training works"),
        ([Status.NOTE, Status.WARNING], 1, "1 warning, 1 note: "),
        ([Status.PROBLEM, Status.WARNING, Status.OK], 2, "1 problem, 1 warning: "),
    ],
)
@pytest.mark.parametrize("form", [[], ["--json"], ["--report"]])
def test_the_worst_is_the_exit_status(
    statuses: list[Status], exit_status: int, says: str, form: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every form."""
    finds(monkeypatch, *map(of, statuses))
    done = run_here("doctor", ".", *form)
    assert done.status == exit_status, done.errors
    if not form:
        last = " ".join(done.output.rpartition("\n\n")[2].split())
        assert last.startswith(says)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_lines_fit_the_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With verdict, check, value and fix; texts with brackets are shown as they are."""
    monkeypatch.setenv("COLUMNS", str(width))
    finds(monkeypatch, of(Status.WARNING), Finding(check="long", status=Status.OK, value="word " * 60))
    done = run_here("doctor", ".")
    lines = done.output.splitlines()
    assert max(map(len, lines)) <= width
    assert "".join(lines).count("word") == 60
    (at,) = [number for number, line in enumerate(lines) if line.startswith("warning")]
    assert lines[at].split() == ["warning", "[x]", "[red]v[/red]", "[/]"]
    assert lines[at + 1].split() == ["fix:", "[y]"]


def test_without_folders_it_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is said; not where one is named."""
    monkeypatch.setattr(doctor_command, "look", lambda world: iter([(world.folders[0].path, [])]))
    assert "current folder" in run_here("doctor").output
    assert "current folder" not in run_here("doctor", ".").output


def test_a_check_that_fails_or_hangs_ends_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a warning, and says what happened."""
    ended = threading.Event()

    @check("fails")
    def fails(world: World) -> Verdict:
        """Divides by zero."""
        raise ZeroDivisionError("by\nzero")

    @check("hangs", seconds=0.01)
    def hangs(world: World) -> Verdict:
        """Waits for ever."""
        ended.wait()
        return ok("late")

    @check("works")
    def works(world: World) -> Verdict:
        """Is asked all the same."""
        return problem("bad", "do it")

    monkeypatch.setattr(check_groups, "GROUPS", (Group("Part", (fails, hangs, works)),))
    done = run_here("doctor", ".", "--json")
    ended.set()
    first, second, third = json.loads(done.output)
    assert (first["status"], first["value"]) == ("warning", "the check failed: ZeroDivisionError: by zero")
    assert (second["status"], second["value"]) == ("warning", "the check timed out after 0 s")
    assert (third["status"], third["value"]) == ("problem", "bad")
    assert done.status == 2


def test_where_the_kernel_tells_nothing(tmp_path: Path) -> None:
    """Without /proc and /sys every check answers something."""
    (tmp_path / "root").mkdir()
    here = World.of([str(tmp_path)], tmp_path / "runtime", tmp_path / "root")
    for _, findings in check_groups.look(here):
        assert findings
        assert all(one.value and bool(one.fix) == (one.status is not Status.OK) for one in findings), findings


def test_a_daemon_that_knows_the_drive(tmp_path: Path) -> None:
    """Its version, what it has measured and what it has reserved."""
    runtime, nvme = tmp_path / "run", tmp_path / "nvme"
    runtime.mkdir(mode=0o700)
    nvme.mkdir()
    with daemon(runtime):
        asked = NodeDaemon(runtime)
        rates = {str(nvme): {"read": 3.21e9, "write": 1.5e9, "mixed": 2e9}}
        assert asked.ask("record_bandwidth", rates=rates, source="probe")
        with asked.space_reserved(str(nvme), 3 << 20, "begins"):
            listed = found(run_here("doctor", nvme, "--runtime-dir", runtime, "--json"))
    of_drive = listed["bandwidth", str(nvme)]
    assert (of_drive["status"], of_drive["value"]) == ("ok", "read 3.21 GB/s, write 1.50 GB/s, mixed 2.00 GB/s")
    assert listed["daemon", None]["value"] == f"infinityd {infinity.__version__} is running"
    assert "besides 3 MiB reserved" in listed["space", str(nvme)]["value"]


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="/dev/shm is no file system of its own")
def test_a_folder_in_memory() -> None:
    """Is found out with the files of the real kernel."""
    place = tempfile.mkdtemp(dir="/dev/shm")
    try:
        listed = found(run_here("doctor", place, "--json"))
    finally:
        os.rmdir(place)  # which is empty
    assert locate("/dev/shm").in_memory
    assert "in memory" in listed["file system", place]["value"]
    assert "in memory" in listed["drive", place]["value"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_folder_of_another_user() -> None:
    """Is a problem, and the fix gives it to this one."""
    place = Path(tempfile.mkdtemp(dir="/tmp"))
    run_here("doctor", place, "--json")  # loads what another user may not read
    os.seteuid(65534)
    try:
        done = run_here("doctor", place, place / "new", "--json")
    finally:
        os.seteuid(0)
        shutil.rmtree(place)
    listed = found(done)
    for path in (place, place / "new"):
        one = listed["folder", str(path)]
        fix = f"install -d -o 65534 -g {os.getegid()} {path}"
        assert is_(Finding(**{**one, "status": Status(one["status"])}), "problem", "Permission denied", fix)
    assert done.status == 2


@pytest.fixture
def alice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The home folder of a user whose name, host and variables are to stay unknown."""
    home = tmp_path / "home" / "alice"
    (home / "run").mkdir(parents=True)
    for name, value in {
        "HOME": str(home),
        "MASTER_ADDR": "node7.example.org",
        "OMP_NUM_THREADS": "3",
        "XDG_RUNTIME_DIR": "/run/user/alice",
        "HF_TOKEN": "hf_secret",
        "RANK": "0",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(socket, "gethostname", lambda: "node7.example.org")
    monkeypatch.setattr(getpass, "getuser", lambda: "alice")
    return home


def test_a_report_names_neither_host_nor_user(alice: Path) -> None:
    """Nor anything that it was not told to look at; all else is in it."""
    done = run_here("doctor", alice / "run", "/srv/node7/alice/run", "--report")
    assert not [word for word in ("node7", "alice", "hf_secret", str(alice)) if word in done.output], done.output
    for text in (
        "### infinity doctor", "| infinity | ", "| torch | ", "| folder of ~/run | ok | ", "| ~/run | ",
        "/srv/<host>/<user>/run", "| OMP_NUM_THREADS | 3 |", "| MASTER_ADDR | is set |",
        "| XDG_RUNTIME_DIR | /run/user/<user> |", "| MEMLOCK | ", "| system | Linux ",
    ):  # fmt: skip
        assert text in done.output, text
    for name in OF_THE_MACHINE:
        assert f"| {name} | " in done.output


def test_a_report_is_markdown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is in the cells, rows of a table have as many as its head."""
    value = "a | b\nc"
    finds(monkeypatch, Finding(check="x", status=Status.WARNING, value=value, fix="y"))
    output = run_here("doctor", ".", "--report").output
    assert "| x | warning | a / b c |" in output
    for table in output.split("\n\n")[1:]:
        assert len({line.count("|") for line in table.strip().splitlines()}) == 1, table


def test_names_are_replaced_as_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a short name, not every letter."""
    monkeypatch.setattr(socket, "gethostname", lambda: "db")
    monkeypatch.setattr(getpass, "getuser", lambda: "root")
    monkeypatch.setenv("HOME", "/home/al")
    assert doctor_report.without_names("/home/al /home/al/x /home/alice") == "~ ~/x /home/alice"
    assert doctor_report.without_names("db:/x dbus a-db root") == "<host>:/x dbus a-db root"


def test_the_worst_of_nothing_is_ok() -> None:
    """As there is nothing to do."""
    assert finding.worst([]) is Status.OK
