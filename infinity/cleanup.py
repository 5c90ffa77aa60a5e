"""The end of what holds resources: everything is released, and the first thing that went wrong is what is said."""

from __future__ import annotations

import logging
from collections.abc import Callable

_log = logging.getLogger("infinity")


def end_all(*steps: Callable[[], object], cause: BaseException | None = None) -> None:
    """Call everything, one after the other, also where one before it fails.

    Args:
        cause: why it ends. It is what counts then: what fails here is logged and not raised.

    Raises:
        BaseException: the first that was raised, if there is no `cause`; later ones are logged. Ctrl-C while one step
            waits is raised after the last, also where there is a `cause`.
    """
    first, interrupt = cause, None
    for step in steps:
        try:
            step()
        except BaseException as error:
            if not isinstance(error, Exception):
                interrupt = interrupt or error
            if first is None:
                first = error
            else:
                _log.error("at the end: %s: %s", type(error).__name__, error)
    if interrupt is not None:
        raise interrupt
    if first is not None and cause is None:
        raise first


class Undo:
    """What was opened and is to be released: the latest first, everything, whatever fails on the way."""

    def __init__(self) -> None:
        self._steps: list[Callable[[], object]] = []  # the oldest first

    def push(self, step: Callable[[], object]) -> None:
        """Note what releases the thing that was opened last."""
        self._steps.append(step)

    def push_under(self, step: Callable[[], object]) -> None:
        """Note what releases a thing that all that is open now may use until its own end."""
        self._steps.insert(0, step)

    def take(self) -> tuple[Callable[[], object], ...]:
        """Return all steps in the order in which they are to be called (`end_all`); none are left."""
        steps, self._steps = tuple(reversed(self._steps)), []
        return steps
