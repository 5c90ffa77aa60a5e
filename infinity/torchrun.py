"""What torchrun, or whoever sets the same variables, tells a process about its place among the ranks."""

from __future__ import annotations

import os

from infinity.errors import ConfigError

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_FIX = "start the program with torchrun, which sets it, or unset it"


def number(name: str, default: int) -> int:
    """Return a variable that is a whole number from 0 on, or `default` where it is not set. Raises `ConfigError`."""
    text = os.environ.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal()) or len(text) > 9:
        raise ConfigError(f"{name}={text!r} in the environment is not a whole number; {_FIX}")
    return int(text)


def variables(rank: int, count: int, port: int) -> dict[str, str]:
    """Return what one of `count` ranks of this machine, which meet at a port of it, is told."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def launched() -> bool:
    """Return whether this process is one of several ranks, or told to act as one.

    Raises:
        ConfigError: the variables are incomplete, or contradict each other.
    """
    world_size = number("WORLD_SIZE", 1)
    if "RANK" not in os.environ:
        if world_size > 1:
            raise ConfigError(f"WORLD_SIZE={world_size} in the environment, but RANK is not set; {_FIX}")
        return False
    if missing := [name for name in _NEEDED if not os.environ.get(name)]:
        raise ConfigError(f"RANK is set in the environment, but not {', '.join(missing)}; start it with torchrun")
    if not 0 < number("MASTER_PORT", 0) < 1 << 16:
        raise ConfigError(f"MASTER_PORT={os.environ['MASTER_PORT']!r} in the environment is no port; {_FIX}")
    for rank, size in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if number(rank, 0) >= number(size, world_size):
            raise ConfigError(
                f"{rank}={number(rank, 0)} in the environment must be below {size}={number(size, world_size)}; {_FIX}"
            )
    return True
