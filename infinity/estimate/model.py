"""Model description for estimates: parameter shapes, grouped by FSDP module."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

from infinity.content.format import StateFormat
from infinity.content.layout import FSDPModuleSpec, ShardSpec
from infinity.errors import ConfigError

Kinds = tuple[tuple[str, str], ...]
"""Name and dtype of each element-wise state of an optimizer."""

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
"""States of each optimizer, by name. They are the states that `torch.optim` creates for fp32 parameters. `amsgrad` is
Adam with ``amsgrad=True``, and `momentum` is SGD with momentum.
"""


@dataclass(frozen=True, kw_only=True)
class ParameterShape:
    """Shape of one full parameter."""

    name: str
    """Name of the parameter in the model."""
    shape: tuple[int, ...]
    """Size of each dimension. The first dimension is sharded."""
    dtype: str = "float32"
    """Dtype of the parameter. Frozen parameters are stored in this dtype."""
    trainable: bool = True
    """Whether the parameter is trained."""
    used: float = 1.0
    """Fraction of the elements with which each token is multiplied. It is 0 for an embedding table, whose rows are only
    looked up, and less than 1 for experts, because each token is routed to a few of them. It is ignored for vectors.
    """
    looked_up: bool = False
    """Whether the parameter is an embedding table that is looked up before the first layer."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def shard(self, world_size: int) -> tuple[int, ...]:
        """Return the shape of rank 0's slice, which is the largest, because FSDP2 splits rows as `torch.chunk` does."""
        rows, *others = self.shape or (1,)
        return (-(-rows // world_size), *others)


@dataclass(frozen=True, kw_only=True)
class FSDPModuleShape:
    """Parameter shapes of one module on which `fully_shard` is called."""

    name: str
    """Name of the module."""
    parameters: tuple[ParameterShape, ...]
    """Parameters in all-gather order."""

    @cached_property
    def numel(self) -> int:
        """Number of elements."""
        return sum(parameter.numel for parameter in self.parameters)

    @cached_property
    def used(self) -> float:
        """Number of elements with which each token is multiplied in forward."""
        return sum(parameter.used * parameter.numel for parameter in self.parameters if len(parameter.shape) > 1)

    @property
    def used_last(self) -> float:
        """Number of elements of the last matrix with which each token is multiplied.

        It is 0 for experts, because the sum over experts needs the result of this product for backward.
        """
        last = next((parameter for parameter in reversed(self.parameters) if len(parameter.shape) > 1), None)
        return last.used * last.numel if last and last.used == 1 else 0.0

    @cached_property
    def trained(self) -> int:
        """Number of trained elements."""
        return sum(parameter.numel for parameter in self.parameters if parameter.trainable)

    @property
    def trainable(self) -> bool:
        """Whether any parameter is trained."""
        return self.trained > 0


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Shapes of a model that consists of a root and layers, each of which is an FSDP module."""

    name: str
    """Name shown in messages."""
    root: FSDPModuleShape
    """Parameters outside of the layers: embeddings, head and final norm. Gathered first, and once per step."""
    layers: tuple[FSDPModuleShape, ...]
    """Layers in forward order."""
    hidden: int
    """Width of the hidden state between layers, in elements per token."""
    vocabulary: int
    """Logits per token."""

    @property
    def fsdp_modules(self) -> tuple[FSDPModuleShape, ...]:
        """All FSDP modules, in the order in which they are first gathered."""
        return (self.root, *self.layers)

    @cached_property
    def parameters(self) -> int:
        """Number of elements of all parameters."""
        return sum(fsdp_module.numel for fsdp_module in self.fsdp_modules)

    @cached_property
    def trainable_parameters(self) -> int:
        """Number of elements of all trained parameters."""
        return sum(fsdp_module.trained for fsdp_module in self.fsdp_modules)

    def forward_flops(self, sequence: int) -> tuple[float, float]:
        """Return the number of floating-point operations per token in forward, as (root, all layers).

        Each token requires 2 operations per element with which it is multiplied, and 4 · sequence · hidden operations
        in the attention of each layer (Chowdhery et al., "PaLM", 2022, appendix B).

        Args:
            sequence: Tokens per sequence.
        """
        attention = 4.0 * sequence * self.hidden * len(self.layers)
        return 2.0 * self.root.used, 2.0 * sum(layer.used for layer in self.layers) + attention

    def recomputed_flops(self, sequence: int) -> float:
        """Return the number of floating-point operations per token that activation checkpointing computes again.

        torch stops recomputing a layer as soon as all tensors for backward exist. The last product, which is
        ``down_proj`` in Llama, is not computed again, because backward only needs its inputs.

        Args:
            sequence: Tokens per sequence.
        """
        return self.forward_flops(sequence)[1] - 2.0 * sum(layer.used_last for layer in self.layers)

    def specs(
        self, optimizer: str, *, world_size: int, computed: str, state_format: str, replicas: int = 1
    ) -> tuple[list[FSDPModuleSpec], dict[str, StateFormat]]:
        """Return the FSDP modules and state formats that rank 0 of an offloaded model would have.

        Args:
            optimizer: Name of an optimizer in `OPTIMIZERS`.
            world_size: Number of ranks.
            computed: Compute dtype, such as ``bfloat16``.
            state_format: Value of the setting `state.format`.
            replicas: Number of replicas of the model. Each parameter is sharded across the ranks of a replica.
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
                numel = math.prod(parameter.shard(world_size // replicas))
                shards.append(
                    ShardSpec(name=parameter.name, numel=numel, padded=numel, segment_key=key, trainable=trainable)
                )
            fsdp_modules.append(FSDPModuleSpec(name=fsdp_module.name, shards=tuple(shards)))
        return fsdp_modules, formats


def decoder(*, parameters: float, layers: int, hidden: int, vocabulary: int, tied: bool = False) -> ModelShape:
    """Return the shapes of a decoder with gated MLPs, such as Llama, that has about the given number of parameters.

    All parameters outside the embedding and the head are distributed evenly across the layers. Each layer has four
    attention matrices and three MLP matrices. Attention matrices have the shape hidden by hidden, or fewer rows if they
    would otherwise exceed half of the layer. The inner width of the MLP follows from the remaining parameters.

    Args:
        parameters: Total number of parameters.
        layers: Number of layers.
        hidden: Width of the hidden state.
        vocabulary: Number of tokens in the vocabulary.
        tied: Whether the head shares the weights of the embedding.

    Raises:
        ConfigError: If there are too few parameters for the other sizes.
    """
    outside = vocabulary * hidden * (1 if tied else 2) + hidden
    each = (parameters - outside) / layers - 2 * hidden
    inner = round((each - 4 * (rows := min(hidden, int(each / 2 / 4 / hidden))) * hidden) / (3 * hidden))
    if rows < 1 or inner < 1:
        raise ConfigError(
            f"{parameters:,.0f} parameters are too few for {layers} layers of width {hidden} and a vocabulary of "
            f"{vocabulary}: the parameters of embedding{'' if tied else ' and head'} alone are {outside:,.0f}; use a "
            "smaller width or vocabulary, or fewer layers"
        )
    attention = {name: (rows, hidden) for name in ("q_proj", "k_proj", "v_proj")} | {"o_proj": (hidden, rows)}
    mlp = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    norms = {"input_norm": (hidden,), "output_norm": (hidden,)}
    embedding = ParameterShape(name="embedding", shape=(vocabulary, hidden), used=1.0 if tied else 0.0, looked_up=True)
    head = ParameterShape(name="head", shape=(vocabulary, hidden))
    return ModelShape(
        name=f"{layers}-layer decoder",
        root=FSDPModuleShape(
            name="root", parameters=(embedding, ParameterShape(name="norm", shape=(hidden,)), *([] if tied else [head]))
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
    """Return the model with frozen parameters, and with LoRA adapters on the matrices of its layers.

    The two adapters of an m by n matrix have the shapes rank by n and m by rank (Hu et al., "LoRA", 2021).

    Args:
        model: Base model.
        rank: Rank of the adapters.
        dtype: Dtype of the frozen parameters.
        targets: Name suffixes of the modules to adapt, as in `peft.LoraConfig`. Empty: every matrix of a layer.

    Raises:
        ConfigError: If a target does not match any module of a layer.
    """
    matrices = {item.name.removesuffix(".weight") for layer in model.layers for item in layer.parameters}
    for target in targets:
        if not any(_ends_with(name, target) for name in matrices):
            names = sorted({name.rsplit(".", 1)[-1] for name in matrices})
            raise ConfigError(f"no layer of {model.name} has a module {target!r}; choose from {', '.join(names)}")

    def adapters(parameter: ParameterShape) -> tuple[ParameterShape, ...]:
        module = parameter.name.removesuffix(".weight")
        if len(parameter.shape) != 2 or (targets and not any(_ends_with(module, target) for target in targets)):
            return ()
        rows, columns = parameter.shape
        return (
            ParameterShape(name=f"{parameter.name}.lora_A", shape=(rank, columns)),
            ParameterShape(name=f"{parameter.name}.lora_B", shape=(rows, rank)),
        )

    def adapted(layer: FSDPModuleShape) -> FSDPModuleShape:
        parameters = ((parameter, *adapters(parameter)) for parameter in _frozen(layer, dtype).parameters)
        return replace(layer, parameters=tuple(chain.from_iterable(parameters)))

    name, root = f"{model.name}, LoRA of rank {rank}", _frozen(model.root, dtype)
    return replace(model, name=name, root=root, layers=tuple(map(adapted, model.layers)))


def with_trainable_share(model: ModelShape, share: float, dtype: str) -> ModelShape:
    """Return the model with all parameters frozen except those of its last layers.

    Args:
        model: Base model.
        share: Minimum fraction of the model's parameters in the trained layers together.
        dtype: Dtype of the frozen parameters.
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
