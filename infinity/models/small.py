"""Build small copies of transformers models with random values.

A copy contains every kind of layer that the model contains, but fewer and narrower layers.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from infinity.errors import UnsupportedError
from infinity.models.building import attention_of, build, one_line
from infinity.models.sharding import layers_of

VOCABULARY = 256
"""Maximum vocabulary size of a copy."""

_LARGEST = 64_000_000  # maximum number of parameters of a copy
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = re.compile(r"(^|_)(n|num)_(\w+_)?heads?$|attention_heads$")
_GROUPS = re.compile(r"(key_value|kv)_heads$|n_?groups$|num_query_groups$")
_WIDTHS = re.compile(
    r"(^|_)(hidden|intermediate|embedding)_size|^emb(edding)?_dim$|^d_model$|^n_embd$|^n_inner$|^d_inner$|^dim_ff$|ffn_dim$|proj_dim$"
    r"|ffn_hidden|lora_rank$|dt_rank$|time_step_rank$|lru_width$|d_ssm$"
)
_EXPERTS = re.compile(r"^(n|num|moe_num)_(local_|routed_)?experts$")
_MODEL_WIDTH = re.compile(r"^(hidden_size|d_model|n_embd|emb(edding)?_dim)$")
_MULTIPLE = 8  # widths stay multiples of this, as grouped matrix multiplications of experts require
_TOKENS = re.compile(r"_token_(id|index)$")


def small_copy(config: Any, auto_class: str) -> nn.Module:
    """Return a small model with the structure of a large one, on the CPU and in evaluation mode.

    The copy contains as many of the model's first layers as it takes to include each kind of layer, or all layers if
    fewer do not work. Widths and numbers of heads are divided by a common factor. The kinds of layers are compared with
    the original model, built on the meta device, and a copy that lacks a kind is rejected. Every parameter has random
    values, including parameters that models initialize to zero. The states of the random number generators are
    preserved. Building a copy takes a few seconds and less than 1 GiB of memory.

    Args:
        config: transformers configuration. It is not modified.
        auto_class: Name of an AutoModel class.

    Raises:
        ConfigError: If the original model cannot be built.
        UnsupportedError: If none of the copies that were tried has the structure of the model. The message gives the
            reason.
    """
    attention = attention_of(config, auto_class)
    whole = build(copy.deepcopy(config), auto_class, attn_implementation=attention)
    kinds = [_kind(layer) for layer in layers_of(whole)]
    reason = "the model has no list of layers"
    for candidate in _candidates(config, kinds) if kinds else ():
        try:
            on_meta = build(copy.deepcopy(candidate), auto_class, attn_implementation=attention)
            if {_kind(layer) for layer in layers_of(on_meta)} != set(kinds):
                reason = "a smaller model has different layers"
            elif sum(parameter.numel() for parameter in on_meta.parameters()) > _LARGEST:
                reason = f"a smaller model still has more than {_LARGEST} parameters"
            else:
                return _with_values(candidate, auto_class, attention)
        except Exception as error:  # inconsistent numbers may raise an exception of any type
            reason = one_line(error)
    raise UnsupportedError(f"cannot build a small copy of a {config.model_type} model: {reason}")


def _with_values(config: Any, auto_class: str, attention: str) -> nn.Module:
    import transformers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made: Any = getattr(transformers, auto_class)
        model: nn.Module = made.from_config(config, dtype=torch.float32, attn_implementation=attention)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval()


def _kind(layer: nn.Module) -> tuple[Any, ...]:
    """Return a layer's structure regardless of its sizes: its modules, with their boolean and string attributes."""
    return tuple(
        (name, type(module).__name__, tuple(sorted((key, value) for key, value in vars(module).items()
                                                   if isinstance(value, bool | str))))
        for name, module in layer.named_modules()
    )  # fmt: skip


def _candidates(config: Any, kinds: list[Any]) -> Iterator[Any]:
    """Yield smaller configurations, most promising first: few layers before all layers, narrow before wide."""
    least = max(2, max(kinds.index(kind) for kind in kinds) + 1)
    numbers = [number for part in _parts(config) for number in _numbers(part)]
    heads = [value for name, value in numbers if _HEADS.search(name) and not _GROUPS.search(name)]
    widths = [value for name, value in numbers if _MODEL_WIDTH.search(name)]
    common = math.gcd(*heads, *(value // _MULTIPLE if value % _MULTIPLE == 0 else value for value in widths))
    bound = min(heads) // 2 if heads else max(1, min(widths, default=1) // 64)
    divisors = [number for number in range(common, 0, -1) if common % number == 0]
    narrow = [number for number in divisors if number <= max(1, bound)][:3] + divisors[:1]
    for layers in (least, len(kinds)) if least < len(kinds) else (len(kinds),):
        for divisor, fewer_experts in [*((divisor, 1) for divisor in narrow), (narrow[0], 4)]:
            candidate = copy.deepcopy(config)
            for part in _parts(candidate):
                _shrink(part, divisor, layers, len(kinds), fewer_experts)
            yield candidate


def _parts(config: Any) -> Iterator[Any]:
    import transformers

    yield config
    for value in list(vars(config).values()):
        if isinstance(value, transformers.PreTrainedConfig):
            yield from _parts(value)


def _numbers(config: Any) -> Iterator[tuple[str, int]]:
    for name, value in list(vars(config).items()):
        if isinstance(value, int) and not isinstance(value, bool):
            yield name, value


def _shrink(config: Any, divisor: int, layers: int, all_layers: int, fewer_experts: int) -> None:
    """Scale the sizes in one configuration proportionally, preserving the head size."""
    for name, value in _numbers(config):
        if name in _LAYERS and value == all_layers:
            setattr(config, name, layers)
        elif _GROUPS.search(name) or _HEADS.search(name):
            setattr(config, name, max(1, value // divisor))
        elif _WIDTHS.search(name):
            setattr(config, name, _narrowed(value, divisor))
        elif _EXPERTS.search(name) and value % (_MULTIPLE * fewer_experts) == 0:
            setattr(config, name, value // fewer_experts)
        elif "vocab_size" in name:
            setattr(config, name, min(value, VOCABULARY))
        elif _TOKENS.search(name):
            setattr(config, name, min(value, VOCABULARY - 1))
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and _TOKENS.search(name):
            setattr(config, name, [min(one, VOCABULARY - 1) for one in value])
        elif isinstance(value, list) and len(value) == all_layers:
            kept = value[:layers]
            setattr(config, name, [_narrowed(one, divisor) for one in kept] if _WIDTHS.search(name) else kept)


def _narrowed(width: int, divisor: int) -> int:
    least = min(width, _MULTIPLE)
    return max(least, -(-width // divisor // least) * least) if width > 0 else width
