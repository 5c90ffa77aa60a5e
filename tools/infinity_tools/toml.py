"""Settings as TOML, as `--config` and `infinity.offload` take them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from infinity.config import load_config


def to_toml(tree: Mapping[str, Mapping[str, Any]], comments: Sequence[str] = ()) -> str:
    """Return sections of settings as TOML, behind lines of comment.

    Raises:
        ConfigError: these are no settings; nothing is printed then that nobody would take.
    """
    load_config(tree)
    return "\n".join([*(f"# {line}" for line in comments), *_lines(tree)]) + "\n"


def _lines(tree: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for section, values in tree.items():
        yield ""
        yield f"[{section}]"
        for name, value in values.items():
            # JSON's text, numbers, booleans and lists of them are TOML's too; other characters than ASCII stay.
            yield f"{name} = {json.dumps(value, ensure_ascii=False)}".replace("\x7f", "\\u007f")
