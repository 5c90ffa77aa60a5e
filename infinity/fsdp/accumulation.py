"""Layer-major accumulation: each unit runs all slices of the batch before the next unit starts.

FSDP2's hooks stay around the whole: a unit is gathered once in forward and once in backward, and its gradients are
reduced once, for any number of slices. Kept for backward are the inputs of units; all else is computed again.

[Note: order of summation] In backward autograd runs first what was made last. Slices run last to first in forward, so
their gradients are added up first to last, as a loop over micro-batches adds them. The reentrant form of checkpointing
ends the backward of one slice before that of the next, so that each adds its gradients to the others in the reduce
dtype, as FSDP2 does when it accumulates. The other form would add them up inside of autograd, in the compute dtype.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import update_wrapper
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from infinity.errors import ConfigError, UnsupportedError
from infinity.fsdp import private
from infinity.fsdp.slicing import BatchDim, Call, Slicing, SlicingFinder, flatten

_log = logging.getLogger("infinity")
_OF_THE_LOSS = ("num_items_in_batch", "shift_labels", "ignore_index")


def micro_batches(model: nn.Module, count: int, *, batch_dim: BatchDim = None) -> None:
    """Let every unit of a sharded model run a batch in `count` slices, so that more slices move no more weights.

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
    layers = {name: module for name, module in model.named_modules() if name and private.is_sharded_module(module)}
    if not private.is_sharded_module(model) or not layers:
        raise UnsupportedError(
            "micro_batches needs a sharded model: call fully_shard on its layers and on itself first"
        )
    for name, module in model.named_modules():
        if private.recomputes(module):
            raise UnsupportedError(
                f"{name or 'the model'} recomputes its activations already, as micro_batches does; leave activation "
                "checkpointing off"
            )
    for name in layers:
        inner = next((other for other in layers if other.startswith(f"{name}.")), None)
        if inner is not None:
            raise UnsupportedError(f"micro_batches needs units side by side, but {name} contains {inner}")
    forwards = [SlicedForward(layer, count, batch_dim) for layer in layers.values()]
    if _is_causal_lm(model):
        forwards.append(SlicedCausalLM(model, count, layers))
    for forward in forwards:
        _replace_forward(forward.module, forward)


def _replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    module.forward = forward


class SlicedForward:
    """The forward of a module, slice by slice."""

    def __init__(self, module: nn.Module, count: int, batch_dim: BatchDim = None) -> None:
        """Take over from the forward that `module` has."""
        forward = module.forward
        self.module, self.count = module, count
        self.whole: Callable[..., Any] = forward.whole if isinstance(forward, SlicedForward) else forward
        self._finder = SlicingFinder(module, self.whole, batch_dim)
        update_wrapper(self, self.whole)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the whole batch gives.

        Raises:
            ConfigError: the batch cannot be split.
            UnsupportedError: an argument or an output cannot be.
        """
        call = Call.of(self.whole, args, kwargs)
        slicing = None if self.count == 1 else self._finder.find(self.whole, call, self.count)
        return self._run(self.whole, call, slicing)

    def _run(self, function: Callable[..., Any], call: Call, slicing: Slicing | None) -> Any:
        """Return what a function returns for all slices; without a slicing, for the whole as one."""
        rebuilds: list[Callable[[Sequence[Any]], Any]] = []

        def run_slice(anchor: torch.Tensor, *parts: Any) -> tuple[Any, ...]:
            outputs, rebuild = flatten(call.run(function, parts))
            rebuilds.append(rebuild)
            return tuple(outputs)

        if slicing is not None:
            private.add_up_gradients(self.module)
        # Without it a slice would not be part of the graph where its inputs need no gradient, but parameters do.
        anchor = torch.empty(0, requires_grad=any(param.requires_grad for param in self.module.parameters()))
        recompute = torch.is_grad_enabled() and any(
            leaf.requires_grad for leaf in (anchor, *call.leaves) if isinstance(leaf, torch.Tensor)
        )
        slices = [call.leaves] if slicing is None else slicing.split(call.leaves, self.count)
        outputs = [
            checkpoint(run_slice, anchor, *parts, use_reentrant=True) if recompute else run_slice(anchor, *parts)
            for parts in reversed(slices)  # see [Note: order of summation]
        ]
        return rebuilds[0](outputs[0] if slicing is None else slicing.join(outputs[::-1]))


class SlicedCausalLM(SlicedForward):
    """The forward of a causal language model of transformers: with labels, head and loss slice by slice."""

    def __init__(self, model: nn.Module, count: int, layers: dict[str, nn.Module]) -> None:
        """Take over.

        Raises:
            UnsupportedError: a unit other than the root has a part of the head.
        """
        super().__init__(model, count)
        base: Any = model.base_model
        self._base: nn.Module = getattr(base, "decoder", base)  # some models call that part of it
        of_base = set(self._base.modules())
        for name, layer in layers.items():
            if layer not in of_base:
                raise UnsupportedError(f"micro_batches needs the head in the unit of the model, but {name} is a unit")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return loss and no logits where there are labels, else what the model returns.

        Raises:
            UnsupportedError: the loss is not a sum over labels.
        """
        given = inspect.signature(self.whole).bind(*args, **kwargs).arguments
        given |= given.pop("kwargs", {})
        labels = given.pop("labels", None)
        if labels is None:
            return self.whole(*args, **kwargs)
        model: Any = self.module
        if given.get("output_router_logits", getattr(model.config, "output_router_logits", False)):
            raise UnsupportedError("micro_batches cannot slice the loss of routers; set output_router_logits=False")
        from transformers.modeling_outputs import CausalLMOutputWithPast

        of_loss = {name: given.pop(name) for name in _OF_THE_LOSS if name in given}
        targets = of_loss.pop("shift_labels", None)
        if targets is None:
            targets = nn.functional.pad(labels, (0, 1), value=of_loss.get("ignore_index", -100))[..., 1:].contiguous()
        if of_loss.get("num_items_in_batch") is None:
            of_loss["num_items_in_batch"] = (targets != of_loss.get("ignore_index", -100)).sum()
        given |= {"use_cache": False, "return_dict": True}
        outputs = self._base(**given)

        def loss_of(hidden: torch.Tensor, targets: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
            with _answering(self._base, type(outputs)(last_hidden_state=hidden)):
                logits = self.whole(**given).logits
            size = logits.shape[-1]
            loss: torch.Tensor = model.loss_function(
                logits=logits, labels=targets, shift_labels=targets, vocab_size=size, **of_loss
            )
            return loss.reshape(1)

        call = Call.of(loss_of, (outputs.last_hidden_state, targets, given), {})
        rows = len(targets)
        if rows % self.count:
            raise ConfigError(f"a batch of {rows}, which {self.count} micro-batches cannot share equally")
        slicing = Slicing(
            tuple(0 if isinstance(x, torch.Tensor) and x.shape[:1] == (rows,) else None for x in call.leaves), (0,)
        )
        losses = self._run(loss_of, call, slicing if self.count > 1 else None)
        return CausalLMOutputWithPast(loss=losses.sum())


@contextmanager
def _answering(module: nn.Module, answer: Any) -> Iterator[None]:
    """Let a module return what it has computed before, so that the code around it can run on it.

    Raises:
        UnsupportedError: the module was not called.
    """
    asked = []

    def forward(*args: Any, **kwargs: Any) -> Any:
        asked.append(True)
        return answer

    before = vars(module).get("forward")
    _replace_forward(module, forward)
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            _replace_forward(module, before)
    if not asked:
        raise UnsupportedError(f"micro_batches cannot tell the head of this model from its {type(module).__name__}")


def _is_causal_lm(model: Any) -> bool:
    """Whether the model is one of transformers whose loss is the sum over labels that are shifted by one."""
    if not hasattr(model, "loss_function") or "transformers" not in sys.modules:
        return False
    from transformers.loss.loss_utils import ForCausalLMLoss

    calls = inspect.unwrap(type(model).forward).__code__.co_names
    found = (
        "loss_function" in calls
        and model.loss_function is ForCausalLMLoss
        and model.base_model is not model
        and not model.config.is_encoder_decoder
    )
    if not found:
        _log.warning("head and loss of %s run on the whole batch at once", type(model).__name__)
    return found
