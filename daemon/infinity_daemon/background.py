"""Background threads of the daemon, one per task, so that an unresponsive drive blocks only one task."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from infinity_daemon.log import event

_JOIN_SECONDS = 5.0
"""Maximum time to wait for the thread at shutdown, because it may be blocked by an unresponsive drive."""


class Background:
    """Thread that calls `act` repeatedly from `start` to `close`, and waits `seconds` after each call.

    An exception does not stop the thread. It is logged unless the previous call failed with the same exception.
    """

    def __init__(self, name: str, act: Callable[[], None], seconds: float) -> None:
        self._name, self._act, self._seconds = name, act, seconds
        self._said = ""  # last logged error; only the thread uses it
        self._ended = threading.Event()  # set by `close`
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop the thread. A call that does not return is abandoned. Idempotent."""
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
