"""Structured logging: each line contains a time, a level, an event name and ``key=value`` pairs."""

from __future__ import annotations

import json
import logging
import re

_LOG = logging.getLogger("infinityd")
_PLAIN = re.compile(r"[\w./:+-]+")


def event(level: int, name: str, /, **values: object) -> None:
    """Log an event with the given values."""
    _LOG.log(level, "%s", " ".join([name, *(f"{key}={_quoted(value)}" for key, value in values.items())]))


def start_logging() -> None:
    """Send the log to stderr."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)


def _quoted(value: object) -> str:
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)
