"""Settings as TOML, for `--config` and `infinity.offload`."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from infinity.config import Config, load_config
from infinity.errors import ConfigError
from infinity.units import GIB, KIB, MIB

Tree = Mapping[str, Mapping[str, Any]]
"""Settings by section and name."""


def settings_toml(settings: Config, comments: Sequence[str] = ()) -> str:
    """Return the settings that differ from the defaults, preceded by comment lines.

    Raises:
        ConfigError: If a value cannot be written in TOML.
    """
    defaults = Config()
    tree: dict[str, dict[str, Any]] = {}
    for section in fields(settings):
        found, usual = getattr(settings, section.name), getattr(defaults, section.name)
        changed = {one.name: getattr(found, one.name) for one in fields(found)}
        changed = {name: value for name, value in changed.items() if value != getattr(usual, name)}
        if changed:
            tree[section.name] = changed
    return tree_toml(tree, comments)


def tree_toml(tree: Tree, comments: Sequence[str] = ()) -> str:
    """Return sections of settings as TOML, after checking that they can be read back unchanged.

    Raises:
        ConfigError: If the settings are invalid, or a value is not valid text.
    """
    text = "\n".join([*(f"# {line}" for line in comments), *_lines(tree)]).lstrip("\n") + "\n"
    try:
        text.encode()
        read = load_config(tomllib.loads(text))
    except (tomllib.TOMLDecodeError, UnicodeError) as error:
        raise ConfigError(f"a value of these settings cannot be written in TOML: {error}") from error
    if read != load_config({section: dict(values) for section, values in tree.items()}):
        raise ConfigError("settings changed when read back from TOML; this is a bug in infinity, please report it")
    return text


def quoted(text: str) -> str:
    """Return a TOML basic string: a JSON string with DEL escaped, as TOML requires."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _lines(tree: Tree) -> Iterator[str]:
    for section, values in tree.items():
        yield ""
        yield f"[{section}]"
        for name, value in values.items():
            yield f"{name} = {literal(name, value)}"


def literal(name: str, value: Any) -> str:
    """Return the value of a setting as TOML."""
    if isinstance(value, tuple | list):
        return f"[{', '.join(literal(name, one) for one in value)}]"
    if isinstance(value, int):
        return _size(value) if name.endswith("_bytes") else str(value)
    return quoted(str(value))


def _size(size: int) -> str:
    """Return a size as TOML, in the largest unit that divides it, or in bytes."""
    for factor, unit in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size and size % factor == 0:
            return f'"{size // factor}{unit}"'
    return str(size)
