"""Files that an export needs in addition to the weights: config.json, the tokenizer and similar files.

A run keeps copies of these files in the folder `model`, next to its checkpoints. An export therefore requires neither
the model's class nor the folder from which the initial weights were loaded.
"""

from __future__ import annotations

import json
import logging
import stat
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn

from infinity.checkpoint.durable import write_durably
from infinity.content.views import dtype_name
from infinity.errors import ConfigError
from infinity.formats import transformers_names as names
from infinity.formats.adapters import ADAPTER_CONFIG, Adapter, adapters_of, peft_model
from infinity.formats.weight_files import WeightFiles, read_json
from infinity.untrusted_files import read_regular, sync_folder

_log = logging.getLogger(__name__)

CONFIG, GENERATION = "config.json", "generation_config.json"
_FOLDER, _NAMES, _ADAPTERS = "model", "names.json", "adapters.json"
_SUFFIXES = {".json", ".txt", ".jinja", ".model", ".spm", ".tiktoken", ".codes", ".bpe", ".vocab"}
_TEMPLATES = "additional_chat_templates/"
_FOLDERS = (_TEMPLATES, "custom_generate")  # subfolders that transformers loads files from
_LEFT = {CONFIG, _NAMES, _ADAPTERS, "trainer_state.json", ADAPTER_CONFIG}
_TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "chat_template.json", "tokenizer.model", "vocab.json", "merges.txt", "vocab.txt",
)  # fmt: skip
_MOST = 256 << 20  # maximum size of a file, in bytes; tokenizers have tens of MiB


@dataclass(frozen=True)
class Companions:
    """Files and names that accompany the weights of a run in an export."""

    config: dict[str, Any] | None  # content of config.json; None for models that are not from transformers
    files: Mapping[str, Path]  # tokenizer, generation_config.json and similar files, by name in the export
    loaded_from: tuple[str, ...] | None  # names of the tensors in the initial weights, if any
    loaded_dtype: str | None  # dtype of most of the initial weights, if any
    adapters: tuple[Adapter, ...]  # PEFT adapters that the run trains

    @classmethod
    def of_run(cls, checkpoints: Path) -> Companions:
        """Read the copies that a run keeps in its checkpoint folder.

        Raises:
            ConfigError: if a file is malformed.
        """
        folder = checkpoints / _FOLDER
        config = read_json(folder / CONFIG) if (folder / CONFIG).is_file() else None
        initial = read_json(folder / _NAMES) if (folder / _NAMES).is_file() else {}
        found, dtype = initial.get("names"), initial.get("dtype")
        loaded = tuple(map(str, found)) if isinstance(found, list) else None
        named = dtype if isinstance(dtype, str) else None
        return cls(config, companion_files(folder), loaded, named, _find_adapters(folder / _ADAPTERS))


def _find_adapters(file: Path) -> tuple[Adapter, ...]:
    if not file.is_file():
        return ()
    try:
        return tuple(Adapter(**tree) for tree in read_json(file)["adapters"])
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{file} is malformed: {error}") from error


def companion_files(folder: Path) -> dict[str, Path]:
    """Return the files in a weight folder that an export copies, by their names relative to the folder.

    These are the tokenizer, chat templates, generation config, preprocessor and license. If a configuration in the
    folder refers to Python code (``auto_map``), the Python files are included.

    Raises:
        OSError: if the folder cannot be read.
    """
    if not folder.is_dir():
        return {}
    suffixes = _SUFFIXES | {".py"} if _refers_to_code(folder) else _SUFFIXES
    found = {}
    for place in (folder, *(folder / name for name in _FOLDERS)):
        for file in sorted(place.iterdir()) if place.is_dir() else ():
            known = file.suffix in suffixes or (file.suffix == ".py" and place.name == "custom_generate")
            known = known and not file.name.endswith(".index.json") and file.name not in _LEFT
            if not known or file.name.startswith(".") or not file.is_file():
                continue
            if file.stat().st_size > _MOST:
                _log.warning("%s is too large to be copied for exports; copy it to each export yourself", file)
            else:
                found[file.relative_to(folder).as_posix()] = file
    return found


def _refers_to_code(folder: Path) -> bool:
    configs = (file for file in folder.glob("*config.json") if file.is_file() and file.stat().st_size <= _MOST)
    return any(b'"auto_map"' in file.read_bytes() for file in configs)


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
    for name, file in (companion_files(weights.folder) if weights is not None else {}).items():
        (folder / name).parent.mkdir(exist_ok=True)
        write_durably(folder / name, file.read_bytes())
    if weights is not None:
        sizes = Counter[str]()
        for tensor in weights.tensors.values():
            sizes[dtype_name(tensor.dtype)] += tensor.nbytes
        initial = {"names": sorted(weights.tensors), "dtype": max(sizes, key=sizes.__getitem__, default=None)}
        write_durably(folder / _NAMES, json.dumps(initial).encode())
    if peft_model(model) is not None:
        _keep_adapters(folder, model)
    keep_configs(checkpoints, model)


def keep_configs(checkpoints: Path, model: nn.Module) -> None:
    """Store the current configuration, generation config and custom code of a transformers model for exports.

    The user or a training framework may change them during training. Files that have not changed are not written.

    Args:
        checkpoints: checkpoint folder of the run.
        model: model in training.

    Raises:
        OSError: if a file cannot be read or written.
    """
    folder, inner = checkpoints / _FOLDER, names.pretrained_model(model)
    if inner is None:
        return
    try:
        # The first configuration is written before training, when no FSDP module is gathered in its compute dtype.
        dtype = read_json(folder / CONFIG)["dtype"] if (folder / CONFIG).is_file() else dtype_name(inner.dtype)
        files = names.saved_configs(model, dtype=dtype, default_generation=not (folder / GENERATION).exists())
    except (TypeError, ValueError, AttributeError) as error:  # the configuration cannot be written as JSON
        _log.warning(
            "config.json cannot be saved for exports (%s: %s); pass a config.json to the export",
            type(error).__name__,
            error,
        )
        return
    folder.mkdir(exist_ok=True)
    _write_changed(folder, files)


def _write_changed(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        if not (folder / name).is_file() or (folder / name).read_bytes() != content:
            (folder / name).parent.mkdir(exist_ok=True)
            write_durably(folder / name, content)


def keep_tokenizer(checkpoints: Path, tokenizer: Any) -> None:
    """Store the tokenizer and chat template of a run for exports, in place of those next to its initial weights.

    Args:
        checkpoints: checkpoint folder of the run.
        tokenizer: transformers tokenizer or processor.

    Raises:
        OSError: if a file cannot be read or written.
    """
    folder = checkpoints / _FOLDER
    folder.mkdir(exist_ok=True)
    with TemporaryDirectory() as place:
        tokenizer.save_pretrained(place)
        new = {name: file.read_bytes() for name, file in companion_files(Path(place)).items()}
    vocabularies = getattr(tokenizer, "vocab_files_names", None) or {}
    templates = {name for name in companion_files(folder) if name.startswith(_TEMPLATES)}
    for name in {*_TOKENIZER, *vocabularies.values(), *templates} - new.keys():
        (folder / name).unlink(missing_ok=True)
    _write_changed(folder, new)


def _keep_adapters(folder: Path, model: nn.Module) -> None:
    try:
        tree = {"adapters": [asdict(adapter) for adapter in adapters_of(model)]}
        write_durably(folder / _ADAPTERS, json.dumps(tree).encode())
    except OSError:
        raise
    except Exception as error:  # PEFT raises various errors for adapters that it can train but not save
        _log.warning("this run cannot store the adapter configuration that `infinity export` needs (%s: %s); call "
                     "model.save_pretrained() during training to save the adapter",
                     type(error).__name__, error)  # fmt: skip


def carry_companions(old: Path, new: Path) -> None:
    """Copy the accompanying files of a run to the run that continues it, except links. Raises `OSError`."""
    if not (old / _FOLDER).is_dir():
        return
    (new / _FOLDER).mkdir(exist_ok=True)
    for place in (Path(), *map(Path, _FOLDERS)):
        source, target = old / _FOLDER / place, new / _FOLDER / place
        if source.is_symlink() or not source.is_dir():
            continue
        target.mkdir(exist_ok=True)
        for file in sorted(source.iterdir()):
            if file.suffix != ".tmp" and stat.S_ISREG(file.lstat().st_mode):
                write_durably(target / file.name, read_regular(file, _MOST))
    sync_folder(new)
