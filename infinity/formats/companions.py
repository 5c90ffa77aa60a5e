"""Files that an export needs in addition to the weights: config.json, the tokenizer and similar files.

A run keeps copies of these files in the folder `model`, next to its checkpoints. An export therefore requires neither
the model's class nor the folder from which the initial weights were loaded.
"""

from __future__ import annotations

import copy
import json
import logging
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from infinity.checkpoint.durable import write_durably
from infinity.errors import ConfigError
from infinity.formats import transformers_names as names
from infinity.formats.adapters import ADAPTER_CONFIG, Adapter, adapters_of, peft_model
from infinity.formats.weight_files import WeightFiles, read_json
from infinity.untrusted_files import read_regular, sync_folder

_log = logging.getLogger(__name__)

CONFIG, GENERATION = "config.json", "generation_config.json"
_FOLDER, _NAMES, _ADAPTERS = "model", "names.json", "adapters.json"
_SUFFIXES = {".json", ".txt", ".jinja", ".model", ".spm", ".tiktoken", ".codes", ".bpe", ".vocab"}
_LEFT = {CONFIG, _NAMES, _ADAPTERS, "trainer_state.json", ADAPTER_CONFIG}
_MOST = 256 << 20  # maximum size of a file, in bytes; tokenizers have tens of MiB


@dataclass(frozen=True)
class Companions:
    """Files and names that accompany the weights of a run in an export."""

    config: dict[str, Any] | None  # content of config.json; None for models that are not from transformers
    files: tuple[Path, ...]  # tokenizer, generation_config.json and similar files
    loaded_from: tuple[str, ...] | None  # names of the tensors in the initial weights, if any
    adapters: tuple[Adapter, ...]  # PEFT adapters that the run trains

    @classmethod
    def of_run(cls, checkpoints: Path) -> Companions:
        """Read the copies that a run keeps in its checkpoint folder.

        Raises:
            ConfigError: if a file is malformed.
        """
        folder = checkpoints / _FOLDER
        config = read_json(folder / CONFIG) if (folder / CONFIG).is_file() else None
        found = read_json(folder / _NAMES).get("names") if (folder / _NAMES).is_file() else None
        loaded = tuple(map(str, found)) if isinstance(found, list) else None
        return cls(config, tuple(companion_files(folder)), loaded, _find_adapters(folder / _ADAPTERS))


def _find_adapters(file: Path) -> tuple[Adapter, ...]:
    if not file.is_file():
        return ()
    try:
        return tuple(Adapter(**tree) for tree in read_json(file)["adapters"])
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{file} is malformed: {error}") from error


def companion_files(folder: Path) -> Iterator[Path]:
    """Yield the files in a weight folder that an export copies: tokenizer, generation config, preprocessor, license.

    Raises:
        OSError: if the folder cannot be read.
    """
    if not folder.is_dir():
        return
    for file in sorted(folder.iterdir()):
        known = file.suffix in _SUFFIXES and not file.name.endswith(".index.json") and file.name not in _LEFT
        if not known or file.name.startswith(".") or not file.is_file():
            continue
        if file.stat().st_size > _MOST:
            _log.warning("%s is too large to be copied for exports; copy it to each export yourself", file)
        else:
            yield file


def keep_companions(checkpoints: Path, model: nn.Module, weights: WeightFiles | None) -> None:
    """Copy the accompanying files next to the checkpoints of a new run.

    Args:
        checkpoints: checkpoint folder of the run.
        model: model to train.
        weights: initial weights, or None if they were not loaded from safetensors files.

    Raises:
        OSError: if a file cannot be read or written.
    """
    folder = checkpoints / _FOLDER
    folder.mkdir(exist_ok=True)
    for file in companion_files(weights.folder) if weights is not None else ():
        write_durably(folder / file.name, file.read_bytes())
    if weights is not None:
        write_durably(folder / _NAMES, json.dumps({"names": sorted(weights.tensors)}).encode())
    if peft_model(model) is not None:
        _keep_adapters(folder, model)
        return
    inner = names.pretrained_model(model)
    if inner is None:
        return
    try:
        config = copy.deepcopy(inner.config)
        config.architectures = [names.class_name(model)]
        config.dtype = str(inner.dtype).removeprefix("torch.")
        write_durably(folder / CONFIG, config.to_json_string().encode())
        if not (folder / GENERATION).exists() and inner.can_generate():
            write_durably(folder / GENERATION, inner.generation_config.to_json_string().encode())
    except (TypeError, ValueError, AttributeError) as error:  # the configuration cannot be written as JSON
        _log.warning(
            "config.json cannot be saved for exports (%s: %s); pass a config.json to the export",
            type(error).__name__,
            error,
        )


def _keep_adapters(folder: Path, model: nn.Module) -> None:
    try:
        tree = {"adapters": [adapter.tree for adapter in adapters_of(model)]}
        write_durably(folder / _ADAPTERS, json.dumps(tree).encode())
    except OSError:
        raise
    except Exception as error:  # PEFT raises various errors for adapters that it can train but not save
        _log.warning("this run cannot store the adapter configuration that `infinity export` needs (%s: %s); call model.save_pretrained() during training to save the adapter",
                     type(error).__name__, error)  # fmt: skip


def carry_companions(old: Path, new: Path) -> None:
    """Copy the accompanying files of a run to the run that continues it, except links. Raises `OSError`."""
    if not (old / _FOLDER).is_dir():
        return
    (new / _FOLDER).mkdir(exist_ok=True)
    for file in sorted((old / _FOLDER).iterdir()):
        if file.suffix != ".tmp" and stat.S_ISREG(file.lstat().st_mode):
            write_durably(new / _FOLDER / file.name, read_regular(file, _MOST))
    sync_folder(new)
