"""Translation of each key of a configuration, from the table of keys and the configuration's values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from infinity.schema import brief
from infinity_tools.migrate import toml_output
from infinity_tools.migrate.answers import ANSWERS
from infinity_tools.migrate.code import code_of, ranks_of, ranks_sentence, trainer_code_of
from infinity_tools.migrate.key_table import TABLE
from infinity_tools.migrate.keys import Key, Status
from infinity_tools.migrate.read import AUTO, Entry, Found


@dataclass(frozen=True, kw_only=True)
class Row:
    """Translation of one key."""

    key: str
    """Name of the key."""
    value: Any
    """Value in the configuration."""
    status: Status
    """Kind of translation."""
    becomes: str
    """Counterpart, or a replacement to use instead."""
    why: str
    """Reason."""
    changes: bool = False
    """Whether training changes because the key has no counterpart."""


@dataclass(frozen=True, kw_only=True)
class Migration:
    """Translation of a configuration."""

    toml: str
    """Text of a settings file."""
    settings: dict[str, Any]
    """Settings in that file."""
    code: str
    """Lines of training code that change."""
    trainer_code: str | None
    """The same with transformers' Trainer, or None if no value is "auto"."""
    ranks: int | None
    """Number of ranks that the batch sizes determine, or None if they do not."""
    rows: tuple[Row, ...]
    """Translations of all keys."""

    @property
    def refusals(self) -> tuple[Row, ...]:
        """Unsupported keys that change the training."""
        return tuple(row for row in self.rows if row.changes)


def migrate(found: Found, source: str, settings_file: str, nvme: Sequence[str] = ()) -> Migration:
    """Return the translation of a configuration.

    Args:
        found: DeepSpeed configuration.
        source: Name of its file, for the settings file.
        settings_file: Path of the settings file, for the code.
        nvme: Paths that replace the ones in the configuration.

    Raises:
        ConfigError: if `infinity.load_config` rejects the settings.
    """
    text, settings = toml_output.to_toml(toml_output.lines_of(found, nvme), source, ranks_sentence(found))
    rows = tuple(_row(entry, found, nvme) for entry in found.entries)
    return Migration(
        toml=text,
        settings=settings,
        code=code_of(found, settings_file),
        trainer_code=trainer_code_of(found, settings_file),
        ranks=ranks_of(found),
        rows=rows,
    )


def _row(entry: Entry, found: Found, nvme: Sequence[str]) -> Row:
    key, value = entry.key, entry.value

    def row(status: Status, becomes: str, why: str, changes: bool = False) -> Row:
        return Row(key=entry.name, value=value, status=status, becomes=becomes, why=why, changes=changes)

    if key is None:
        near = TABLE.nearest(entry.name)
        why = "not in DeepSpeed's documentation" + (f"; did you mean {near}?" if near else "")
        return row(Status.UNKNOWN, "", why)
    if value is None:
        return row(Status.NOT_NEEDED, "", "null: not set")
    if found.is_off(entry.name):
        switch = f"{entry.name.partition('.')[0]}.enabled"
        return row(Status.NOT_NEEDED, "", f"depends on {switch}, which is {_shown(found[switch])}")
    if _unused(key, value):
        return row(Status.NOT_NEEDED, "", "switched off in DeepSpeed, too")
    below = ANSWERS.get(entry.name.rpartition(".")[0] + ".*")
    if value == AUTO:
        unused = below(found, entry.name, value, nvme) if below is not None else None
        return row(*unused) if unused is not None and unused[0] is Status.NOT_NEEDED else _from_trainer(key, row)
    if special := ANSWERS.get(entry.name, below):
        return row(*special(found, entry.name, value, nvme))
    return row(key.status, key.becomes, key.why, key.changes)


def _unused(key: Key, value: Any) -> bool:
    if any(type(value) is type(off) and value == off for off in key.off):
        return True
    if not key.switch or not isinstance(value, dict):
        return bool(key.switch) and not value
    if key.switch == "nested" and value.get("enabled") is not False:
        return not _enabled_below(value)
    return not value.get("enabled", key.switch == "any" and bool(value))


def _shown(value: Any) -> str:
    return "not set" if value is None else brief(value) if not isinstance(value, bool) else str(value).lower()


def _enabled_below(value: Any) -> bool:
    """Return whether a section or a subsection is enabled. A section without any `enabled` key counts as enabled."""
    switches, level = [], [value]
    while level:
        one = level.pop()
        if isinstance(one, dict):
            switches += [bool(inner) for name, inner in one.items() if name == "enabled"]
            level += one.values()
    return any(switches) or (bool(value) and not switches)


def _from_trainer(key: Key, row: Callable[..., Row]) -> Row:
    where = "filled in by transformers' Trainer"
    if key.auto:
        return row(Status.TRANSLATED, key.auto, f"{where}: use the value of your TrainingArguments")
    if key.name == "fp16.enabled":
        return row(Status.NOT_NEEDED, "bf16.enabled", f"{where}: TrainingArguments.fp16 must be off; {key.why}")
    if key.status is Status.TRANSLATED:
        return row(Status.NOT_NEEDED, "", f"{where}; the default applies here")
    return row(Status.NOT_NEEDED, key.becomes if key.status is Status.NOT_NEEDED else "", f"{where}; {key.why}")
