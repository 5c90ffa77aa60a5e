"""Sliced LM head and loss for transformers causal language models."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from infinity.accumulation.sliced_forward import SlicedForward, replace_forward
from infinity.accumulation.slicing import Call, Slicing
from infinity.errors import ConfigError, UnsupportedError
from infinity.formats.adapters import peft_model

_OF_THE_LOSS = ("num_items_in_batch", "shift_labels", "ignore_index")


class SlicedCausalLM(SlicedForward):
    """Forward of a transformers causal language model that runs the LM head and the loss slice by slice.

    It does so only if labels are given. A slice consists of batch rows, as in the layers, or of `tokens` tokens from
    any rows, because the logits and the loss of a token do not depend on other tokens. If the model's forward is
    already an instance of this class, the number of tokens per slice is kept.

    Args:
        model: model returned by `causal_lm_in`.
        count: number of slices of rows, as in `SlicedForward`.
        layers: all FSDP modules other than the root, by name.
        fsdp_module: module on which `fully_shard` was called: the model itself, or the adapter model around it.

    Raises:
        UnsupportedError: if the head belongs to an FSDP module other than the root.
    """

    def __init__(self, model: nn.Module, count: int, layers: Mapping[str, nn.Module], fsdp_module: nn.Module) -> None:
        self.tokens: int | None = model.forward.tokens if isinstance(model.forward, SlicedCausalLM) else None
        """Number of tokens per slice; ``None`` for slices of rows. Set by `sliced_loss`."""
        super().__init__(model, count, fsdp_module=fsdp_module)
        base: Any = model.base_model
        self._base: nn.Module = getattr(base, "decoder", base)  # some models call their body `decoder`
        of_base = set(self._base.modules())
        for name, layer in layers.items():
            if layer not in of_base:
                raise UnsupportedError(
                    "the head and the loss can only be sliced if they belong to the root FSDP module, but fully_shard "
                    f"was called on {name}; do not shard it separately"
                )
        children, fsdp_modules = list(self._base.children()), set(layers.values())
        first = 1 + max(
            (at for at, child in enumerate(children) if fsdp_modules & set(child.modules())), default=len(children)
        )
        self.norms = [child for child in children[first:] if _may_be_norm(child)]
        """Norms that the root runs between the layers and the head, judging by the order of its modules."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return only the loss if labels are given; otherwise, return the output of the original forward.

        Raises:
            ConfigError: if the batch size is not divisible by the number of slices.
            UnsupportedError: if the loss includes a router loss, or the head cannot run separately from the body.
        """
        if not self.count and self.tokens is None:
            return self.whole(*args, **kwargs)
        signature = inspect.signature(self.whole)
        given = signature.bind(*args, **kwargs).arguments
        for parameter in signature.parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                given |= given.pop(parameter.name, {})
        labels = given.pop("labels", None)
        if labels is None:
            return self.whole(*args, **kwargs)
        model: Any = self.module
        if given.get("output_router_logits", getattr(model.config, "output_router_logits", False)):
            raise UnsupportedError("the router loss cannot be sliced; set output_router_logits=False")
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
            with _returning(self._base, type(outputs)(last_hidden_state=hidden)):
                logits = self.whole(**given).logits
            size = logits.shape[-1]
            loss: torch.Tensor = model.loss_function(
                logits=logits, labels=targets, shift_labels=targets, vocab_size=size, **of_loss
            )
            return loss.reshape(1)

        hidden, rows, count = outputs.last_hidden_state, len(targets), self.count
        if count and rows % count:
            raise ConfigError(f"the batch size {rows} is not divisible by {count} micro-batches")
        dim = 0
        if self.tokens is not None:
            hidden, targets, dim = hidden.reshape(1, -1, hidden.shape[-1]), targets.reshape(1, -1), 1
            count = -(-targets.numel() // self.tokens)
            count = -(-targets.numel() // -(-targets.numel() // count))  # `chunk` may return fewer parts
        # The other arguments matter only to the body, which has already run, so all slices receive them unchanged.
        call = Call.of(loss_of, (hidden, targets, given), {}, whole=("given",))
        slicing = Slicing((dim, dim, *[None] * (len(call.leaves) - 2)), (0,))
        losses = self.run(loss_of, call, slicing if count > 1 else None, count)
        return CausalLMOutputWithPast(loss=losses.sum())


@contextmanager
def _returning(module: nn.Module, answer: Any) -> Iterator[None]:
    """Make `module` return `answer` without computing it, so that only the code around the module runs.

    Raises:
        UnsupportedError: if the module was not called.
    """
    calls = []

    def forward(*args: Any, **kwargs: Any) -> Any:
        calls.append(True)
        return answer

    before = vars(module).get("forward")
    replace_forward(module, forward)
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            replace_forward(module, before)
    if not calls:
        raise UnsupportedError(f"the head of this model cannot be separated from its {type(module).__name__}")


def causal_lm_in(model: nn.Module) -> nn.Module | None:
    """Return the transformers causal language model in `model`, or ``None`` if `model` is of a different kind.

    The result is `model` itself or, if it has PEFT adapters, the model to which they were added. Its loss is
    transformers' `ForCausalLMLoss`: a sum over labels shifted by one position.
    """
    base = _base_of(model)
    if not computes_loss(model):
        return None
    from transformers.loss.loss_utils import ForCausalLMLoss

    found = (
        "loss_function" in inspect.unwrap(type(base).forward).__code__.co_names
        and base.loss_function is ForCausalLMLoss
        and base.base_model is not base
        and not base.config.is_encoder_decoder
    )
    return base if found else None


def computes_loss(model: nn.Module) -> bool:
    """Return whether a model, with or without PEFT adapters, is a transformers model that computes a loss."""
    return hasattr(_base_of(model), "loss_function") and "transformers" in sys.modules


def _base_of(model: nn.Module) -> Any:
    """Return the model to which PEFT adapters were added, or `model` if it has none."""
    adapted = peft_model(model)
    return model if adapted is None else adapted.get_base_model()


def _may_be_norm(module: nn.Module) -> bool:
    parameters = list(module.parameters())
    return bool(parameters) and not list(module.children()) and all(parameter.ndim == 1 for parameter in parameters)
