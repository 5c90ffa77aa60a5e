"""Small models for tests, each of which covers a special case."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import infinity
from support.adapted import ADAPTED

POLICIES = {
    "bf16": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    "fp32": MixedPrecisionPolicy(),
    "pure_bf16": MixedPrecisionPolicy(),
}
WIDTH = 67  # not a multiple of any vector width


class Block(nn.Module):
    """Layer norm and two linear layers with unusual sizes, with a residual connection."""

    def __init__(self, width: int = WIDTH, checkpointed: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width + 1)
        self.down = nn.Linear(3 * width + 1, width)
        self.checkpointed = checkpointed

    def _inside(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checkpointed and torch.is_grad_enabled():
            return checkpoint(self._inside, x, use_reentrant=False)
        return self._inside(x)


class Toy(nn.Module):
    """Embedding, blocks and head. `order` contains the indices of the blocks in execution order."""

    vocabulary = 131

    def __init__(self, blocks: int = 3, order: tuple[int, ...] | None = None, checkpointed: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(self.vocabulary, WIDTH)
        self.blocks = nn.ModuleList(Block(checkpointed=checkpointed) for _ in range(blocks))
        self.head = nn.Linear(WIDTH, self.vocabulary)
        self.order = tuple(range(blocks)) if order is None else order

    def through_blocks(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            x = self.blocks[index](x)
        return x

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return cross_entropy(self.head(self.through_blocks(self.embedding(tokens))), tokens)


def cross_entropy(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())


class Even(Toy):
    """Model whose FSDP modules fill their 64 KiB pages completely, with 65536 elements each."""

    vocabulary = 128

    def __init__(self, blocks: int = 6) -> None:
        nn.Module.__init__(self)
        self.embedding = nn.Embedding(self.vocabulary, 256)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(256, 128, bias=False), nn.GELU(), nn.Linear(128, 256, bias=False))
            for _ in range(blocks)
        )
        self.head = nn.Linear(256, self.vocabulary, bias=False)
        self.order = tuple(range(blocks))


class Buffered(Toy):
    """Model with a persistent buffer that forward modifies and uses, and a non-persistent buffer."""

    def __init__(self) -> None:
        super().__init__(blocks=1)
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("scale", torch.ones(1), persistent=False)

    def reset_parameters(self) -> None:
        self.seen.zero_()
        self.scale.fill_(1.0)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen += self.scale
        return super().forward(tokens) * (1 + self.seen.clone() / 8)


class Spare(Toy):
    """Model with a parameter and an FSDP module that forward does not use."""

    def __init__(self) -> None:
        super().__init__(blocks=3, order=(0, 2))
        self.blocks[0].register_parameter("unused", nn.Parameter(torch.randn(900)))


class Loose(Toy):
    """Model with an unused root parameter, so that the root module has no complete gradients after backward."""

    def __init__(self) -> None:
        super().__init__(blocks=2)
        self.register_parameter("unused", nn.Parameter(torch.randn(900)))


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Return the loss of next-token prediction (of the same token, for a `Toy`)."""
    if isinstance(model, Toy):
        return model(tokens)
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


def vocabulary_of(model: nn.Module) -> int:
    """Return the vocabulary size of a model."""
    return model.vocabulary if isinstance(model, Toy) else model.config.vocab_size


def llama(
    *, width: int = 64, layers: int = 3, vocabulary: int = 256, tied: bool = False, dropout: float = 0.0
) -> nn.Module:
    """Return a tiny Llama."""
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
    )  # imported here, so that other processes start without transformers

    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=vocabulary,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        attention_dropout=dropout,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    """Return a tiny GPT-2 with the full vocabulary and dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_embd=16, n_layer=2, n_head=2, n_positions=64, vocab_size=50257, bos_token_id=None, eos_token_id=None
    )
    return GPT2LMHeadModel(config)


def frozen() -> nn.Module:
    """Return a Llama in which the embedding, the first layer and one matrix of the second layer are frozen."""
    model = llama()
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    model.model.layers[1].mlp.up_proj.requires_grad_(False)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "wide": lambda: llama(width=1024, layers=4, vocabulary=8192),
    "tied": lambda: llama(tied=True),
    "gpt2": gpt2,
    "toy": Toy,
    "even": Even,
    "repeated": lambda: Toy(blocks=2, order=(0, 1, 0)),
    "spare": Spare,
    "loose": Loose,
    "buffered": Buffered,
    "frozen": frozen,
    **ADAPTED,
}


def layers_of(model: nn.Module) -> nn.ModuleList:
    """Return the layers to which `fully_shard` is applied."""
    if isinstance(model, Toy):
        return model.blocks
    if hasattr(model, "peft_config"):
        model = model.get_base_model()
    return model.transformer.h if hasattr(model, "transformer") else model.model.layers


def build(
    name: str,
    *,
    policy: str = "bf16",
    checkpointing: bool = False,
    meta: bool = False,
    seed: int = 0,
    reshard: bool = True,
    compiled: bool = False,
    device: str = "cpu",
) -> nn.Module:
    """Return a sharded model. The same arguments give the same values on any device."""
    torch.manual_seed(seed)
    with torch.device("meta" if meta else "cpu"):
        model = MODELS[name]()
    if policy == "pure_bf16":
        model = model.to(torch.bfloat16)
    if checkpointing:
        if isinstance(model, Toy):
            for block in model.blocks:
                block.checkpointed = True
        else:
            model.gradient_checkpointing_enable({"use_reentrant": False})
    if compiled:
        torch.compiler.reset()  # type: ignore[no-untyped-call]  # otherwise, earlier models count as recompilations
        for layer in layers_of(model):
            layer.compile(backend="aot_eager")  # requires no compiler
    return shard(model if meta else model.to(device), policy, reshard=reshard, device=device)


def shard(model: nn.Module, policy: str = "bf16", *, reshard: bool = True, device: str = "cpu") -> nn.Module:
    """Apply `fully_shard` to the layers and to the model."""
    mesh = infinity.mesh(device)
    for layer in layers_of(model):
        fully_shard(layer, mesh=mesh, mp_policy=POLICIES[policy], reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=POLICIES[policy])
    return model
