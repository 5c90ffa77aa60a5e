"""Deferral of Ctrl-C in short blocks that must not be interrupted.

Python may raise `KeyboardInterrupt` between any two bytecodes of the main thread, for example between removing an
update from a list and passing it on, or between taking a lock and recording that it is held. Within a block, the SIGINT
handler only records the signal, and the previous handler is called at the end of the block. A second Ctrl-C that
arrives later than `SAME_SECONDS` after the first is not deferred. Handlers that C code installs, as
`faulthandler.register` does, are invisible to Python and are lost after the first block.
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
"""Repetitions of SIGINT within this time are one request: torchrun and batch systems forward a signal that a process
has already received."""


class _HeldBack:
    """State of the main thread, the only thread that runs signal handlers. Used by that thread only."""

    def __init__(self) -> None:
        self.main = threading.main_thread().ident
        """Id of the main thread. In a child that another thread forked, the id of that thread."""
        self._blocks = 0
        """Number of nested blocks."""
        self._whole = 0
        """Number of nested blocks in which waits are not interrupted either."""
        self._noted = False
        """``True`` if SIGINT arrived within a block and has not been delivered."""
        self._since = 0.0
        """Arrival time of the first SIGINT of the block, of `time.monotonic`; 0 if there was none."""
        self._noting = self._note
        """The bound method, created once so that it can be compared by identity."""
        self._before: Callable[[int, Any], Any] | None = None
        """Previous handler, from before the outermost block; None if it was not installed by Python."""

    def begin(self, whole: bool = False) -> None:
        """Start a block. If `whole`, waits within the block are not interrupted either."""
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
        if self._noted:  # checked after restoring the handler, so that no signal is lost in between
            self._noted = False
            self._before(_SIGINT, None)

    def check(self) -> None:
        """Deliver a recorded signal, at a point that may be interrupted. Raises like `end`."""
        if self._noted and not self._whole and self._before is not None and get_ident() == self.main:
            self._noted = False
            self._before(_SIGINT, None)

    def enter_child(self) -> None:
        """Reset the state in a forked child, whose only thread becomes the main thread."""
        if self.main != get_ident():
            self.main, self._blocks, self._whole, self._noted = get_ident(), 0, 0, False
            self._put_back()

    def _put_back(self) -> None:
        """Restore the previous handler, unless another handler has been installed since."""
        if self._before is not None and _signal.getsignal(_SIGINT) is self._noting:
            _signal.signal(_SIGINT, self._before)

    def _note(self, number: int, frame: Any) -> None:
        before, now = self._before, time.monotonic()
        if before is None:
            return
        if not self._blocks:  # a handler of another signal raised at the start or end of a block
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
        waits: whether waits within the block are not interrupted either (see `check`).
    """
    begin(waits)
    try:
        yield
    finally:
        end(waits)


os.register_at_fork(after_in_child=_HELD.enter_child)
