"""The micro-batches of a Trainer's step, run layer-major as one batch where that gives what its loop would."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers import Trainer

from infinity.accumulation.causal_lm import causal_lm_in
from infinity.accumulation.micro_batches import LayerMajor
from infinity.errors import UnsupportedError
from infinity.formats.adapters import peft_model
from infinity.ranks import Ranks

_log = logging.getLogger("infinity")


class Accumulation:
    """Joins the micro-batches of a step: those that come first are held back, the last one runs all of them."""

    def __init__(self, layers: LayerMajor) -> None:
        self._layers = layers
        self._joined = 0  # micro-batches of this step that run as one batch; 0: each by itself
        self._held: list[Mapping[str, torch.Tensor]] = []

    def begin(self, batches: Sequence[Any], labels: Any) -> None:
        """Begin a step, all ranks together.

        Micro-batches of several lengths run one by one: padding would change bits, and what is computed. If those of
        one rank are such, all ranks run theirs one by one: weights are gathered as often on each of them.

        Args:
            batches: the micro-batches of this rank.
            labels: how many the step's loss is divided by; None where each micro-batch has a mean of its own.

        Raises:
            LostRankError: another rank is gone.
        """
        self._held = []
        joined = len(batches) if labels is not None and len(batches) > 1 and _alike(batches) else 0
        found = set(Ranks.current().collect(joined))
        self._joined = joined if len(found) == 1 else 0

    def run(self, inputs: Mapping[str, torch.Tensor], step: Callable[[Any], torch.Tensor]) -> torch.Tensor | None:
        """Run the step on what is due with a micro-batch; None where that is held back."""
        if not self._joined:
            return step(inputs)
        self._held.append(inputs)
        if len(self._held) < self._joined:
            return None
        held, self._held = self._held, []
        whole = {name: torch.cat([batch[name] for batch in held]) for name in inputs}
        with self._layers.slices(self._joined):
            return step(whole)


def _alike(batches: Sequence[Any]) -> bool:
    """Whether batches have the same names, of tensors of the same shapes, whose first dimension is the same too."""
    shapes = []
    for batch in batches:
        if not isinstance(batch, Mapping) or not all(isinstance(value, torch.Tensor) for value in batch.values()):
            return False
        shapes.append({name: (value.shape, value.dtype) for name, value in batch.items()})
        if any(not shape for shape, _ in shapes[-1].values()):
            return False
    rows = {shape[0] for shape, _ in shapes[0].values()}
    return len(rows) == 1 and all(other == shapes[0] for other in shapes[1:])


def accumulation_of(trainer: Any, wanted: bool | None) -> Accumulation | None:
    """Return what runs the micro-batches of a step as one batch; None where the Trainer's loop runs them.

    Args:
        trainer: whose model is sharded.
        wanted: whether that is to be; None: where it serves.

    Raises:
        UnsupportedError: it is wanted, and cannot be.
    """
    if wanted is False or (trainer.args.gradient_accumulation_steps < 2 and not wanted):
        return None
    reason = _why_not(trainer)
    if reason is None:
        try:
            accumulation = Accumulation(LayerMajor(trainer.model, head=not _is_sft(trainer)))
        except UnsupportedError as error:
            reason = str(error)
        else:
            if trainer.args.activation_checkpointing:
                _log.info("activations are recomputed slice by slice; the Trainer's own checkpointing is left off")
                trainer.args.activation_checkpointing = trainer.args.gradient_checkpointing = False
            return accumulation
    if wanted:
        raise UnsupportedError(f"layer_major=True cannot be: {reason}")
    _log.warning(
        "gradient_accumulation_steps = %d runs as a loop, which reads all weights twice per micro-batch and keeps "
        "gradients on NVMe in between: %s", trainer.args.gradient_accumulation_steps, reason,
    )  # fmt: skip
    return None


def _why_not(trainer: Any) -> str | None:
    """Return why the loss of a whole step is not what the micro-batches' losses add up to, or would take its logits."""
    if trainer.args.torch_compile:
        return "torch_compile is set, and each slice would be compiled by itself"
    if trainer.compute_loss_func is not None:
        return "compute_loss_func is given, which takes the logits of a whole batch"
    if trainer.label_smoother is not None:
        return "label_smoothing_factor is set, which takes the logits of a whole batch"
    if _is_sft(trainer):
        if trainer.args.loss_type not in ("nll", "dft") or trainer.aux_loss_enabled:
            return f"the loss of SFTTrainer ({trainer.args.loss_type}) is no sum over labels"
        return None
    own = type(trainer).compute_loss
    if own is not Trainer.compute_loss:
        return f"{own.__qualname__} computes the loss"
    if not trainer.model_accepts_loss_kwargs or causal_lm_in(trainer.model) is None:
        return f"{type(trainer.model).__name__} is no causal language model whose loss is a sum over labels"
    adapted = peft_model(trainer.model)
    if adapted is not None and adapted.active_peft_config.peft_type == "PREFIX_TUNING":
        return "its prefixes are keys and values that layers are given, which cannot be sliced"
    return None


def _is_sft(trainer: Any) -> bool:
    """Whether it is TRL's SFTTrainer itself, which computes head and loss in chunks of tokens."""
    trl = sys.modules.get("trl.trainer.sft_trainer")
    return trl is not None and type(trainer).compute_loss is trl.SFTTrainer.compute_loss
