"""Reading of single key presses."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import termios
import tty
from collections import deque
from types import FrameType
from typing import Any, Final

from infinity_tools.signals import give_back, heard_by

_NAMES: Final = {
    b"\x1b[A": "up", b"\x1bOA": "up", b"\x1b[B": "down", b"\x1bOB": "down", b"\r": "enter", b"\n": "enter",
    b"\x1a": "suspend",
}  # fmt: skip
_KEY = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]|\x1bO.|\x1b|[^\x1b]", re.DOTALL)
_BEGUN = re.compile(rb"\x1b(?:O|\[[0-?]*[ -/]*)?\Z")
"""Matches an incomplete key sequence at the end of the input."""
_REST_SECONDS: Final = 0.05
"""Time limit for the rest of a key sequence, whose bytes may arrive one by one over a network."""


class Terminal:
    """Context manager that reads single key presses without echo, and restores the terminal on exit.

    Inside the context, signals raise `SystemExit`, so that the terminal is restored in these cases as well.
    """

    def __init__(self, file: int) -> None:
        self._file = file
        self._before: list[Any] = []  # original terminal attributes; set by `__enter__`
        self._handlers: dict[signal.Signals, Any] = {}  # original signal handlers; set by `__enter__`
        self._keys: deque[bytes] = deque()  # keys that have been read but not yet returned

    def __enter__(self) -> Terminal:
        self._before = termios.tcgetattr(self._file)
        self._handlers = heard_by(_end)
        self._read_keys()
        return self

    def __exit__(self, *_: object) -> None:
        self._put_back()
        give_back(self._handlers)

    def key(self, seconds: float) -> str | None:
        """Wait up to `seconds` for a key, and return its name, or None on timeout.

        The result is ``up``, ``down``, ``enter``, ``escape``, ``suspend`` (Ctrl-Z) or a character. If the terminal has
        been closed, the result is ``q``.
        """
        if not self._keys:
            if not self._is_ready(max(0.0, seconds)):
                return None
            text = read = self._read()
            if not read:
                return "q"  # end of input: the terminal has been closed
            while _BEGUN.search(text) and self._is_ready(_REST_SECONDS) and (read := self._read()):
                text += read
            self._keys.extend(_KEY.findall(text))
        key = self._keys.popleft()
        return _NAMES.get(key) or ("escape" if key.startswith(b"\x1b") else key.decode("latin-1"))

    def suspend(self) -> None:
        """Restore the terminal and suspend the process group, as Ctrl-Z does. Returns when the process is resumed."""
        self._put_back()
        os.kill(0, signal.SIGTSTP)  # also stops a wrapper, for which the shell waits
        self._read_keys()

    def _read_keys(self) -> None:
        tty.setcbreak(self._file, termios.TCSANOW)
        modes = termios.tcgetattr(self._file)
        modes[6][termios.VSUSP] = b"\0"  # Ctrl-Z becomes a key, so that the screen is restored before the process stops
        termios.tcsetattr(self._file, termios.TCSANOW, modes)

    def _put_back(self) -> None:
        with contextlib.suppress(termios.error):  # the terminal has been closed
            termios.tcsetattr(self._file, termios.TCSANOW, self._before)

    def _is_ready(self, seconds: float) -> bool:
        return bool(select.select([self._file], [], [], seconds)[0])

    def _read(self) -> bytes:
        try:
            return os.read(self._file, 1024)
        except OSError:
            return b""


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(0 if number == signal.SIGINT else 128 + number)
