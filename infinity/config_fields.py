"""Trees of settings: frozen dataclasses, one per section, read from TOML, a mapping, or a command line.

`infinity.config` declares those of a run, `infinity_daemon.daemon_config` those of the node's daemon. Every field
carries its
documentation; pages of settings are generated from it.
"""

from __future__ import annotations

import difflib
import os
import tomllib
import typing
from collections.abc import Mapping
from dataclasses import field, fields, replace
from typing import Any, Generic, Literal, TypeVar

from infinity.errors import ConfigError
from infinity.schema import Mismatch, Rule, UnknownKey, flag, integer, number, one_of, record, size, table
from infinity.units import LARGEST, format_setting
from infinity.untrusted_files import read_regular

_FILE_LIMIT = 1 << 20
T = TypeVar("T")


def setting(default: Any, doc: str, *, size: bool = False, minimum: int = 0, maximum: int = LARGEST) -> Any:
    """Declare a setting; the bounds are those of numbers and sizes (in tables: of their values), both included."""
    metadata = {"doc": doc, "size": size, "minimum": minimum, "maximum": maximum}
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


class Settings(Generic[T]):
    """How trees of one dataclass are read: its fields are sections, whose fields are settings.

    A setting is an int, a float, a bool, a str, one of several texts (`Literal`), a tuple of str, or a `Mapping` from
    names to numbers or sizes.
    """

    def __init__(self, kind: type[T]) -> None:
        self._kind = kind
        # By section, the rule of each setting.
        self._rules = {
            section: {item.name: _rule_of(typing.get_type_hints(of)[item.name], item.metadata) for item in fields(of)}
            for section, of in typing.get_type_hints(kind).items()
        }
        sections = {name: record(lacking=rules, **rules) for name, rules in self._rules.items()}  # type: ignore[arg-type]
        self._record = record(lacking=sections, **sections)  # type: ignore[arg-type]

    def load(self, source: T | Mapping[str, Any] | str | os.PathLike[str] | None) -> T:
        """Return the settings from a TOML file, a nested mapping, a ready tree, or the defaults.

        Raises:
            ConfigError: an unknown key (the nearest known one is named), a value of the wrong type or range,
                or a file that is missing or is not TOML.
        """
        if source is None:
            return self._kind()
        if isinstance(source, self._kind):
            return self.merged(self._kind(), _plain(source))  # nothing has looked at its values yet
        if isinstance(source, Mapping):
            return self.merged(self._kind(), source)
        if not isinstance(source, str | os.PathLike):
            raise ConfigError(
                f"config = {source!r:.80} is neither a TOML file nor a mapping nor a {self._kind.__name__}"
            )
        try:
            data = tomllib.loads(read_regular(os.path.realpath(source), _FILE_LIMIT).decode())
        except OSError as error:
            raise ConfigError(f"configuration file {os.fspath(source)!r} cannot be read: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"configuration file {os.fspath(source)!r} is not valid TOML: {error}") from error
        return self.merged(self._kind(), data)

    def with_values(self, base: T, dotted: Mapping[str, Any]) -> T:
        """Return a copy with settings replaced, named like ``memory.host_bytes``. Raises `ConfigError`."""
        tree: dict[str, Any] = {}
        for name, value in dotted.items():
            section, dot, key = name.partition(".")
            if dot:
                tree.setdefault(section, {})[key] = value
            else:
                tree[section] = value
        return self.merged(base, tree)

    def merged(self, base: T, values: Mapping[str, Any]) -> T:
        """Return the settings with those replaced that a tree of plain data names. Raises `ConfigError`."""
        try:
            changed = self._record(values)
        except UnknownKey as error:
            if error.place.count("."):
                raise ConfigError(str(error)) from None
            prefix, what = (f"{error.place}.", "settings") if error.place else ("", "sections")
            near = self._nearest(str(error.key), values.get(error.key), prefix)
            hint = f"; did you mean {near}?" if near else ""
            name = f"{prefix}{error.key}"[:80]
            raise ConfigError(f"unknown setting {name}{hint} (known {what} here: {', '.join(error.known)})") from None
        except Mismatch as error:
            raise ConfigError(str(error)) from None
        sections = {name: replace(getattr(base, name), **settings) for name, settings in changed.items()}
        return replace(base, **sections)  # type: ignore[type-var]

    def _nearest(self, key: str, value: Any, prefix: str) -> str:
        """Return the section or setting that was meant, if any is near: the same word elsewhere, or a similar one."""
        rules = self._rules
        if not prefix and isinstance(value, Mapping):
            return "".join(difflib.get_close_matches(key, rules, n=1, cutoff=0.4))
        everywhere = {name: f"{section}.{name}" for section in reversed(rules) for name in rules[section]}
        if key in everywhere:
            return everywhere[key]
        if near := difflib.get_close_matches(key, rules.get(prefix[:-1], ()), n=1, cutoff=0.4):
            return f"{prefix}{near[0]}"
        return "".join(everywhere[near] for near in difflib.get_close_matches(key, everywhere, n=1, cutoff=0.6))

    def markdown(self, heading: str, origin: str) -> str:
        """Return a page about all settings; `origin` says how it is generated."""
        lines = [
            f"# {heading}",
            "",
            f"Generated by `{origin}`; do not edit. A TOML file has one table per section; sizes are bytes",
            'or text such as `"64MiB"`. Unknown keys are refused.',
            "",
        ]
        for section, of in typing.get_type_hints(self._kind).items():
            lines += [f"## [{section}]", "", (of.__doc__ or "").strip(), ""]
            lines += ["| setting | default | range | meaning |", "|---|---|---|---|"]
            defaults = of()
            for item in fields(of):
                value = getattr(defaults, item.name)
                default = str(list(value)) if isinstance(value, tuple) else repr(value)
                bounded = isinstance(value, int | float) and not isinstance(value, bool)
                bounds = _range(item.metadata) if bounded else ""
                lines.append(f"| `{item.name}` | `{default}` | {bounds} | {item.metadata['doc']} |")
            lines.append("")
        return "\n".join(lines)


def _word(value: Any) -> str:
    """A text that may be a path."""
    if not isinstance(value, str):
        raise Mismatch(value, "must be a text")
    if "\0" in value:
        raise Mismatch(value, "has a zero byte in it, which no path can have")
    return value


def _words(value: Any) -> tuple[str, ...]:
    """Texts that may be paths; also from Python, as tuples and objects of `pathlib`."""
    if not isinstance(value, list | tuple) or not all(isinstance(item, str | os.PathLike) for item in value):
        raise Mismatch(value, "must be a list of texts")
    return tuple(_word(os.fspath(item)) for item in value)


def _rule_of(kind: Any, metadata: Mapping[str, Any]) -> Rule:
    """Return the rule of a setting of this type."""
    low, high = metadata["minimum"], metadata["maximum"]
    if typing.get_origin(kind) is Literal:
        return one_of(*typing.get_args(kind))
    if getattr(typing.get_origin(kind), "__name__", "") == "Mapping":
        return table(_word, _rule_of(typing.get_args(kind)[1], metadata))
    if kind is bool:
        return flag
    if kind is float:
        return number(low, high)
    if kind is int:
        return (size if metadata["size"] else integer)(low, high)
    return _word if kind is str else _words


def _range(metadata: Mapping[str, Any]) -> str:
    """Return the bounds of a number in words."""
    shown = format_setting if metadata["size"] else str
    if metadata["maximum"] == LARGEST:
        return f"{shown(metadata['minimum'])} or more"
    return f"from {shown(metadata['minimum'])} to {shown(metadata['maximum'])}"


def _plain(tree: Any) -> dict[str, Any]:
    """Return a ready tree as a file would have it."""
    return {
        section.name: {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in vars(getattr(tree, section.name)).items()
        }
        for section in fields(tree)
    }
