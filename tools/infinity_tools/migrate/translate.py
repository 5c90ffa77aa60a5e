"""What becomes of each key of a configuration: the table of keys, with this configuration's values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from infinity.errors import ConfigError
from infinity.schema import brief
from infinity_tools.migrate import toml_output
from infinity_tools.migrate.answers import ANSWERS
from infinity_tools.migrate.code import code_of
from infinity_tools.migrate.keys import Key, Status
from infinity_tools.migrate.keys_around import TABLE
from infinity_tools.migrate.read import AUTO, Entry, Found
from infinity_tools.migrate.schedulers import SCHEDULERS


@dataclass(frozen=True, kw_only=True)
class Row:
    """What becomes of one key."""

    key: str
    """Its name."""
    value: Any
    """What the configuration says."""
    status: Status
    """What becomes of it."""
    becomes: str
    """Its counterpart, or what to do instead."""
    why: str
    """The reason."""
    changes: bool = False
    """Whether training would be another one without it."""


@dataclass(frozen=True, kw_only=True)
class Migration:
    """What a configuration becomes."""

    toml: str
    """The text of a settings file."""
    settings: dict[str, Any]
    """What is in it."""
    code: str
    """The lines of training code that change."""
    rows: tuple[Row, ...]
    """All keys."""

    @property
    def refusals(self) -> tuple[Row, ...]:
        """Keys without which training would be another one."""
        return tuple(row for row in self.rows if row.changes)


def migrate(found: Found, source: str, settings_file: str, nvme: Sequence[str] = ()) -> Migration:
    """Return what a configuration becomes.

    Args:
        found: the configuration.
        source: its file, as the settings name it.
        settings_file: where the code finds the settings.
        nvme: paths in place of those of the configuration.

    Raises:
        ConfigError: the settings are none that `infinity.load_config` takes.
    """
    _check_scheduler(found)
    text, settings = toml_output.to_toml(toml_output.lines_of(found, nvme), source)
    rows = tuple(_row(entry, found, nvme) for entry in found.entries)
    return Migration(toml=text, settings=settings, code=code_of(found, settings_file), rows=rows)


def _check_scheduler(found: Found) -> None:
    """Raise `ConfigError` where DeepSpeed could not make the scheduler either."""
    kind = found["scheduler.type"]
    for name, default in SCHEDULERS[kind].defaults.items() if kind in SCHEDULERS else ():
        if not default and name != "total_num_steps" and found[f"scheduler.params.{name}"] in (None, AUTO):
            raise ConfigError(f"scheduler.params.{name} is missing, which {kind} needs; DeepSpeed refuses it too")


def _row(entry: Entry, found: Found, nvme: Sequence[str]) -> Row:
    key, value = entry.key, entry.value

    def row(status: Status, becomes: str, why: str, changes: bool = False) -> Row:
        return Row(key=entry.name, value=value, status=status, becomes=becomes, why=why, changes=changes)

    if key is None:
        near = TABLE.nearest(entry.name)
        why = "DeepSpeed's documentation has no such key" + (f"; did you mean {near}?" if near else "")
        return row(Status.UNKNOWN, "", why)
    if value is None:
        return row(Status.NOT_NEEDED, "", "null: it is not set")
    if found.is_off(entry.name):
        switch = f"{entry.name.partition('.')[0]}.enabled"
        return row(Status.NOT_NEEDED, "", f"it goes with {switch}, which is {_shown(found[switch])}")
    if _unused(key, value):
        return row(Status.NOT_NEEDED, "", "off in DeepSpeed too")
    below = ANSWERS.get(entry.name.rpartition(".")[0] + ".*")
    if value == AUTO:
        unused = below(found, entry.name, value, nvme) if below is not None else None
        return row(*unused) if unused is not None and unused[0] is Status.NOT_NEEDED else _from_trainer(key, row)
    if special := ANSWERS.get(entry.name, below):
        return row(*special(found, entry.name, value, nvme))
    return row(key.status, key.becomes, key.why, key.changes)


def _unused(key: Key, value: Any) -> bool:
    """Whether DeepSpeed does nothing of the kind with this value."""
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
    """Whether a section, or one below it, says that it is enabled; without any such word it is."""
    switches, level = [], [value]
    while level:
        one = level.pop()
        if isinstance(one, dict):
            switches += [bool(inner) for name, inner in one.items() if name == "enabled"]
            level += one.values()
    return any(switches) or (bool(value) and not switches)


def _from_trainer(key: Key, row: Callable[..., Row]) -> Row:
    """A value that the Trainer of transformers would fill in."""
    where = "the Trainer of transformers fills it in"
    if key.auto:
        return row(Status.TRANSLATED, key.auto, f"{where}: write what your TrainingArguments say")
    if key.name == "fp16.enabled":
        return row(Status.NOT_NEEDED, "bf16.enabled", f"{where}: TrainingArguments.fp16 must be off; {key.why}")
    if key.status is Status.TRANSLATED:
        return row(Status.NOT_NEEDED, "", f"{where}; the default here holds")
    return row(Status.NOT_NEEDED, key.becomes if key.status is Status.NOT_NEEDED else "", f"{where}; {key.why}")
