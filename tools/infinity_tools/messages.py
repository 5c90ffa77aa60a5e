"""Standard error of a run that is to go on when nobody reads its messages any more."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO


class LastingStream:
    """A text stream for which a reader that is gone, or a full disk, is no error: from then on nothing is written."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lost = False

    def write(self, text: str) -> int:
        """Write, as far as anybody reads it."""
        if not self._lost:
            try:
                return self._stream.write(text)
            except OSError:
                self._lose()
        return len(text)

    def flush(self) -> None:
        """Flush, as far as anybody reads it."""
        if not self._lost:
            try:
                self._stream.flush()
            except OSError:
                self._lose()

    def _lose(self) -> None:
        self._lost = True
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, self._stream.fileno())  # for what writes past this object, and what is in its buffer yet
        os.close(nothing)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def lasting_messages() -> Iterator[None]:
    """Let nothing that is written to standard error in the body end it."""
    before = sys.stderr
    sys.stderr = LastingStream(before)  # type: ignore[assignment]
    try:
        yield
    finally:
        sys.stderr = before
