"""Tests of terminal output at several widths, and of the options that all commands share."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

import infinity
from infinity_daemon.main import app as daemon
from infinity_tools.cli import app
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


def test_progress_always_shows_step_loss_and_time_left(subtests: pytest.Subtests) -> None:
    for width in [50, 60, 80, 120, 200]:
        with subtests.test(width=width):
            assert re.search(r"step 1234/100000 .*loss 2\.346  13:43:03 left", shown(width))


def test_wider_terminal_shows_more() -> None:
    """Tokens per second come first, then abbreviated rates, then full ones."""
    assert "131k tok/s" in shown(68)
    assert "r/w 5.00/3.00 GB/s  stall 25%" in shown(96)
    assert "read 5.00 GB/s  write 3.00 GB/s  stall 25%" in shown(120)


def test_state_that_fits_host_cache_needs_no_paging(tmp_path: Path) -> None:
    """The run reports this at its start and at its end."""
    large = [*SMALL, "--host-memory", "32MiB", "--offload.memory.page_bytes", "64KiB", "--max_steps", "3", "--out", "o"]
    done = run_here(*large)
    assert done.status == 0, done.errors
    assert "holds the whole state: no paging" in " ".join(done.errors.split())
    assert "holds the whole state: no paging" in " ".join(done.output.split())
    summary = json.loads((tmp_path / "o/summary.json").read_text())
    assert summary["nvme_read_bytes_per_step"] == summary["nvme_written_bytes_per_step"] == 0


def commands(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the words of every command."""
    yield words
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, (*words, name))


def test_every_command_has_version_and_help(subtests: pytest.Subtests) -> None:
    """Required arguments may be missing."""
    for words in commands(typer.main.get_command(app)):
        for option in ("--version", "-h", "--help"):
            with subtests.test(" ".join((*words, option))):
                done = run_here(*words, option)
                assert (done.status, done.errors) == (0, "")
                said = f"infinity {infinity.__version__}\n" if option == "--version" else "Usage: infinity"
                assert " ".join((said, *words)) in done.output or done.output == said


def test_help_shows_every_option_in_full(subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch) -> None:
    """At 80 columns, no name is truncated, and no meaningless upper bound is shown."""
    monkeypatch.setenv("COLUMNS", "80")
    for words in commands(typer.main.get_command(app)):
        command: Any = typer.main.get_command(app)
        for word in words:
            command = command.commands[word]
        names = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
        with subtests.test(" ".join(words)):
            text = run_here(*words, "--help").output
            shown = " ".join(re.findall("^  -.*", text, re.MULTILINE)).replace(",", " ").split()
            assert max(map(len, text.splitlines())) <= 80
            assert {name for name in names if name[0] == "-"} <= set(shown)
            assert not re.search(r"-\S*…|<=\d{6}", text)


def test_infinityd_version_and_help() -> None:
    for option, text in (
        ("--version", infinity.__version__),
        ("-h", "Usage: infinityd"),
        ("--help", "Usage: infinityd"),
    ):
        done = CliRunner().invoke(daemon, [option], prog_name="infinityd")
        assert (done.exit_code, text in done.output) == (0, True), option


def test_shell_completion(subtests: pytest.Subtests) -> None:
    """Commands and options are completed."""
    for typed, offered in [("infinity st", "store"), ("infinity train --metrics-p", "--metrics-port")]:
        with subtests.test(typed=typed):
            environment = {
                "_INFINITY_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1),
            }  # fmt: skip
            done = CliRunner().invoke(app, [], env=environment, prog_name="infinity")
            assert offered in done.output.split()


def test_preset_list(subtests: pytest.Subtests) -> None:
    for command in ["train", "plan", "tune"]:
        with subtests.test(command=command):
            listed = json.loads(run_here(command, "--model", "list", "--json").output)
            assert [preset["name"] for preset in listed][:2] == ["tiny", "llama-100m"]
            assert (listed[1]["parameters"], listed[1]["vocabulary"]) == (113_664_768, 256)
            assert re.search(r"gpt2-354m +354\.8 M +50257", run_here(command, "--model", "list").output)


def test_brackets_are_not_interpreted_as_markup(subtests: pytest.Subtests) -> None:
    """Otherwise, a path with brackets would lose a part or raise an exception."""
    for text, terminal in product(("/mnt/[drive]/x", "http://[fe80::1]:9000/metrics", "/mnt/[/drive]"), (True, False)):
        console = Console(file=io.StringIO(), width=100, force_terminal=terminal, color_system=None)
        with subtests.test(text, terminal=terminal), open_view(console, silent=False) as view:
            view.say(text)
        assert console.file.getvalue().strip() == text


def test_folders_with_brackets_are_shown_in_full(tmp_path: Path) -> None:
    done = run_here(*SMALL, "--max_steps", "1", "--out", "o[x]")
    assert "o[x]/nvme, 1 rank" in done.errors
    assert "no paging" not in done.errors
    assert "o[x]/summary.json" in done.output
    assert "e[y]: step 1 of" in run_here("export", "o[x]/nvme", "--out", "e[y]").output
    Path("n[z]").mkdir()
    assert "no runs in n[z]" in run_here("store", "ls", "n[z]").output
    assert "nothing to do in n[z]" in run_here("store", "verify", "n[z]").output
