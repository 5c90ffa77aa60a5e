"""Reader of DeepSpeed configurations: parsing and validation of the known keys."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from keyword import iskeyword
from pathlib import Path
from typing import Any

from infinity.errors import ConfigError
from infinity.schema import Mismatch, anything, at, brief, flag, integer, one_of, text
from infinity.untrusted_files import read_regular
from infinity_tools.migrate.key_table import TABLE
from infinity_tools.migrate.keys import Key
from infinity_tools.migrate.schedulers import OF_TORCH

_LIMIT = 1 << 20
AUTO = "auto"
"""Value that transformers' Trainer replaces with one of its TrainingArguments."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """An entry of a configuration: a known key or an outermost unknown key, with its value."""

    name: str
    key: Key | None
    value: Any


class Found:
    """Values in a configuration, by the names of known keys. null counts as not set."""

    def __init__(self, entries: list[Entry]) -> None:
        self.entries = entries
        self._values = {entry.name: entry.value for entry in entries if entry.key is not None}

    def __getitem__(self, name: str) -> Any:
        return self._values.get(name)

    def first(self, *names: str) -> Any:
        """Return the value of the first of these names that is set."""
        return next((self[name] for name in names if self[name] is not None), None)

    def device(self, role: str) -> str:
        """Return the device to which DeepSpeed offloads `param` or `optimizer`: nvme, cpu, or none."""
        told = self[f"zero_optimization.offload_{role}.device"]
        old = self["zero_optimization.cpu_offload" + ("_param" if role == "param" else "")]
        return str(told or ("cpu" if old is True else "none"))

    def precision(self) -> Any:
        """Return whether the model is trained in bf16: true, false, or `auto`."""
        if self["fp16.enabled"] is True:  # fp16 is not supported; bf16 takes its place
            return True
        return self.first("bf16.enabled", "bfloat16.enabled") or False

    def is_off(self, name: str) -> bool:
        """Return whether a key belongs to a section that is not enabled."""
        section = name.partition(".")[0]
        if section not in ("fp16", "bf16", "bfloat16", "torch_autocast") or name == f"{section}.enabled":
            return False
        enabled = self[f"{section}.enabled"]
        return not enabled or (section == "fp16" and enabled == AUTO)  # fp16 must be off, so auto counts as off


def read_config(file: Path) -> Found:
    """Return the configuration in a file.

    Raises:
        ConfigError: if the file cannot be read or is not a DeepSpeed configuration in JSON, or a value has the wrong
            type.
    """
    name = repr(str(file))
    try:
        content = read_regular(os.path.realpath(file), _LIMIT).decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"cannot read {name}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name} is not UTF-8 text, as JSON must be") from error
    try:
        data = json.loads(content, object_pairs_hook=_unique, parse_constant=_no_number, parse_float=_finite)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{name} is not JSON: line {error.lineno}: {_problem(content, error)}") from error
    except RecursionError as error:
        raise ConfigError(f"{name} is not a DeepSpeed configuration: it is nested too deeply") from error
    except ValueError as error:
        raise ConfigError(f"{name} is not a DeepSpeed configuration: {error!s:.200}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{name} is not a DeepSpeed configuration: it must be a JSON object, got {brief(data)}")
    try:
        json.dumps(data, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{name} contains an incomplete surrogate pair such as \\ud800; write the character itself"
        ) from error
    if not set(data) & ({key.partition(".")[0] for key in TABLE.keys}):
        raise ConfigError(
            f"{name} is not a DeepSpeed configuration: it contains none of the known keys; pass your ds_config.json"
        )
    try:
        return Found(list(_entries(data, "")))
    except Mismatch as error:
        raise ConfigError(f"{name}: {error}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        (twice, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {brief(twice)} occurs twice; remove one of them")
    return found


def _no_number(word: str) -> Any:
    raise ValueError(f"{word} is not a JSON number")


def _finite(word: str) -> float:
    if not math.isfinite(value := float(word)):
        raise ValueError(f"{word[:80]} is out of range")
    return value


def _problem(text: str, error: json.JSONDecodeError) -> str:
    """Return a description of a syntax error. Comments and trailing commas are the most common ones."""
    here = text[error.pos : error.pos + 2]
    if here[:1] == "#" or here in ("//", "/*"):
        return "it contains comments, which DeepSpeed's Hjson allows and JSON does not; remove them"
    if here[:1] in ("}", "]") and text[: error.pos].rstrip().endswith(","):
        return "there is a comma before a closing bracket; remove it"
    if "trailing comma" in error.msg:
        return "there is a comma before a closing bracket; remove it"
    return error.msg[:1].lower() + error.msg[1:]


def _entries(section: Mapping[str, Any], prefix: str) -> Iterator[Entry]:
    """Yield the entries of a section. Raises `Mismatch`."""
    for word, value in section.items():
        name = prefix + word
        if key := TABLE.keys.get(name):
            if value is not None and value != AUTO:
                value = at(name, CHECKS[key.takes], value)
            yield Entry(name=name, key=key, value=value)
        elif name == "scheduler.params" and section.get("type") in OF_TORCH:
            yield Entry(name=name, key=TABLE.keys["scheduler.type"], value=at(name, _arguments, value or {}))
        elif name in TABLE.sections and value is not None:
            yield from _entries(at(name, _section, value), f"{name}.")
        else:
            yield Entry(name=name, key=None, value=value)


def _section(value: Any) -> Any:
    if not isinstance(value, dict):
        raise Mismatch(value, "must be an object with keys")
    return value


def _count(value: Any) -> int:
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**63:  # 5e8
        value = int(value)
    if type(value) is not int or value < 0:
        raise Mismatch(value, "must be an integer of at least 0")
    if value >= 2**63:
        raise Mismatch(value, "is too large for a count")
    return int(value)


def _number(value: Any) -> Any:
    if type(value) not in (int, float) or abs(value) > 1e300:
        raise Mismatch(value, "must be a number")
    return value


def _path(value: Any) -> str:
    if not text()(value).strip():
        raise Mismatch(value, "must be a path")
    if "\0" in value:
        raise Mismatch(value, "contains a zero byte, which is not allowed in a path")
    return str(value)


def _pair(value: Any) -> Any:
    if not isinstance(value, list) or len(value) != 2:
        raise Mismatch(value, "must be a list of two numbers")
    return [_number(item) for item in value]


def _arguments(value: Any) -> Any:
    """Check the arguments of a torch scheduler. They become code, so they must be Python names and literals."""
    for name, given in _section(value).items():
        items = given if isinstance(given, list) else [given]
        if not name.isidentifier() or not name.isascii() or iskeyword(name):
            raise Mismatch(name, "is not a valid argument name")
        if not all(item is None or isinstance(item, bool | str) or _number(item) is item for item in items):
            raise Mismatch(given, "must be a number, a string, true or false, or a list of them")
    return value


CHECKS: dict[str, Callable[[Any], Any]] = {
    "any": anything,
    "flag": flag,
    "count": _count,
    "number": _number,
    "text": text(),
    "path": _path,
    "pair": _pair,
    "stage": integer(0, 3),
    "device": one_of("none", "cpu", "nvme"),
    "section": anything,
}
"""Checks of values, by `Key.takes`."""
