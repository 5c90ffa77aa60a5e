"""Release of resources: run all release steps, and report the first error."""

from __future__ import annotations

import logging
from collections.abc import Callable

_log = logging.getLogger("infinity")


def end_all(*steps: Callable[[], object], cause: BaseException | None = None) -> None:
    """Call all steps in order, even if an earlier one fails.

    Args:
        steps: functions to call.
        cause: exception that is being handled, if any. It takes precedence, so errors of the steps are logged instead
            of raised.

    Raises:
        BaseException: the first error of a step if `cause` is None; later errors are logged. An interrupt such as
            `KeyboardInterrupt` is raised after the last step even if there is a `cause`.
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
                _log.error("error during cleanup: %s: %s", type(error).__name__, error)
    if interrupt is not None:
        raise interrupt
    if first is not None and cause is None:
        raise first


class Undo:
    """Stack of release steps for open resources, released in reverse order of opening."""

    def __init__(self) -> None:
        self._steps: list[Callable[[], object]] = []  # the oldest first

    def push(self, step: Callable[[], object]) -> None:
        """Add the release step of the resource that was opened last."""
        self._steps.append(step)

    def push_under(self, step: Callable[[], object]) -> None:
        """Add a release step that runs after all steps added so far, for a resource that they may use."""
        self._steps.insert(0, step)

    def take(self) -> tuple[Callable[[], object], ...]:
        """Return all steps in the order in which to call them (see `end_all`), and clear the stack."""
        steps, self._steps = tuple(reversed(self._steps)), []
        return steps
