"""What users give `save_checkpoint()` of their own, as JSON that gives back something equal to it.

Numbers, texts, None, lists and dicts with texts as keys are themselves. JSON has neither tuples nor other keys, which
state dicts of schedulers have: a tuple is `{"tuple": [item, …]}`, a dict with a key that is no text
`{"pairs": [[key, value], …]}`, and so is one whose only key is "tuple" or "pairs".
"""

from __future__ import annotations

from typing import Any

from infinity.errors import CheckpointError
from infinity.schema import brief

_MOST_NESTED = 100
_MOST_BITS = 1 << 13  # of an integer: Python turns no longer ones into texts, or back
_MARKS = ({"tuple"}, {"pairs"})


def save_extra(extra: Any) -> dict[str, Any]:
    """Return plain data of JSON for what `checkpoint` is given.

    NaN and infinities are accepted, as schedulers have them; Python's JSON gives them back.

    Raises:
        CheckpointError: it would come back changed, or not at all; the place is named.
    """
    if not isinstance(extra, dict) or not all(isinstance(key, str) for key in extra):
        raise CheckpointError(f"extra is {brief(extra)}; checkpoint a dict with texts as keys")
    return {_key(key, "extra"): _plain(value, f"extra[{brief(key)}]", _MOST_NESTED) for key, value in extra.items()}


def _plain(value: Any, place: str, depth: int) -> Any:
    if not depth:
        raise CheckpointError(f"{place[:200]}… is nested more than {_MOST_NESTED} deep, or contains itself")
    if isinstance(value, dict):
        items = [(_key(key, place), _plain(item, f"{place}[{brief(key)}]", depth - 1)) for key, item in value.items()]
        if all(isinstance(key, str) for key in value) and set(value) not in _MARKS:
            return dict(items)
        return {"pairs": [list(item) for item in items]}
    if isinstance(value, list | tuple):
        plain = [_plain(item, f"{place}[{number}]", depth - 1) for number, item in enumerate(value)]
        return {"tuple": plain} if isinstance(value, tuple) else plain
    return _atom(value, place)


def _key(key: Any, place: str) -> Any:
    if isinstance(key, tuple):
        raise CheckpointError(f"{place} has the key {brief(key)}; use texts or numbers as keys")
    return _atom(key, f"a key of {place}")


def _atom(value: Any, place: str) -> Any:
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise CheckpointError(
                f"{place} is a text that is not Unicode: {brief(value)}; checkpoint bytes as hex()"
            ) from error
    elif isinstance(value, int) and value.bit_length() > _MOST_BITS:
        raise CheckpointError(f"{place} is an integer of more than {_MOST_BITS} bits; checkpoint it as a text")
    elif not isinstance(value, int | float | None):
        raise CheckpointError(
            f"{place} is of type {type(value).__name__}; checkpoint numbers, texts, None, and lists, tuples and dicts of "
            "them (of a tensor or an array, tolist())"
        )
    return value


def load_extra(saved: dict[str, Any]) -> dict[str, Any]:
    """Return what `save_extra` was given.

    Raises:
        ValueError: it is nothing that `save_extra` returns.
    """
    return {key: _rich(value) for key, value in saved.items()}


def _rich(value: Any) -> Any:
    if isinstance(value, list):
        return [_rich(item) for item in value]
    if not isinstance(value, dict):
        return value
    if set(value) not in _MARKS:
        return {key: _rich(item) for key, item in value.items()}
    ((mark, items),) = value.items()
    if not isinstance(items, list):
        raise ValueError(f"extra: {brief(value)} is not the items of a {mark}")
    if mark == "tuple":
        return tuple(_rich(item) for item in items)
    if any(not isinstance(item, list) or len(item) != 2 or isinstance(item[0], list | dict) for item in items):
        raise ValueError(f"extra: {brief(value)} is not pairs of a key and a value")
    return {key: _rich(item) for key, item in items}
