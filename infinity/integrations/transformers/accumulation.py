"""Layer-major execution of the micro-batches of a Trainer step, if this does not change the definition of the loss."""

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
    """Joins the micro-batches of a step. All but the last are held back, and the last runs all of them as one batch."""

    def __init__(self, layers: LayerMajor) -> None:
        self._layers = layers
        self._joined = 0  # number of micro-batches that run as one batch; 0 if each runs by itself
        self._held: list[Mapping[str, torch.Tensor]] = []

    def begin(self, batches: Sequence[Any], labels: Any) -> None:
        """Start a step. All ranks must call this method together.

        Micro-batches of different lengths run one by one, because padding would change the numerical results and add
        computation. If this applies to any rank, all ranks run their micro-batches one by one, because all ranks must
        gather weights equally often.

        Args:
            batches: micro-batches of this rank.
            labels: number by which the loss of the step is divided, or None if each micro-batch computes its own mean.

        Raises:
            LostRankError: if another rank exited.
        """
        self._held = []
        joined = len(batches) if labels is not None and len(batches) > 1 and _alike(batches) else 0
        found = set(Ranks.current().collect(joined))
        self._joined = joined if len(found) == 1 else 0

    def run(self, inputs: Mapping[str, torch.Tensor], step: Callable[[Any], torch.Tensor]) -> torch.Tensor | None:
        """Run a micro-batch, or the batch that it completes. Return None if the micro-batch is held back."""
        if not self._joined:
            return step(inputs)
        self._held.append(inputs)
        if len(self._held) < self._joined:
            return None
        held, self._held = self._held, []
        joined, self._joined = self._joined, 0  # later micro-batches, such as a user's own, run by themselves
        whole = {name: torch.cat([batch[name] for batch in held]) for name in inputs}
        with self._layers.slices(joined):
            return step(whole)


def _alike(batches: Sequence[Any]) -> bool:
    """Return whether all batches contain tensors of the same names, shapes and dtypes, and of one batch size."""
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
    """Return an object that runs the micro-batches of a step as one batch, or None to use the Trainer's loop.

    Args:
        trainer: trainer with a sharded model.
        wanted: True to require layer-major execution, False to disable it, None to use it if the loss allows it.

    Raises:
        UnsupportedError: if layer-major execution is required but not possible.
    """
    if wanted is False or (trainer.args.gradient_accumulation_steps < 2 and not wanted):
        return None
    reason = why_not_layer_major(trainer)
    if reason is None:
        try:
            accumulation = Accumulation(LayerMajor(trainer.model, head=not _is_sft(trainer)))
        except UnsupportedError as error:
            reason = str(error)
        else:
            if trainer.args.activation_checkpointing:
                _log.info("activations are recomputed slice by slice; the Trainer's gradient checkpointing is disabled")
                trainer.args.activation_checkpointing = trainer.args.gradient_checkpointing = False
            return accumulation
    if wanted:
        raise UnsupportedError(f"layer_major=True is not supported: {reason}")
    _log.warning(
        "gradient_accumulation_steps = %d runs as a loop, which reads all weights twice per micro-batch and stores "
        "gradients on NVMe between them: %s", trainer.args.gradient_accumulation_steps, reason,
    )  # fmt: skip
    return None


def why_not_layer_major(trainer: Any) -> str | None:
    """Return the reason why layer-major execution is not possible, or None if it is possible."""
    if trainer.args.torch_compile:
        return "torch_compile is set, which would compile each slice separately"
    if trainer.compute_loss_func is not None:
        return "compute_loss_func is set, which needs the logits of the whole batch"
    if trainer.label_smoother is not None:
        return "label_smoothing_factor is set, which needs the logits of the whole batch"
    if _is_sft(trainer):
        if trainer.args.loss_type not in ("nll", "dft") or trainer.aux_loss_enabled:
            return f"the SFTTrainer loss ({trainer.args.loss_type}) is not a sum over labels"
        return None
    own = _loss_function(trainer)
    if own is not Trainer.compute_loss:
        return f"{getattr(own, '__qualname__', own)} overrides the computation of the loss"
    if not trainer.model_accepts_loss_kwargs or causal_lm_in(trainer.model) is None:
        return f"{type(trainer.model).__name__} is not a causal language model whose loss is a sum over labels"
    adapted = peft_model(trainer.model)
    if adapted is not None and adapted.active_peft_config.peft_type == "PREFIX_TUNING":
        return "prefix tuning passes keys and values to the layers, which cannot be sliced"
    return None


def _is_sft(trainer: Any) -> bool:
    """Return whether TRL's SFTTrainer computes the loss. It runs the head and the loss on chunks of tokens."""
    trl = sys.modules.get("trl.trainer.sft_trainer")
    return trl is not None and _loss_function(trainer) is trl.SFTTrainer.compute_loss


def _loss_function(trainer: Any) -> Any:
    """Return the function that `trainer.compute_loss` calls. It may be defined by a subclass, or set on the object."""
    return getattr(trainer.compute_loss, "__func__", trainer.compute_loss)
