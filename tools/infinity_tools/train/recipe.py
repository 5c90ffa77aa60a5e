"""Recipes of `infinity train`: flat mappings from keys to values, read from YAML and from the command line.

A key is an option of `infinity train` (`model`), a field of TRL's `SFTConfig` or `DPOConfig` (`learning_rate`), a
setting of infinity (`offload.state.format`), or a field of peft's `LoraConfig` (`peft.r`).
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Final, NoReturn, get_type_hints

from infinity import Config
from infinity.checkpoint.durable import write_durably
from infinity.config import load_config, with_absolute_paths
from infinity.errors import ConfigError
from infinity.optional_dependencies import needs
from infinity.units import format_setting, parse_size
from infinity.untrusted_files import read_regular
from infinity_tools.presets import PRESETS

FILE = "recipe.yaml"
"""Name of the recipe in the output folder of a run."""
METHODS: Final = {"sft": "SFTConfig", "dpo": "DPOConfig"}
"""Training methods, and the TRL class of their arguments."""
OWN: Final = (
    "model", "method", "tokenizer", "data", "split", "eval_data", "eval_split", "columns", "early_stopping_patience",
    "quantize",
)  # fmt: skip
"""Keys that are neither arguments of TRL nor settings of infinity or peft."""
_CHOICES: Final[Mapping[str, tuple[Any, ...]]] = {"method": tuple(METHODS), "quantize": ("int8", "nf4", None)}
"""Allowed values of keys that are neither arguments of TRL nor settings of infinity or peft."""
SECRET: Final = ("hub_token",)
"""Keys whose values are never stored or shown."""
_LISTS = {"data", "eval_data"}
_SECTIONS = ("offload", "peft")
_LIMIT = 1 << 20
_SHORT: Final = {"nvme": "offload.storage.paths", "host_memory": "offload.memory.host_bytes", "out": "output_dir"}
"""Options of `infinity train` that recipes also accept, and the keys that they set."""
_RENAMED: Final = {
    "steps": "max_steps", "epochs": "num_train_epochs", "lr": "learning_rate", "seq": "max_length", "lora": "peft.r",
    "batch_tokens": "per_device_train_batch_size", "micro_tokens": "gradient_accumulation_steps",
    "activation_checkpointing": "gradient_checkpointing", "checkpoint_every": "save_steps", "log": "report_to",
    "dtype": "bf16", "out": "output_dir", "override": "resume", "eval_every": "eval_steps",
    "load_in_8bit": "quantize", "load_in_4bit": "quantize", "quantization_config": "quantize",
}  # fmt: skip
"""Keys for common names of the same thing, for messages about unknown keys."""
_FIXED: Final = (
    "model", "method", "tokenizer", "data", "split", "columns", "peft.*", "optim", "optim_args", "adam_beta1",
    "adam_beta2", "adam_epsilon", "weight_decay", "max_length", "packing", "packing_strategy", "seed", "data_seed",
    "completion_only_loss", "assistant_only_loss", "dataset_text_field", "chat_template_path", "eos_token", "bf16",
    "quantize",
)  # fmt: skip
"""Keys that a resumed run cannot change: they define the model, the data, or the state in the checkpoint."""

Recipe = dict[str, Any]


def read(file: Path) -> Recipe:
    """Read a recipe from a YAML file. Keys of sections may be nested or dotted. Types are not checked.

    Raises:
        ConfigError: if the file cannot be read, or is not a mapping.
    """
    with needs("train", "infinity train"):
        import yaml
    try:
        found = yaml.safe_load(read_regular(os.path.realpath(file), _LIMIT))
    except OSError as error:
        raise ConfigError(f"the recipe {str(file)!r} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"the recipe {str(file)!r} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"the recipe {str(file)!r} is not a mapping; write lines such as `model: tiny`")
    return {_SHORT.get(key, key): value for name, part in found.items() for key, value in _flat(str(name), part)}


def _flat(name: str, value: Any) -> Iterable[tuple[str, Any]]:
    """Yield the settings of a section under dotted names. All other mappings are values."""
    section, _, rest = name.partition(".")
    depth = {"offload": 2, "peft": 1}.get(section, 0)
    if isinstance(value, dict) and len([part for part in rest.split(".") if part]) < depth:
        for key, part in value.items():
            yield from _flat(f"{name}.{key}", part)
    else:
        yield name.replace("-", "_"), value


def of_config(file: Path) -> Recipe:
    """Return the settings that a TOML file contains, with absolute paths. Raises `ConfigError`."""
    settings = with_absolute_paths(load_config(file))
    tree = tomllib.loads(read_regular(os.path.realpath(file), _LIMIT).decode())
    names = [f"{section}.{key}" for section, part in tree.items() for key in part]
    return {f"offload.{name}": _value_in(settings, name, plain=True) for name in names}


def write(file: Path, recipe: Recipe) -> None:
    """Write a recipe atomically, with the sections nested. Raises `OSError`."""
    import yaml

    tree: dict[str, Any] = {}
    for key, value in recipe.items():
        *sections, last = key.split(".") if key.startswith(tuple(f"{name}." for name in _SECTIONS)) else [key]
        place = tree
        for name in sections:
            place = place.setdefault(name, {})
        place[last] = list(value) if isinstance(value, tuple) else value
    write_durably(file, yaml.safe_dump(tree, sort_keys=False, allow_unicode=True).encode(), mode=0o666)


def of_words(words: Sequence[str]) -> dict[str, list[str]]:
    """Return the values that follow each `--key` on a command line. `--key=value` is also accepted.

    Raises:
        ConfigError: if a word does not belong to a key.
    """
    found: dict[str, list[str]] = {}
    values: list[str] | None = None
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            key = name.replace("-", "_")
            values = found.setdefault(key, []) if key in _LISTS else []  # for other keys, the last use counts
            found[_SHORT.get(key, key)] = values
            values += [value] if equals else []
        elif values is None:
            raise ConfigError(f"{word!r} does not follow a key; the recipe comes first, and keys are `--key value`")
        else:
            values.append(word)
    return found


def checked(recipe: Mapping[str, Any], method: str) -> Recipe:
    """Return a recipe with every key known, and every value converted to the type of its key.

    Settings of infinity are checked first, because importing TRL takes seconds.

    Raises:
        ConfigError: if a key is unknown or a value is invalid.
        MissingPackageError: if TRL is not installed.
    """
    found, rest = {}, {}
    for key, value in recipe.items():
        if key.startswith("offload."):
            found[key] = _setting(key, value)
        elif key in OWN:
            found[key] = _own(key, value)
        else:
            rest[key] = value
    Config().with_values(**settings_of(found))
    for key in list(rest):
        if key.startswith("peft."):
            found[key] = _peft(key, rest.pop(key))
    return found | (_arguments(rest, method) if rest else {})


def settings_of(recipe: Recipe) -> dict[str, Any]:
    """Return the settings of infinity in a recipe, by their names in TOML."""
    return _section(recipe, "offload")


def peft_of(recipe: Recipe) -> dict[str, Any]:
    """Return the fields of `LoraConfig` in a recipe. Empty: no adapters are trained."""
    return _section(recipe, "peft")


def _section(recipe: Recipe, name: str) -> dict[str, Any]:
    return {key.partition(".")[2]: value for key, value in recipe.items() if key.startswith(f"{name}.")}


def arguments_of(recipe: Recipe) -> dict[str, Any]:
    """Return the fields of TRL's configuration in a recipe."""
    return {key: value for key, value in recipe.items() if key not in OWN and "." not in key}


def conflicts(given: Recipe, stored: Recipe) -> tuple[Recipe, Recipe]:
    """Return the given values that differ from the stored ones: those that a resumed run cannot change, and others."""
    before = {**_defaults(given.keys() - stored.keys(), str(stored.get("method", "sft"))), **stored}
    different = {key: value for key, value in given.items() if key != "output_dir" and value != before.get(key)}
    fixed = {key for key in different if key in _FIXED or f"{key.partition('.')[0]}.*" in _FIXED}
    return {key: different[key] for key in fixed}, {key: different[key] for key in different.keys() - fixed}


def _defaults(keys: Iterable[str], method: str) -> Recipe:
    """Return TRL's defaults of those keys that are fields of its configuration."""
    names = {key for key in keys if key not in OWN and "." not in key}
    return {field.name: field.default for field in fields(config_class(method)) if field.name in names} if names else {}


def replacing(given: Recipe, stored: Recipe) -> Recipe:
    """Return given values, and values that unset the stored ones that contradict them."""
    found = dict(given)
    if "num_train_epochs" in given and "max_steps" in stored:
        found.setdefault("max_steps", -1)
    if "lr_scheduler_type" in given and given["lr_scheduler_type"] not in (
        stored.get("lr_scheduler_type"),
        [stored.get("lr_scheduler_type")],  # from the command line
    ):
        found.setdefault("lr_scheduler_kwargs", None)
    return found


def shown(values: Recipe, stored: Recipe) -> str:
    """Return values and those that were stored, for messages."""
    return ", ".join(f"{key} {_text(values[key])} (was {_text(stored.get(key))})" for key in sorted(values))


def _text(value: Any) -> str:
    return "not set" if value is None else "+".join(map(str, value)) if isinstance(value, list) else str(value)


def _own(key: str, value: Any) -> Any:
    """Return the value of an option of `infinity train`. Raises `ConfigError`."""
    if key in _LISTS:
        return [_absolute(str(item)) for item in (value if isinstance(value, list) else [value])]
    if isinstance(value, list):
        value = ",".join(map(str, value)) if key == "columns" else _single(key, value)
    if key == "columns":
        return value if isinstance(value, dict) else _pairs(str(value))
    if key == "early_stopping_patience":
        return _whole(key, value)
    if value not in _CHOICES.get(key, (value,)):
        raise ConfigError(f"--{key} {value!r} is not one of {', '.join(filter(None, _CHOICES[key]))}")
    if key in ("model", "tokenizer") and value is not None:
        return str(value) if value in PRESETS else _absolute(str(value))
    return None if value is None else str(value)


def _absolute(name: str) -> str:
    """Return an existing path as an absolute path, so that the recipe works from any folder, or the name itself."""
    path = os.path.expanduser(name)
    return os.path.abspath(path) if os.path.exists(path) else name


def _pairs(text: str) -> dict[str, str]:
    pairs = [pair.partition("=") for pair in text.split(",")]
    if not all(name.strip() and value.strip() for name, _, value in pairs):
        raise ConfigError(f"--columns {text!r} is not valid; write, for example, prompt=question,completion=answer")
    return {name.strip(): value.strip() for name, _, value in pairs}


def _whole(key: str, value: Any) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError):
        number = 0
    if number < 1:
        raise ConfigError(f"--{key} {value!r} is not a number above 0")
    return number


def _single(key: str, values: Sequence[Any]) -> Any:
    if len(values) != 1:
        raise ConfigError(f"--{key} requires one value, got {' '.join(map(str, values)) or 'none'}")
    return values[0]


def _setting(key: str, value: Any) -> Any:
    """Return the value of a setting. Words of the command line are read as in TOML."""
    parts = [_toml(item) for item in value] if isinstance(value, list) else [value]
    name = key.partition(".")[2]
    many = isinstance(_value_in(Config(), name), tuple)
    return _value_in(Config().with_values(**{name: parts if many else _single(key, parts)}), name, plain=True)


def _value_in(settings: Config, name: str, *, plain: bool = False) -> Any:
    """Return the value of a setting, or None if there is none of this name. `plain`: as it is written in a recipe."""
    section, _, key = name.partition(".")
    part: Any = getattr(settings, section, None)
    value = getattr(part, key, None)
    if plain and isinstance(value, tuple):
        return list(value)
    sizes = {field.name for field in fields(part) if field.metadata.get("size")} if plain else set()
    shown = format_setting(value) if key in sizes and isinstance(value, int) else value
    return shown if isinstance(shown, str) and key in sizes and parse_size(shown) == value else value


def with_settings(recipe: Recipe, settings: Config) -> Recipe:
    """Return a recipe with all settings that differ from their defaults, except the timeline of one start."""
    names = [name for name in _settings() if name not in ("telemetry.timeline",)]
    changed = [name for name in names if _value_in(settings, name) != _value_in(Config(), name)]
    rest = {key: value for key, value in recipe.items() if not key.startswith("offload.")}
    return rest | {f"offload.{name}": _value_in(settings, name, plain=True) for name in changed}


def _toml(word: Any) -> Any:
    try:
        return tomllib.loads(f"x = {word}")["x"] if isinstance(word, str) else word
    except tomllib.TOMLDecodeError:
        return word


def _peft(key: str, value: Any) -> Any:
    """Return the value of a field of `LoraConfig`. Raises `ConfigError` if there is no such field."""
    with needs("train", f"--{key}"):
        import yaml
        from peft import LoraConfig
    types = {f"peft.{field.name}": str(field.type) for field in fields(LoraConfig)}
    if key not in types:
        raise _unknown(key, types)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        return value
    parts = [yaml.safe_load(item) for item in value]
    is_name = [isinstance(part, str) and part.isidentifier() for part in parts]
    if len(parts) == 1 and not ("list" in types[key] and is_name[0]):  # other texts are patterns
        return parts[0]
    return parts


def _unknown(key: str, known: Iterable[str]) -> ConfigError:
    known = list(known)
    if key in _options():
        return ConfigError(f"{key} cannot be part of a recipe; pass --{key.replace('_', '-')} on the command line")
    near = _RENAMED.get(key) or next(iter(difflib.get_close_matches(key, known, n=1, cutoff=0.5)), None)
    return ConfigError(f"--{key} is not an option of infinity train" + (f"; did you mean --{near}?" if near else ""))


class _Parser(argparse.ArgumentParser):
    """Parser for the fields of a dataclass that returns only the given fields, and raises its errors."""

    def error(self, message: str) -> NoReturn:
        """Raise the error of an invalid value.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(message.replace("argument ", "", 1))


def config_class(method: str) -> Any:
    """Return TRL's class for the arguments of a method. Raises `MissingPackageError`."""
    with needs("train", "infinity train"):
        import trl
    return getattr(trl, METHODS[method])


def _arguments(given: Mapping[str, Any], method: str) -> Recipe:
    """Return fields of TRL's configuration, converted to their types by transformers' argument parser.

    Raises:
        ConfigError: if there is no such field, or the value does not have its type.
    """
    from transformers import HfArgumentParser

    kind = config_class(method)

    class Parser(_Parser, HfArgumentParser):
        pass

    parser = Parser(kind, allow_abbrev=False, add_help=False, prog="infinity train")
    for action in parser._actions:
        action.default, action.required = argparse.SUPPRESS, False
    hints = get_type_hints(kind)  # the parser changes the types of the fields themselves
    types = {field.name: str(hints[field.name]) for field in fields(kind)}
    words: list[str] = []
    found: Recipe = {}
    for key, value in given.items():
        if key not in types:
            raise _unknown(key, [*OWN, *types, *_SHORT, *_options(), *(f"offload.{name}" for name in _settings())])
        if (
            value is None
            or isinstance(value, dict)
            or (isinstance(value, list) and len(value) > 1 and "list" in types[key])
        ):
            found[key] = value  # the parser would take one value for a field that is text or a list
        else:
            words += [f"--{key}", *map(str, value if isinstance(value, list) else [value])]
    for key, value in vars(parser.parse_args(words)).items():
        found[key] = _mapping(key, value) if isinstance(value, str) and value.startswith("{") else value
    if found.get("chat_template_path"):
        found["chat_template_path"] = _absolute(found["chat_template_path"])
    return found


def _mapping(key: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--{key} {text!r} is not valid JSON: {error}") from error


def _settings() -> list[str]:
    """Return the names of all settings of infinity."""
    tree = Config()
    return [f"{part.name}.{field.name}" for part in fields(tree) for field in fields(getattr(tree, part.name))]


def _options() -> list[str]:
    """Return the options that concern one start of a run, which recipes therefore do not contain."""
    return ["resume", "trace", "metrics_port", "metrics_host", "metrics_linger", "nproc", "config", "json", "debug"]
