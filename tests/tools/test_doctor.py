"""Tests of the `infinity doctor` command: output formats and exit status."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

import infinity
from infinity.daemon_client import NodeDaemon
from infinity_tools.doctor import doctor_command
from infinity_tools.doctor.doctor_command import GROUPS
from infinity_tools.doctor.finding import Finding, Group, Status, check, ok, problem
from infinity_tools.doctor.world import World
from support.command import Finished, run_here
from support.daemon_process import daemon

FOLDER_CHECKS = [one.name for group in GROUPS for one in group.of_folders]
MACHINE_CHECKS = [one.name for group in GROUPS for one in group.checks]


def found(done: Finished) -> dict[tuple[str, str | None], dict[str, str]]:
    """Return the findings that `--json` prints, by check and folder."""
    return {(one["check"], one["folder"]): one for one in json.loads(done.output)}


def fake_findings(monkeypatch: pytest.MonkeyPatch, *findings: Finding) -> None:
    """Replace all checks with the given findings."""
    monkeypatch.setattr(doctor_command, "look", lambda world: iter([("Part", list(findings))]))


def finding_with(status: Status) -> Finding:
    """Return a finding with this status whose texts contain brackets."""
    return Finding(check="[x]", status=status, value="[red]v[/red] [/]", fix="" if status is Status.OK else "[y]")


def test_json_reports_every_check_once(tmp_path: Path) -> None:
    """No check fails itself, only JSON is printed, and the folders are unchanged."""
    (tmp_path / "a").mkdir()
    done = run_here("doctor", "a", "new", "missing/deeper", "--json")
    listed = json.loads(done.output)
    expected = [*((name, folder) for folder in ("a", "new") for name in FOLDER_CHECKS), ("folder", "missing/deeper")]
    expected += [(name, None) for name in MACHINE_CHECKS]
    assert sorted((one["check"], one["folder"] or "") for one in listed) == sorted((a, b or "") for a, b in expected)
    for one in listed:
        assert list(one) == ["check", "status", "value", "fix", "folder"]
        assert one["status"] in list(Status)
        assert one["value"]
        assert bool(one["fix"]) == (one["status"] != "ok"), one
        assert "the check " not in one["value"], one
    assert (done.status, done.errors) == (2, ""), "a folder that cannot be created is a problem"
    assert list((tmp_path / "a").iterdir()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "tmp"]


def test_exit_status_is_worst_status(subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exit status does not depend on the output format."""
    for form in [[], ["--json"]]:
        for statuses, exit_status, says in [
            ([Status.OK, Status.OK], 0, "training works"),
            ([Status.OK, Status.NOTE, Status.NOTE], 0, "2 notes: training works"),
            ([Status.NOTE, Status.WARNING], 1, "1 warning, 1 note: "),
            ([Status.PROBLEM, Status.WARNING, Status.OK], 2, "1 problem, 1 warning: "),
        ]:
            with subtests.test(says, form=form):
                fake_findings(monkeypatch, *map(finding_with, statuses))
                done = run_here("doctor", ".", *form)
                assert done.status == exit_status, done.errors
                if not form:
                    last = " ".join(done.output.rpartition("\n\n")[2].split())
                    assert last.startswith(says)


def test_lines_fit_terminal_width(subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text in brackets is not interpreted as markup."""
    for width in [60, 80, 120]:
        with subtests.test(width=width):
            monkeypatch.setenv("COLUMNS", str(width))
            fake_findings(
                monkeypatch, finding_with(Status.WARNING), Finding(check="long", status=Status.OK, value="word " * 60)
            )
            done = run_here("doctor", ".")
            lines = done.output.splitlines()
            assert max(map(len, lines)) <= width
            assert "".join(lines).count("word") == 60
            (at,) = [number for number, line in enumerate(lines) if line.startswith("warning")]
            assert lines[at].split() == ["warning", "[x]", "[red]v[/red]", "[/]"]
            assert lines[at + 1].split() == ["fix:", "[y]"]


def test_doctor_defaults_to_current_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """The output mentions the default only if no folder is given."""
    monkeypatch.setattr(doctor_command, "look", lambda world: iter([(world.folders[0].path, [])]))
    assert "current folder" in run_here("doctor").output
    assert "current folder" not in run_here("doctor", ".").output


def test_failing_or_hanging_check_becomes_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """The remaining checks still run."""
    ended = threading.Event()

    @check("fails")
    def fails(world: World) -> Finding:
        """Raise an exception."""
        raise ZeroDivisionError("by\nzero")

    @check("hangs", seconds=0.01)
    def hangs(world: World) -> Finding:
        """Wait forever."""
        ended.wait()
        return ok("late")

    @check("works")
    def works(world: World) -> Finding:
        """Report a problem."""
        return problem("bad", "do it")

    monkeypatch.setattr(doctor_command, "GROUPS", (Group("Part", (fails, hangs, works)),))
    done = run_here("doctor", ".", "--json")
    ended.set()
    first, second, third = json.loads(done.output)
    assert (first["status"], first["value"]) == ("warning", "the check failed: ZeroDivisionError: by zero")
    assert (second["status"], second["value"]) == ("warning", "the check timed out after 0 s")
    assert (third["status"], third["value"]) == ("problem", "bad")
    assert done.status == 2


def test_checks_work_without_proc_and_sys(tmp_path: Path) -> None:
    """Every check still returns a value and, unless it is ok, a fix."""
    (tmp_path / "root").mkdir()
    here = World.of([str(tmp_path)], tmp_path / "runtime", tmp_path / "root")
    for _, findings in doctor_command.look(here):
        assert findings
        assert all(one.value and bool(one.fix) == (one.status is not Status.OK) for one in findings), findings


def test_doctor_shows_data_from_daemon(runtime: Path, tmp_path: Path) -> None:
    """The daemon provides its version, the measured bandwidth and the reserved space."""
    nvme = tmp_path / "nvme"
    nvme.mkdir()
    with daemon(runtime):
        asked = NodeDaemon(runtime)
        rates = {str(nvme): {"read": 3.21e9, "write": 1.5e9, "mixed": 2e9}}
        assert asked.ask("record_bandwidth", rates=rates, source="probe")
        with asked.space_reserved(str(nvme), 3 << 20, "begins"):
            listed = found(run_here("doctor", nvme, "--runtime-dir", runtime, "--json"))
    bandwidth = listed["bandwidth", str(nvme)]
    assert (bandwidth["status"], bandwidth["value"]) == ("ok", "read 3.21 GB/s, write 1.50 GB/s, mixed 2.00 GB/s")
    assert listed["daemon", None]["value"] == f"infinityd {infinity.__version__} is running"
    assert "besides 3 MiB reserved" in listed["space", str(nvme)]["value"]
