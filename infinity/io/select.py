"""Selection of the I/O engine."""

from __future__ import annotations

import logging
from functools import cache

from infinity.config import StorageConfig
from infinity.errors import ConfigError
from infinity.io.engine import Engine
from infinity.io.ring import RingRefusedError
from infinity.io.threads import ThreadEngine
from infinity.io.uring import UringEngine

_log = logging.getLogger(__name__)


def open_engine(config: StorageConfig) -> Engine:
    """Return a running engine. The reason for choosing it is logged.

    Args:
        config: storage settings. ``auto`` means io_uring if the kernel allows it.

    Raises:
        ConfigError: if `storage.engine` is ``io_uring``, but the kernel does not allow it.
    """
    engine, reason = _choose(config)
    _log.info("I/O engine %s: %s", engine.name, reason)
    return engine


@cache
def _say_once(reason: str) -> None:
    _log.warning("%s. Using the thread engine instead, which uses more CPU time.", reason)


def _choose(config: StorageConfig) -> tuple[Engine, str]:
    if config.engine == "threads":
        return ThreadEngine(config.queue_depth, config.request_bytes), "set by storage.engine"
    try:
        engine = UringEngine(config.queue_depth, config.request_bytes, max(1, len(config.paths)))
    except RingRefusedError as error:
        if config.engine == "io_uring":
            raise ConfigError(f"storage.engine is 'io_uring', but {error}. Use 'auto' or 'threads'.") from error
        _say_once(str(error))
        return ThreadEngine(config.queue_depth, config.request_bytes), str(error)
    if config.engine == "io_uring":
        return engine, "set by storage.engine"
    return engine, "io_uring is available"
