"""Log lines in one format: time, level, event, then ``key=value`` pairs with values quoted if needed."""

from __future__ import annotations

import json
import logging
import re

_LOG = logging.getLogger("infinityd")
_PLAIN = re.compile(r"[\w./:+-]+")


def event(level: int, name: str, **values: object) -> None:
    """Write one line about an event."""
    _LOG.log(level, "%s", " ".join([name, *(f"{key}={_quoted(value)}" for key, value in values.items())]))


def start_logging() -> None:
    """Send the log to stderr."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)


def _quoted(value: object) -> str:
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)
