"""Standard output and error of a program that is to go on when nobody reads them any more."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO


class LastingStream:
    """A text stream for which a reader that is gone, or a full disk, is no error: from then on nothing is written."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.error: OSError | None = None
        """Why nothing is written any more."""

    def write(self, text: str) -> int:
        """Write, as far as anybody reads it."""
        if self.error is None:
            try:
                return self._stream.write(text)
            except OSError as error:
                self._lose(error)
        return len(text)

    def flush(self) -> None:
        """Flush, as far as anybody reads it."""
        if self.error is None:
            try:
                self._stream.flush()
            except OSError as error:
                self._lose(error)

    def _lose(self, error: OSError) -> None:
        self.error = error
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, self._stream.fileno())  # for what writes past this object, and what is in its buffer yet
        os.close(nothing)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def open_missing_streams() -> None:
    """Give a program that was started with standard streams closed ones that lead nowhere.

    Else the next file that it opens gets the number of a missing stream, and messages would be written into it.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w", closefd=False))  # noqa: SIM115


@contextmanager
def lasting_streams() -> Iterator[LastingStream]:
    """Let nothing that is written to standard output or error in the body end it; give that of standard output."""
    before = sys.stdout, sys.stderr
    output, errors = LastingStream(sys.stdout), LastingStream(sys.stderr)
    sys.stdout, sys.stderr = output, errors  # type: ignore[assignment]
    try:
        yield output
    finally:
        with suppress(ValueError):  # somebody has closed it
            output.flush()
            errors.flush()
        sys.stdout, sys.stderr = before
