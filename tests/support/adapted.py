"""Partly frozen models, with and without peft adapters."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn


def llama(**settings: Any) -> nn.Module:
    """Return a tiny Llama."""
    from support import models

    return models.llama(**settings)


def gpt2() -> nn.Module:
    """Return a tiny GPT-2 without dropout. Its weight matrices are transposed."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_embd=64, n_layer=4, n_head=2, n_positions=64, vocab_size=301, bos_token_id=None, eos_token_id=None,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def adapted(kind: str, make: Callable[[], nn.Module] = llama, **settings: Any) -> nn.Module:
    """Return a model with a peft adapter.

    Args:
        kind: Class name of the adapter's configuration, such as ``LoraConfig``.
        make: Function that creates the base model.
        settings: Settings of the adapter.
    """
    import peft

    standard: dict[str, Any] = {"task_type": "CAUSAL_LM"}
    if kind == "LoraConfig":
        standard |= {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    return peft.get_peft_model(make(), getattr(peft, kind)(**{**standard, **settings}))


lora = partial(adapted, "LoraConfig")


def _in_bf16() -> nn.Module:
    """Return a bf16 base model with fp32 adapters."""
    return lora(lambda: llama().to(torch.bfloat16))


def _two() -> nn.Module:
    """Return a model with two adapters, one of which is trained."""
    import peft

    model: Any = lora()
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["o_proj"], task_type="CAUSAL_LM"))
    return model


def _reentrant() -> nn.Module:
    """Return a model with reentrant activation checkpointing, for which peft makes inputs require gradients."""
    model: Any = lora()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    return model


def _trained(make: Callable[[], nn.Module], *parts: str) -> nn.Module:
    """Return a model whose trainable parameters are those with one of `parts` in their names."""
    model = make()
    for name, param in model.named_parameters():
        param.requires_grad_(any(part in name for part in parts))
    return model


def quantized(dtype: str) -> nn.Module:
    """Return a bf16 base model whose layers are quantized to ``int8`` or ``nf4``."""
    from infinity.formats.quantized import quantize_

    base = llama(width=128).to(torch.bfloat16)
    quantize_(base, quantization(dtype))
    return base


def quantization(dtype: str) -> Any:
    """Return the torchao configuration for ``int8`` or ``nf4``, with block sizes that divide small matrices."""
    if dtype == "int8":
        from torchao.quantization import Int8WeightOnlyConfig

        return Int8WeightOnlyConfig()
    from torchao.prototype._nf4tensor_api import NF4WeightOnlyConfig

    settings = NF4WeightOnlyConfig()
    settings.scaler_block_size = 64
    return settings


ADAPTED: dict[str, Callable[[], nn.Module]] = {
    "lora": lora,
    "lora-all": partial(lora, target_modules="all-linear", bias="all"),
    "lora-dropout": partial(lora, lora_dropout=0.1),
    "lora-rank-stabilized": partial(lora, use_rslora=True, init_lora_weights="gaussian"),
    "lora-bf16-base": _in_bf16,
    "lora-two-adapters": _two,
    "lora-reentrant": _reentrant,
    "lora-tied": partial(lora, partial(llama, tied=True)),
    "lora-transposed": partial(lora, gpt2, target_modules=["c_attn"], fan_in_fan_out=True),
    "lora-saved-head": partial(lora, modules_to_save=["lm_head"]),
    "lora-embeddings": partial(lora, target_modules=["q_proj", "embed_tokens", "lm_head"]),
    "lora-tokens": partial(lora, trainable_token_indices={"embed_tokens": [3, 5]}),
    "dora": partial(lora, use_dora=True),
    "ia3": partial(adapted, "IA3Config"),
    "loha": partial(adapted, "LoHaConfig", target_modules=["q_proj", "up_proj"]),
    "oft": partial(adapted, "OFTConfig", target_modules=["q_proj"], oft_block_size=8),
    "prompt": partial(adapted, "PromptTuningConfig", partial(llama, layers=8), num_virtual_tokens=5),
    "prefix": partial(adapted, "PrefixTuningConfig", num_virtual_tokens=5),
    "prompt-encoder": partial(adapted, "PromptEncoderConfig", num_virtual_tokens=5, encoder_hidden_size=16),
    "qlora-int8": partial(lora, partial(quantized, "int8"), target_modules="all-linear"),
    "qlora-nf4": partial(lora, partial(quantized, "nf4")),
    "biases": partial(_trained, gpt2, "bias"),
    "norms": partial(_trained, llama, "norm"),
    "head": partial(_trained, llama, "lm_head"),
    "upper-layers": partial(_trained, llama, "layers.2", "lm_head", "model.norm"),
    "lower-layers": partial(_trained, llama, "layers.0"),
    "single-matrix": partial(_trained, llama, "layers.1.mlp.up_proj"),
    "tied-frozen": partial(_trained, partial(llama, tied=True), "layers"),
    "tied-trained": partial(_trained, partial(llama, tied=True), "embed_tokens"),
}
"""Functions that create the models, by name."""
