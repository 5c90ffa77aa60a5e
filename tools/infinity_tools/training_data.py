"""What `infinity train` trains on and evaluates with, by its options: plain text, or data sets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from infinity.errors import ConfigError
from infinity.ranks import Ranks
from infinity.units import format_number
from infinity_tools.data import Batches, Corpus, tokenizer_of
from infinity_tools.presets import ModelSource
from infinity_tools.progress import short
from infinity_tools.samples.batches import Drawn, Readable
from infinity_tools.samples.encode import Columns
from infinity_tools.samples.neighbors import why_apart
from infinity_tools.samples.prepared import Facts, Preparation, Recipe, Sequences, prepare
from infinity_tools.samples.source import Rows, is_data_set
from infinity_tools.samples.tokenizer import check_vocabulary, load_tokenizer, padding_of

_BYTE_VALUES = 256
_HELD_OUT = ("validation", "test", "eval")
"""Splits to evaluate with, where none is named."""
Report = Callable[[str], None]


class DataOptions(Protocol):
    """The options that say what the data are."""

    @property
    def data(self) -> tuple[Path, ...]: ...

    @property
    def split(self) -> str: ...

    @property
    def text_column(self) -> str: ...

    @property
    def loss_on(self) -> str: ...

    @property
    def tokenizer(self) -> Path | None: ...

    @property
    def epochs(self) -> float | None: ...

    @property
    def eval_data(self) -> tuple[Path, ...]: ...

    @property
    def eval_split(self) -> str: ...

    @property
    def batch_tokens(self) -> int: ...

    @property
    def seq(self) -> int: ...


class BatchSource(Protocol):
    """Where the batches of a rank come from."""

    def at(self, step: int) -> dict[str, torch.Tensor]:
        """Return the batch of a step, counted from 0, as arguments of the model."""

    def start(self, step: int, drawn: int) -> None:
        """Let `drawn` sequences be those that the first `step` steps have had."""

    def drawn(self, step: int) -> int:
        """Return how many sequences the first `step` steps take."""

    @property
    def uneven(self) -> bool:
        """Whether in some sequences more tokens count than in others."""


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """Data that are there."""

    batches: BatchSource
    """Of this rank."""
    held_out: Readable | None
    """To evaluate with; None: nothing is evaluated."""
    epoch: int
    """Sequences of a data set; 0: plain text, which has no epochs."""
    facts: dict[str, Any]
    """What tells them from other data; checkpoints keep it."""
    said: tuple[str, ...]
    """What a person is told of them, line by line."""
    not_packed: str
    """Why every sequence has a single sample; empty: several are packed into one, or the data are one long text."""


def open_data(
    options: DataOptions, source: ModelSource, ranks: Ranks, seed: int, folder: Path, report: Report
) -> TrainingData:
    """Find what the options name, and make it ready.

    Args:
        options: what is asked for.
        source: the model.
        ranks: that share the batches.
        seed: of the order.
        folder: for sequences that are prepared.
        report: is told what is done.

    Raises:
        ConfigError: it is missing, cannot be trained on, or options do not go together.
    """
    sequences = options.batch_tokens // options.seq
    share = {"sequences": sequences, "seed": seed, "rank": ranks.rank, "world_size": ranks.world_size}
    kinds = {path: is_data_set(path) for path in (*options.data, *options.eval_data)}
    if len({kinds[path] for path in options.data}) > 1:
        text = next(path for path in options.data if not kinds[path])
        raise ConfigError(f"--data {str(text)!r} is plain text, but other --data are datasets; use one kind")
    paths = options.eval_data or (options.data if options.eval_split else ())
    if paths and kinds[paths[0]]:
        Rows.of(paths, options.eval_split, "--eval-data", _HELD_OUT)  # said before hours are spent on the others
    opening = _Opening(options, source, ranks, folder, report)
    if options.data and kinds[options.data[0]]:
        found, facts, said = opening.data_set(options.data, options.split, "--data", ("train",))
        batches: BatchSource = Drawn(found, **share)
        epoch = len(found)
        said += f"; an epoch is {format_number(len(found) / sequences)} steps"
    else:
        _refuse_for_text(options)
        corpus = Corpus.of(options.data) if options.data else Corpus.of_standard_library()
        encode = _encode(options, source)
        check_bytes(source, encode)
        batches = Batches(corpus, length=options.seq, encode=encode, **share)
        epoch, facts = 0, {"text_bytes": corpus.size}
        said = f"data: plain text, {short(corpus.size)} bytes in {corpus.files} files"
    lines = [said]
    held_out: Readable | None = None
    if paths and kinds[paths[0]]:
        held_out, _, said = opening.data_set(paths, options.eval_split, "--eval-data", _HELD_OUT)
        lines.append(f"evaluation {said}")
    elif paths:
        if options.eval_split:
            raise ConfigError(f"--eval-split {options.eval_split} requires a dataset, but {paths[0]} is plain text")
        windows = Windows(Corpus.of(paths, "--eval-data"), options.seq, _encode(options, source))
        held_out = windows
        lines.append(f"evaluation data: plain text, {len(windows)} sequences")
    facts |= {"seed": seed, "batch_tokens": options.batch_tokens, "seq": options.seq}
    if opening.not_packed:
        lines.append(f"samples are padded, not packed: {opening.not_packed}")
    return TrainingData(
        batches=batches,
        held_out=held_out,
        epoch=epoch,
        facts=facts,
        said=tuple(lines),
        not_packed=opening.not_packed,
    )


def _encode(options: DataOptions, source: ModelSource) -> Callable[[str], list[int]] | None:
    """Return what makes tokens of plain text; None: they are its bytes."""
    encode = tokenizer_of(options.tokenizer or source.weights)
    if options.tokenizer is not None and encode is None:
        raise ConfigError(
            f"--tokenizer {str(options.tokenizer)!r} has no tokenizer.json; pass a folder that contains one"
        )
    return encode


def check_bytes(source: ModelSource, encode: Callable[[str], list[int]] | None) -> None:
    """Check that a model knows every byte, where tokens are bytes. Raises `ConfigError`."""
    vocabulary = source.config.vocab_size
    if encode is None and vocabulary < _BYTE_VALUES:
        raise ConfigError(f"the model's vocab_size is {vocabulary}, but byte tokens need {_BYTE_VALUES}")


class Windows:
    """Plain text to evaluate with: sequences side by side, from its beginning on."""

    def __init__(self, corpus: Corpus, length: int, encode: Callable[[str], list[int]] | None) -> None:
        """Find how many there are. Raises `ConfigError` if there is not one."""
        self._batches = Batches(corpus, sequences=1, length=length, seed=0, rank=0, world_size=1, encode=encode)
        self._count = corpus.size // self._batches.span

    def __len__(self) -> int:
        return self._count

    @property
    def uneven(self) -> bool:
        """Every token counts."""
        return False

    def rows(self, numbers: Sequence[int]) -> dict[str, torch.Tensor]:
        """Return some as `input_ids` and `labels`: int64 of shape (sequences, length)."""
        tokens = self._batches.from_places([number * self._batches.span for number in numbers])
        return {"input_ids": tokens, "labels": tokens.clone()}


class _Opening:
    """What data sets of one command have in common: model, tokenizer, ranks."""

    def __init__(self, options: DataOptions, source: ModelSource, ranks: Ranks, folder: Path, report: Report) -> None:
        self._options, self._source, self._ranks = options, source, ranks
        self._folder, self._report = folder, report
        self._tokenizer: Any = None  # once it is loaded
        self._apart: str | None = None  # of rank 0: what `why_apart` says, once it was asked
        self.not_packed = ""
        """Why samples are not packed, where any data set is of samples that could be."""

    def data_set(
        self, paths: Sequence[Path], split: str, option: str, preferred: Sequence[str]
    ) -> tuple[Sequences, dict[str, Any], str]:
        """Return the sequences of a data set, what tells it from others, and a line about it."""
        options, named = self._options, f"{option} {paths[0]}"
        if any(not is_data_set(path) for path in paths):
            raise ConfigError(f"{option}: plain text and datasets cannot be mixed; use one kind")
        rows = Rows.of(paths, split, option, preferred)
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(options.tokenizer, self._source.weights, named)
            check_vocabulary(self._tokenizer, self._source.config.vocab_size, self._source.name)
        reason = self._ranks.on_first(
            "checking whether packed samples see each other", lambda: self._why_apart(rows, named)
        )
        self.not_packed = self.not_packed or reason
        recipe = Recipe(
            text_column=options.text_column,
            loss_on=options.loss_on,
            length=options.seq,
            padding=padding_of(self._tokenizer),
            packs=not reason,
        )
        found = prepare(
            Preparation(rows, self._tokenizer, recipe, self._folder),
            self._ranks.collect,
            writes=self._ranks.local_rank == 0,
            report=self._report,
        )
        return found, {"content": found.facts.content}, _line(found.facts, options.seq)

    def _why_apart(self, rows: Rows, named: str) -> str:
        """Return why whole samples cannot lie side by side; empty where they can, or the data set is of texts."""
        first = next(iter(rows), None)
        if first is None or Columns.of(first, self._options.text_column, named).kind == "text":
            return ""
        if self._apart is None:
            self._report(f"checking whether packed samples see each other in {self._source.name}")
            self._apart = why_apart(self._source.config)
        return self._apart


def _refuse_for_text(options: DataOptions) -> None:
    given = {
        "--epochs": options.epochs,
        "--split": options.split,
        "--text-column": options.text_column,
        "--loss-on": options.loss_on if options.loss_on == "all" else "",
    }
    for name, value in given.items():
        if value:
            shown = f"{value:g}" if isinstance(value, float) else value
            raise ConfigError(
                f"{name} {shown} requires a dataset (parquet, jsonl, json, csv, arrow, or from save_to_disk), but "
                f"{options.data[0] if options.data else 'the standard library'} is plain text"
            )


def _line(facts: Facts, length: int) -> str:
    what = {"text": "texts", "completion": "prompts and completions", "chat": "chats"}[facts.kind]
    line = (
        f"data: {short(facts.rows)} {what} in {short(facts.sequences)} sequences of {length} tokens, "
        f"{facts.trained / (facts.sequences * length):.0%} of the tokens trained"
    )
    if facts.cut:
        line += f"; {facts.cut} longer than --seq {length} were truncated"
    if facts.empty:
        line += f"; {facts.empty} had no tokens to train on"
    return line
