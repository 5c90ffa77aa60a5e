"""Tests of `infinity top` on a terminal: keys, resizing, signals and restoring the terminal."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from infinity_tools.signals import SIGNALS
from infinity_tools.top.keyboard import Terminal
from support.command import environment
from support.counted_rank import CountedRank
from support.daemon_process import until
from support.tables import WIDE

_CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
IN, OUT = "\x1b[?1049h", "\x1b[?1049l"
"""Escape sequences that switch to the alternate screen and back."""


class OnTerminal:
    """A process whose standard streams are a pseudo-terminal, and the other end of the terminal."""

    def __init__(self, process: subprocess.Popen[bytes], terminal: int, other: int) -> None:
        self.process, self.text = process, ""
        self._terminal, self._other = terminal, other

    def resize(self, columns: int, lines: int) -> None:
        """Change the size of the terminal."""
        fcntl.ioctl(self._other, termios.TIOCSWINSZ, struct.pack("4H", lines, columns, 0, 0))

    def press(self, keys: str) -> None:
        os.write(self._terminal, keys.encode())

    @property
    def modes(self) -> list[Any]:
        """Terminal attributes."""
        return termios.tcgetattr(self._other)

    @property
    def screen(self) -> list[str]:
        """Lines of the most recently drawn screen."""
        self.read()
        screens = self.text.split("\x1b[H")
        return [line.rstrip() for line in _CODES.sub("", screens[-1]).replace("\r", "").split("\n")]

    def read(self) -> str:
        """Read the available output; return all output since the start."""
        with contextlib.suppress(OSError):
            while select.select([self._terminal], [], [], 0)[0] and (part := os.read(self._terminal, 65536)):
                self.text += part.decode(errors="replace")
        return self.text

    def shows(self, *texts: str) -> None:
        """Wait until the screen contains all texts."""
        seen: list[str] = []

        def found() -> bool:
            seen[:] = self.screen  # the next screen may already be different
            return all(text in "\n".join(seen) for text in texts)

        until(lambda: found() or self.ended())
        assert all(text in "\n".join(seen) for text in texts), (texts, self.text[-4000:])

    def wait(self) -> int:
        """Wait until the process ends; return its exit status."""
        until(self.ended)
        self.read()
        return self.process.returncode

    def hang_up(self) -> None:
        """Close the terminal."""
        os.close(self._other)
        os.close(self._terminal)
        self._terminal = self._other = -1

    def ended(self) -> bool:
        """Return whether the process has ended."""
        self.read()  # a process that writes to a full terminal buffer blocks
        return self.process.poll() is not None

    def close(self) -> None:
        """Kill the process and close the terminal."""
        self.process.kill()
        self.process.wait()
        if self._terminal >= 0:
            self.hang_up()


@contextlib.contextmanager
def on_terminal(
    folder: Path, *arguments: str, columns: int = 80, lines: int = 24, more: Mapping[str, str] | None = None
) -> Iterator[OnTerminal]:
    """Run Python with the given arguments in `folder`, with the additional environment variables `more`."""
    terminal, other = os.openpty()
    variables = {**environment(folder / "tmp"), "TERM": "xterm-256color", **(more or {})}
    variables.pop("COLUMNS")
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdin=other,
        stdout=other,
        stderr=other,
        cwd=folder,
        env=variables,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    made = OnTerminal(process, terminal, other)
    made.resize(columns, lines)
    try:
        yield made
    finally:
        made.close()


SHOW_CURSOR = "\x1b[?25h"
TOP = ("-m", "infinity_tools", "top", "--interval", "0.1", "--runtime-dir", "run")


@pytest.fixture
def runs(tmp_path: Path) -> dict[str, CountedRank]:
    """Return two runs in the folder `run`; `slow` has longer steps, and `busy` is first by id."""
    made = {name: CountedRank(tmp_path / "run", name, paths=[tmp_path]) for name in ("slow", "busy")}
    for name, rank in made.items():
        for _ in range(3):
            rank.step(seconds=2.0 if name == "slow" else 0.5)
    return made


@pytest.fixture
def top(runs: dict[str, CountedRank], tmp_path: Path) -> Iterator[OnTerminal]:
    """Start the command and wait until it has drawn."""
    with on_terminal(tmp_path, *TOP) as shown:
        shown.before = shown.modes
        shown.shows("infinity top", "> slow", "q quit")
        yield shown


@pytest.mark.parametrize(
    ("cause", "status"),
    [("q", 0), (signal.SIGTERM, 143), *(pytest.param(*row, marks=WIDE) for row in (("\x03", 0), (signal.SIGHUP, 129)))],
)
def test_key_or_signal_quits(top: OnTerminal, cause: str | int, status: int) -> None:
    assert not top.modes[3] & (termios.ICANON | termios.ECHO)
    if isinstance(cause, str):
        top.press(cause)
    else:
        top.process.send_signal(cause)
    assert top.wait() == status
    assert top.modes == top.before
    assert top.text.count(IN) == top.text.count(OUT) >= 1
    assert top.text.rindex(OUT) > top.text.rindex(IN)
    assert top.text.rindex(SHOW_CURSOR) > top.text.rindex("\x1b[?25l")
    assert "Traceback" not in top.text


def test_keys_select_sort_pause_and_help(top: OnTerminal) -> None:
    """Arrow keys work in both encodings."""
    top.press("\x1b[B")
    top.shows("> busy")
    top.press("\r")
    top.shows("rank 0", "errors/retries")
    top.press("\x1bOA")
    top.shows("> slow")
    top.press("sss")
    top.shows("by id")
    top.press("r")
    top.shows("by id, reversed")
    assert [line.split()[-1] for line in top.screen if "slow" in line or "busy" in line]
    top.press("?")
    top.shows("infinity top: help", "reverse the sort order")
    top.press("x")
    top.shows("by id, reversed")
    top.press("p")
    top.shows("paused")
    top.press("p\x1b[5~")
    top.shows("every 0.1 s")


def test_pause_freezes_figures(top: OnTerminal, runs: dict[str, CountedRank], tmp_path: Path) -> None:
    """Without a pause, new runs appear and finished runs are marked."""
    CountedRank(tmp_path / "run", "fresh").step()
    top.shows("fresh")
    runs["busy"].stats.close()
    top.shows("2 live, 1 ended")
    runs["slow"].step(loss=1.25)
    top.shows("1.250")
    top.press("p")
    top.shows("paused")
    runs["slow"].step(loss=7.5)
    top.press("s")
    top.shows("by stall share")
    top.press("s")
    top.shows("by bytes", "1.250")
    top.press("p")
    top.shows("7.500")


def test_resize_redraws(top: OnTerminal) -> None:
    """The help page remains open."""
    for columns, lines in ((60, 15), (120, 40), (30, 6)):
        top.press("?")
        top.shows("press any key")
        top.resize(columns, lines)
        top.shows("help")
        top.press("x")
        top.press("?x")
        top.shows("infinity top", "slow")
        until(lambda: (len(top.screen) == lines and max(map(cell_len, top.screen)) <= columns) or top.ended())
        assert not top.ended(), top.text[-2000:]
        assert ("host cache" in "\n".join(top.screen)) == (columns == 120)


def test_closed_terminal_quits(top: OnTerminal) -> None:
    top.hang_up()
    assert top.process.wait(300) != 0


def test_internal_error_restores_terminal(runs: dict[str, CountedRank], tmp_path: Path) -> None:
    """The traceback is printed on the original screen."""
    program = (
        "import sys, infinity_tools.top.top_command as command, infinity_tools.cli as cli\n"
        "def view(state, width, height, _view=command.view):\n"
        "    if state.help: raise RuntimeError('a defect')\n"
        "    return _view(state, width, height)\n"
        "command.view = view\n"
        "sys.argv = ['infinity', *sys.argv[1:]]\n"
        "cli.main()\n"
    )
    with on_terminal(tmp_path, "-c", program, *TOP[2:]) as top:
        top.before = top.modes
        top.shows("> slow")
        top.press("?")
        assert top.wait() == 1
        assert top.modes == top.before
        assert top.text.index("RuntimeError: a defect") > top.text.rindex(OUT)


SHELL = """
import os, signal, subprocess, sys, termios
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
child = subprocess.Popen(["sh", "-c", '"$@"; exit $?', "sh", sys.executable, *sys.argv[1:]], process_group=0,
                         preexec_fn=lambda: signal.signal(signal.SIGTTOU, signal.SIG_DFL))
os.tcsetpgrp(0, child.pid)
_, status = os.waitpid(child.pid, os.WUNTRACED)
os.tcsetpgrp(0, os.getpgrp())
line = bool(termios.tcgetattr(0)[3] & termios.ICANON)
print(f"stopped {os.WIFSTOPPED(status)} line by line {line}", flush=True)
sys.stdin.readline()
os.tcsetpgrp(0, child.pid)
os.killpg(child.pid, signal.SIGCONT)
_, status = os.waitpid(child.pid, 0)
os.tcsetpgrp(0, os.getpgrp())
print(f"status {os.waitstatus_to_exitcode(status)}", flush=True)
"""


def test_ctrl_z_restores_terminal_until_resumed(runs: dict[str, CountedRank], tmp_path: Path) -> None:
    """After `fg`, the view is redrawn and keys work."""
    with on_terminal(tmp_path, "-c", SHELL, *TOP) as top:
        top.shows("> slow")
        top.press("j")
        top.shows("> busy")
        top.press("\x1a")
        top.shows("stopped True line by line True")
        assert top.read().rindex(OUT) > top.text.rindex(IN)
        top.press("\n")
        until(lambda: top.read().count(IN) >= 2)
        top.shows("> busy", "q quit")
        assert not top.modes[3] & termios.ICANON
        top.press("q")
        top.shows("status 0")
        assert top.wait() == 0


def test_dumb_terminal_prints_text_once(runs: dict[str, CountedRank], tmp_path: Path) -> None:
    """With NO_COLOR, only the colors are omitted."""
    with on_terminal(tmp_path, *TOP, more={"TERM": "dumb"}) as top:
        assert top.wait() == 0
        assert "\x1b" not in top.text
        assert "slow" in top.text
    with on_terminal(tmp_path, *TOP, more={"NO_COLOR": "1"}) as top:
        top.shows("> slow", "compute 80%")
        assert not any(f"\x1b[{code}m" in top.text for code in (31, 32, 33, 34, 35, 36))
        assert "\x1b[1m" in top.text


def keys_of(text: bytes) -> list[str | None]:
    """Return the keys that a terminal reads."""
    there, here = os.openpty()
    try:
        with Terminal(here) as terminal:
            os.write(there, text)
            return [terminal.key(300.0), *iter(lambda: terminal.key(0.0), None)]
    finally:
        os.close(there)
        os.close(here)


def test_key_sequences_are_decoded() -> None:
    """An unknown sequence is `escape`, not its letters."""
    assert keys_of(b"\x1b[A\x1bOBqj\r\n?") == ["up", "down", "q", "j", "enter", "enter", "?"]
    assert keys_of(b"\x1b[1;5C\x1b[200~s\x1b") == ["escape", "escape", "s", "escape"]
    assert keys_of("é".encode()) == ["Ã", "©"]


def test_closed_terminal_is_reported_and_handlers_are_restored() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    there, here = os.openpty()
    with Terminal(here) as terminal:
        assert terminal.key(0.0) is None
        with pytest.raises(SystemExit, match="143"):
            signal.raise_signal(signal.SIGTERM)
        os.close(there)
        assert terminal.key(300.0) == "q"
    os.close(here)
    assert [signal.getsignal(number) for number in SIGNALS] == before
