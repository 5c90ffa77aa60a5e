"""The keys of a DeepSpeed configuration: what becomes of each here, and why. docs/how-to/migrate.md is made from this."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Status(StrEnum):
    """What becomes of a key."""

    TRANSLATED = "translated"
    NOT_NEEDED = "not needed"
    NO_COUNTERPART = "no counterpart"
    UNKNOWN = "unknown key"


@dataclass(frozen=True, kw_only=True)
class Key:
    """One key of DeepSpeed's."""

    name: str
    """With the sections that it lies in, joined by dots."""
    status: Status
    """What becomes of it where it is in use."""
    becomes: str = ""
    """The setting or line of code here; for what has no counterpart, what to do instead."""
    why: str
    """The reason, a sentence without its end."""
    takes: str = "any"
    """What its value must be, one of `translate.CHECKS`."""
    off: tuple[Any, ...] = ()
    """Values with which DeepSpeed does nothing of the kind."""
    switch: str = ""
    """Of a section that is looked at as a whole, when it is in use: `enabled` is true, it has `any` key, or a `nested`
    `enabled` is true."""
    changes: bool = False
    """Whether training would be another one without it, so that migration is refused."""
    auto: str = ""
    """What `"auto"` stands for, an expression of transformers' TrainingArguments."""


def translated(name: str, becomes: str, why: str, takes: str = "any", *, auto: str = "") -> Key:
    """Return a key that has a counterpart."""
    return Key(name=name, status=Status.TRANSLATED, becomes=becomes, why=why, takes=takes, auto=auto)


def unneeded(section: str, names: str, why: str, becomes: str = "", switch: str = "") -> list[Key]:
    """Return keys that nothing here needs, all for the same reason."""
    prefix = f"{section}." if section else ""
    return [
        Key(name=prefix + name, status=Status.NOT_NEEDED, becomes=becomes, why=why, switch=switch)
        for name in names.split()
    ]


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
    """Return keys that have no counterpart, all for the same reason."""
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
    """All keys, by name."""

    def __init__(self, keys: list[Key]) -> None:
        self.keys: Mapping[str, Key] = {key.name: key for key in keys}
        self.sections = {name.rpartition(".")[0] for name in self.keys} - {""}
        self.sections |= {section.rpartition(".")[0] for section in self.sections} - {""}

    def nearest(self, name: str) -> str:
        """Return the known key or section that was meant, if any is near: the same word elsewhere, or a similar one."""
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
