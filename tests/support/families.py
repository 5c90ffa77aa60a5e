"""Tiny transformers models whose checkpoints use different names, fusion or tying than the model classes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import infinity
from support.wide_models import SEQ2SEQ, TEXT

_SMALL = {**TEXT, "vocab_size": 64, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_GROUPED = {**_SMALL, "num_key_value_heads": 2}
_SEQ2SEQ = {**SEQ2SEQ, "vocab_size": 64, "forced_eos_token_id": 2}
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_VISION = {key: _SMALL[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")}

FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", _GROUPED),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {**_GROUPED, "tie_word_embeddings": True}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64,
             "vocab_size": 64, "bos_token_id": None, "eos_token_id": None}),
    "bert": ("BertForMaskedLM", "BertConfig", {**_SMALL, "pad_token_id": 0}),
    "t5": ("T5ForConditionalGeneration", "T5Config", {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2,
           "num_heads": 4, "vocab_size": 64, "decoder_start_token_id": 0}),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**_GROUPED, "head_dim": 8, "sliding_window": 16}),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**_GROUPED, **_MOE, "head_dim": 8, "num_experts": 12}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", {**_SMALL, **_MOE, "num_key_value_heads": 4,
                    "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
                    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
                    "v_head_dim": 8}),
    "lfm2_moe": ("Lfm2MoeForCausalLM", "Lfm2MoeConfig", {**_GROUPED, **_MOE, "num_experts": 4, "num_dense_layers": 1,
                 "layer_types": ["conv", "full_attention"]}),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", _SMALL),
    "vit": ("ViTForImageClassification", "ViTConfig", {**_VISION, "image_size": 16, "patch_size": 4}),
    "swin": ("SwinForImageClassification", "SwinConfig", {"image_size": 16, "patch_size": 2, "embed_dim": 8,
             "depths": [1, 1], "num_heads": [2, 2], "window_size": 4}),
    "marian": ("MarianMTModel", "MarianConfig", {**_SEQ2SEQ, "eos_token_id": 0, "forced_eos_token_id": 0}),
    "bart": ("BartForConditionalGeneration", "BartConfig", _SEQ2SEQ),
    "clip_text": ("CLIPTextModel", "CLIPTextConfig", {**_SMALL, "eos_token_id": 2}),
    "resnet": ("ResNetForImageClassification", "ResNetConfig", {"embedding_size": 8, "hidden_sizes": [8, 16],
               "depths": [1, 1]}),
}  # fmt: skip
"""Class, configuration class and configuration values, by name."""


def make(name: str, **values: Any) -> nn.Module:
    """Return an unsharded model of a family on the current device."""
    import transformers

    cls, config, settings = FAMILIES[name]
    return getattr(transformers, cls)(getattr(transformers, config)(**{**settings, **values})).eval()


def filled(name: str, seed: int = 1, **values: Any) -> nn.Module:
    """Return a model whose parameters and persistent buffers have values that no initialization produces."""
    torch.manual_seed(seed)
    model = make(name, **values)
    computed = getattr(model, "_keys_to_ignore_on_save", None) or ()
    with torch.no_grad():
        for key, value in model.state_dict().items():
            if value.is_floating_point() and key not in computed:
                value.copy_(torch.rand_like(value) * 0.2 + 0.01)
            elif not value.is_floating_point() and value.ndim == 0:
                value.fill_(3)  # number of batches, in batch norm
    return model


def on_meta(name: str, **values: Any) -> nn.Module:
    """Return a sharded model of a family on the meta device."""
    with torch.device("meta"):
        model = make(name, **values)
    return shard(model)


def shard(model: nn.Module) -> nn.Module:
    """Apply `fully_shard` to the members of the outermost module lists and to the model."""
    mesh = infinity.mesh("cpu")
    inside: set[int] = set()
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and id(module) not in inside:
            inside.update(id(below) for below in module.modules())
            for layer in module:
                if callable(getattr(layer, "forward", None)) and not isinstance(layer, nn.ModuleList):
                    fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def offload(model: nn.Module, folder: Any, **options: Any) -> infinity.PagedOptimizer:
    """Offload a model to a folder."""
    trained = [param for param in model.parameters() if param.requires_grad]
    settings = {"storage": {"paths": [str(folder)]}, "memory": {"host_bytes": 16 << 20, "page_bytes": 64 << 10}}
    if run := options.pop("run", None):
        settings["run"] = run
    return infinity.offload(model, torch.optim.AdamW(trained, fused=True), settings, **options)


def inputs(model: Any) -> dict[str, torch.Tensor]:
    """Return a batch for a model."""
    generator = torch.Generator().manual_seed(7)
    if model.main_input_name == "pixel_values":
        size = getattr(model.config, "image_size", 16)
        return {"pixel_values": torch.rand(2, 3, size, size, generator=generator)}
    tokens = torch.randint(4, 64, (2, 12), generator=generator)
    return {"input_ids": tokens, **({"decoder_input_ids": tokens} if model.config.is_encoder_decoder else {})}


def output(model: Any) -> torch.Tensor:
    """Return the logits for `inputs(model)`, or the last hidden state."""
    with torch.no_grad():
        return model.eval()(**inputs(model))[0]


def differing(one: nn.Module, other: nn.Module) -> list[str]:
    """Return the names of parameters and buffers that are not bitwise equal."""
    expected = {**dict(one.named_parameters()), **dict(one.named_buffers())}
    found = {**dict(other.named_parameters()), **dict(other.named_buffers())}
    full = {key: value.full_tensor() if hasattr(value, "full_tensor") else value for key, value in found.items()}
    return [
        key
        for key in expected.keys() | full.keys()
        if key not in expected
        or key not in full
        or expected[key].dtype != full[key].dtype
        or not torch.equal(expected[key], full[key])
    ]
