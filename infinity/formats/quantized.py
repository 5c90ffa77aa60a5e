"""Frozen linear layers whose weights are quantized by torchao, paged in quantized form, and dequantized when used.

A torchao quantized weight consists of several tensors (codes, scales, …), which FSDP2 cannot shard as one parameter.
Here, each of these tensors is a separate frozen parameter. Floating-point tensors are stored as integers with the same
bits, so that mixed-precision policies do not cast them. When the layer is used, it reassembles the gathered tensors. It
dequantizes the weight in forward and again in backward, so that no dequantized weight stays in memory in between.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from infinity import torch_private
from infinity.errors import ConfigError, UnsupportedError
from infinity.formats.transformers_names import Conversion
from infinity.optional_dependencies import needs

_PREFIX = "weight_"
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes for the bits of floating-point numbers, by item size in bytes."""


class QuantizedLinear(nn.Linear):
    """Linear layer with a frozen, quantized weight of shape (out_features, in_features)."""

    def __init__(self, made_from: nn.Linear, config: Any) -> None:
        """Quantize the weight of a linear layer. If that layer is on the meta device, so is the new one.

        Args:
            made_from: unquantized linear layer, which is not modified.
            config: torchao configuration, for example ``Int8WeightOnlyConfig()``.
        """
        nn.Module.__init__(self)
        self.in_features, self.out_features = made_from.in_features, made_from.out_features
        self.dtype, self._config = made_from.weight.dtype, config
        on_meta = made_from.weight.is_meta
        like = torch.zeros(made_from.weight.shape, dtype=self.dtype) if on_meta else made_from.weight.detach()
        quantized = _quantize(like, config)
        names, context = quantized.__tensor_flatten__()  # type: ignore[attr-defined]
        inner = {name: getattr(quantized, name) for name in names}
        self._made_of = {name: (part.dtype, part.shape) for name, part in inner.items()}
        self._unflatten = partial(_unflatten, type(quantized), context, quantized.shape, quantized.stride())
        for name, part in self.parts(quantized).items():
            self.register_parameter(name, nn.Parameter(part.to("meta") if on_meta else part, requires_grad=False))
        bias = made_from.bias
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach(), bias.requires_grad))

    def parts(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the parameters that represent a quantized or unquantized weight in this layer, by name."""
        if not hasattr(type(weight), "__tensor_flatten__"):
            weight = _quantize(weight.to(self.dtype), self._config)
        inner = {name: getattr(weight, name).detach() for name in self._made_of}
        return {_PREFIX + name: _as_bits(part).reshape(part.shape or (1,)) for name, part in inner.items()}

    @property
    def stored(self) -> dict[str, torch.Tensor]:
        """Shapes and dtypes of the parameters, as tensors on the meta device, by name."""
        return {
            _PREFIX + name: _as_bits(torch.empty(shape or (1,), dtype=dtype, device="meta"))
            for name, (dtype, shape) in self._made_of.items()
        }

    def is_wrong(self, weight: torch.Tensor) -> bool:
        """Return whether a tensor has a different shape than the weight."""
        return weight.shape != (self.out_features, self.in_features)

    def _dequantized(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        made_of = zip(self._made_of.items(), parts, strict=True)
        return self._unflatten({name: part.view(dtype).view(shape) for (name, (dtype, shape)), part in made_of})

    @property
    def _parts(self) -> list[torch.Tensor]:
        return [getattr(self, _PREFIX + name) for name in self._made_of]

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """Dequantized weight, computed on each access. It has no valid values on the meta device and while sharded."""
        parts = self._parts
        if any(part.is_meta or type(part) is not nn.Parameter for part in parts):
            return torch.empty(self.out_features, self.in_features, dtype=self.dtype, device=parts[0].device.type)
        return self._dequantized(parts).as_subclass(_ToLookAt)

    def reset_parameters(self) -> None:
        """Do nothing, because a quantized weight is not initialized."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the linear layer with the dequantized weight."""
        product: torch.Tensor = _Product.apply(x, self._dequantized, *self._parts)  # type: ignore[no-untyped-call]
        return product if self.bias is None else product + self.bias


class _ToLookAt(torch.Tensor):
    """Dequantized copy of a weight, for reading. Assigning to its `data` raises, because the value would be lost."""

    __torch_function__ = torch_private.NO_TORCH_FUNCTION  # type: ignore[assignment]

    @property  # type: ignore[override]
    def data(self) -> torch.Tensor:
        """The values. PEFT adds an adapter to them to merge it, and assigns the result."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        raise UnsupportedError(
            "merging adapters into a quantized weight is not supported; save the adapter, and merge it into "
            "the original base model with PeftModel.from_pretrained(base, folder).merge_and_unload()"
        )


def _unflatten(
    cls: type[Any], context: Any, size: torch.Size, stride: tuple[int, ...], inner: dict[str, torch.Tensor]
) -> torch.Tensor:
    """Reassemble and dequantize a quantized weight."""
    made = cls.__tensor_unflatten__(inner, context, size, stride)
    found: torch.Tensor = made.get_original_weight() if hasattr(made, "get_original_weight") else made.dequantize()
    return found


class _Product(torch.autograd.Function):
    """Matrix product with a weight that is dequantized in forward and again in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dequantized: Callable[..., torch.Tensor], *parts: torch.Tensor) -> Any:
        ctx.dequantized = dequantized
        ctx.save_for_backward(*parts)
        return linear(x, dequantized(parts).to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        parts = ctx.saved_tensors
        return gradient @ ctx.dequantized(parts).to(gradient.dtype), None, *(None for _ in parts)


@dataclass(frozen=True)
class Quantized:
    """Layers whose weights are quantized while they are read from an unquantized checkpoint."""

    layers: Mapping[str, QuantizedLinear]
    """Layers, by the name of their weight in the checkpoint."""

    @property
    def likes(self) -> dict[str, torch.Tensor]:
        """Unquantized weights on the meta device, by name."""
        return {
            name: torch.empty(layer.out_features, layer.in_features, dtype=layer.dtype, device="meta")
            for name, layer in self.layers.items()
        }

    def conversions(self, found: Iterable[Conversion]) -> Iterator[Conversion]:
        """Yield, for each conversion that produces a quantized weight, one that produces its layer's parameters."""
        for conversion in found:
            for name in conversion.targets:
                if name in self.layers and not (layer := self.layers[name]).is_wrong(conversion.targets[name]):
                    rule = _Quantizing(conversion, name, layer)
                    yield Conversion(conversion.sources, rule.likes, rule)


@dataclass(frozen=True)
class _Quantizing:
    """Rule that converts checkpoint tensors to a weight and quantizes it."""

    whole: Conversion
    name: str
    layer: QuantizedLinear

    @property
    def likes(self) -> dict[str, torch.Tensor]:
        prefix = self.name.removesuffix("weight")
        return {prefix + key: torch.empty_like(part, device="meta") for key, part in self.layer.stored.items()}

    def run(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        prefix = self.name.removesuffix("weight")
        return {prefix + key: part for key, part in self.layer.parts(self.whole.run(values)[self.name]).items()}


def quantize_(
    model: nn.Module, config: Any, wanted: Callable[[nn.Module, str], bool] | None = None
) -> dict[str, QuantizedLinear]:
    """Replace a model's linear layers with frozen, quantized layers.

    Call this function before adding adapters and before `fully_shard`. If the model is on the meta device,
    `infinity.offload(…, weights=folder)` reads the unquantized weights and quantizes them one by one while it writes
    them to the drives.

    Args:
        model: model with unquantized linear layers, on a real device or the meta device.
        config: torchao weight-only configuration, for example ``torchao.quantization.Int8WeightOnlyConfig()``.
        wanted: function that returns whether to quantize a linear layer, given the layer and its name. Default: all
            except the head.

    Returns:
        The new layers, by name.

    Raises:
        MissingPackageError: if torchao is not installed.
        ConfigError: if no layer is selected, or torchao cannot quantize a layer with `config`.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    chosen = wanted or (lambda module, _: module is not head)
    made: dict[str, QuantizedLinear] = {}
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and chosen(module, name):
            parent, _, key = name.rpartition(".")
            made[name] = QuantizedLinear(module, config)
            setattr(model.get_submodule(parent), key, made[name])
    if not made:
        raise ConfigError("the model has no nn.Linear to quantize; select layers with wanted=")
    return made


def _quantize(weight: torch.Tensor, config: Any) -> torch.Tensor:
    with needs("qlora", "quantized weights"):
        from torchao.quantization import quantize_

    layer = nn.Linear(1, 1, bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    layer.out_features, layer.in_features = weight.shape
    holder = nn.Sequential(layer)
    try:
        quantize_(holder, copy.deepcopy(config))
    except (AssertionError, ImportError, NotImplementedError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"{type(config).__name__} cannot quantize a weight of shape {tuple(weight.shape)}: {error}; choose a "
            "different torchao configuration, or exclude the layer with wanted="
        ) from error
    quantized: Any = holder[0]
    found: torch.Tensor = quantized.weight.detach()
    if not hasattr(type(found), "__tensor_flatten__") or not (
        hasattr(found, "get_original_weight") or hasattr(found, "dequantize")
    ):
        raise ConfigError(
            f"{type(config).__name__} produces a {type(found).__name__}, which is not supported as a quantized weight"
        )
    return found


def _as_bits(part: torch.Tensor) -> torch.Tensor:
    part = part.contiguous()
    return part.view(_BITS[part.itemsize]) if part.is_floating_point() else part
