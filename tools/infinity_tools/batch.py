"""Batch options of `infinity tune`, in tokens, and the corresponding ones of `infinity train`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infinity.errors import ConfigError
from infinity_tools.presets import ModelSource

if TYPE_CHECKING:
    from infinity_tools.tune.trial import Workload


def why_not_sliced(loss_tokens: int | None) -> str:
    """Return the reason why `infinity train` cannot compute the loss in slices; empty if it is not sliced."""
    return "it has no counterpart of --loss-tokens; omit the option" if loss_tokens is not None else ""


def check_batch(options: Workload, source: ModelSource, world_size: int) -> None:
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
    check_language_model(source)
    longest = getattr(source.config, "max_position_embeddings", None)
    if longest is not None and options.seq > longest:
        raise ConfigError(f"--seq {options.seq} exceeds the {longest} positions of the model (max_position_embeddings)")


def check_language_model(source: ModelSource) -> None:
    """Check that a model has a vocabulary and layers. Raises `ConfigError`."""
    vocabulary = getattr(source.config, "vocab_size", None)
    if not isinstance(vocabulary, int):
        raise ConfigError(f"--model {source.name} is not a language model: its configuration has no vocab_size")
    if vocabulary < 1:
        raise ConfigError(f"--model {source.name} has vocab_size = {vocabulary}; at least 1 is required")
    if (layers := getattr(source.config, "num_hidden_layers", 1)) < 1:
        raise ConfigError(f"--model {source.name} has num_hidden_layers = {layers}; at least 1 is required")


def batch_words(batch: Workload, ranks: int, *, checkpointing: bool) -> list[str]:
    """Return the options of `infinity train` that define the computation of a step."""
    each = batch.batch_tokens // ranks
    micro = each if batch.micro_tokens is None else batch.micro_tokens
    words = ["--max_length", str(batch.seq), "--per_device_train_batch_size", str(micro // batch.seq)]
    if each > micro:
        words += ["--gradient_accumulation_steps", str(each // micro)]
    return [*words, "--gradient_checkpointing", str(checkpointing).lower()]
