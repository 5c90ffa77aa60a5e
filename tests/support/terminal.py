"""A program on a terminal of its own: what it shows, keys pressed, and how it leaves the terminal."""

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
"""To the screen of a program, and back to what was there before."""


class OnTerminal:
    """A process whose standard streams are a terminal, of which this has the other end."""

    def __init__(self, process: subprocess.Popen[bytes], terminal: int, other: int) -> None:
        self.process, self.text = process, ""
        self._terminal, self._other = terminal, other

    def resize(self, columns: int, lines: int) -> None:
        """Give the terminal another size."""
        fcntl.ioctl(self._other, termios.TIOCSWINSZ, struct.pack("4H", lines, columns, 0, 0))

    def press(self, keys: str) -> None:
        """Type."""
        os.write(self._terminal, keys.encode())

    @property
    def modes(self) -> list:
        """How the terminal is set."""
        return termios.tcgetattr(self._other)

    @property
    def cache_slot(self) -> list[str]:
        """The lines that were drawn last, as one whole screen."""
        self.read()
        cache_slots = self.text.split("\x1b[H")
        return [line.rstrip() for line in _CODES.sub("", cache_slots[-1]).replace("\r", "").split("\n")]

    def read(self) -> str:
        """Take in what was written until now, and return all of it."""
        with contextlib.suppress(OSError):
            while select.select([self._terminal], [], [], 0)[0] and (part := os.read(self._terminal, 65536)):
                self.text += part.decode(errors="replace")
        return self.text

    def shows(self, *texts: str) -> None:
        """Wait until all of these are on the screen."""
        until(lambda: all(text in "\n".join(self.cache_slot) for text in texts) or self._ended())
        assert all(text in "\n".join(self.cache_slot) for text in texts), (texts, self.cache_slot)

    def wait(self) -> int:
        """Wait for the end, and return the exit status."""
        until(self._ended)
        self.read()
        return self.process.returncode

    def hang_up(self) -> None:
        """Take the terminal away."""
        os.close(self._other)
        os.close(self._terminal)
        self._terminal = self._other = -1

    def _ended(self) -> bool:
        self.read()  # whoever writes to a terminal that nobody reads waits
        return self.process.poll() is not None

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()
        if self._terminal >= 0:
            self.hang_up()


@contextlib.contextmanager
def on_terminal(
    folder: Path, *words: str, columns: int = 80, lines: int = 24, more: Mapping[str, str] | None = None
) -> Iterator[OnTerminal]:
    """Run Python with these words in `folder`, with variables `more`."""
    terminal, other = os.openpty()
    variables = {**environment(folder / "tmp"), "TERM": "xterm-256color", **(more or {})}
    variables.pop("COLUMNS")
    process = subprocess.Popen(
        [sys.executable, *words],
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
