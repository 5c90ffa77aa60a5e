"""Search space of `infinity tune`: the tuned settings and the values that are tried."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from infinity.config import Config
from infinity.units import KIB, MIB, align_down, format_size

Candidate = Mapping[str, Any]
"""A value for every tuned setting, by names such as ``storage.queue_depth``."""

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
"""Tuned settings in the order in which they are tried; settings with the largest effect on most machines come first."""

ALLOWED: Mapping[str, tuple[str, ...]] = {
    "same": (),
    "split": ("fp32", "split"),
    "any": ("fp32", "split", "bf16-moments", "8bit"),
}
"""Values of `state.format` that are tried for each value of ``--allow-format``. fp32 and split are bitwise equal."""

AUTOMATIC: Mapping[str, Any] = {
    "update.schedule": "auto", "memory.page_bytes": 0, "update.cores": -1, "storage.engine": "auto",
}  # fmt: skip
"""Values that let infinity choose. The chosen value is known after one step."""

_LARGEST_PAGE, _LEAST_CACHE_SLOTS = 16 * MIB, 8
_MOST_CORES = 4


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of the search space."""

    host_bytes: int
    """Maximum size of the host cache, in bytes."""
    cores: int
    """Number of cores available to this process."""
    formats: str = "same"
    """Key of `ALLOWED`."""
    clipping: bool = False
    """Whether gradients are clipped by their global norm, which excludes updates in backward."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A setting and its values, in ascending order for numbers and otherwise in the order in which they are tried."""

    name: str
    """Name such as ``storage.queue_depth``."""
    values: tuple[Any, ...]
    """Values that are tried."""
    ordered: bool
    """Whether neighboring values have similar effects."""

    def distance(self, before: Any, after: Any) -> int:
        """Return how many positions apart two values are, or 1 for a setting without an order."""
        return abs(self.values.index(after) - self.values.index(before)) if self.ordered else 1


class Space:
    """Settings with more than one value, the start of the search, and which candidates are equivalent."""

    def __init__(self, settings: Sequence[Setting], start: Candidate, defaults: Candidate, page_bytes: int = 0) -> None:
        """Create the space.

        Args:
            settings: Settings and their values. Settings with a single value are left out.
            start: Settings before tuning.
            defaults: Default settings.
            page_bytes: Value that infinity chooses for ``memory.page_bytes = 0``, or 0 if it is not known.
        """
        self.settings = tuple(setting for setting in settings if len(setting.values) > 1)
        self.start, self.defaults = dict(start), dict(defaults)
        self._page_bytes = page_bytes

    def key(self, candidate: Candidate) -> tuple[Any, ...]:
        """Return a key that is equal for equivalent candidates: a request size is limited by the page size."""
        found = dict(candidate)
        page = found.get("memory.page_bytes") or self._page_bytes
        if page and "storage.request_bytes" in found:
            found["storage.request_bytes"] = min(found["storage.request_bytes"], page)
        return tuple(sorted(found.items()))


def changes(candidate: Candidate, base: Candidate) -> dict[str, Any]:
    """Return the settings in which a candidate differs from `base`."""
    return {name: value for name, value in candidate.items() if value != base[name]}


def value_of(settings: Config, name: str) -> Any:
    """Return the value of a setting such as ``storage.queue_depth``."""
    section, _, key = name.partition(".")
    return getattr(getattr(settings, section), key)


def candidate_of(settings: Config, host_bytes: int) -> dict[str, Any]:
    """Return the current values of the tuned settings, with `host_bytes` as the size of the host cache."""
    return {name: value_of(settings, name) for name in TUNED} | {"memory.host_bytes": host_bytes}


def make_space(start: Candidate, limits: Limits, effective: Mapping[str, Any]) -> Space:
    """Return the search space.

    Args:
        start: Value of every setting in `TUNED`.
        limits: Limits of the search space.
        effective: Values that infinity has chosen for the settings in `AUTOMATIC`, as far as they are known. They are
            not tried separately.
    """
    defaults = candidate_of(Config(), limits.host_bytes)
    if start["state.format"] not in ("fp32", *ALLOWED[limits.formats]):
        defaults["state.format"] = start["state.format"]  # a different format changes results, which was not allowed
    settings = [_setting(name, (start[name], defaults[name]), limits, effective) for name in TUNED]
    return Space(settings, start, defaults, int(effective.get("memory.page_bytes", 0)))


def _setting(name: str, known: tuple[Any, Any], limits: Limits, effective: Mapping[str, Any]) -> Setting:
    automatic = AUTOMATIC.get(name)
    same = effective.get(name) if automatic in known else None
    tried = [value for value in _values(name, limits, known[0]) if value != same]
    if name == "update.schedule" and limits.clipping:
        tried = [value for value in tried if value != "in_backward"]
    values = list(dict.fromkeys((*known, *tried)))
    if ordered := is_ordered(name):  # an automatic value is sorted by the value that infinity chooses
        values.sort(key=lambda value: effective.get(name, 0) if value == automatic else value)
    return Setting(name=name, values=tuple(values), ordered=ordered)


def is_size(name: str) -> bool:
    """Return whether a setting is a number of bytes."""
    return name.endswith("_bytes")


def is_ordered(name: str) -> bool:
    """Return whether neighboring values of a setting have similar effects."""
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
    """Return a value as readable text."""
    if is_size(name):
        return format_size(value) if value else "automatic"
    return "auto" if value == -1 else str(value)


def describe(values: Mapping[str, Any], same: str = "unchanged") -> str:
    """Return settings and values on one line, or `same` if there are none."""
    return ", ".join(f"{name.partition('.')[2]} {shown(name, value)}" for name, value in values.items()) or same
