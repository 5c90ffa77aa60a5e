"""Trees of settings: frozen dataclasses, one per section, read from TOML, a mapping or a command line.

`infinity.config` declares the settings of a run, and `infinity_daemon.daemon_config` declares the settings of the
node daemon. Every field carries its documentation, from which `make docs` generates the reference pages.
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
from infinity.units import LARGEST
from infinity.untrusted_files import read_regular

_FILE_LIMIT = 1 << 20
T = TypeVar("T")


def setting(default: Any, doc: str, *, size: bool = False, minimum: int = 0, maximum: int = LARGEST) -> Any:
    """Declare a setting.

    Args:
        default: default value.
        doc: description of the setting, in one or more sentences.
        size: whether the value is a size in bytes, which can also be written as text such as ``"64MiB"``.
        minimum: smallest allowed number or size; for a mapping, it applies to each value.
        maximum: largest allowed number or size; for a mapping, it applies to each value.
    """
    metadata = {"doc": doc, "size": size, "minimum": minimum, "maximum": maximum}
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


class Settings(Generic[T]):
    """Reader for settings trees of dataclass `kind`, whose fields are sections. The fields of a section are settings.

    A setting is an int, a float, a bool, a str, one of several strings (`Literal`), a tuple of str, or a `Mapping`
    from names to numbers or sizes.
    """

    def __init__(self, kind: type[T]) -> None:
        self._kind = kind
        # Validation rules by section and setting.
        self._rules = {
            section: {item.name: _rule_of(typing.get_type_hints(of)[item.name], item.metadata) for item in fields(of)}
            for section, of in typing.get_type_hints(kind).items()
        }
        sections = {name: record(lacking=rules, **rules) for name, rules in self._rules.items()}  # type: ignore[arg-type]
        self._record = record(lacking=sections, **sections)  # type: ignore[arg-type]

    def load(self, source: T | Mapping[str, Any] | str | os.PathLike[str] | None) -> T:
        """Return the settings from a TOML file, a nested mapping or a settings tree, or the defaults for None.

        Raises:
            ConfigError: if a key is unknown, if a value is invalid, or if the file is missing or is not valid TOML.
        """
        if source is None:
            return self._kind()
        if isinstance(source, self._kind):
            return self.merged(self._kind(), _plain(source))  # a dataclass does not validate its values
        if isinstance(source, Mapping):
            return self.merged(self._kind(), source)
        if not isinstance(source, str | os.PathLike):
            raise ConfigError(
                f"config = {source!r:.80} must be the path to a TOML file, a mapping or a {self._kind.__name__}"
            )
        try:
            data = tomllib.loads(read_regular(os.path.realpath(source), _FILE_LIMIT).decode())
        except OSError as error:
            raise ConfigError(f"configuration file {os.fspath(source)!r} cannot be read: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"configuration file {os.fspath(source)!r} is not valid TOML: {error}") from error
        return self.merged(self._kind(), data)

    def with_values(self, base: T, dotted: Mapping[str, Any]) -> T:
        """Return a copy of `base` in which the settings in `dotted` are replaced, like `merged`."""
        tree: dict[str, Any] = {}
        for name, value in dotted.items():
            section, dot, key = name.partition(".")
            if dot:
                tree.setdefault(section, {})[key] = value
            else:
                tree[section] = value
        return self.merged(base, tree)

    def merged(self, base: T, values: Mapping[str, Any]) -> T:
        """Return a copy of `base` in which the settings in the nested mapping `values` are replaced.

        Raises:
            ConfigError: if a setting is unknown, or if a value has the wrong type or is out of range.
        """
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
        """Return the most similar section or setting, or "". An identical key in another section takes precedence."""
        rules = self._rules
        if not prefix and isinstance(value, Mapping):
            return "".join(difflib.get_close_matches(key, rules, n=1, cutoff=0.4))
        everywhere = {name: f"{section}.{name}" for section in reversed(rules) for name in rules[section]}
        if key in everywhere:
            return everywhere[key]
        if near := difflib.get_close_matches(key, rules.get(prefix[:-1], ()), n=1, cutoff=0.4):
            return f"{prefix}{near[0]}"
        return "".join(everywhere[near] for near in difflib.get_close_matches(key, everywhere, n=1, cutoff=0.6))


def _word(value: Any) -> str:
    if not isinstance(value, str):
        raise Mismatch(value, "must be a string")
    if "\0" in value:
        raise Mismatch(value, "contains a zero byte, which is not allowed in a path")
    return value


def _words(value: Any) -> tuple[str, ...]:
    # Python callers may pass tuples and `pathlib.Path` objects.
    if not isinstance(value, list | tuple) or not all(isinstance(item, str | os.PathLike) for item in value):
        raise Mismatch(value, "must be a list of strings")
    return tuple(_word(os.fspath(item)) for item in value)


def _rule_of(kind: Any, metadata: Mapping[str, Any]) -> Rule:
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


def _plain(tree: Any) -> dict[str, Any]:
    return {
        section.name: {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in vars(getattr(tree, section.name)).items()
        }
        for section in fields(tree)
    }
