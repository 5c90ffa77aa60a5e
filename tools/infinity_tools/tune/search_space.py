"""The settings that are tuned, and the values that are tried."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from infinity.config import Config
from infinity.units import KIB, MIB, align_down, format_size

Candidate = Mapping[str, Any]
"""A value for every setting of the space, by names such as ``storage.queue_depth``."""

TUNED = (
    "update.schedule",
    "memory.page_bytes",
    "storage.request_bytes",
    "storage.queue_depth",
    "update.cores",
    "storage.engine",
    "state.format",
    "memory.host_bytes",
)
"""In the order in which they are tried: what changes most steps most comes first."""

ALLOWED: Mapping[str, tuple[str, ...]] = {
    "same": (),
    "split": ("fp32", "split"),
    "any": ("fp32", "split", "bf16-moments", "8bit"),
}
"""Values of `state.format` that each value of ``--allow-format`` lets be tried; split changes no bit of fp32."""

AUTOMATIC: Mapping[str, Any] = {
    "update.schedule": "auto", "memory.page_bytes": 0, "update.cores": -1, "storage.engine": "auto",
}  # fmt: skip
"""The values that leave a setting to infinity; what they come to is known after a step."""

_LARGEST_PAGE, _LEAST_CACHE_SLOTS = 16 * MIB, 8
_MOST_CORES = 4


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What is not to be exceeded."""

    host_bytes: int
    """Size of the host cache."""
    cores: int
    """Of this process."""
    formats: str = "same"
    """Key of `ALLOWED`."""
    clipping: bool = False
    """Whether all gradients are needed together, so that no update can run in backward."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting and its values: in their order if it is a number, else in the order in which they are tried."""

    name: str
    """Such as ``storage.queue_depth``."""
    values: tuple[Any, ...]
    """That are tried."""
    ordered: bool
    """Whether neighbours have similar effects."""

    def distance(self, before: Any, after: Any) -> int:
        """Return how many values away another one is; the next one of a setting without order is always 1 away."""
        return abs(self.values.index(after) - self.values.index(before)) if self.ordered else 1


class Space:
    """The settings with more than one value, where a search starts, and which candidates come to the same."""

    def __init__(self, settings: Sequence[Setting], start: Candidate, defaults: Candidate, page_bytes: int = 0) -> None:
        """Hold them.

        Args:
            start: what is trained with before anything is tuned.
            defaults: what is set where nobody sets anything.
            page_bytes: what ``memory.page_bytes = 0`` comes to; 0 where that is not known.
        """
        self.settings = tuple(setting for setting in settings if len(setting.values) > 1)
        self.start, self.defaults = dict(start), dict(defaults)
        self._page_bytes = page_bytes

    @property
    def size(self) -> int:
        """How many candidates there are."""
        count = 1
        for setting in self.settings:
            count *= len(setting.values)
        return count

    def key(self, candidate: Candidate) -> tuple[Any, ...]:
        """Return what is equal for candidates that do the same: a page is moved as one request that is not smaller."""
        found = dict(candidate)
        page = found.get("memory.page_bytes") or self._page_bytes
        if page and "storage.request_bytes" in found:
            found["storage.request_bytes"] = min(found["storage.request_bytes"], page)
        return tuple(sorted(found.items()))

    def changes(self, candidate: Candidate, base: Candidate) -> dict[str, Any]:
        """Return the settings in which a candidate differs from another one."""
        return {name: value for name, value in candidate.items() if value != base[name]}

    def all(self) -> list[dict[str, Any]]:
        """Return every candidate."""
        names = [setting.name for setting in self.settings]
        rows = itertools.product(*(setting.values for setting in self.settings))
        return [{**self.start, **dict(zip(names, row, strict=True))} for row in rows]


def value_of(settings: Config, name: str) -> Any:
    """Return the value of a setting such as ``storage.queue_depth``."""
    section, _, key = name.partition(".")
    return getattr(getattr(settings, section), key)


def candidate_of(settings: Config, host_bytes: int) -> dict[str, Any]:
    """Return the tuned settings as they are, with a host cache of so many bytes."""
    return {name: value_of(settings, name) for name in TUNED} | {"memory.host_bytes": host_bytes}


def make_space(start: Candidate, limits: Limits, effective: Mapping[str, Any]) -> Space:
    """Return the values to try.

    Args:
        start: value of every setting in `TUNED`.
        effective: what the values in `AUTOMATIC` come to here, as far as that is known: they are not tried again.
    """
    defaults = candidate_of(Config(), limits.host_bytes)
    if start["state.format"] not in ("fp32", *ALLOWED[limits.formats]):
        defaults["state.format"] = start["state.format"]  # another one changes bits, which was not allowed
    settings = [_setting(name, (start[name], defaults[name]), limits, effective) for name in TUNED]
    return Space(settings, start, defaults, int(effective.get("memory.page_bytes", 0)))


def _setting(name: str, known: tuple[Any, Any], limits: Limits, effective: Mapping[str, Any]) -> Setting:
    automatic = AUTOMATIC.get(name)
    same = effective.get(name) if automatic in known else None
    tried = [value for value in _values(name, limits, known[0]) if value != same]
    if name == "update.schedule" and limits.clipping:
        tried = [value for value in tried if value != "in_backward"]
    values = list(dict.fromkeys((*known, *tried)))
    if ordered := is_ordered(name):  # what is left to infinity stands where that is which it comes to
        values.sort(key=lambda value: effective.get(name, 0) if value == automatic else value)
    return Setting(name=name, values=tuple(values), ordered=ordered)


def is_size(name: str) -> bool:
    """Whether a setting is a number of bytes."""
    return name.endswith("_bytes")


def is_ordered(name: str) -> bool:
    """Whether a setting is a number of which neighbours have similar effects."""
    return is_size(name) or name == "storage.queue_depth"


def _values(name: str, limits: Limits, start: Any) -> tuple[Any, ...]:
    if name == "update.schedule":
        return ("in_backward", "in_forward", "after_backward")
    if name == "memory.page_bytes":
        most = min(_LARGEST_PAGE, limits.host_bytes // _LEAST_CACHE_SLOTS)
        return tuple(KIB << power for power in range(8, 15) if KIB << power <= most)
    if name == "storage.request_bytes":
        return tuple(KIB << power for power in range(8, 14))
    if name == "storage.queue_depth":
        return tuple(1 << power for power in range(2, 8))
    if name == "update.cores":
        return tuple(count for count in (0, 1, 2, _MOST_CORES) if count <= limits.cores)
    if name == "storage.engine":
        return ("io_uring", "threads")
    if name == "state.format":
        formats = ALLOWED[limits.formats]
        return formats if start in formats else ()
    return tuple(align_down(limits.host_bytes * share // 4, MIB) for share in (2, 3) if limits.host_bytes > 64 * MIB)


def shown(name: str, value: Any) -> str:
    """Return a value as a person reads it."""
    if is_size(name):
        return format_size(value) if value else "derived"
    return "auto" if value == -1 else str(value)


def describe(changes: Mapping[str, Any], same: str = "as it was") -> str:
    """Return settings and values in a line; `same` where there are none."""
    return ", ".join(f"{name.partition('.')[2]} {shown(name, value)}" for name, value in changes.items()) or same
