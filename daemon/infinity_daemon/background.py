"""Work that the daemon does by itself, in threads: a drive that hangs holds up its own thread only."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from infinity_daemon.log import event

_JOIN_SECONDS = 5.0
"""How long the daemon's end waits for work that was told to end: it may hang on a drive."""


class Background:
    """Calls `act` in a thread of its own, from `start` to `close`, with `seconds` between two calls.

    What goes wrong is said, once until it goes well again or something else goes wrong, and the next call comes all the
    same.
    """

    def __init__(self, name: str, act: Callable[[], None], seconds: float) -> None:
        self._name, self._act, self._seconds = name, act, seconds
        self._said = ""  # what went wrong last; changed by the thread
        self._ended = threading.Event()  # set by `close`
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """End; a call that hangs is left behind. Idempotent."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                self._act()
            except Exception as error:  # whatever it is, the daemon goes on
                reason = f"{type(error).__name__}: {error}"
                if reason != self._said:
                    event(logging.WARNING, f"{self._name}.failed", reason=reason)
                self._said = reason
            else:
                self._said = ""
            self._ended.wait(self._seconds)
