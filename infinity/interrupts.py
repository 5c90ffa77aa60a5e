"""Ctrl-C, held back where it would leave something half done.

Python raises `KeyboardInterrupt` between any two operations of the main thread: also between the two that take an
update out of a list and hand it on, or that take a lock and note that it is held. So in short blocks the handler of
SIGINT only notes it, and the one that was there before gets it at their end. One that comes later is not held back. A
handler that C code has set, as `faulthandler.register` does, is not seen by Python, and gone behind the first block.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` makes enumerations of all, which takes ten times as long
import os
import threading
import time
from _thread import get_ident
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

_SIGINT: Final = _signal.SIGINT
SAME_SECONDS = 2.0
"""What comes again so soon is the same wish: torchrun and batch systems pass on what a process has had already."""


class _HeldBack:
    """What the main thread, which alone runs handlers, holds back. Read and changed by it alone."""

    def __init__(self) -> None:
        self.main = threading.main_thread().ident
        """The main thread; another one in a child that one of another thread has forked."""
        self._blocks = 0
        """Blocks that it is in."""
        self._whole = 0
        """Those of them in which waits are not interrupted."""
        self._noted = False
        """Whether SIGINT came in them, and nobody was told."""
        self._since = 0.0
        """When it came first, of `time.monotonic`; 0: it did not."""
        self._noting = self._note
        """One object, made once."""
        self._before: Callable[[int, Any], Any] | None = None
        """The handler that was there when the outermost block began; None if that was none of Python's."""

    def begin(self, whole: bool = False) -> None:
        """Begin a block; a `whole` one is one in which waits are not interrupted either."""
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
        """End a block. Raises what the handler raises that was there, `KeyboardInterrupt` as a rule."""
        if get_ident() != self.main:
            return
        self._whole -= whole
        self._blocks -= 1
        if self._blocks or self._before is None:
            return
        self._put_back()
        if self._noted:  # looked at behind that, or one would be lost that comes between the two
            self._noted = False
            self._before(_SIGINT, None)

    def check(self) -> None:
        """Let through what has been noted, at a place where nothing is half done. Raises as `end`."""
        if self._noted and not self._whole and self._before is not None and get_ident() == self.main:
            self._noted = False
            self._before(_SIGINT, None)

    def enter_child(self) -> None:
        """In a child that was forked: its thread is the main one; blocks are those of the thread that forked it."""
        if self.main != get_ident():
            self.main, self._blocks, self._whole, self._noted = get_ident(), 0, 0, False
            self._put_back()

    def _put_back(self) -> None:
        """Put the handler back, unless somebody has set another one since."""
        if self._before is not None and _signal.getsignal(_SIGINT) is self._noting:
            _signal.signal(_SIGINT, self._before)

    def _note(self, number: int, frame: Any) -> None:
        before, now = self._before, time.monotonic()
        if before is None:
            return
        if not self._blocks:  # a handler of another signal has raised where a block begins or ends
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
    """Hold Ctrl-C back until the block has ended.

    Args:
        waits: whether waits in it are not interrupted either (`check`).
    """
    begin(waits)
    try:
        yield
    finally:
        end(waits)


os.register_at_fork(after_in_child=_HELD.enter_child)
