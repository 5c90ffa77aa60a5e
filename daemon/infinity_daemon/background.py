"""Background work of the daemon in threads, so that a drive that hangs blocks only its own thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from infinity_daemon.log import event

_JOIN_SECONDS = 5.0
"""Maximum wait at shutdown for work that has been asked to stop, because it may hang on a drive."""


class Background:
    """Call `act` repeatedly in a separate thread, from `start` to `close`, with `seconds` between two calls.

    An error is logged once, until a call succeeds or fails for another reason. The next call is made in any case.
    """

    def __init__(self, name: str, act: Callable[[], None], seconds: float) -> None:
        self._name, self._act, self._seconds = name, act, seconds
        self._said = ""  # last logged error; changed by the thread
        self._ended = threading.Event()  # set by `close`
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop the thread. A call that hangs is abandoned. Idempotent."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                self._act()
            except Exception as error:  # no exception may end the daemon
                reason = f"{type(error).__name__}: {error}"
                if reason != self._said:
                    event(logging.WARNING, f"{self._name}.failed", reason=reason)
                self._said = reason
            else:
                self._said = ""
            self._ended.wait(self._seconds)
