"""Pacing: query the node daemon once per second for the bandwidth that this rank may use on shared drives."""

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
"""Upper bound of a plausible bandwidth, in bytes per second. Larger values in a response are ignored."""
_LEAST: Final = float(MIB)  # bytes per second; below this, requests would time out
_WITHOUT_ANSWER: Final = 3
"""Number of consecutive unanswered queries after which limits are lifted, because the daemon has stopped or was never
running.
"""


class Pacing:
    """A thread that polls the daemon, from construction until `close`, and calls `pace` when the limits change.

    Without a daemon, a query costs one failing system call, and there are no limits.
    """

    def __init__(
        self,
        daemon: NodeDaemon,
        run_id: str,
        paths: Sequence[str],
        folders: Sequence[str],
        pace: Callable[[Mapping[str, float]], None],
    ) -> None:
        """Start polling.

        Args:
            paths: absolute NVMe paths of the run.
            folders: folder of the run on each path, which contains this rank's files.
            pace: function that receives the limits in bytes per second, by folder. Folders without an entry have no
                limit.
        """
        self._daemon, self._run_id, self._pace = daemon, run_id, pace
        self._folders = dict(zip(paths, folders, strict=True))  # by path
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._ask, name="infinity-pacing", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread. The last limits stay in effect. Idempotent."""
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
                    _log.info(
                        "this rank's I/O is %s",
                        "limited, because other runs share its drives" if rates else "no longer limited",
                    )
                told = rates
                self._pace(rates)

    def _rates(self, answer: Mapping[str, Any]) -> dict[str, float]:
        """Return the valid limits in a response, by folder."""
        rates = answer.get("rates")
        if not isinstance(rates, dict):
            return {}
        return {
            self._folders[path]: max(float(rate), _LEAST)
            for path, rate in rates.items()
            if path in self._folders and type(rate) in (int, float) and 0 < rate <= _MOST
        }
