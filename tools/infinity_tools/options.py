"""What `infinity train` is asked for, and what of it cannot be."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from infinity.config import Config, check_config
from infinity.errors import ConfigError
from infinity.ranks import Ranks
from infinity_tools.presets import ModelSource
from infinity_tools.tracking import check_trackers

LOSS_ON = ("completions", "all")
"""What `--loss-on` may name."""


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """What to train and how; where the state lives is in `Config`."""

    model: str
    """Preset, or folder of a configuration or a pretrained model, see `find_model`."""
    strict: bool
    """Refuse a pretrained folder that lacks weights of the model, or has others."""
    data: tuple[Path, ...]
    """Data sets to train on, or files of text; none: the sources of Python's standard library."""
    split: str
    """Of data sets that have several; empty: `train`, or the only one."""
    text_column: str
    """Of data sets; empty: found by the names of columns."""
    loss_on: str
    """Of data sets: `completions`, what a completion or an assistant says, or `all`."""
    tokenizer: Path | None
    """Folder of the tokenizer; None: that of the model."""
    lora: str | None
    """See `Lora`; None: all parameters are trained."""
    epochs: float | None
    """How often every sequence of a data set is trained on, instead of `steps`."""
    eval_data: tuple[Path, ...]
    """What to evaluate with; none: `eval_split` of `data`, if that is named."""
    eval_split: str
    """Split to evaluate with."""
    eval_every: int
    """Steps between evaluations; 0: only at the end."""
    log: tuple[str, ...]
    """See `TRACKERS`."""
    out: Path | None
    """Folder of summary and log; None: `runs/` and the time."""
    batch_tokens: int
    """Tokens of a step, over all ranks."""
    micro_tokens: int | None
    """Tokens of a rank's forward pass; None: all of its tokens of a step."""
    loss_tokens: int | None
    """Tokens whose logits are there at a time; None: those of a forward pass."""
    seq: int
    """Tokens of a sequence."""
    steps: int
    """Step at which the run ends, counted from the very first."""
    given: Mapping[str, Any]
    """What the command line says of the recipe."""
    override: bool
    """Whether what is `given` replaces the recipe of a run that goes on."""
    said: frozenset[str]
    """Names of the options that the command line has said; the others may be those of the run that goes on."""
    again: tuple[str, ...]
    """The command line without what a run that goes on gets anew."""
    checkpoint_every: int
    """Steps between checkpoints; 0: only one, at the end."""
    dtype: str
    """What the model computes in: `bf16`, `fp32`, or `auto`: bf16 where the processor has it."""
    activation_checkpointing: bool
    """Whether blocks compute their forward again in backward."""
    threads: int
    """CPU threads of torch; 0: torch's default."""
    metrics_port: int | None
    """Where rank 0 serves its metrics; None: nowhere, 0: any free port."""
    metrics_host: str
    """Address that it listens on."""
    metrics_linger: float
    """Seconds that it still serves after the last step."""
    json: bool
    """Whether the summary goes to standard output as JSON, and nothing else."""


def check_settings(options: TrainOptions, settings: Config) -> None:
    """Refuse settings that do not go together, or not with the options. Raises `ConfigError`."""
    if "max_grad_norm" in options.given:
        check_clipping("--max-grad-norm", settings)
    if settings.storage.paths:
        check_config(settings)
    elif settings.run.resume and options.out is None:
        raise ConfigError("--resume needs --nvme, or the --out of the run that is to go on")


def check_options(options: TrainOptions) -> None:
    """Refuse options that do not go together, once those of a checkpoint are taken up.

    Raises `ConfigError`, `MissingPackageError`.
    """
    check_sequences(options)
    if options.loss_on not in LOSS_ON:
        raise ConfigError(f"--loss-on {options.loss_on!r} is not one of {', '.join(LOSS_ON)}")
    if options.epochs is not None and not 0 < options.epochs < math.inf:
        raise ConfigError(f"--epochs {options.epochs:g} must be above 0")
    if options.epochs is not None and "steps" in options.said:
        raise ConfigError(f"--epochs {options.epochs:g} and --steps {options.steps} both say when to end; name one")
    if options.eval_every and not (options.eval_data or options.eval_split):
        raise ConfigError(f"--eval-every {options.eval_every} needs --eval-data or --eval-split")
    check_trackers(options.log)


def check_clipping(by: str, settings: Config) -> None:
    """Refuse clipping where updates run in backward; `by` asks for it. Raises `ConfigError`."""
    if settings.update.schedule == "in_backward":
        raise ConfigError(
            f"--update in_backward updates before the global norm is known, which {by} needs; "
            "use --update in_forward or leave --update out"
        )


class Batch(Protocol):
    """The tokens of a step, as `TrainOptions` names them."""

    @property
    def batch_tokens(self) -> int: ...

    @property
    def micro_tokens(self) -> int | None: ...

    @property
    def seq(self) -> int: ...


def check_sequences(options: Batch) -> None:
    """Refuse a batch that is no whole number of sequences. Raises `ConfigError`."""
    if options.batch_tokens % options.seq:
        near = max(1, round(options.batch_tokens / options.seq)) * options.seq
        raise ConfigError(f"--batch-tokens {options.batch_tokens} is not a multiple of --seq {options.seq}; try {near}")


def check_batch(options: Batch, source: ModelSource, world_size: int) -> None:
    """Refuse a batch that so many ranks cannot share, or a model that cannot be trained on it. Raises `ConfigError`."""
    sequences = options.batch_tokens // options.seq
    if sequences % world_size:
        raise ConfigError(
            f"--batch-tokens {options.batch_tokens} makes {sequences} sequences of {options.seq} tokens, which "
            f"{world_size} ranks cannot share equally; try {options.seq * world_size}"
        )
    if options.micro_tokens is not None and (
        options.micro_tokens % options.seq or options.batch_tokens % (options.micro_tokens * world_size)
    ):
        each = sequences // world_size
        possible = ", ".join(str(number * options.seq) for number in range(1, each + 1) if each % number == 0)
        raise ConfigError(
            f"--micro-tokens {options.micro_tokens} cannot share the {options.batch_tokens // world_size} tokens "
            f"per rank equally in sequences of {options.seq}; possible: {possible}"
        )
    vocabulary = getattr(source.config, "vocab_size", None)
    if not isinstance(vocabulary, int):
        raise ConfigError(f"--model {source.name} is no language model: its configuration has no vocab_size")
    if (layers := getattr(source.config, "num_hidden_layers", 1)) < 1:
        raise ConfigError(f"--model {source.name} has {layers} layers (num_hidden_layers); it needs 1 or more")
    longest = getattr(source.config, "max_position_embeddings", None)
    if longest is not None and options.seq > longest:
        raise ConfigError(f"--seq {options.seq} is above the {longest} positions of the model")


def micro_batches(options: TrainOptions, ranks: Ranks) -> int:
    """Return the number of micro-batches of a rank in a step."""
    return options.batch_tokens // (options.micro_tokens * ranks.world_size) if options.micro_tokens else 1


def batch_words(
    batch_tokens: int, seq: int, micro_tokens: int | None, loss_tokens: int | None, *, checkpointing: bool
) -> list[str]:
    """Return the options of `infinity train` that say what a step computes."""
    words = ["--batch-tokens", str(batch_tokens), "--seq", str(seq)]
    if micro_tokens is not None:
        words += ["--micro-tokens", str(micro_tokens)]
    if loss_tokens is not None:
        words += ["--loss-tokens", str(loss_tokens)]
    return [*words, "--activation-checkpointing"] if checkpointing else words
