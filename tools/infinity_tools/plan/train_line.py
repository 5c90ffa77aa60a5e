"""The `infinity train` command that runs a plan."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from infinity.config import Config
from infinity.errors import ConfigError
from infinity.estimate.estimate import Estimate
from infinity.units import format_setting
from infinity_tools.plan.lora import Lora

if TYPE_CHECKING:
    from infinity_tools.plan.inputs import Asked

_OWN: Final = ("memory.host_bytes", "run.retained_checkpoints", "storage.paths")
"""Settings for which `infinity train` has options of its own."""


@dataclass(frozen=True, kw_only=True)
class _Batch:
    """Tokens of a step, named as in `infinity_tools.batch`."""

    batch_tokens: int
    micro_tokens: int | None
    seq: int


def train_line(asked: Asked, found: Estimate, settings: Config, written: Path | None) -> str | None:
    """Return the command that trains the planned run, or the reason why `infinity train` cannot run it.

    Args:
        asked: Options of `infinity plan`.
        found: Estimate.
        settings: Settings of the run, with its folders.
        written: File that contains the settings, if any.

    Returns:
        The command or the reason. None without --model, with several nodes, and if the plan does not fit.
    """
    if asked.model is None or found.problems or asked.nodes > 1:
        return None
    from infinity_tools.batch import batch_words
    from infinity_tools.presets import find_model

    if why := _why_not(asked, found):
        return f"`infinity train` cannot run this plan: {why}"
    words = ["infinity", "train", "--model", asked.model, "--bf16", str(asked.dtype == "bf16").lower()]
    if find_model(asked.model).weights is not None:
        words += ["--data", "DATA"]
    words += batch_words(_batch(found), asked.ranks, checkpointing=asked.checkpointing)
    words += ["--max_grad_norm", "1" if asked.clip else "0"]
    if asked.lora is not None:
        words += Lora.of(asked.lora).words
    if asked.ranks > 1:
        words += ["--nproc", str(asked.ranks)]
    if settings.run.retained_checkpoints == 0:
        words += ["--save_strategy", "no"]
    elif settings.run.retained_checkpoints > 1:
        words += ["--save_total_limit", str(settings.run.retained_checkpoints)]
    return shlex.join(words + _of_settings(asked, settings, written))


def _of_settings(asked: Asked, settings: Config, written: Path | None) -> list[str]:
    if written is not None:
        return ["--config", str(written)]
    words = [] if asked.config is None else ["--config", str(asked.config)]
    for path in settings.storage.paths:
        words += ["--nvme", path]
    words += ["--host-memory", format_setting(settings.memory.host_bytes)]
    for name, value in asked.settings.items():
        if name not in _OWN:
            words += [f"--offload.{name}", str(value)]
    return words


def _batch(found: Estimate) -> _Batch:
    work = found.workload
    each = work.batch_tokens // (work.world_size * work.micro_batches)
    return _Batch(
        batch_tokens=work.batch_tokens, micro_tokens=each if work.micro_batches > 1 else None, seq=work.sequence
    )


def _why_not(asked: Asked, found: Estimate) -> str:
    from infinity_tools.batch import check_batch, check_sequences, why_not_sliced
    from infinity_tools.presets import find_model

    if asked.optimizer != "adamw":
        return "it only supports --optimizer adamw"
    if asked.trainable is not None:
        return "it does not support --trainable; it trains all parameters or --peft"
    if asked.loop:
        return "it does not support --loop; each layer processes all micro-batches (--gradient_accumulation_steps)"
    if why := why_not_sliced(asked.loss_tokens):
        return why
    work = found.workload
    sequences, rest = divmod(work.batch_tokens, work.world_size * work.sequence)
    if not rest and sequences % work.micro_batches:
        possible = ", ".join(str(number) for number in range(1, sequences + 1) if sequences % number == 0)
        return (
            f"--micro-batches {work.micro_batches} does not divide the {sequences} sequences per rank equally; "
            f"possible: {possible}"
        )
    try:
        check_sequences(_batch(found))
        check_batch(_batch(found), find_model(asked.model or ""), asked.ranks)
    except ConfigError as error:
        return str(error)
    return ""
