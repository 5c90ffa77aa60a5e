"""Head and loss of a causal language model of transformers, slice by slice."""

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
    """The forward of a causal language model of transformers: with labels, head and loss slice by slice.

    A slice is of rows, as of layers, or of `tokens`, whatever rows they are of: no token has a part in the logits and
    the loss of another.
    """

    def __init__(self, model: nn.Module, count: int, layers: Mapping[str, nn.Module], fsdp_module: nn.Module) -> None:
        """Take over; slices of tokens stay.

        Args:
            model: found by `causal_lm_in`.
            count: as for other modules.
            layers: other FSDP modules, by name.
            FSDP module: `fully_shard` was called on it: the model, or what adapters have put around it.

        Raises:
            UnsupportedError: an FSDP module other than the root has a part of the head.
        """
        self.tokens: int | None = model.forward.tokens if isinstance(model.forward, SlicedCausalLM) else None
        """Tokens in a slice; None: those of `count` slices of rows. Changed by `sliced_loss`."""
        super().__init__(model, count, fsdp_module=fsdp_module)
        base: Any = model.base_model
        self._base: nn.Module = getattr(base, "decoder", base)  # some models call that part of it
        of_base = set(self._base.modules())
        for name, layer in layers.items():
            if layer not in of_base:
                raise UnsupportedError(
                    f"head and loss can be sliced in the FSDP module of the model only, but {name} is an FSDP module"
                )
        children, fsdp_modules = list(self._base.children()), set(layers.values())
        behind = 1 + max(
            (at for at, child in enumerate(children) if fsdp_modules & set(child.modules())), default=len(children)
        )
        self.norms = [child for child in children[behind:] if _may_be_norm(child)]
        """What the root runs between layers and head, as far as the order of modules tells; fixed."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return loss and no logits where there are labels, else what the model returns.

        Raises:
            UnsupportedError: the loss is not a sum over labels.
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
            raise UnsupportedError("the loss of routers cannot be sliced; set output_router_logits=False")
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

        hidden, rows, count = outputs.last_hidden_state, len(targets), self.count
        if count and rows % count:
            raise ConfigError(f"a batch of {rows}, which {count} micro-batches cannot share equally")
        if self.tokens is None:
            call = Call.of(loss_of, (hidden, targets, given), {})
            slicing = Slicing(
                tuple(0 if isinstance(x, torch.Tensor) and x.shape[:1] == (rows,) else None for x in call.leaves), (0,)
            )
        else:
            # What the body was given it has used, and a head has one row of hidden states: all slices may be given it.
            arguments = (hidden.reshape(1, -1, hidden.shape[-1]), targets.reshape(1, -1), given)
            call = Call.of(loss_of, arguments, {}, whole=("given",))
            slicing = Slicing((1, 1, *[None] * (len(call.leaves) - 2)), (0,))
            count = -(-targets.numel() // self.tokens)
            count = -(-targets.numel() // -(-targets.numel() // count))  # as `chunk` counts
        losses = self.run(loss_of, call, slicing if count > 1 else None, count)
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
    replace_forward(module, forward)
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            replace_forward(module, before)
    if not asked:
        raise UnsupportedError(f"the head of this model cannot be told from its {type(module).__name__}")


def causal_lm_in(model: nn.Module) -> nn.Module | None:
    """Return the model of transformers whose loss is the sum over labels that are shifted by one; None without any.

    That is the model itself, or the one that adapters of peft were added to.
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
    """Whether it is a model of transformers that has a loss, with adapters of peft or without."""
    return hasattr(_base_of(model), "loss_function") and "transformers" in sys.modules


def _base_of(model: nn.Module) -> Any:
    """Return what adapters of peft were added to; the model itself without any."""
    adapted = peft_model(model)
    return model if adapted is None else adapted.get_base_model()


def _may_be_norm(module: nn.Module) -> bool:
    """Whether all that a module has is vectors, as a norm."""
    parameters = list(module.parameters())
    return bool(parameters) and not list(module.children()) and all(parameter.ndim == 1 for parameter in parameters)
