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

if TYPE_CHECKING:
    from infinity_tools.plan.inputs import Asked

_SETTINGS: Final = {
    "memory.page_bytes": "--page-bytes",
    "state.format": "--state-format",
    "update.schedule": "--update",
    "activations.tier": "--activations",
    "run.retained_checkpoints": "--retained-checkpoints",
}
"""Settings that both commands have an option for, except the host cache, which is always passed."""
_HOST_CACHE: Final = "memory.host_bytes"


@dataclass(frozen=True, kw_only=True)
class _Batch:
    """Tokens of a step, named as in the `infinity train` options."""

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
    from infinity_tools.options import batch_words

    if why := _why_not(asked, found, written):
        return f"`infinity train` cannot run this plan: {why}"
    batch = _batch(found)
    words = ["infinity", "train", "--model", asked.model, "--dtype", asked.dtype]
    words += batch_words(
        batch.batch_tokens, batch.seq, batch.micro_tokens, asked.loss_tokens, checkpointing=asked.checkpointing
    )
    if asked.clip:
        words += ["--max-grad-norm", "1"]
    if asked.lora is not None:
        words += ["--lora", asked.lora]
    if asked.ranks > 1:
        words += ["--nproc", str(asked.ranks)]
    if settings.run.retained_checkpoints == 0:
        words += ["--keep", "never"]
    return shlex.join(words + _of_settings(asked, settings, written))


def _of_settings(asked: Asked, settings: Config, written: Path | None) -> list[str]:
    if written is not None:
        return ["--config", str(written)]
    words = [] if asked.config is None else ["--config", str(asked.config)]
    for path in settings.storage.paths:
        words += ["--nvme", path]
    words += ["--host-memory", format_setting(settings.memory.host_bytes)]
    for name, value in asked.settings.items():
        if name in _SETTINGS:
            words += [_SETTINGS[name], str(value)]
    return words


def _batch(found: Estimate) -> _Batch:
    work = found.workload
    each = work.batch_tokens // (work.world_size * work.micro_batches)
    return _Batch(
        batch_tokens=work.batch_tokens, micro_tokens=each if work.micro_batches > 1 else None, seq=work.sequence
    )


def _why_not(asked: Asked, found: Estimate, written: Path | None) -> str:
    from infinity_tools.options import check_batch, check_sequences
    from infinity_tools.presets import find_model

    if asked.optimizer != "adamw":
        return "it only supports --optimizer adamw"
    if asked.trainable is not None:
        return "it does not support --trainable; it trains all parameters or --lora"
    if asked.loop:
        return "it does not support --loop; each layer processes all micro-batches (--micro-tokens)"
    if written is None and (others := [*asked.settings.keys() - _SETTINGS.keys() - {_HOST_CACHE}]):
        return f"{others[0]} must be set in a --config file; pass --out to write one"
    try:
        check_sequences(_batch(found))
        check_batch(_batch(found), find_model(asked.model or ""), asked.ranks)
    except ConfigError as error:
        return str(error)
    return ""
