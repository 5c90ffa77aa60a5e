"""Options of `infinity train`, and checks of their combinations."""

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
"""Values of `--loss-on`."""


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Options of a training run. The location of its state is in `Config`."""

    model: str
    """Preset, config.json or model folder; see `find_model`."""
    strict: bool
    """``True`` to reject a pretrained folder with missing or unexpected weights."""
    data: tuple[Path, ...]
    """Datasets or text files to train on. Empty: the source code of Python's standard library."""
    split: str
    """Dataset split to train on. Empty: `train`, or the only one."""
    text_column: str
    """Dataset column with texts or chats. Empty: detected from the column names."""
    loss_on: str
    """Dataset tokens that contribute to the loss: `completions` (completions and assistant messages) or `all`."""
    tokenizer: Path | None
    """Folder of the tokenizer. None: the model folder."""
    lora: str | None
    """LoRA options, see `Lora`. None: all parameters are trained."""
    epochs: float | None
    """Number of passes over the dataset, instead of `steps`."""
    eval_data: tuple[Path, ...]
    """Evaluation data. Empty: `eval_split` of `data`, if given."""
    eval_split: str
    """Evaluation split."""
    eval_every: int
    """Steps between evaluations. 0: only after the last step."""
    log: tuple[str, ...]
    """Trackers, see `TRACKERS`."""
    out: Path | None
    """Folder of the summary and logs. None: a folder in `runs/`, named after the current time."""
    batch_tokens: int
    """Tokens per step, summed over all ranks."""
    micro_tokens: int | None
    """Tokens per micro-batch of a rank. None: all tokens of the rank in a step."""
    loss_tokens: int | None
    """Tokens whose logits exist at the same time. None: all tokens of a micro-batch."""
    seq: int
    """Tokens per sequence."""
    steps: int
    """Total number of steps of the run, including steps before a resume."""
    given: Mapping[str, Any]
    """Recipe options from the command line."""
    override: bool
    """``True`` if `given` replaces the stored recipe of a resumed run."""
    said: frozenset[str]
    """Names of the options that were passed. A resumed run takes all other options from its checkpoint."""
    again: tuple[str, ...]
    """The command line, without the options that the command for resuming the run sets itself."""
    checkpoint_every: int
    """Steps between checkpoints. 0: only one, at the end."""
    dtype: str
    """Compute dtype: `bf16`, `fp32`, or `auto` (bf16 if the processor supports it)."""
    activation_checkpointing: bool
    """``True`` if layers are recomputed in backward."""
    threads: int
    """CPU threads of torch. 0: torch's default."""
    metrics_port: int | None
    """Port on which the first rank of each node serves metrics. None: no metrics. 0: any free port."""
    metrics_host: str
    """Address on which metrics are served."""
    metrics_linger: float
    """Seconds for which metrics stay available after the last step."""
    json: bool
    """``True`` to print only the summary to standard output, as JSON."""


def check_settings(options: TrainOptions, settings: Config) -> None:
    """Check that the settings are consistent with each other and with the options. Raises `ConfigError`."""
    if "max_grad_norm" in options.given:
        check_clipping("--max-grad-norm", settings)
    if settings.storage.paths:
        check_config(settings)
    elif settings.run.resume and options.out is None:
        raise ConfigError("--resume requires --nvme, or the --out folder of the run to resume")


def check_options(options: TrainOptions) -> None:
    """Check that the options are consistent, after options stored in a checkpoint have been applied.

    Raises `ConfigError`, `MissingPackageError`.
    """
    check_sequences(options)
    if options.loss_on not in LOSS_ON:
        raise ConfigError(f"--loss-on {options.loss_on!r} is not one of {', '.join(LOSS_ON)}")
    if options.epochs is not None and not 0 < options.epochs < math.inf:
        raise ConfigError(f"--epochs {options.epochs:g} must be greater than 0")
    if options.epochs is not None and "steps" in options.said:
        raise ConfigError(
            f"--epochs {options.epochs:g} and --steps {options.steps} both set the end of the run; pass one of them"
        )
    if options.eval_every and not (options.eval_data or options.eval_split):
        raise ConfigError(f"--eval-every {options.eval_every} requires --eval-data or --eval-split")
    check_trackers(options.log)


def check_clipping(by: str, settings: Config) -> None:
    """Check that updates do not run in backward if option `by` enables clipping. Raises `ConfigError`."""
    if settings.update.schedule == "in_backward":
        raise ConfigError(
            f"--update in_backward runs updates before the global norm is known, but {by} needs it; "
            "use --update in_forward or omit --update"
        )


class Batch(Protocol):
    """Options that define the tokens of a step, named as in `TrainOptions`."""

    @property
    def batch_tokens(self) -> int: ...

    @property
    def micro_tokens(self) -> int | None: ...

    @property
    def seq(self) -> int: ...


def check_sequences(options: Batch) -> None:
    """Check that the batch is a whole number of sequences. Raises `ConfigError`."""
    if options.batch_tokens % options.seq:
        near = max(1, round(options.batch_tokens / options.seq)) * options.seq
        raise ConfigError(f"--batch-tokens {options.batch_tokens} is not a multiple of --seq {options.seq}; try {near}")


def check_batch(options: Batch, source: ModelSource, world_size: int) -> None:
    """Check that the batch can be divided among the ranks and suits the model. Raises `ConfigError`."""
    sequences = options.batch_tokens // options.seq
    if sequences % world_size:
        raise ConfigError(
            f"--batch-tokens {options.batch_tokens} makes {sequences} sequences of {options.seq} tokens, which cannot "
            f"be divided equally among {world_size} ranks; try {options.seq * world_size}"
        )
    if options.micro_tokens is not None and (
        options.micro_tokens % options.seq or options.batch_tokens % (options.micro_tokens * world_size)
    ):
        each = sequences // world_size
        possible = ", ".join(str(number * options.seq) for number in range(1, each + 1) if each % number == 0)
        raise ConfigError(
            f"--micro-tokens {options.micro_tokens} does not divide the {options.batch_tokens // world_size} tokens "
            f"per rank into equal slices of whole sequences of {options.seq}; possible: {possible}"
        )
    vocabulary = getattr(source.config, "vocab_size", None)
    if not isinstance(vocabulary, int):
        raise ConfigError(f"--model {source.name} is not a language model: its configuration has no vocab_size")
    if (layers := getattr(source.config, "num_hidden_layers", 1)) < 1:
        raise ConfigError(f"--model {source.name} has num_hidden_layers = {layers}; at least 1 is required")
    longest = getattr(source.config, "max_position_embeddings", None)
    if longest is not None and options.seq > longest:
        raise ConfigError(f"--seq {options.seq} exceeds the {longest} positions of the model (max_position_embeddings)")


def micro_batches(options: TrainOptions, ranks: Ranks) -> int:
    """Return the number of micro-batches per rank per step."""
    return options.batch_tokens // (options.micro_tokens * ranks.world_size) if options.micro_tokens else 1


def batch_words(
    batch_tokens: int, seq: int, micro_tokens: int | None, loss_tokens: int | None, *, checkpointing: bool
) -> list[str]:
    """Return the options of `infinity train` that define the computation of a step."""
    words = ["--batch-tokens", str(batch_tokens), "--seq", str(seq)]
    if micro_tokens is not None:
        words += ["--micro-tokens", str(micro_tokens)]
    if loss_tokens is not None:
        words += ["--loss-tokens", str(loss_tokens)]
    return [*words, "--activation-checkpointing"] if checkpointing else words
