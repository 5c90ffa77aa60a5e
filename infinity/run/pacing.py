"""Asks the node's daemon, once a second, how fast this rank may use drives that it shares with other runs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from infinity.daemon_client import NodeDaemon
from infinity.units import MIB

_log = logging.getLogger("infinity")
_EVERY_SECONDS: Final = 1.0
_MOST: Final = 1e15
"""What is above is no bandwidth, in bytes per second."""
_LEAST: Final = float(MIB)  # bytes per second: with less, requests would run into their time-out
_WITHOUT_ANSWER: Final = 3
"""After so many questions without an answer there is no limit any more: the daemon is gone, or never was."""


class Pacing:
    """A thread that asks, from `__init__` to `close`, and tells `pace` when the answer is another one.

    Without a daemon a question is a system call that fails, and nothing ever has a limit.
    """

    def __init__(
        self,
        daemon: NodeDaemon,
        run_id: str,
        paths: Sequence[str],
        folders: Sequence[str],
        pace: Callable[[Mapping[str, float]], None],
    ) -> None:
        """Begin to ask.

        Args:
            paths: the run's NVMe paths, absolute.
            folders: the run's folder on each of them, where the files of this rank are.
            pace: is told the bytes per second by folder; those that are not there have no limit.
        """
        self._daemon, self._run_id, self._pace = daemon, run_id, pace
        self._folders = dict(zip(paths, folders, strict=True))  # by path
        self._ended = threading.Event()  # set by `close`
        self._thread = threading.Thread(target=self._ask, name="infinity-pacing", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; what was told last stays. Idempotent."""
        self._ended.set()
        self._thread.join()

    def _ask(self) -> None:
        told: dict[str, float] = {}
        silent = 0
        while not self._ended.wait(_EVERY_SECONDS):
            answer = self._daemon.ask("pace", run_id=self._run_id, paths=list(self._folders))
            silent = silent + 1 if answer is None else 0
            if answer is None and silent < _WITHOUT_ANSWER:
                continue
            rates = self._rates(answer or {})
            if rates != told:
                if bool(rates) != bool(told):
                    _log.info("this rank shares drives with other runs and is %s", "held back" if rates else "free")
                told = rates
                self._pace(rates)

    def _rates(self, answer: Mapping[str, Any]) -> dict[str, float]:
        """Return the usable part of an answer, by folder."""
        rates = answer.get("rates")
        if not isinstance(rates, dict):
            return {}
        return {
            self._folders[path]: max(float(rate), _LEAST)
            for path, rate in rates.items()
            if path in self._folders and type(rate) in (int, float) and 0 < rate <= _MOST
        }
