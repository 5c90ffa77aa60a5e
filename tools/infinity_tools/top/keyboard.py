"""Single keys from a terminal, and what happens to it meanwhile: another size, Ctrl-Z, its end."""

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
"""What may be the begin of a longer key at the end of what was read."""
_REST_SECONDS: Final = 0.05
"""How long the rest of a key may take: over a network its bytes may come one by one."""
_EVENTS: Final = {signal.SIGTSTP: "suspend", signal.SIGCONT: "continue", signal.SIGWINCH: "resize"}
_ENDS: Final = (signal.SIGTERM, signal.SIGHUP)
_USUAL: Final = os.terminal_size((80, 24))


class Terminal:
    """A terminal that gives keys as they are pressed, without showing them; a context manager that puts it back.

    Within it SIGTERM and SIGHUP raise `SystemExit`, so that whatever is shown is put back too; Ctrl-C stays
    `KeyboardInterrupt`.
    """

    def __init__(self, file: int) -> None:
        self._file = file
        self._before: list[Any] = []  # how the terminal was; set by `__enter__`
        self._handlers: dict[signal.Signals, Any] = {}  # those of before, as `_before`
        self._wakeup = -1  # descriptor of before, as `_before`
        self._signals, self._told = socket.socketpair()  # numbers of signals, as the interpreter writes them
        self._left = b""  # read, but not yet given out as keys

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
        """Columns and lines; those of most terminals where it does not tell."""
        try:
            found = os.get_terminal_size(self._file)
        except OSError:
            return _USUAL
        return found if found.columns and found.lines else _USUAL

    def key(self, seconds: float) -> str | None:
        """Wait for a key and return it: ``up``, ``down``, ``enter``, ``escape``, a character; None if there is none.

        ``resize``, ``suspend`` and ``continue`` are what happened to the terminal; ``q`` is also its end.
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
                    return "q"  # nobody is there any more
                self._left += read
            elif not ready:
                return self._next() if self._left else None

    def suspend(self) -> None:
        """Stop this process, as Ctrl-Z does, with the terminal as it was; returns when it goes on."""
        self._put_back()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, _note)
        self.resume()
        while self._event():  # that it goes on is known
            pass

    def resume(self) -> None:
        """Take the terminal again, of which a shell may have made what it likes."""
        tty.setcbreak(self._file, termios.TCSANOW)

    def _put_back(self) -> None:
        with contextlib.suppress(termios.error):  # it is gone
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
        """Return what a signal said, empty if none came."""
        with contextlib.suppress(BlockingIOError):
            while byte := self._signals.recv(1):
                for number, event in _EVENTS.items():
                    if byte[0] == number:
                        return event
        return ""


def _note(number: int, cache_slot: FrameType | None) -> None:
    """Do nothing: the interpreter has written the number of the signal where `Terminal.key` reads it."""


def _end(number: int, cache_slot: FrameType | None) -> None:
    raise SystemExit(128 + number)
