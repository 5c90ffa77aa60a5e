"""Keys of a DeepSpeed configuration, with counterparts and reasons."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

NOT_IMPORTED = (
    "DeepSpeed stores them in pickle files, which can run code when they are read, and in a flat layout that depends "
    "on its version and on the number of ranks"
)
"""Reason why the optimizer state of a DeepSpeed checkpoint is not imported."""


class Status(StrEnum):
    """Kind of translation."""

    TRANSLATED = "translated"
    NOT_NEEDED = "not needed"
    NO_COUNTERPART = "no counterpart"
    UNKNOWN = "unknown key"


@dataclass(frozen=True, kw_only=True)
class Key:
    """A key of a DeepSpeed configuration."""

    name: str
    """Name with its sections, joined by dots."""
    status: Status
    """Kind of translation if the feature is switched on."""
    becomes: str = ""
    """Setting or line of code. For a key without a counterpart, a replacement."""
    why: str
    """Reason, as a sentence without a final period."""
    takes: str = "any"
    """Required kind of value; a key in `read.CHECKS`."""
    off: tuple[Any, ...] = ()
    """Values that switch the feature off in DeepSpeed."""
    switch: str = ""
    """For a section that is translated as a whole, the condition under which it is switched on. ``enabled``: that key
    is true; ``any``: it contains any key; ``nested``: a subsection has ``enabled`` set to true.
    """
    changes: bool = False
    """Whether training differs without the key, so that the migration is incomplete."""
    auto: str = ""
    """Expression in terms of transformers' TrainingArguments that replaces ``"auto"``."""


def translated(name: str, becomes: str, why: str, takes: str = "any", *, auto: str = "") -> Key:
    """Return a key with a counterpart."""
    return Key(name=name, status=Status.TRANSLATED, becomes=becomes, why=why, takes=takes, auto=auto)


def unneeded(section: str, names: str, why: str, becomes: str = "") -> list[Key]:
    """Return keys that are not needed, all for the same reason."""
    prefix = f"{section}." if section else ""
    return [Key(name=prefix + name, status=Status.NOT_NEEDED, becomes=becomes, why=why) for name in names.split()]


def lacking(
    section: str,
    names: str,
    why: str,
    instead: str,
    *,
    off: tuple[Any, ...] = (False,),
    switch: str = "",
    takes: str = "any",
    changes: bool = False,
) -> list[Key]:
    """Return keys without a counterpart, all for the same reason."""
    prefix = f"{section}." if section else ""
    return [
        Key(
            name=prefix + name,
            status=Status.NO_COUNTERPART,
            becomes=instead,
            why=why,
            takes="section" if switch else takes,
            off=off,
            switch=switch,
            changes=changes,
        )
        for name in names.split()
    ]


class Table:
    """All keys by name."""

    def __init__(self, keys: list[Key]) -> None:
        self.keys: Mapping[str, Key] = {key.name: key for key in keys}
        self.sections = {name.rpartition(".")[0] for name in self.keys} - {""}
        self.sections |= {section.rpartition(".")[0] for section in self.sections} - {""}

    def nearest(self, name: str) -> str:
        """Return the most similar known key or section, if any: the same word in a different section, or a similar
        word.
        """
        section, _, leaf = name[:200].rpartition(".")
        names = [*self.keys, *sorted(self.sections)]
        for known in names:
            if known.rpartition(".")[2] == leaf:
                return known
        beside = [known for known in names if known.rpartition(".")[0] == section]
        leaves = {known.rpartition(".")[2]: known for known in (*names, *beside)}
        for known_leaves, cutoff in (([known.rpartition(".")[2] for known in beside], 0.6), (list(leaves), 0.75)):
            if near := difflib.get_close_matches(leaf, known_leaves, n=1, cutoff=cutoff):
                return leaves[near[0]]
        return ""
