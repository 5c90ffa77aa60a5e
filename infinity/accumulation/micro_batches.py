"""Layer-major accumulation: each FSDP module runs all slices of the batch before the next FSDP module starts.

FSDP2's hooks stay around the whole: an FSDP module is gathered once in forward and once in backward, and its gradients
are
reduced once, for any number of slices. Kept for backward are the inputs of FSDP modules; all else is computed again.
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
    """Let every FSDP module of a sharded model run a batch in `count` slices, so that more slices move no more weights.

    Called after `fully_shard`, before or after `infinity.offload`; a later call changes the number. Batches given to
    the model are whole. In the first forward each layer is tried with one and two rows of its batch: which arguments
    are sliced, along which dimension outputs are joined, and whether rows are independent of each other (attention
    along the batch, `BatchNorm` in training, packed sequences, and scales, ranks, capacities or counts of all rows are
    refused). It is tried again when it is called with other numbers or strings as arguments: in every call, which costs
    time, once there have been 64 kinds (a counter of steps). With gradients, each slice is computed again in backward,
    with the random state that it had (buffers that its forward changes are changed twice). Without, nothing is kept.

    Causal language models of transformers that are given `labels` run head and loss slice by slice too, divide the sum
    by the number of labels of the whole batch (or `num_items_in_batch`), and return no logits. In other models, put
    what must be sliced into a layer of its own, which returns one row per sequence.

    Args:
        model: `fully_shard` was called on its layers, side by side, and on itself.
        count: slices per batch; it must divide the number of sequences of every batch (`ConfigError` in forward).
        batch_dim: the dimension of a layer's first tensor argument that is the batch. By default what torch's own
            layers say (`batch_first`), for all others 0. Where shapes allow several ways to slice the other arguments,
            the error in forward asks for a mapping: from the names of arguments to their dimension, None for those that
            are not sliced.

    Raises:
        ConfigError: `count` is below 1.
        UnsupportedError: the model is not sharded like that, or recomputes activations already.
    """
    if count < 1:
        raise ConfigError(f"micro_batches needs a number of 1 or more, got {count}")
    _sliced(model, count, batch_dim, head=True)


def sliced_loss(model: nn.Module, tokens: int) -> None:
    """Let a causal language model of transformers compute head and loss for so many tokens at a time.

    For long sequences and large vocabularies: logits, in the compute dtype and in fp32, and their gradients are there
    of `tokens` only, and are computed again in backward. With `labels` the model returns no logits then, and the loss
    of the whole batch: the sum over all labels, divided by their number (or by `num_items_in_batch`). Gradients of
    slices are added up in the reduce dtype, first to last, so they differ from those of the whole in the last bits;
    paged and in memory are equal to the bit. It is called after `fully_shard`, before or after `infinity.offload` and
    `micro_batches`. `torch.autograd.grad` and `backward(inputs=…)` do not work with it. Adapters of peft may be in it.

    Args:
        model: `fully_shard` was called on it; the head is in the FSDP module of the model itself.
        tokens: per slice of the tokens of a batch, all its sequences one behind the other.

    Raises:
        ConfigError: `tokens` is below 1.
        UnsupportedError: it is no such model.
    """
    if tokens < 1:
        raise ConfigError(f"sliced_loss needs a number of 1 or more, got {tokens}")
    if not torch_private.is_sharded_module(model):
        raise UnsupportedError("sliced_loss needs a sharded model: call fully_shard on it first")
    found = causal_lm_in(model)
    if found is None:
        raise UnsupportedError(
            f"{type(model).__name__} is no causal language model of transformers whose loss is a sum over labels; "
            "slice its loss in your own code"
        )
    forward = found.forward
    if not isinstance(forward, SlicedCausalLM):
        forward = SlicedCausalLM(found, 0, _fsdp_modules(model), model)
        replace_forward(found, forward)
    forward.tokens = tokens


def _fsdp_modules(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if name and torch_private.is_sharded_module(module)}


class LayerMajor:
    """Slices the batches of a sharded model like `micro_batches`, but only those that run inside of `slices`."""

    def __init__(self, model: nn.Module, *, head: bool = True) -> None:
        """Take over the forwards of the model's FSDP modules, which run as they are until `slices`.

        Args:
            model: as `micro_batches` takes it.
            head: whether head and loss of a causal language model of transformers are sliced too.

        Raises:
            UnsupportedError: as `micro_batches` does.
        """
        self._forwards = _sliced(model, 0, None, head=head)

    @contextmanager
    def slices(self, count: int) -> Iterator[None]:
        """Inside of the block, a batch runs in `count` slices: forward and its backward."""
        for forward in self._forwards:
            forward.count = count
        try:
            yield
        finally:
            for forward in self._forwards:
                forward.count = 0


def _sliced(model: nn.Module, count: int, batch_dim: BatchDim, *, head: bool) -> list[SlicedForward]:
    """Put sliced forwards in the place of those of the model's FSDP modules."""
    layers = _fsdp_modules(model)
    if not torch_private.is_sharded_module(model) or not layers:
        raise UnsupportedError(
            "micro_batches needs a sharded model: call fully_shard on its layers and on itself first"
        )
    for name, module in model.named_modules():
        if torch_private.recomputes(module):
            raise UnsupportedError(
                f"{name or 'the model'} recomputes its activations already, as micro_batches does; leave activation "
                "checkpointing off"
            )
    for name in layers:
        inner = next((other for other in layers if other.startswith(f"{name}.")), None)
        if inner is not None:
            raise UnsupportedError(f"micro_batches needs FSDP modules side by side, but {name} contains {inner}")
    forwards = [SlicedForward(layer, count, batch_dim) for layer in layers.values()]
    found = causal_lm_in(model) if head else None
    if found is not None:
        whole = SlicedCausalLM(found, count, layers, model)
        forwards += [whole, *(SlicedNorm(norm, count, fsdp_module=model) for norm in whole.norms)]
    elif head and computes_loss(model):
        _log.warning("head and loss of %s run on the whole batch at once", type(model).__name__)
    for forward in forwards:
        replace_forward(forward.module, forward)
    return forwards
