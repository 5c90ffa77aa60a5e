"""Where a pretrained model lies: a folder, or a model of the Hub by its id, by transformers' own functions."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infinity.errors import ConfigError
from infinity.formats.weight_files import INDEX, SINGLE, WeightFiles, read_index, refuse_quantised
from infinity.models.building import one_line
from infinity.optional_dependencies import needs


@dataclass(frozen=True, kw_only=True)
class HubOptions:
    """Arguments of transformers about where files come from."""

    revision: str | None = None
    """Branch, tag or checkpoint; None: the main branch."""
    subfolder: str = ""
    """Folder of the files, below the model's."""
    cache_dir: str | os.PathLike[str] | None = None
    """Where fetched files lie; None: as the Hub's variables say."""
    token: str | bool | None = None
    """For models that not everybody may read; None: as `hf auth login` has left it."""
    local_files_only: bool = False
    """Whether nothing is fetched."""

    def arguments(self, revision: str | None = None) -> dict[str, Any]:
        """Return them for a function of transformers; `revision` replaces one that may move."""
        return {**vars(self), "revision": revision or self.revision}


def find_config(
    name: str | os.PathLike[str], options: HubOptions, *, trust_remote_code: bool, values: Mapping[str, Any]
) -> Any:
    """Return the configuration of a pretrained model, of type `PreTrainedConfig`.

    Args:
        name: folder, or id.
        trust_remote_code: whether the configuration may bring its class along.
        values: that differ from those of the file.

    Raises:
        ConfigError: there is none that can be read, or it has no such values.
        MissingPackageError: transformers is not installed.
    """
    with needs("hf", "infinity.from_pretrained"):
        from transformers import AutoConfig

    if os.path.isfile(name):
        raise ConfigError(
            f"{os.fspath(name)} is a file; name its folder, or make a configuration for from_config of it"
        )
    try:
        config, unused = AutoConfig.from_pretrained(
            os.fspath(name),
            trust_remote_code=trust_remote_code,
            return_unused_kwargs=True,
            **options.arguments(),
            **values,
        )
    except Exception as error:  # whatever the Hub, or a file of any content, makes of transformers
        raise ConfigError(f"{_where(name)}: {one_line(error)}") from error
    if wrong := sorted(unused.keys() & values.keys()):
        near = difflib.get_close_matches(wrong[0], config.to_dict(), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"{wrong[0]} is no value of a {type(config).__name__}, nor an argument{hint}")
    return config


def _where(name: str | os.PathLike[str]) -> str:
    if os.path.isdir(name):
        return f"the configuration in {os.fspath(name)} cannot be read"
    return f"{os.fspath(name)!r} is no folder here, and is not to be had as a model of the Hub"


def find_weights(name: str | os.PathLike[str], config: Any, options: HubOptions) -> Path:
    """Return the folder that holds the safetensors of a pretrained model; fetch them first if it is an id.

    Raises:
        ConfigError: there are none, one is malformed, or they are quantised.
    """
    refuse_quantised(config.to_dict(), os.fspath(name))
    folder = Path(name) / options.subfolder if os.path.isdir(name) else _fetch(str(name), config, options)
    WeightFiles(folder)  # which says what is wrong with them
    return folder.absolute()


def _fetch(name: str, config: Any, options: HubOptions) -> Path:
    """Have the files of the weights in the cache, all of one checkpoint; return their folder there."""
    from transformers.utils.hub import cached_file

    arguments = options.arguments(getattr(config, "_checkpoint_hash", None))
    explicit = getattr(config, "transformers_weights", None)
    reason = ""
    for file in [str(explicit)] if explicit else [SINGLE, INDEX]:
        try:
            found: Any = cached_file(name, file, **arguments)
            for part in sorted(set(read_index(Path(found)).values())) if file.endswith(".json") else ():
                cached_file(name, part, **arguments)
        except OSError as error:  # not there, or nobody could be asked
            reason = reason or one_line(error)
            continue
        return Path(found).parent
    raise ConfigError(
        f"{name} has no weights as safetensors ({SINGLE} or {INDEX}) that are to be had here; pickles are not read: "
        f"load it with from_pretrained of transformers and save it with save_pretrained. What was said: {reason}"
    )


def find_generation_config(folder: Path) -> Any | None:
    """Return the generation config that lies beside weights; None where there is none that can be read."""
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError):
        return None
