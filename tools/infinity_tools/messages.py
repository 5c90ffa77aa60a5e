"""Standard output and error streams that keep the program running after their reader has exited."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO


class LastingStream:
    """Text stream that ignores a closed reader or a full disk. After the first error, all output is discarded."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.error: OSError | None = None
        """First error, after which output is discarded."""

    def write(self, text: str) -> int:
        """Write text, unless an earlier write failed."""
        if self.error is None:
            try:
                return self._stream.write(text)
            except OSError as error:
                self._lose(error)
        return len(text)

    def flush(self) -> None:
        """Flush, unless an earlier write failed."""
        if self.error is None:
            try:
                self._stream.flush()
            except OSError as error:
                self._lose(error)

    def _lose(self, error: OSError) -> None:
        self.error = error
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, self._stream.fileno())  # for code that bypasses this object, and for buffered data
        os.close(nothing)

    def __getattr__(self, name: str) -> Any:
        if name == "buffer":  # through which typer would write past this object if the encoding is ASCII
            raise AttributeError(name)
        return getattr(self._stream, name)


def open_missing_streams() -> None:
    """Open ``/dev/null`` for standard streams that were closed when the program started.

    Otherwise the next file that the program opens gets the descriptor of a missing stream, and messages are written to
    it.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free descriptor, which is `number`
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w", closefd=False))  # noqa: SIM115


@contextmanager
def lasting_streams() -> Iterator[LastingStream]:
    """Keep the body running if writes to standard output or error fail. Yields the wrapper of standard output."""
    before = sys.stdout, sys.stderr
    output, errors = LastingStream(sys.stdout), LastingStream(sys.stderr)
    sys.stdout, sys.stderr = output, errors  # type: ignore[assignment]
    try:
        yield output
    finally:
        with suppress(ValueError):  # the stream has been closed
            output.flush()
            errors.flush()
        sys.stdout, sys.stderr = before
