"""Layer-major accumulation: each FSDP module runs all slices of the batch before the next FSDP module starts.

FSDP2's hooks apply to the whole batch. For any number of slices, FSDP2 gathers an FSDP module once in forward and once
in backward, and reduces its gradients once. Only the inputs of FSDP modules are kept for backward; all other
activations are recomputed.
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
    """Make every FSDP module of a sharded model run its batch in `count` slices.

    The number of slices does not affect the traffic for weights. Call this after `fully_shard`, before or after
    `infinity.offload`. A later call changes the number of slices. Pass complete batches to the model.

    The first forward tests each layer with one and two rows of its batch. The tests determine which arguments are
    sliced, along which dimension outputs are concatenated, and whether rows are independent of each other. Attention
    along the batch dimension, `BatchNorm` in training, packed sequences, and scales, ranks, capacities or counts over
    all rows are not supported. A layer is tested again when it is called with other numbers or strings as arguments.
    After 64 such variants, for example with a step counter, it is tested in every call, which costs time.

    With gradients enabled, each slice is recomputed in backward with its original random state. Buffers that the
    forward changes are therefore changed twice. Without gradients, no inputs are kept.

    Causal language models of transformers that receive `labels` also run head and loss slice by slice. They divide the
    sum by the number of labels of the whole batch (or by `num_items_in_batch`), and return no logits. In other models,
    move the computations to slice into a separate layer that returns one row per sequence.

    Args:
        model: model on which `fully_shard` was called, after its layers. The layers must not be nested.
        count: number of slices per batch. It must divide the batch size; otherwise, the forward raises `ConfigError`.
        batch_dim: batch dimension of the first tensor argument of a layer. The default is the dimension given by
            `batch_first` for torch's own layers, and 0 for all others. If the shapes allow several ways to slice the
            other arguments, the forward raises an error. In that case, pass a mapping from argument names to their
            batch dimension, with ``None`` for arguments that are not sliced.

    Raises:
        ConfigError: if `count` is less than 1.
        UnsupportedError: if the model is not sharded in this way, or already uses activation checkpointing.
    """
    if count < 1:
        raise ConfigError(f"micro_batches requires a count of at least 1, got {count}")
    _sliced(model, count, batch_dim, head=True)


def sliced_loss(model: nn.Module, tokens: int) -> None:
    """Make a causal language model of transformers compute head and loss for `tokens` tokens at a time.

    Use this for long sequences and large vocabularies. Logits in the compute dtype and in fp32, and their gradients,
    exist for `tokens` tokens only, and are recomputed in backward. With `labels`, the model then returns no logits, and
    the loss of the whole batch: the sum over all labels divided by their number (or by `num_items_in_batch`).

    Gradients of slices are summed in the reduce dtype, from first to last. They differ from the gradients of the whole
    batch in the last bits, but paged and in-memory results are bitwise equal. Call this after `fully_shard`, before or
    after `infinity.offload` and `micro_batches`. `torch.autograd.grad` and `backward(inputs=…)` are not supported. PEFT
    adapters are supported.

    Args:
        model: model on which `fully_shard` was called. The head must belong to the root FSDP module.
        tokens: number of tokens per slice, counted over all sequences of a batch.

    Raises:
        ConfigError: if `tokens` is less than 1.
        UnsupportedError: if the model is not a sharded causal language model of transformers.
    """
    if tokens < 1:
        raise ConfigError(f"sliced_loss requires a number of tokens of at least 1, got {tokens}")
    if not torch_private.is_sharded_module(model):
        raise UnsupportedError("sliced_loss requires a sharded model; call fully_shard on it first")
    found = causal_lm_in(model)
    if found is None:
        raise UnsupportedError(
            f"{type(model).__name__} is not a causal language model of transformers whose loss is a sum over labels; "
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
    """Slice the batches of a sharded model like `micro_batches`, but only within `slices`.

    Until then, the forwards of the FSDP modules are unchanged.

    Args:
        model: sharded model, as for `micro_batches`.
        head: whether to slice head and loss of a causal language model of transformers too.

    Raises:
        UnsupportedError: under the conditions of `micro_batches`.
    """

    def __init__(self, model: nn.Module, *, head: bool = True) -> None:
        self._forwards = _sliced(model, 0, None, head=head)

    @contextmanager
    def slices(self, count: int) -> Iterator[None]:
        """Run forward and backward in `count` slices within the block."""
        for forward in self._forwards:
            forward.count = count
        try:
            yield
        finally:
            for forward in self._forwards:
                forward.count = 0


def _sliced(model: nn.Module, count: int, batch_dim: BatchDim, *, head: bool) -> list[SlicedForward]:
    """Replace the forwards of the model's FSDP modules with sliced forwards."""
    layers = _fsdp_modules(model)
    if not torch_private.is_sharded_module(model) or not layers:
        raise UnsupportedError(
            "micro_batches requires a sharded model; call fully_shard on its layers and on the model first"
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
        _log.warning("head and loss of %s are not sliced and run on the whole batch", type(model).__name__)
    for forward in forwards:
        replace_forward(forward.module, forward)
    return forwards
