"""Reading of single key presses and terminal events: resizing, Ctrl-Z and hangup."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import socket
import termios
import time
import tty
from types import FrameType, TracebackType
from typing import Any, Final

_NAMES: Final = {
    b"\x1b[A": "up", b"\x1bOA": "up", b"\x1b[B": "down", b"\x1bOB": "down", b"\r": "enter", b"\n": "enter",
}  # fmt: skip
_KEY = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]|\x1bO.|\x1b|[^\x1b]", re.DOTALL)
_BEGUN = re.compile(rb"\x1b(?:O|\[[0-?]*[ -/]*)?\Z")
"""Matches an incomplete key sequence at the end of the input."""
_REST_SECONDS: Final = 0.05
"""Time limit for the rest of a key sequence, whose bytes may arrive one by one over a network."""
_EVENTS: Final = {signal.SIGTSTP: "suspend", signal.SIGCONT: "continue", signal.SIGWINCH: "resize"}
_ENDS: Final = (signal.SIGTERM, signal.SIGHUP)
_USUAL: Final = os.terminal_size((80, 24))


class Terminal:
    """Context manager that reads single key presses without echo, and restores the terminal on exit.

    Inside the context, SIGTERM and SIGHUP raise `SystemExit`, so that the terminal is restored in these cases as well.
    Ctrl-C raises `KeyboardInterrupt` as usual.
    """

    def __init__(self, file: int) -> None:
        self._file = file
        self._before: list[Any] = []  # original terminal attributes; set by `__enter__`
        self._handlers: dict[signal.Signals, Any] = {}  # original signal handlers; set by `__enter__`
        self._wakeup = -1  # original wakeup descriptor; set by `__enter__`
        self._signals, self._told = socket.socketpair()  # the interpreter writes signal numbers to `_told`
        self._left = b""  # bytes that have been read but not yet returned as keys

    def __enter__(self) -> Terminal:
        self._before = termios.tcgetattr(self._file)
        for end in (self._signals, self._told):
            end.setblocking(False)
        self._wakeup = signal.set_wakeup_fd(self._told.fileno(), warn_on_full_buffer=False)
        for number in (*_EVENTS, *_ENDS):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                self._handlers[number] = signal.signal(number, _end if number in _ENDS else _note)
        tty.setcbreak(self._file, termios.TCSANOW)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._put_back()
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._signals.close()
        self._told.close()

    @property
    def size(self) -> os.terminal_size:
        """Columns and lines of the terminal; 80 x 24 if unknown."""
        try:
            found = os.get_terminal_size(self._file)
        except OSError:
            return _USUAL
        return found if found.columns and found.lines else _USUAL

    def key(self, seconds: float) -> str | None:
        """Wait up to `seconds` for a key or a terminal event, and return its name, or None on timeout.

        A key is ``up``, ``down``, ``enter``, ``escape`` or a character. A terminal event is ``resize``, ``suspend`` or
        ``continue``. If the terminal has been closed, the result is ``q``.
        """
        end = time.monotonic() + max(0.0, seconds)
        while True:
            if self._left and not _BEGUN.search(self._left):
                return self._next()
            wait = _REST_SECONDS if self._left else max(0.0, end - time.monotonic())
            ready, _, _ = select.select([self._file, self._signals.fileno()], [], [], wait)
            if self._signals.fileno() in ready and (event := self._event()):
                return event
            if self._file in ready:
                read = self._read()
                if not read:
                    return "q"  # end of input: the terminal has been closed
                self._left += read
            elif not ready:
                return self._next() if self._left else None

    def suspend(self) -> None:
        """Restore the terminal and suspend this process, as Ctrl-Z does. Returns when the process is resumed."""
        self._put_back()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, _note)
        self.resume()
        while self._event():  # discards the pending `continue` event
            pass

    def resume(self) -> None:
        """Switch the terminal back to single-key mode, because a shell may have changed the mode."""
        tty.setcbreak(self._file, termios.TCSANOW)

    def _put_back(self) -> None:
        with contextlib.suppress(termios.error):  # the terminal has been closed
            termios.tcsetattr(self._file, termios.TCSANOW, self._before)

    def _read(self) -> bytes:
        try:
            return os.read(self._file, 1024)
        except OSError:
            return b""

    def _next(self) -> str:
        match = _KEY.match(self._left)
        key = match[0] if match else self._left
        self._left = self._left[len(key) :]
        return _NAMES.get(key) or ("escape" if key.startswith(b"\x1b") else key.decode("latin-1"))

    def _event(self) -> str:
        with contextlib.suppress(BlockingIOError):
            while byte := self._signals.recv(1):
                for number, event in _EVENTS.items():
                    if byte[0] == number:
                        return event
        return ""


def _note(number: int, frame: FrameType | None) -> None:
    """Do nothing: the interpreter has already written the signal number to the socket that `Terminal.key` reads."""


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
