"""Tests of terminal output at several widths, and of the options that all commands share."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

import infinity
from infinity_daemon.main import app as daemon
from infinity_tools.cli import COMMANDS, app
from infinity_tools.progress import StepView, open_view
from support.command import SMALL, run_here

VIEW = StepView(
    step=1234, loss=2.3456, seconds=0.5, tokens=65536, read_bytes=2.5e9, written_bytes=1.5e9, stall_share=0.25
)


def shown(width: int, total: int = 100_000) -> str:
    """Return the last line of the progress bar on a terminal of this width."""
    console = Console(file=io.StringIO(), width=width, height=20, force_terminal=True, color_system=None)
    with open_view(console, silent=False) as view:
        view.begin(1233, total)
        view.stepped(VIEW)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())
    lines = [line.rstrip() for line in re.split(r"[\r\n]+", text) if "loss" in line]
    assert all(len(line) <= width for line in lines)
    return lines[-1]


@pytest.mark.parametrize("width", [50, 60, 80, 120, 200])
def test_progress_always_shows_step_loss_and_time_left(width: int) -> None:
    assert re.search(r"step 1234/100000 .*loss 2\.346  13:43:03 left", shown(width))


def test_wider_terminal_shows_more() -> None:
    """Tokens per second come first, then abbreviated rates, then full ones."""
    assert "131k tok/s" in shown(68)
    assert "r/w 5.00/3.00 GB/s  stall 25%" in shown(96)
    assert "read 5.00 GB/s  write 3.00 GB/s  stall 25%" in shown(120)


def test_state_that_fits_host_cache_needs_no_paging(tmp_path: Path) -> None:
    """The run reports this at its start and at its end."""
    large = [*SMALL, "--host-memory", "32MiB", "--offload.memory.page_bytes", "64KiB", "--max_steps", "4", "--out", "o"]
    done = run_here(*large)
    assert done.status == 0, done.errors
    assert "holds the whole state: no paging" in " ".join(done.errors.split())
    assert "holds the whole state: no paging" in " ".join(done.output.split())
    summary = json.loads((tmp_path / "o/summary.json").read_text())
    assert summary["nvme_read_bytes_per_step"] == summary["nvme_written_bytes_per_step"] == 0
    assert "no paging" not in run_here(*SMALL, "--max_steps", "1", "--out", "p").errors


def commands(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the words of every command."""
    yield words
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, (*words, name))


@pytest.mark.parametrize("words", list(commands(typer.main.get_command(app))), ids=" ".join)
@pytest.mark.parametrize("option", ["--version", "-h", "--help"])
def test_every_command_has_version_and_help(words: tuple[str, ...], option: str) -> None:
    """Required arguments may be missing."""
    done = run_here(*words, option)
    assert done.status == 0
    assert not done.errors
    if option == "--version":
        assert done.output == f"infinity {infinity.__version__}\n"
    else:
        assert f"Usage: {' '.join(['infinity', *words])}" in done.output


@pytest.mark.parametrize("words", list(commands(typer.main.get_command(app))), ids=" ".join)
def test_help_shows_every_option_in_full(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """At 80 columns, no name is truncated, and no meaningless upper bound is shown."""
    monkeypatch.setenv("COLUMNS", "80")
    command: Any = typer.main.get_command(app)
    for word in words:
        command = command.commands[word]
    shown = run_here(*words, "--help").output
    assert max(map(len, shown.splitlines())) <= 80
    names = {name for option in command.params for name in (*option.opts, *option.secondary_opts) if name[0] == "-"}
    assert names <= {word.strip(",") for line in re.findall("^  -.*", shown, re.MULTILINE) for word in line.split()}
    assert not re.search(r"-\S*…", shown)
    assert not re.search(r"<=\d{6}", shown)


def test_help_lists_every_command_in_order() -> None:
    lines = [line.strip("│ ").split(" ")[0] for line in run_here("-h").output.splitlines()]
    assert [name for name in lines if name in COMMANDS] == [*COMMANDS]


@pytest.mark.parametrize("option", ["--version", "-h", "--help"])
def test_infinityd_version_and_help(option: str) -> None:
    done = CliRunner().invoke(daemon, [option], prog_name="infinityd")
    assert done.exit_code == 0
    assert ("Usage: infinityd" if "h" in option else infinity.__version__) in done.output


@pytest.mark.parametrize(
    ("typed", "offered"), [("infinity st", "store"), ("infinity train --metrics-p", "--metrics-port")]
)
def test_shell_completion(typed: str, offered: str) -> None:
    """Commands and options are completed."""
    environment = {
        "_INFINITY_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1),
    }  # fmt: skip
    done = CliRunner().invoke(app, [], env=environment, prog_name="infinity")
    assert offered in done.output.split()


@pytest.mark.parametrize("command", ["train", "plan", "tune"])
def test_preset_list_as_json(command: str) -> None:
    listed = json.loads(run_here(command, "--model", "list", "--json").output)
    assert [preset["name"] for preset in listed][:2] == ["tiny", "llama-100m"]
    assert (listed[1]["parameters"], listed[1]["vocabulary"]) == (113_664_768, 256)


@pytest.mark.parametrize("terminal", [True, False])
def test_brackets_are_not_interpreted_as_markup(terminal: bool) -> None:
    """Otherwise, a path with brackets would lose a part or raise an exception."""
    for text in ("/mnt/[drive]/x", "http://[fe80::1]:9000/metrics", "/mnt/[/drive]"):
        console = Console(file=io.StringIO(), width=100, force_terminal=terminal, color_system=None)
        with open_view(console, silent=False) as view:
            view.say(text)
        assert console.file.getvalue().strip() == text


def test_folders_with_brackets_are_shown_in_full(tmp_path: Path) -> None:
    done = run_here(*SMALL, "--max_steps", "1", "--out", "o[x]")
    assert "o[x]/nvme, 1 rank" in done.errors
    assert "o[x]/summary.json" in done.output
    assert "e[y]: step 1 of" in run_here("export", "o[x]/nvme", "--out", "e[y]").output
    Path("n[z]").mkdir()
    assert "no runs in n[z]" in run_here("store", "ls", "n[z]").output
    assert "nothing to do in n[z]" in run_here("store", "verify", "n[z]").output
