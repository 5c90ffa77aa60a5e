"""The tokenizer of a model, as transformers loads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from infinity.errors import ConfigError


def load_tokenizer(named: Path | None, weights: Path | None, option: str) -> Any:
    """Return the tokenizer of a folder.

    Args:
        named: by `--tokenizer`; None: it is that of the weights.
        weights: folder of a pretrained model, if there is one.
        option: the data that needs it, for messages.

    Raises:
        ConfigError: no folder is named, or the folder has no tokenizer.
    """
    folder = named or weights
    if folder is None:
        raise ConfigError(
            f"{option} is a dataset, which requires a tokenizer, but the model has none; pass a folder with a "
            "tokenizer with --tokenizer"
        )
    import transformers

    said = "--tokenizer" if named is not None else "--model"
    if not folder.is_dir():
        raise ConfigError(f"{said} {str(folder)!r} is not a folder; pass one with a tokenizer.json")
    try:
        return transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # whatever files of any content make of transformers
        reason = " ".join(str(error).split())
        raise ConfigError(f"{said} {str(folder)!r} has no tokenizer that transformers can load: {reason}") from error


def check_vocabulary(tokenizer: Any, vocabulary: int, model: str) -> None:
    """Check that the model knows every token. Raises `ConfigError`."""
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if largest >= vocabulary:
        raise ConfigError(
            f"the tokenizer has token ids up to {largest}, but vocab_size of --model {model} is only {vocabulary}; "
            "pass the tokenizer of the model with --tokenizer"
        )


def padding_of(tokenizer: Any) -> int:
    """Return the token for what is empty. It is never learned, nor seen by what is."""
    found = (tokenizer.pad_token_id, tokenizer.eos_token_id)
    return next((int(token) for token in found if token is not None), 0)
