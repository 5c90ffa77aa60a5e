"""Run a program in a pseudo-terminal: read its screen, send keys, and check the state of the terminal afterwards."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator, Mapping
from pathlib import Path

from support.command import environment
from support.daemon_process import until

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
    def modes(self) -> list:
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
