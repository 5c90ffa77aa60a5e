"""Resource cleanup: run all cleanup steps, and report the first error."""

from __future__ import annotations

import logging
from collections.abc import Callable

_log = logging.getLogger("infinity")


def end_all(*steps: Callable[[], object], cause: BaseException | None = None) -> None:
    """Call all steps in order, even if an earlier one fails.

    Args:
        steps: functions to call.
        cause: exception that is currently being handled, if any. It takes precedence, so errors in steps are logged
            instead of raised.

    Raises:
        BaseException: the first error in a step if `cause` is None; later errors are logged. An interrupt such as
            `KeyboardInterrupt` is raised after the last step even if `cause` is set.
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
    """Stack of cleanup steps for open resources, which are closed in reverse order of opening."""

    def __init__(self) -> None:
        self._steps: list[Callable[[], object]] = []  # oldest first

    def push(self, step: Callable[[], object]) -> None:
        """Add the cleanup step for the most recently opened resource."""
        self._steps.append(step)

    def push_under(self, step: Callable[[], object]) -> None:
        """Add a cleanup step that runs after all steps added so far, for a resource that they may use."""
        self._steps.insert(0, step)

    def take(self) -> tuple[Callable[[], object], ...]:
        """Clear the stack and return its steps in the order in which `end_all` must call them."""
        steps, self._steps = tuple(reversed(self._steps)), []
        return steps
