"""A data set, ready to be trained on: sequences of tokens in an Arrow file, written once and then memory-mapped."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from infinity.errors import ConfigError
from infinity_tools.samples.encode import Columns, Encoder
from infinity_tools.samples.pack import Packed, Packer
from infinity_tools.samples.source import Rows

_VERSION = 1  # of what the same rows become
_ROWS, _SEQUENCES = 256, 64  # at a time: rows that are encoded, and sequences of a record batch


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What was found in a data set."""

    sequences: int
    """That it became."""
    rows: int
    """That it has."""
    empty: int
    """Rows with nothing to train on, also once they were cut off."""
    cut: int
    """Rows that are longer than a sequence, whose end was cut off."""
    trained: int
    """Tokens that count in the loss."""
    kind: str
    """See `Columns`."""
    columns: str
    """The column that is trained on."""
    content: str
    """A hash of all sequences."""
    packed: bool
    """Whether whole samples lie side by side, told apart by positions that begin again."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What a data set is made into."""

    text_column: str
    """Empty: found by the names of columns."""
    loss_on: str
    """`completions` or `all`."""
    length: int
    """Tokens of a sequence."""
    padding: int
    """Token for what is empty."""
    packs: bool = True
    """Whether a sequence has several samples that are whole; else it has one, and padding."""


class Preparation:
    """Writes the Arrow file of a data set, piece by piece, so that whoever waits for it can be told."""

    def __init__(self, rows: Rows, tokenizer: Any, recipe: Recipe, folder: Path) -> None:
        """Name the file by what goes into it; nothing is read or written yet.

        Args:
            rows: the data set.
            tokenizer: of transformers.
            recipe: what it is made into.
            folder: of the file.
        """
        self._rows, self._tokenizer, self._recipe = rows, tokenizer, recipe
        self.what = f"{rows.option} {rows.paths[0]}"
        """Names the data set, for messages."""
        key = [_VERSION, rows.stamps, rows.split, asdict(recipe), _identity(tokenizer)]
        name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]
        self.file = folder / f"{name}.arrow"
        """Where the sequences are."""
        self.done = 0
        """Rows that were read."""

    @property
    def complete(self) -> bool:
        """Whether the file is there."""
        return _facts_file(self.file).is_file() and self.file.is_file()

    def run(self, pause: Callable[[], None]) -> None:
        """Write the file; `pause` is called now and then.

        Raises:
            ConfigError: the rows cannot be trained on, with the reason, or the file cannot be written.
        """
        draft = self.file.with_suffix(f".{secrets.token_hex(8)}.tmp")  # several hosts may write the same
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            facts = self._write(draft, pause)
            os.replace(draft, self.file)
            draft.write_text(json.dumps(asdict(facts)))
            os.replace(draft, _facts_file(self.file))
        except OSError as error:
            raise ConfigError(
                f"{self.file.parent} cannot be written: {error.strerror}; choose another --out"
            ) from error
        finally:
            with suppress(OSError):
                draft.unlink()

    def _write(self, draft: Path, pause: Callable[[], None]) -> Facts:
        import pyarrow as pa

        rows, option = iter(self._rows), self.what
        first = next(rows, None)
        if first is None:
            raise ConfigError(f"{option} has no rows; choose a different dataset")
        columns = Columns.of(first, self._recipe.text_column, option)
        encoder = Encoder(self._tokenizer, columns, self._recipe.loss_on, option)
        packer = Packer(self._recipe.length, self._recipe.padding, one_row=encoder.one_row, packs=self._recipe.packs)
        empty = 0

        def sequences() -> Iterator[Packed]:
            nonlocal empty
            source = chain([first], rows)
            while piece := list(islice(source, _ROWS)):
                for sample in encoder.encode(piece):
                    if sample is None:
                        empty += 1
                    else:
                        yield from packer.add(sample)
                self.done += len(piece)
                pause()
            yield from packer.end()

        digest, count, trained = xxhash.xxh3_128(), 0, 0
        tokens = pa.list_(pa.int32(), self._recipe.length)
        schema = pa.schema([("tokens", tokens), ("labels", tokens), ("lengths", pa.list_(pa.int32()))])
        found = sequences()
        with pa.OSFile(str(draft), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
            while piece := list(islice(found, _SEQUENCES)):
                values = [np.array([getattr(one, name) for one in piece], np.int32) for name in ("tokens", "labels")]
                columns_of = [pa.FixedSizeListArray.from_arrays(value.ravel(), self._recipe.length) for value in values]
                lengths = [one.lengths for one in piece]
                writer.write_batch(pa.record_batch([*columns_of, pa.array(lengths, pa.list_(pa.int32()))], schema))
                for value in values:
                    digest.update(value.tobytes())
                digest.update(json.dumps(lengths).encode())
                count += len(piece)
                trained += int((values[1][:, 1:] >= 0).sum())
        if not count:
            raise ConfigError(
                f"{option}: none of the {self.done} rows has tokens to train on"
                + (f"; {packer.cut} are longer than --seq {self._recipe.length}" if packer.cut else "")
                + (
                    "; pass --loss-on all to train on all tokens"
                    if self._recipe.loss_on != "all" and not encoder.one_row
                    else ""
                )
            )
        return Facts(
            sequences=count,
            rows=self.done,
            empty=empty + packer.dropped,
            cut=packer.cut,
            trained=trained,
            kind=columns.kind,
            columns=columns.name,
            content=digest.hexdigest(),
            packed=self._recipe.packs and not encoder.one_row,
        )


class Sequences:
    """The sequences of a prepared data set. They are read where they lie: memory is that of what is asked for."""

    def __init__(self, file: Path) -> None:
        """Map the file. Raises `ConfigError` if it cannot be read."""
        import pyarrow as pa

        try:
            self.facts = Facts(**json.loads(_facts_file(file).read_text()))
            """What was found in the data set."""
            self._file = pa.ipc.open_file(pa.memory_map(str(file)))
        except (OSError, ValueError, TypeError, pa.ArrowInvalid) as error:
            raise ConfigError(f"{file} is corrupt; remove it: {error}") from error

    def __len__(self) -> int:
        return self.facts.sequences

    @property
    def uneven(self) -> bool:
        """Whether in some sequences more tokens count than in others."""
        return self.facts.kind != "text"

    def rows(self, numbers: Sequence[int]) -> dict[str, torch.Tensor]:
        """Return sequences by number: `input_ids`, `labels` and, where samples are packed, `position_ids`, which begin
        at 0 with each sample; all int64 of shape (sequences, length).
        """
        batches = [(self._file.get_batch(number // _SEQUENCES), number % _SEQUENCES) for number in numbers]

        def column(index: int) -> torch.Tensor:
            rows = [batch.column(index)[place].values.to_numpy(zero_copy_only=False) for batch, place in batches]
            return torch.from_numpy(np.stack(rows).astype(np.int64))

        found = {"input_ids": column(0), "labels": column(1)}
        if self.facts.packed:
            lengths = [batch.column(2)[place].as_py() for batch, place in batches]
            found["position_ids"] = torch.stack([torch.cat([torch.arange(one) for one in row]) for row in lengths])
        return found


def prepare(preparation: Preparation, together: Callable[[object], list[Any]], *, writes: bool,
            report: Callable[[str], None]) -> Sequences:  # fmt: skip
    """Return the sequences of a data set; what is not there yet is written, while the other ranks wait.

    Ranks exchange a word every few seconds: waiting in one exchange for hours, they would take each other for lost.

    Args:
        preparation: of the data set.
        together: returns what each rank has given it, on all of them.
        writes: whether this rank is the one that writes, for its node.
        report: is told what is done.

    Raises:
        ConfigError: the data set cannot be trained on, on any rank.
    """
    failure: Exception | None = None
    last = time.monotonic()

    def pause() -> None:
        nonlocal last
        if time.monotonic() - last >= _WORD_SECONDS:
            report(f"preparing {preparation.what}: {preparation.done} rows")
            _raise_first(together("going on"))
            last = time.monotonic()

    try:
        if writes and not preparation.complete:
            report(f"preparing {preparation.what}")
            preparation.run(pause)
    except _Elsewhere:
        raise
    except Exception as error:
        failure = error
    while True:
        words = together("done" if failure is None else f"{type(failure).__name__}: {failure}")
        if failure is not None:
            raise failure
        _raise_first(words)
        if "going on" not in words:
            return Sequences(preparation.file)


_WORD_SECONDS = 2.0


class _Elsewhere(ConfigError):
    """What another rank has said already."""

    told_elsewhere = True


def _raise_first(words: list[Any]) -> None:
    for rank, word in enumerate(words):
        if word not in ("done", "going on"):
            raise _Elsewhere(f"preparing the data failed on rank {rank}: {word}")


def _facts_file(file: Path) -> Path:
    return file.with_suffix(".json")


def _identity(tokenizer: Any) -> str:
    """Return a hash of all that a tokenizer makes of text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    made_of = [
        type(tokenizer).__name__,
        backend.to_str() if backend is not None else sorted(tokenizer.get_vocab().items()),
        tokenizer.chat_template,
        {name: str(value) for name, value in tokenizer.special_tokens_map.items()},
    ]
    return hashlib.sha256(json.dumps(made_of).encode()).hexdigest()
