"""Tokenizers and datasets of `infinity train`, in the columns that TRL expects.

TRL tokenizes the datasets and packs them. This module finds them, brings their columns into a shape that TRL knows,
and checks what TRL does not: that packed examples do not attend to each other, and that prepared tokens were not
changed on disk.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from infinity.checkpoint.durable import write_durably
from infinity.errors import ConfigError, InfinityError
from infinity.models.building import one_line
from infinity.optional_dependencies import needs
from infinity.ranks import Ranks
from infinity.units import MIB
from infinity_tools.train.columns import in_columns_of_trl

if TYPE_CHECKING:
    from infinity_tools.presets import ModelSource

_TABLES = {".parquet", ".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".arrow"}
"""Name suffixes of files that `datasets` reads. All other files are plain text."""
_COMPANIONS = {".md", ".txt", ".gitattributes", ""}
"""Name suffixes of files that may accompany a dataset."""
_PIECE = MIB
"""Size of a text at which it is split into several examples, at the end of a line."""
_LIBRARY = 16 * MIB
"""Maximum size of the part of Python's standard library that is used as training data."""
_END = "\0"
"""End of a text for a model without a tokenizer, whose tokens are bytes."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """Datasets in TRL's columns."""

    train: Any
    """`datasets.Dataset`."""
    evaluation: Any | None
    """`datasets.Dataset`, or None."""
    said: str
    """One line for the heading of a run: the number and kind of examples."""
    defaults: Mapping[str, Any]
    """Fields of SFTConfig or DPOConfig that suit this data, and apply unless the user sets them."""
    why_not_packed: str | None = None
    """Result of `why_not_packed`, or None if it was not called."""


def load_tokenizer(name: str | None, source: ModelSource, chat_template: str | None = None) -> Any:
    """Return a tokenizer.

    Args:
        name: folder or Hub id. None: the tokenizer of the model, or bytes for a model without weights.
        source: model, whose vocabulary must contain all tokens.
        chat_template: Jinja file with a chat template, or folder or Hub id of a tokenizer that has one. This is
            `chat_template_path` of SFTConfig, which must be None in the trainer's arguments, because TRL would add
            tokens to the embeddings of a model that is sharded already. DPOConfig has no such field and raises
            TypeError, even for None (`run.py` must not pass it with ``--method dpo``).

    Raises:
        ConfigError: if the tokenizer cannot be loaded. For a model folder without one, the message names `--tokenizer`.
    """
    if name is None and source.weights is None:
        found = _bytes_tokenizer()
    else:
        found = _pretrained(name or str(source.weights), "--tokenizer" if name else "--model")
    largest, vocabulary = max(found.get_vocab().values()), source.config.get_text_config().vocab_size
    if largest >= vocabulary:
        raise ConfigError(
            f"the tokenizer has token ids up to {largest}, but vocab_size of --model {source.name} is only "
            f"{vocabulary}; pass the tokenizer of the model with --tokenizer"
        )
    if found.eos_token is None:
        raise ConfigError("the tokenizer has no eos_token, which ends every text; set it in tokenizer_config.json")
    if chat_template is not None:
        file = Path(chat_template)
        other = None if file.is_file() else _pretrained(chat_template, "--chat_template_path")
        found.chat_template = file.read_text() if other is None else other.chat_template
    return found


def _pretrained(name: str, option: str) -> Any:
    from transformers import AutoTokenizer

    try:
        found = AutoTokenizer.from_pretrained(name)
    except Exception as error:  # transformers raises many types for malformed files
        fix = "" if option != "--model" else "; pass a folder or Hub id with one as --tokenizer"
        raise ConfigError(f"{option} {name!r} has no tokenizer that can be loaded{fix}: {one_line(error)}") from error
    if not len(found):  # transformers makes an empty one of a folder that only has a config.json
        raise ConfigError(f"{option} {name!r} has no tokenizer; pass a folder or Hub id with one as --tokenizer")
    return found


def _bytes_tokenizer() -> Any:
    """Return a tokenizer whose 256 tokens are bytes. Byte 0 ends a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    alphabet: Any = bytes_to_unicode
    kind: Any = PreTrainedTokenizerFast
    ids = {_END: 0} | {char: byte for byte, char in alphabet().items() if byte}
    tokenizer = Tokenizer(models.BPE(ids, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return kind(tokenizer_object=tokenizer, eos_token=_END, pad_token=_END)


def cache_in(folder: Path) -> None:
    """Let `datasets` store prepared tokens in a folder if its own cache cannot be written, for example without HOME."""
    from datasets import config

    with suppress(OSError):
        Path(config.HF_DATASETS_CACHE).mkdir(parents=True, exist_ok=True)
    if not os.access(config.HF_DATASETS_CACHE, os.W_OK, effective_ids=True):
        config.HF_DATASETS_CACHE = folder / "datasets"


def load(recipe: Mapping[str, Any], tokenizer: Any, source: ModelSource) -> Data:
    """Return the datasets of a recipe. All ranks must call this function together.

    Without `data`, this is the source code of Python's standard library. The default of `split` is `train` or the only
    one, and the default of `eval_split` is `validation`, `test` or `eval`, or the only one of `eval_data`.

    Raises:
        ConfigError: if a dataset cannot be read, or its columns are not recognized; the message lists them.
        MissingPackageError: if `datasets` is not installed.
    """
    with needs("train", "infinity train"):
        from accelerate import PartialState

    method, columns = recipe["method"], recipe.get("columns") or {}
    given, eval_split = recipe.get("data") or (), recipe.get("eval_split") or ""
    with PartialState().local_main_process_first():
        as_bytes = tokenizer.eos_token == _END
        if given:
            rows = _open(given, recipe.get("split") or "", "--data", ("train",), as_bytes)
        else:
            rows = _standard_library(as_bytes)
        train, kind = in_columns_of_trl(rows, method, columns, tokenizer, "--data")
        held_out = recipe.get("eval_data") or (given if eval_split else ())
        evaluation = None
        if held_out:
            rows = _open(held_out, eval_split, "--eval_data", ("validation", "test", "eval"), as_bytes)
            evaluation, other = in_columns_of_trl(rows, method, columns, tokenizer, "--eval_data")
            if other != kind:
                raise ConfigError(f"--data contains {kind}, but --eval_data contains {other}; use the same kind")
    said = f"data: {len(train):,} {kind}" + (f"; {len(evaluation):,} to evaluate on" if evaluation is not None else "")
    defaults: dict[str, Any] = {}
    reason = None
    if kind == "texts":
        defaults = {"packing": True, "packing_strategy": "wrapped"}
    elif method == "sft":
        reason = why_not_packed(source.config)
        defaults = {"packing": not reason}
        said += f"; padded, not packed: {reason}" if reason else ""
    if kind == "chats" and method == "sft":
        defaults["assistant_only_loss"] = _marks_answers(tokenizer)
        if not defaults["assistant_only_loss"]:
            said += "; all tokens are trained, because the chat template has no {% generation %} marks"
    return Data(train=train, evaluation=evaluation, said=said, defaults=defaults, why_not_packed=reason)


def _marks_answers(tokenizer: Any) -> bool:
    """Return whether TRL can locate the messages of the assistant: by the chat template, or because TRL knows it."""
    from trl.chat_template_utils import get_training_chat_template, has_generation_markers

    try:
        return has_generation_markers(tokenizer.chat_template) or get_training_chat_template(tokenizer) is not None
    except ValueError:  # not a template that TRL knows
        return False


# Reading #


def _open(names: Sequence[str], split: str, option: str, preferred: Sequence[str], as_bytes: bool) -> Any:
    """Return the rows of files, folders and Hub ids as one dataset."""
    import datasets

    found = []
    names = [os.path.expanduser(name) for name in names]
    for name in names:
        if not os.path.exists(name) and (
            _suffix(Path(name)) in _TABLES or name.count("/") > 1 or name[:1] in (".", "/")
        ):
            raise ConfigError(f"{option} {name!r} does not exist; pass a file, a folder or the id of a Hub dataset")
    texts = [name for name in names if os.path.exists(name) and not _is_dataset(Path(name))]
    if texts:
        if len(texts) < len(names):
            raise ConfigError(f"{option} {texts[0]!r} is plain text, but others are datasets; use one kind")
        if split:
            raise ConfigError(f"{option} {texts[0]!r} is plain text, which has no split {split!r}")
        return _texts([file for name in names for file in _files(Path(name))], option, as_bytes)
    for name in names:
        try:
            opened = _read(name, split)
        except Exception as error:  # datasets raises many types for malformed files
            raise ConfigError(f"{option} {name!r} cannot be read as a dataset: {_reason(error)}") from error
        if isinstance(opened, datasets.DatasetDict):
            chosen = next((one for one in (split, *preferred) if one in opened), "")
            if len(opened) == 1 and not split:
                chosen = next(iter(opened))
            if not chosen or (split and chosen != split):
                raise ConfigError(
                    f"{option} {name!r} has the splits {', '.join(opened)}; select one with "
                    f"{'--split' if option == '--data' else '--eval_split'}"
                )
            opened = opened[chosen]
        if not len(opened):
            raise ConfigError(f"{option} {name!r} has no rows")
        found.append(opened)
    try:
        return datasets.concatenate_datasets(found)
    except ValueError as error:
        raise ConfigError(f"{option}: the datasets have different columns: {one_line(error)}") from error


def _read(name: str, split: str) -> Any:
    """Return a Dataset, or a DatasetDict with all splits if `datasets` knows them by name only."""
    import datasets

    path = Path(name)
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        return datasets.load_from_disk(name)
    wanted = split if "[" in split else None  # such as train[:10%], which datasets itself understands
    if path.is_dir():
        return datasets.load_dataset(name, split=wanted)
    if path.is_file():
        return datasets.load_dataset(str(path.parent), data_files=path.name, split=wanted)
    repository, _, subset = name.partition(":")
    return datasets.load_dataset(repository, subset or None, split=wanted)


def _is_dataset(path: Path) -> bool:
    """Return whether `datasets` should read a path. A folder of other files, such as source code, is plain text."""
    if path.is_file():
        return _suffix(path) in _TABLES
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        return True
    suffixes = {_suffix(file) for file in _files(path)}
    return bool(suffixes & _TABLES) and not suffixes - _TABLES - _COMPANIONS


def _suffix(file: Path) -> str:
    """Return the suffix of a file name, ignoring a suffix of a compression."""
    return Path(file.stem if file.suffix in (".gz", ".zst", ".bz2", ".xz") else file.name).suffix


def _files(path: Path) -> list[Path]:
    """Return the visible files of a folder, or a file itself."""
    if path.is_file():
        return [path]
    found = (file for file in path.rglob("*") if file.is_file())
    return sorted(file for file in found if not any(part.startswith(".") for part in file.relative_to(path).parts))


def _texts(files: Iterable[Path], option: str, as_bytes: bool) -> Any:
    """Return plain text files as a dataset with a column `text`, or with their bytes as tokens."""
    import datasets

    stamps = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    if not sum(size for _, size, _ in stamps):
        raise ConfigError(f"{option}: no text in {stamps[0][0] if stamps else 'an empty folder'}")
    try:
        # The arguments are the key of the cache, so they contain the time of the last change.
        return datasets.Dataset.from_generator(_pieces, gen_kwargs={"files": stamps, "as_bytes": as_bytes})
    except Exception as error:
        raise ConfigError(f"{option}: {_reason(error)}") from error


def _pieces(files: Iterable[tuple[str, int, int]], as_bytes: bool) -> Iterator[dict[str, Any]]:
    for name, _, _ in files:
        with open(name, "rb") as file:
            while lines := file.readlines(_PIECE):
                if as_bytes:  # without TRL's loops in Python over every token
                    tokens = np.frombuffer(b"".join([*lines, _END.encode()]), np.uint8).astype(np.int32)
                    yield {"input_ids": tokens, "labels": tokens}
                else:
                    yield {"text": b"".join(lines).decode(errors="replace")}


def _standard_library(as_bytes: bool) -> Any:
    """Return the first MiB of the Python sources of the standard library."""
    chosen, size = [], 0
    for root, folders, names in os.walk(sysconfig.get_path("stdlib")):
        folders[:] = sorted({*folders} - {"site-packages", "test", "tests"})
        for name in sorted(name for name in names if name.endswith(".py")):
            if size < _LIBRARY:
                chosen.append(Path(root, name))
                size += chosen[-1].stat().st_size
    if not chosen:
        raise ConfigError(f"no Python sources in {sysconfig.get_path('stdlib')}; pass a text as --data")
    return _texts(chosen, "--data", as_bytes)


def _reason(error: Exception) -> str:
    while isinstance(error.__cause__, Exception):  # datasets says only that it failed
        error = error.__cause__
    return one_line(error)


# Prepared tokens #


def check_prepared(dataset: Any) -> str:
    """Return a checksum of the examples of a prepared dataset (`trainer.train_dataset`), to compare at resume.

    `datasets` keeps prepared tokens in its cache and uses them again without looking at them. The first call writes
    the checksum to a file next to them, and later calls compare it. All ranks must call this function together. One
    rank of each node reads the tokens once.

    Raises:
        ConfigError: if the cached tokens were changed since they were prepared.
    """
    ranks = Ranks.current()
    found = ranks.together("checking the prepared tokens", lambda: "" if ranks.local_rank else _checked(dataset))
    return ranks.agree(found)


def _checked(dataset: Any) -> str:
    import pyarrow
    from xxhash import xxh3_128

    files = [Path(entry["filename"]) for entry in dataset.cache_files]
    digest = xxh3_128()
    try:
        for batch in dataset.with_format("arrow").iter(1000):
            for column in batch.columns:
                _update(digest, column.combine_chunks())
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"prepared tokens cannot be read: {one_line(error)}; remove {files[0].parent}") from error
    found = digest.hexdigest()
    if files:
        record = files[0].with_name(f"{files[0].name}.{dataset._fingerprint}.xxh3")
        if not record.exists():
            write_durably(record, found.encode(), mode=0o666)
        elif record.read_text() != found:
            raise ConfigError(
                f"the prepared tokens in {files[0]} were changed on disk (checksum {found[:8]}, not "
                f"{record.read_text()[:8]}, which is in {record.name}); remove both files to prepare them again"
            )
    return found


def _update(digest: Any, column: Any) -> None:
    """Add the values of an Arrow array to a digest, independent of how they are divided into buffers."""
    import pyarrow

    if isinstance(column, pyarrow.ListArray | pyarrow.LargeListArray):
        digest.update(column.value_lengths().to_numpy(zero_copy_only=False).tobytes())
        _update(digest, column.flatten())
    elif pyarrow.types.is_primitive(column.type) and not column.null_count:
        digest.update(column.to_numpy(zero_copy_only=False).tobytes())
    else:
        digest.update(repr(column.to_pylist()).encode())


# Packing #


def check_packing(trainer: Any, model_name: str, reason: str | None = None) -> None:
    """Check that the examples of a packed sequence do not attend to each other, and give all sequences one length.

    With one length, the micro-batches of a step run layer by layer. TRL would join the sequences of a batch to a single
    one, whose length varies. With flash attention, which separates examples only in a single sequence, TRL's collator
    is kept.

    Args:
        trainer: SFTTrainer or DPOTrainer.
        model_name: name of the model, for messages.
        reason: result of `why_not_packed`, if it is known.

    Raises:
        ConfigError: if they do.
    """
    args = trainer.args
    if not getattr(args, "packing", False) or args.packing_strategy == "wrapped":
        return
    if reason is None:
        reason = why_not_packed(trainer.model.config)
    if reason:
        raise ConfigError(f"packing is not supported for --model {model_name}: {reason}; remove --packing")
    if "flash" not in str(trainer.model.config._attn_implementation):
        trainer.data_collator = FixedLength(args.max_length, trainer.data_collator.pad_token_id)
        trainer.model.register_forward_pre_hook(_without_mask, with_kwargs=True)


def _without_mask(module: Any, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Remove the attention mask of a packed batch: transformers separates examples by position only without one."""
    return args, {name: value for name, value in named.items() if name != "attention_mask"}


@dataclass(frozen=True)
class FixedLength:
    """Collator of packed sequences, which are padded to one length. Positions start at 0 for each example."""

    length: int
    pad_token_id: int

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """Return `input_ids`, `labels`, `position_ids`, and `attention_mask`, by which TRL counts tokens."""
        batch = {
            "input_ids": torch.full((len(rows), self.length), self.pad_token_id),
            "labels": torch.full((len(rows), self.length), -100),
            "position_ids": torch.zeros((len(rows), self.length), dtype=torch.int64),
            "attention_mask": torch.zeros((len(rows), self.length), dtype=torch.int64),
        }
        for number, row in enumerate(rows):
            used = len(row["input_ids"])
            lengths = [*row.get("seq_lengths", [used]), self.length - used]  # with eval_packing=False, no lengths
            batch["attention_mask"][number, :used] = 1
            batch["input_ids"][number, :used] = torch.as_tensor(row["input_ids"])
            batch["labels"][number, :used] = torch.as_tensor(row["labels"])
            batch["position_ids"][number] = torch.cat([torch.arange(length) for length in lengths])
        batch["labels"][batch["position_ids"] == 0] = -100  # an example is not predicted from the one before it
        return batch


def why_not_packed(config: Any) -> str:
    """Return why examples of this model cannot share a sequence, or an empty text if they can.

    A small copy of the model computes a sequence of two examples, and then the same sequence with other tokens in one
    of them. The predictions for the other example must not change. A model that cannot be tried is not packed.

    Args:
        config: configuration of a causal language model of transformers.
    """
    from infinity.models.small import small_copy

    try:
        kept = _separates(small_copy(config, "AutoModelForCausalLM"))
    except Exception as error:  # models raise many types for unsupported positions
        reason = str(error) if isinstance(error, InfinityError) else one_line(error)
        return f"it cannot be checked whether {config.model_type} separates packed examples: {reason}"
    return "" if kept else f"{config.model_type} does not separate packed examples"


def _separates(model: Any) -> bool:
    first, second = slice(0, 7), slice(7, 16)
    positions = torch.cat([torch.arange(7), torch.arange(9)])[None]
    tokens = _ordinary_tokens(model.config)

    def predicted(changed: slice) -> torch.Tensor:
        row = tokens[torch.arange(16) % len(tokens)]
        row[changed] = tokens[(torch.arange(16)[changed] + 1) % len(tokens)]
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            found: torch.Tensor = model(input_ids=row[None], position_ids=positions, use_cache=False).logits
        return found[0].double()

    before = predicted(slice(0, 0))
    own = (predicted(slice(7, 8)) - before)[8:].abs().max()
    moved = [(predicted(other) - before)[one].abs().max() for other, one in ((first, second), (second, first))]
    if not own > 0:
        raise ConfigError("a small copy predicts the same for any tokens")
    # Experts that compute the tokens of all examples together may round differently.
    return bool(max(moved) <= 1e-3 * own)


def _ordinary_tokens(config: Any) -> torch.Tensor:
    """Return token ids without a special meaning."""
    special: set[Any] = set()
    for part in (config, config.get_text_config()):
        for name, value in part.to_dict().items():
            if "token_id" in name or "token_index" in name:
                special.update(value if isinstance(value, list) else [value])
    return torch.tensor([token for token in range(config.get_text_config().vocab_size) if token not in special])
