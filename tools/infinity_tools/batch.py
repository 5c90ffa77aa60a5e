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


def check_batch(options: Workload, source: ModelSource) -> None:
    """Check that the batch can be divided into micro-batches and suits the model. Raises `ConfigError`."""
    if options.micro_tokens is not None and (
        options.micro_tokens % options.seq or options.batch_tokens % options.micro_tokens
    ):
        sequences = options.batch_tokens // options.seq
        possible = ", ".join(str(number * options.seq) for number in range(1, sequences + 1) if sequences % number == 0)
        raise ConfigError(
            f"--micro-tokens {options.micro_tokens} does not divide the {options.batch_tokens} tokens of a batch into "
            f"equal slices of whole sequences of {options.seq}; possible: {possible}"
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


def batch_words(batch: Workload, *, checkpointing: bool) -> list[str]:
    """Return the options of `infinity train` that define the computation of a step."""
    micro = batch.micro_tokens or batch.batch_tokens
    words = ["--max_length", str(batch.seq), "--per_device_train_batch_size", str(micro // batch.seq)]
    if batch.batch_tokens > micro:
        words += ["--gradient_accumulation_steps", str(batch.batch_tokens // micro)]
    return [*words, "--gradient_checkpointing", str(checkpointing).lower()]
