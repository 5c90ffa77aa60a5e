"""Plain-text training data, read in pieces and never as a whole.

A batch is a pure function of seed and step. A resumed run therefore sees the same batches as an uninterrupted one, and
so does a run with a different number of ranks.
"""

from __future__ import annotations

import os
import sysconfig
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch

from infinity.errors import ConfigError
from infinity.units import MIB, format_size

_BYTES_PER_TOKEN = 8  # initial read per token; doubled until it yields enough tokens
_MOST_WITHOUT = 16 * MIB  # limit on text without tokens, because a tokenizer may drop unknown text
_Tokens = Sequence[int] | np.ndarray[Any, np.dtype[np.uint8]]


class Corpus:
    """Text files, read as one continuous sequence of bytes."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = list(files)
        self._ends = list(accumulate(file.stat().st_size for file in files))  # bytes up to the end of each file

    @classmethod
    def of(cls, names: Iterable[Path], option: str = "--data") -> Corpus:
        """Return the corpus of files, and of all files in folders, sorted by name.

        Args:
            names: Files and folders.
            option: Name of the option, for messages.

        Raises:
            ConfigError: If a path is missing or unreadable, or the files contain no text.
        """
        files: list[Path] = []
        try:
            for name in names:
                if name.is_dir():
                    files += sorted(file for file in name.rglob("*") if file.is_file() and _visible(file, name))
                elif name.is_file():
                    files.append(name)
                else:
                    raise ConfigError(f"{option} {str(name)!r} is not a file or folder")
            corpus = cls(files)
        except OSError as error:
            raise ConfigError(f"{option}: {error.filename} cannot be read: {error.strerror}") from error
        if closed := [file for file in files if not os.access(file, os.R_OK, effective_ids=True)]:
            raise ConfigError(f"{option}: {closed[0]} cannot be read: permission denied; omit it or change its mode")
        if not corpus.size:
            found = f"no text in {', '.join(map(str, names))}" if names else "no file is given"
            raise ConfigError(f"{option}: {found}")
        return corpus

    @classmethod
    def of_standard_library(cls) -> Corpus:
        """Return the Python sources of the standard library."""
        folder = sysconfig.get_path("stdlib")
        found: list[Path] = []
        for root, folders, names in os.walk(folder):
            if "site-packages" in folders:
                folders.remove("site-packages")  # installed packages may be a hundred times as large
            found += [Path(root, name) for name in names if name.endswith(".py")]
        found.sort()
        if not found:
            raise ConfigError(f"no Python sources in {folder}; pass a text with --data")
        return cls(found)

    @property
    def size(self) -> int:
        """Size in bytes."""
        return self._ends[-1] if self._ends else 0

    @property
    def files(self) -> int:
        """Number of files."""
        return len(self._files)

    def read(self, start: int, length: int) -> bytes:
        """Return `length` bytes from `start` on, wrapping around at the end.

        Raises:
            ConfigError: If a file cannot be read, or has become shorter.
        """
        pieces: list[bytes] = []
        while length > 0:
            start %= self.size
            index = bisect_right(self._ends, start)
            begin = self._ends[index - 1] if index else 0
            wanted = min(length, self._ends[index] - start)
            try:
                with open(self._files[index], "rb", buffering=0) as file:
                    file.seek(start - begin)
                    piece = file.read(wanted)
            except OSError as error:
                raise ConfigError(f"--data: {self._files[index]} cannot be read: {error.strerror}") from error
            if len(piece) != wanted:
                raise ConfigError(
                    f"--data: {self._files[index]} has changed since the start of the run; restore it, or start a new "
                    "run"
                )
            pieces.append(piece)
            start, length = start + wanted, length - wanted
        return b"".join(pieces)


class Batches:
    """Batches of one rank, as a pure function of seed and step."""

    def __init__(
        self,
        corpus: Corpus,
        *,
        sequences: int,
        length: int,
        seed: int,
        rank: int,
        world_size: int,
        encode: Callable[[str], list[int]] | None = None,
    ) -> None:
        self._corpus, self._length, self._seed, self._encode = corpus, length, seed, encode
        self._sequences = sequences
        local = sequences // world_size
        self._mine = slice(rank * local, (rank + 1) * local)  # this rank's sequences of a batch
        if corpus.size < length * (_BYTES_PER_TOKEN if encode else 1):
            raise ConfigError(
                f"--data has only {format_size(corpus.size)} of text, too little for sequences of {length} tokens"
            )

    @property
    def span(self) -> int:
        """Bytes of text per sequence."""
        return self._length * (_BYTES_PER_TOKEN if self._encode else 1)

    def start(self, step: int, drawn: int) -> None:
        """Do nothing, because batches do not depend on earlier draws."""

    def drawn(self, step: int) -> int:
        """Return the number of sequences in the first `step` steps."""
        return step * self._sequences

    @property
    def uneven(self) -> bool:
        """Return ``False``, because every token contributes to the loss."""
        return False

    def at(self, step: int) -> dict[str, torch.Tensor]:
        """Return the model inputs for a step, counted from 0: int64 tensors of shape (sequences per rank, length)."""
        generator = np.random.Generator(np.random.Philox(key=[self._seed, step]))
        starts = generator.integers(0, self._corpus.size, size=self._sequences)[self._mine]
        tokens = self.from_places([int(start) for start in starts])
        return {"input_ids": tokens, "labels": tokens}

    def from_places(self, starts: Sequence[int]) -> torch.Tensor:
        """Return the sequences that start at these byte offsets: int64 of shape (sequences, sequence length)."""
        return torch.stack([torch.tensor(np.asarray(self._tokens(start)), dtype=torch.int64) for start in starts])

    def _tokens(self, start: int) -> _Tokens:
        if self._encode is None:
            return np.frombuffer(self._corpus.read(start, self._length), dtype=np.uint8)
        amount = self._length * _BYTES_PER_TOKEN
        while True:
            tokens = self._encode(self._corpus.read(start, amount).decode(errors="replace"))
            if len(tokens) >= self._length:
                return tokens[: self._length]
            if not tokens and amount >= min(self._corpus.size, _MOST_WITHOUT):
                raise ConfigError(
                    "--data: the model's tokenizer.json yields no tokens for this text; pass a different text"
                )
            amount *= 2


def tokenizer_of(weights: Path | None) -> Callable[[str], list[int]] | None:
    """Return the encoding function of a folder's tokenizer.json, or None if it has none and tokens are bytes."""
    if weights is None or not (weights / "tokenizer.json").is_file():
        return None
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(weights / "tokenizer.json"))
    except Exception as error:  # tokenizers raises plain Exception
        raise ConfigError(f"{weights / 'tokenizer.json'} cannot be read: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)


def _visible(file: Path, folder: Path) -> bool:
    return not any(part.startswith(".") for part in file.relative_to(folder).parts)
