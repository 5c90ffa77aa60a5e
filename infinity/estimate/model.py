"""A model as far as an estimate needs it: the shapes of its parameters, FSDP module by FSDP module."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from infinity.content.format import StateFormat
from infinity.content.layout import FSDPModuleSpec, ShardSpec
from infinity.errors import ConfigError

Kinds = tuple[tuple[str, str], ...]
"""An optimizer's element-wise states, as (name, dtype)."""

OPTIMIZERS: dict[str, Kinds] = {
    "adamw": (("exp_avg", "float32"), ("exp_avg_sq", "float32")),
    "adam": (("exp_avg", "float32"), ("exp_avg_sq", "float32")),
    "amsgrad": (("exp_avg", "float32"), ("exp_avg_sq", "float32"), ("max_exp_avg_sq", "float32")),
    "adagrad": (("sum", "float32"),),
    "rmsprop": (("square_avg", "float32"),),
    "lion": (("exp_avg", "float32"),),
    "momentum": (("momentum_buffer", "float32"),),
    "sgd": (),
}
"""The states of optimizers by name: those of torch.optim with fp32 parameters; `amsgrad` is Adam with it, `momentum` is
SGD with it."""


@dataclass(frozen=True, kw_only=True)
class ParameterShape:
    """One parameter, whole."""

    name: str
    """Its name in the model."""
    shape: tuple[int, ...]
    """Elements by dimension; the first one is cut among the ranks."""
    dtype: str = "float32"
    """In which it is trained, or, where it is frozen, kept."""
    trainable: bool = True
    """Whether it is trained."""
    used: float = 1.0
    """With which share of it a token is multiplied: 0 for a table in which tokens are only looked up; less than 1 for
    experts, of which each token takes a few. Vectors do not count."""
    looked_up: bool = False
    """Whether it is a table in which tokens are looked up, before the first layer."""

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    def shard(self, world_size: int) -> tuple[int, ...]:
        """Return the shape of the first rank's slice, which is none's smaller one: rows are dealt out as FSDP2 does."""
        rows, *others = self.shape or (1,)
        return (-(-rows // world_size), *others)


@dataclass(frozen=True, kw_only=True)
class FSDPModuleShape:
    """One `fully_shard` group."""

    name: str
    """Of the module that it was called on."""
    parameters: tuple[ParameterShape, ...]
    """In the order in which they are gathered."""

    @cached_property
    def numel(self) -> int:
        """Elements."""
        return sum(parameter.numel for parameter in self.parameters)

    @cached_property
    def used(self) -> float:
        """Elements that a token is multiplied with in a forward."""
        return sum(parameter.used * parameter.numel for parameter in self.parameters if len(parameter.shape) > 1)

    @cached_property
    def trained(self) -> int:
        """Elements that are trained."""
        return sum(parameter.numel for parameter in self.parameters if parameter.trainable)

    @property
    def trainable(self) -> bool:
        """Whether any of it is trained."""
        return self.trained > 0


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A model of a root and layers that are FSDP modules of their own."""

    name: str
    """What to call it."""
    root: FSDPModuleShape
    """What is in no layer: embeddings, head, the last norm. FSDP2 gathers it first, and once per step."""
    layers: tuple[FSDPModuleShape, ...]
    """In the order in which they compute."""
    hidden: int
    """Width of what goes from layer to layer, in elements per token."""
    vocabulary: int
    """Logits per token."""

    @property
    def fsdp_modules(self) -> tuple[FSDPModuleShape, ...]:
        """All FSDP modules, in the order in which they are first gathered."""
        return (self.root, *self.layers)

    @cached_property
    def parameters(self) -> int:
        """Elements of all parameters."""
        return sum(fsdp_module.numel for fsdp_module in self.fsdp_modules)

    @cached_property
    def trainable_parameters(self) -> int:
        """Elements of those that are trained."""
        return sum(fsdp_module.trained for fsdp_module in self.fsdp_modules)

    def forward_flops(self, sequence: int) -> tuple[float, float]:
        """Return the floating-point operations per token in a forward of the root, and of all layers.

        Two for each element that the token is multiplied with, and 4 · sequence · hidden in the attention of a layer
        (Chowdhery et al., "PaLM", 2022, appendix B).
        """
        attention = 4.0 * sequence * self.hidden * len(self.layers)
        return 2.0 * self.root.used, 2.0 * sum(layer.used for layer in self.layers) + attention

    def specs(
        self, optimizer: str, *, world_size: int, computed: str, state_format: str
    ) -> tuple[list[FSDPModuleSpec], dict[str, StateFormat]]:
        """Return the FSDP modules and formats of the first rank, as an offloaded model has them.

        Args:
            optimizer: one of `OPTIMIZERS`.
            world_size: ranks among which each parameter is cut.
            computed: dtype of the computation, such as ``bfloat16``.
            state_format: setting `state.format`.
        """
        formats: dict[str, StateFormat] = {}
        fsdp_modules = []
        for fsdp_module in self.fsdp_modules:
            shards = []
            for parameter in fsdp_module.parameters:
                trainable, own = parameter.trainable, parameter.dtype
                fmt = StateFormat.of(own, computed, OPTIMIZERS[optimizer], trainable=trainable, alone=world_size == 1)
                key = fmt.key(own, trainable=trainable)
                formats[key] = fmt.stored_as(state_format)
                numel = math.prod(parameter.shard(world_size))
                shards.append(
                    ShardSpec(name=parameter.name, numel=numel, padded=numel, segment_key=key, trainable=trainable)
                )
            fsdp_modules.append(FSDPModuleSpec(name=fsdp_module.name, shards=tuple(shards)))
        return fsdp_modules, formats


def decoder(*, parameters: float, layers: int, hidden: int, vocabulary: int, tied: bool = False) -> ModelShape:
    """Return a decoder with gated layers of about so many parameters, such as the Llamas.

    What is not in embedding and head is in the layers: four matrices of attention, of hidden by hidden where that is at
    most half of a layer, and three of hidden by inner, with the inner width that comes out.

    Raises:
        ConfigError: the numbers cannot be those of one model.
    """
    outside = vocabulary * hidden * (1 if tied else 2) + hidden
    each = (parameters - outside) / layers - 2 * hidden
    inner = round((each - 4 * (rows := min(hidden, int(each / 2 / 4 / hidden))) * hidden) / (3 * hidden))
    if rows < 1 or inner < 1:
        raise ConfigError(
            f"{parameters:.4g} parameters are too few for {layers} layers of width {hidden} and a vocabulary of "
            f"{vocabulary}: embedding{'' if tied else ' and head'} alone have {outside:.4g}"
        )
    attention = {name: (rows, hidden) for name in ("q_proj", "k_proj", "v_proj")} | {"o_proj": (hidden, rows)}
    mlp = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    norms = {"input_norm": (hidden,), "output_norm": (hidden,)}
    embedding = ParameterShape(name="embedding", shape=(vocabulary, hidden), used=1.0 if tied else 0.0, looked_up=True)
    head = ParameterShape(name="head", shape=(vocabulary, hidden))
    return ModelShape(
        name=f"decoder of {layers} layers",
        root=FSDPModuleShape(
            name="root",
            parameters=(embedding, ParameterShape(name="norm", shape=(hidden,)), *([] if tied else [head])),
        ),
        layers=tuple(
            FSDPModuleShape(
                name=f"layers.{number}",
                parameters=tuple(
                    ParameterShape(name=f"layers.{number}.{name}", shape=shape)
                    for name, shape in (attention | mlp | norms).items()
                ),
            )
            for number in range(layers)
        ),
        hidden=hidden,
        vocabulary=vocabulary,
    )


def _ends_with(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def with_lora(model: ModelShape, rank: int, dtype: str, targets: Sequence[str] = ()) -> ModelShape:
    """Return the model with all that it has frozen and kept in `dtype`, and LoRA beside matrices of the layers.

    For a matrix of m by n these are rank by n and m by rank elements (Hu et al., "LoRA", 2021).

    Args:
        targets: ends of names of the modules whose matrices get them, as peft takes them; none: each matrix.

    Raises:
        ConfigError: no matrix of a layer has a name with one of these ends.
    """
    matrices = {item.name.removesuffix(".weight") for layer in model.layers for item in layer.parameters}
    for target in targets:
        if not any(_ends_with(name, target) for name in matrices):
            names = sorted({name.rsplit(".", 1)[-1] for name in matrices})
            raise ConfigError(f"no layer of {model.name} has {target!r}; there are {', '.join(names)}")

    def frozen(parameter: ParameterShape) -> ParameterShape:
        return replace(parameter, trainable=False, dtype=dtype)

    def adapters(parameter: ParameterShape) -> tuple[ParameterShape, ...]:
        module = parameter.name.removesuffix(".weight")
        if len(parameter.shape) != 2 or (targets and not any(_ends_with(module, target) for target in targets)):
            return ()
        rows, columns = parameter.shape
        return (
            ParameterShape(name=f"{parameter.name}.lora_A", shape=(rank, columns)),
            ParameterShape(name=f"{parameter.name}.lora_B", shape=(rows, rank)),
        )

    return replace(
        model,
        name=f"{model.name}, LoRA of rank {rank}",
        root=replace(model.root, parameters=tuple(map(frozen, model.root.parameters))),
        layers=tuple(
            replace(
                layer,
                parameters=tuple(
                    item for parameter in layer.parameters for item in (frozen(parameter), *adapters(parameter))
                ),
            )
            for layer in model.layers
        ),
    )


def with_trainable_share(model: ModelShape, share: float, dtype: str) -> ModelShape:
    """Return the model of which only the last layers are trained: as many as have about `share` of its parameters.

    The others, and the root, are frozen and kept in `dtype`.
    """
    trained, wanted = 0, share * model.parameters
    layers: list[FSDPModuleShape] = []
    for layer in reversed(model.layers):
        keep = trained < wanted
        trained += layer.numel if keep else 0
        layers.append(layer if keep else _frozen(layer, dtype))
    return replace(model, root=_frozen(model.root, dtype), layers=tuple(reversed(layers)))


def _frozen(fsdp_module: FSDPModuleShape, dtype: str) -> FSDPModuleShape:
    return replace(
        fsdp_module, parameters=tuple(replace(p, trainable=False, dtype=dtype) for p in fsdp_module.parameters)
    )
