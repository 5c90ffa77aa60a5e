"""Locate the files of a pretrained model in a folder or on the Hugging Face Hub, using transformers' functions."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infinity.errors import ConfigError
from infinity.formats.weight_files import INDEX, SINGLE, WeightFiles, check_not_quantized, read_index
from infinity.models.building import one_line
from infinity.optional_dependencies import needs
from infinity.schema import did_you_mean


def find_config(
    name: str | os.PathLike[str], options: Mapping[str, Any], *, trust_remote_code: bool, values: Mapping[str, Any]
) -> Any:
    """Return the configuration of a pretrained model, of type `PreTrainedConfig`.

    Args:
        name: Folder, or model id on the Hub.
        options: Arguments to transformers' `from_pretrained` that select where the files come from.
        trust_remote_code: Whether code that comes with the configuration may run.
        values: Values that override entries of the configuration file.

    Raises:
        ConfigError: If no configuration can be read, or it has no entry for one of the values.
        MissingPackageError: If transformers is not installed.
    """
    with needs("hf", "infinity.from_pretrained"):
        from transformers import AutoConfig

    if os.path.isfile(name):
        raise ConfigError(
            f"{os.fspath(name)} is a file; pass its folder, or load it as a configuration and call from_config"
        )
    try:
        config, unused = AutoConfig.from_pretrained(
            os.fspath(name),
            trust_remote_code=trust_remote_code,
            return_unused_kwargs=True,
            **options,
            **values,
        )
    except Exception as error:  # the Hub or a malformed file may raise an exception of any type
        raise ConfigError(f"{_where(name)}: {one_line(error)}") from error
    if wrong := sorted(unused.keys() & values.keys()):
        hint = did_you_mean(wrong[0], config.to_dict())
        raise ConfigError(f"{wrong[0]} is neither an entry of {type(config).__name__} nor an argument{hint}")
    return config


def _where(name: str | os.PathLike[str]) -> str:
    if os.path.isdir(name):
        return f"the configuration in {os.fspath(name)} cannot be read"
    return f"{os.fspath(name)!r} is not a folder and cannot be loaded from the Hub"


def find_weights(name: str | os.PathLike[str], config: Any, options: Mapping[str, Any]) -> Path:
    """Return the folder that contains a pretrained model's safetensors files. If `name` is a model id, download them
    first. See `find_config`.

    Raises:
        ConfigError: If there are no safetensors files, a file is malformed, or the weights are quantized.
    """
    check_not_quantized(config.to_dict(), os.fspath(name))
    folder = Path(name) / options.get("subfolder", "") if os.path.isdir(name) else _fetch(str(name), config, options)
    WeightFiles(folder)  # raises if a file is malformed
    return folder.absolute()


def _fetch(name: str, config: Any, options: Mapping[str, Any]) -> Path:
    """Download all weight files of one commit into the cache, and return the folder that contains them."""
    from transformers.utils.hub import cached_file

    # the same commit for all files, even if the revision is a branch
    arguments = {**options, "revision": getattr(config, "_checkpoint_hash", None) or options.get("revision")}
    explicit = getattr(config, "transformers_weights", None)
    reason = ""
    for file in [str(explicit)] if explicit else [SINGLE, INDEX]:
        try:
            found: Any = cached_file(name, file, **arguments)
            for part in sorted(set(read_index(Path(found)).values())) if file.endswith(".json") else ():
                cached_file(name, part, **arguments)
        except OSError as error:  # the file does not exist, or the Hub cannot be reached
            reason = reason or one_line(error)
            continue
        return Path(found).parent
    raise ConfigError(
        f"{name} has no safetensors files that can be loaded ({SINGLE} or {INDEX}): {reason}; pickle files are not "
        "supported; to convert them, load the model with transformers' from_pretrained and save it with save_pretrained"
    )


def find_generation_config(folder: Path) -> Any | None:
    """Return the generation config next to the weights, or ``None`` if it does not exist or cannot be read."""
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError):
        return None
