"""Layer-major accumulation: each FSDP module runs all slices of the batch before the next FSDP module starts.

FSDP2's hooks run once for the whole batch. Regardless of the number of slices, FSDP2 gathers each FSDP module once in
forward and once in backward, and reduces its gradients once. Only the inputs of FSDP modules are kept for backward; all
other activations are recomputed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from infinity import torch_private
from infinity.accumulation.causal_lm import SlicedCausalLM, causal_lm_in, computes_loss
from infinity.accumulation.sliced_forward import SlicedForward, SlicedNorm, replace_forward
from infinity.accumulation.slicing import BatchDim
from infinity.errors import ConfigError, UnsupportedError

_log = logging.getLogger("infinity")


def micro_batches(model: nn.Module, count: int, *, batch_dim: BatchDim = None) -> None:
    """Make every FSDP module of a sharded model process its batch in `count` slices.

    The number of slices does not affect how often weights are read and gathered. Call this function after
    `fully_shard`, either before or after `infinity.offload`, and pass complete batches to the model. Call it again to
    change the number of slices.

    The first forward calls each layer with one and two rows (examples) of the batch, to determine which arguments to
    slice, along which dimension to concatenate outputs, and whether rows are independent of each other. Layers whose
    rows depend on each other are not supported. Examples are attention along the batch dimension, `BatchNorm` in
    training, packed sequences, and scales, ranks, capacities or counts computed over all rows. A layer is tested again
    when a non-tensor argument has a new value. After 64 such variants (for example, if an argument is a step counter),
    every call with a new variant repeats the test, which costs time.

    If gradients are enabled, backward recomputes each slice with its original random state, so buffers that the forward
    modifies are modified twice. If gradients are disabled, no inputs are kept.

    If a transformers causal language model receives `labels`, it also runs the LM head and the loss slice by slice. It
    divides the summed loss by the number of labels in the whole batch (or by `num_items_in_batch`), and returns no
    logits. In other models, move computations that should be sliced into a separate FSDP module that returns one row
    per sequence.

    Args:
        model: model on which `fully_shard` was called after it was called on the layers. Sharded layers must not be
            nested.
        count: number of slices per batch. The batch size must be divisible by it; otherwise, the forward raises
            `ConfigError`.
        batch_dim: batch dimension of the first tensor argument of each layer. By default, it is given by `batch_first`
            for PyTorch's own layers, and is 0 for all other layers. If the shapes allow several ways to slice the other
            arguments, the forward raises an error. In that case, pass a mapping from argument names to batch
            dimensions, with ``None`` for arguments that must not be sliced.

    Raises:
        ConfigError: if `count` is less than 1.
        UnsupportedError: if the model or its layers are not sharded, sharded layers are nested, or the model already
            uses activation checkpointing.
    """
    if count < 1:
        raise ConfigError(f"micro_batches requires a count of at least 1, got {count}")
    _sliced(model, count, batch_dim, head=True)


def sliced_loss(model: nn.Module, tokens: int) -> None:
    """Make a transformers causal language model run its LM head and loss on `tokens` tokens at a time.

    Use this function for long sequences or large vocabularies. Logits (in the compute dtype and in fp32) and their
    gradients are in memory for only `tokens` tokens at a time, and logits are recomputed in backward. If the model
    receives `labels`, it returns no logits, only the loss of the whole batch: the sum over all labels divided by their
    number (or by `num_items_in_batch`).

    The gradients of the slices are summed in the reduce dtype, from the first slice to the last. The sums differ from
    the gradients of an unsliced batch by rounding errors, but are bitwise equal with and without paging. Call this
    function after `fully_shard`, either before or after `infinity.offload` and `micro_batches`. `torch.autograd.grad`
    and `backward(inputs=…)` are not supported. PEFT adapters are supported.

    Args:
        model: model on which `fully_shard` was called. The head must belong to the root FSDP module.
        tokens: number of tokens per slice, counted across all sequences of a batch.

    Raises:
        ConfigError: if `tokens` is less than 1.
        UnsupportedError: if the model is not a sharded transformers causal language model.
    """
    if tokens < 1:
        raise ConfigError(f"sliced_loss requires at least 1 token per slice, got {tokens}")
    if not torch_private.is_sharded_module(model):
        raise UnsupportedError(
            "sliced_loss requires a sharded model; create it with infinity.from_pretrained or "
            "infinity.from_config, or call fully_shard on its layers and on the model first"
        )
    found = causal_lm_in(model)
    if found is None:
        raise UnsupportedError(
            f"{type(model).__name__} is not a transformers causal language model whose loss is a sum over labels; "
            "slice the loss in your own code"
        )
    forward = found.forward
    if not isinstance(forward, SlicedCausalLM):
        forward = SlicedCausalLM(found, 0, _fsdp_modules(model), model)
        replace_forward(found, forward)
    forward.tokens = tokens


def _fsdp_modules(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if name and torch_private.is_sharded_module(module)}


class LayerMajor:
    """Slice the batches of a sharded model as `micro_batches` does, but only inside the context `slices`.

    Outside of this context, FSDP modules run their original forwards.

    Args:
        model: sharded model, as for `micro_batches`.
        head: whether to also slice the LM head and loss of a transformers causal language model.

    Raises:
        UnsupportedError: under the same conditions as `micro_batches`.
    """

    def __init__(self, model: nn.Module, *, head: bool = True) -> None:
        self._forwards = _sliced(model, 0, None, head=head)

    @contextmanager
    def slices(self, count: int) -> Iterator[None]:
        """Run forward and backward in `count` slices inside the context."""
        for forward in self._forwards:
            forward.count = count
        try:
            yield
        finally:
            for forward in self._forwards:
                forward.count = 0


def _sliced(model: nn.Module, count: int, batch_dim: BatchDim, *, head: bool) -> list[SlicedForward]:
    layers = _fsdp_modules(model)
    if not torch_private.is_sharded_module(model) or not layers:
        raise UnsupportedError(
            "micro_batches requires a sharded model; create it with infinity.from_pretrained or infinity.from_config, "
            "or call fully_shard on its layers and on the model first"
        )
    for name, module in model.named_modules():
        if torch_private.recomputes(module):
            raise UnsupportedError(
                f"{name or 'the model'} uses activation checkpointing, but micro_batches already recomputes "
                "activations; disable activation checkpointing"
            )
    for name in layers:
        inner = next((other for other in layers if other.startswith(f"{name}.")), None)
        if inner is not None:
            raise UnsupportedError(f"micro_batches does not support nested FSDP modules, but {name} contains {inner}")
    forwards = [SlicedForward(layer, count, batch_dim) for layer in layers.values()]
    found = causal_lm_in(model) if head else None
    if found is not None:
        whole = SlicedCausalLM(found, count, layers, model)
        forwards += [whole, *(SlicedNorm(norm, count, fsdp_module=model) for norm in whole.norms)]
    elif head and computes_loss(model):
        _log.warning("the head and loss of %s cannot be sliced and run on the whole batch", type(model).__name__)
    for forward in forwards:
        replace_forward(forward.module, forward)
    return forwards
