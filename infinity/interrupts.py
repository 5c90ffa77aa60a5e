"""Deferral of Ctrl-C in short blocks that must not be interrupted.

Python may raise `KeyboardInterrupt` between any two bytecodes of the main thread, for example after an update was
removed from a list and before it was passed on, or after a lock was taken and before this was recorded. Within a
block, the SIGINT handler only records the signal. The previous handler is called at the end of the block. A second
Ctrl-C is not deferred if it arrives more than `SAME_SECONDS` after the first. Handlers installed by C code, such as
the one of `faulthandler.register`, are invisible to Python and are lost after the first block.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` converts to enums, which is ten times slower
import os
import threading
import time
from _thread import get_ident
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

_SIGINT: Final = _signal.SIGINT
SAME_SECONDS = 2.0
"""Repeated SIGINTs within this time count as one request, because torchrun and batch systems forward a signal that
the process has already received.
"""


class _HeldBack:
    """State of the main thread, which is the only thread that runs signal handlers. Only this thread uses the state."""

    def __init__(self) -> None:
        self.main = threading.main_thread().ident
        """Id of the main thread. In a child process, the id of the thread that forked it."""
        self._blocks = 0
        """Number of nested blocks."""
        self._whole = 0
        """Number of nested blocks in which waits are not interrupted either."""
        self._noted = False
        """``True`` if a SIGINT that arrived within a block has not been delivered yet."""
        self._since = 0.0
        """Arrival time of the first SIGINT in the block, from `time.monotonic`; 0 if there was none."""
        self._noting = self._note
        """Bound method, created once so that it can be compared by identity."""
        self._before: Callable[[int, Any], Any] | None = None
        """Handler that was active before the outermost block; None if it was not installed by Python."""

    def begin(self, whole: bool = False) -> None:
        """Start a block. With `whole`, waits within the block are not interrupted either."""
        if get_ident() != self.main:
            return
        if not self._blocks:
            before = _signal.getsignal(_SIGINT)
            if before is not self._noting:
                self._before = before if callable(before) else None
            self._noted, self._since = False, 0.0
            if self._before is not None:
                _signal.signal(_SIGINT, self._noting)
        self._blocks += 1
        self._whole += whole

    def end(self, whole: bool = False) -> None:
        """End a block. Raises the exception of the previous handler, usually `KeyboardInterrupt`."""
        if get_ident() != self.main:
            return
        self._whole -= whole
        self._blocks -= 1
        if self._blocks or self._before is None:
            return
        self._put_back()
        if self._noted:  # checked after the handler is restored, so that no signal is lost in between
            self._noted = False
            self._before(_SIGINT, None)

    def check(self) -> None:
        """Deliver a recorded signal, at a point where an interrupt is safe. Raises the same exceptions as `end`."""
        if self._noted and not self._whole and self._before is not None and get_ident() == self.main:
            self._noted = False
            self._before(_SIGINT, None)

    def enter_child(self) -> None:
        """Reset the state in a forked child process, whose only thread becomes the main thread."""
        if self.main != get_ident():
            self.main, self._blocks, self._whole, self._noted = get_ident(), 0, 0, False
            self._put_back()

    def _put_back(self) -> None:
        """Restore the previous handler, unless a different handler has been installed in the meantime."""
        if self._before is not None and _signal.getsignal(_SIGINT) is self._noting:
            _signal.signal(_SIGINT, self._before)

    def _note(self, number: int, frame: Any) -> None:
        before, now = self._before, time.monotonic()
        if before is None:
            return
        if not self._blocks:  # the handler of a different signal raised an exception at the start or end of a block
            self._put_back()
            before(number, frame)
        elif not self._since:
            self._noted, self._since = True, now
        elif now - self._since >= SAME_SECONDS:
            self._noted = False
            before(number, frame)


_HELD: Final = _HeldBack()
begin, end, check = _HELD.begin, _HELD.end, _HELD.check


@contextmanager
def held(*, waits: bool = True) -> Iterator[None]:
    """Defer Ctrl-C until the end of the block.

    Args:
        waits: whether Ctrl-C does not interrupt waits within the block either (see `check`).
    """
    begin(waits)
    try:
        yield
    finally:
        end(waits)


os.register_at_fork(after_in_child=_HELD.enter_child)
