"""Table of the transformers models that the wide suite trains, with tiny configurations."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from support.rows import Row

TEXT = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GQA = {**TEXT, "num_key_value_heads": 2}
HEADS8 = {**GQA, "head_dim": 8}
ENCODER = {**TEXT, "type_vocab_size": 2}
SEQ2SEQ = {
    "vocab_size": 96, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}  # fmt: skip
VISION = {
    "image_size": 32, "patch_size": 8, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_labels": 5,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ModelRow(Row):
    """A model family: names of its classes in transformers, a tiny configuration, its layers and its type of input.

    `layers` are paths of the modules to which `fully_shard` is applied. ``*`` selects all children of a list.
    """

    family: str
    model: str
    config: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    layers: tuple[str, ...] = ("model.layers.*",)
    inputs: str = "text"


def build(row: ModelRow) -> Any:
    """Create the model of a row from its configuration on the current device."""
    transformers = importlib.import_module("transformers")
    cls = getattr(transformers, row.config or row.family + "Config")
    config = cls(**SUBCONFIGS.get(row.name, dict)(), **row.settings)
    config._attn_implementation = "eager"
    return getattr(transformers, row.model)(config)


def _clip() -> dict[str, Any]:
    text = {**TEXT, "projection_dim": 16}
    return {"text_config": text, "vision_config": {**VISION, "projection_dim": 16}, "projection_dim": 16}


def _llava() -> dict[str, Any]:
    image = {**VISION, "model_type": "clip_vision_model", "projection_dim": 16}
    return {"text_config": {**GQA, "model_type": "llama"}, "vision_config": image}


SUBCONFIGS: dict[str, Callable[[], dict[str, Any]]] = {"CLIP": _clip, "Llava": _llava}
"""Functions that create nested configurations, by name of the row."""


def causal(family: str, settings: Mapping[str, Any] = GQA, *, name: str = "", **more: Any) -> ModelRow:
    """Return the row of a causal language model."""
    more.setdefault("layers", ("model.layers.*",))
    return ModelRow(name=name or family, family=family, model=more.pop("model", family + "ForCausalLM"),
                    settings=settings, **more)  # fmt: skip


def other(
    family: str, model: str, settings: Mapping[str, Any], layers: tuple[str, ...], inputs: str, **more: Any
) -> ModelRow:
    """Return the row of a model of another type."""
    return ModelRow(name=more.pop("name", family), family=family, model=model, settings=settings, layers=layers,
                    inputs=inputs, **more)  # fmt: skip


def _gpt(**more: Any) -> dict[str, Any]:
    return {"vocab_size": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **more}


BOTH = ("model.encoder.layers.*", "model.decoder.layers.*")
MOE = {**GQA, "num_experts_per_tok": 2}
ROWS: tuple[ModelRow, ...] = (
    causal("Llama"),
    causal("Llama", {**GQA, "tie_word_embeddings": True, "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32}}, name="Llama 3, tied weights"),
    causal("Mistral"),
    causal("Mixtral", {**MOE, "num_local_experts": 4}),
    causal("Qwen2"),
    causal("Qwen3", HEADS8),
    causal("Qwen3Moe", {**MOE, "head_dim": 8, "num_experts": 4, "moe_intermediate_size": 16}),
    causal("Gemma", HEADS8),
    causal("Gemma2", HEADS8),
    causal("Gemma3", HEADS8, config="Gemma3TextConfig", model="Gemma3ForCausalLM"),
    causal("Phi"),
    causal("Phi3"),
    causal("GPT2", _gpt(n_embd=32, n_layer=2, n_head=4, n_positions=64), model="GPT2LMHeadModel",
           layers=("transformer.h.*",)),
    causal("GPTNeo", _gpt(hidden_size=32, num_layers=2, num_heads=4, max_position_embeddings=64, window_size=8,
                          attention_types=[[["global", "local"], 1]]), layers=("transformer.h.*",)),
    causal("GPTNeoX", TEXT, layers=("gpt_neox.layers.*",)),
    causal("GPTJ", _gpt(n_embd=32, n_layer=2, n_head=4, n_positions=64, rotary_dim=4), layers=("transformer.h.*",)),
    causal("CodeGen", _gpt(n_embd=32, n_layer=2, n_head=4, n_positions=64, rotary_dim=4), layers=("transformer.h.*",)),
    causal("GPTBigCode", _gpt(n_embd=32, n_layer=2, n_head=4, n_positions=64), layers=("transformer.h.*",)),
    causal("OPT", {**TEXT, "ffn_dim": 48, "word_embed_proj_dim": 32}, layers=("model.decoder.layers.*",)),
    causal("Bloom", _gpt(hidden_size=32, n_layer=2, n_head=4), layers=("transformer.h.*",)),
    causal("Falcon", _gpt(hidden_size=32, num_hidden_layers=2, num_attention_heads=4), layers=("transformer.h.*",)),
    causal("Mpt", _gpt(d_model=32, n_layers=2, n_heads=4, max_seq_len=64), layers=("transformer.blocks.*",)),
    causal("StableLm"),
    causal("Olmo"),
    causal("Olmo2"),
    causal("Cohere"),
    causal("Cohere2", HEADS8),
    causal("DeepseekV2", {**GQA, "num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4, "v_head_dim": 8, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}),
    causal("DeepseekV3", {**GQA, "num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4, "v_head_dim": 8, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1}),
    causal("Lfm2", {**GQA, "layer_types": ["conv", "full_attention"], "block_multiple_of": 16, "block_ff_dim": 48}),
    causal("Lfm2Moe", {**GQA, "layer_types": ["conv", "full_attention"], "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "num_dense_layers": 1}),
    causal("Granite"),
    causal("GraniteMoe", {**MOE, "num_local_experts": 4}),
    causal("Mamba", _gpt(hidden_size=32, num_hidden_layers=2, state_size=4, time_step_rank=4, use_mambapy=False),
           layers=("backbone.layers.*",)),
    causal("Mamba2", _gpt(hidden_size=32, num_hidden_layers=2, state_size=8, num_heads=8, head_dim=8, n_groups=2,
           chunk_size=8), layers=("backbone.layers.*",)),
    causal("Rwkv", _gpt(hidden_size=32, num_hidden_layers=2, attention_hidden_size=32, intermediate_size=48,
           context_length=64), layers=("rwkv.blocks.*",)),
    causal("Jamba", {**GQA, "num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1,
        "expert_layer_period": 2, "expert_layer_offset": 1, "num_experts": 4, "mamba_d_state": 4, "mamba_dt_rank": 4,
        "use_mamba_kernels": False}),
    causal("Bamba", {**GQA, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 8,
        "attn_layer_indices": [1], "mamba_chunk_size": 8}),
    causal("Helium", HEADS8),
    causal("SmolLM3", {**GQA, "layer_types": ["full_attention"] * 2}),
    causal("Glm", {**HEADS8}),
    causal("Starcoder2"),
    other("Bert", "BertForMaskedLM", ENCODER, ("bert.encoder.layer.*",), "text"),
    other("Roberta", "RobertaForMaskedLM", {**ENCODER, "max_position_embeddings": 66},
          ("roberta.encoder.layer.*",), "text"),
    other("XLMRoberta", "XLMRobertaForMaskedLM", {**ENCODER, "max_position_embeddings": 66},
          ("roberta.encoder.layer.*",), "text"),
    other("DistilBert", "DistilBertForMaskedLM", {"vocab_size": 96, "dim": 32, "hidden_dim": 48, "n_layers": 2,
          "n_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0, "sinusoidal_pos_embds": True},
          ("distilbert.transformer.layer.*",), "text"),
    other("Albert", "AlbertForMaskedLM", {**ENCODER, "embedding_size": 16},
          ("albert.encoder.albert_layer_groups.*",), "text"),
    other("Electra", "ElectraForMaskedLM", {**ENCODER, "embedding_size": 16}, ("electra.encoder.layer.*",), "text"),
    other("DebertaV2", "DebertaV2ForMaskedLM", {**ENCODER, "type_vocab_size": 0, "relative_attention": True,
          "pos_att_type": ["p2c", "c2p"], "position_buckets": 8, "norm_rel_ebd": "layer_norm", "share_att_key": True},
          ("deberta.encoder.layer.*",), "text"),
    other("MPNet", "MPNetForMaskedLM", {**TEXT, "max_position_embeddings": 66}, ("mpnet.encoder.layer.*",), "text"),
    other("Bert", "BertModel", ENCODER, ("encoder.layer.*",), "hidden", name="MiniLM (BertModel)"),
    other("ModernBert", "ModernBertForMaskedLM", {**TEXT, "global_attn_every_n_layers": 2, "cls_token_id": 1,
          "sep_token_id": 2}, ("model.layers.*",), "text"),
    other("T5", "T5ForConditionalGeneration", {"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2,
          "num_heads": 4, "decoder_start_token_id": 0}, ("encoder.block.*", "decoder.block.*"), "text"),
    other("T5", "T5ForConditionalGeneration", {"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2,
          "num_heads": 4, "decoder_start_token_id": 0, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
          ("encoder.block.*", "decoder.block.*"), "text", name="T5 v1.1"),
    other("Bart", "BartForConditionalGeneration", SEQ2SEQ, BOTH, "text"),
    other("MBart", "MBartForConditionalGeneration", SEQ2SEQ, BOTH, "text"),
    other("Marian", "MarianMTModel", SEQ2SEQ, BOTH, "text"),
    other("Pegasus", "PegasusForConditionalGeneration", SEQ2SEQ, BOTH, "text"),
    other("Whisper", "WhisperForConditionalGeneration", {**{k: v for k, v in SEQ2SEQ.items() if k not in
          ("max_position_embeddings",)}, "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 64,
          "suppress_tokens": None, "begin_suppress_tokens": None},
          BOTH, "mel"),
    other("ViT", "ViTForImageClassification", VISION, ("vit.layers.*",), "image"),
    other("DeiT", "DeiTForImageClassification", VISION, ("deit.layers.*",), "image"),
    other("Beit", "BeitForImageClassification", {**VISION, "use_relative_position_bias": True,
          "layer_scale_init_value": 0.1}, ("beit.layers.*",), "image"),
    other("Dinov2", "Dinov2ForImageClassification", {**VISION, "mlp_ratio": 2}, ("dinov2.encoder.layer.*",), "image"),
    other("Swin", "SwinForImageClassification", {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [1, 1],
          "num_heads": [2, 4], "window_size": 4, "num_labels": 5}, ("swin.encoder.layers.*",), "image"),
    other("ConvNext", "ConvNextForImageClassification", {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2,
          "num_labels": 5}, ("convnext.encoder.stages.*",), "image"),
    other("ResNet", "ResNetForImageClassification", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1],
          "layer_type": "basic", "num_labels": 5}, ("resnet.encoder.stages.*",), "image"),
    other("MobileNetV2", "MobileNetV2ForImageClassification", {"image_size": 32, "depth_multiplier": 0.25,
          "num_labels": 5}, ("mobilenet_v2.layer.*",), "image"),
    other("Segformer", "SegformerForImageClassification", {"num_encoder_blocks": 2, "depths": [1, 1],
          "hidden_sizes": [8, 16], "num_attention_heads": [1, 2], "sr_ratios": [2, 1], "patch_sizes": [7, 3],
          "strides": [4, 2], "mlp_ratios": [2, 2], "num_labels": 5}, ("segformer.stages.*",), "image"),
    other("CLIP", "CLIPModel", {}, ("text_model.encoder.layers.*", "vision_model.encoder.layers.*"), "clip",
          note="0-dimensional parameters (`logit_scale`) stay in memory"),
    other("CLIP", "CLIPTextModelWithProjection", {**TEXT, "projection_dim": 16}, ("text_model.encoder.layers.*",),
          "embeds", name="CLIP text model", config="CLIPTextConfig"),
    other("CLIP", "CLIPVisionModelWithProjection", {**VISION, "projection_dim": 16}, ("vision_model.encoder.layers.*",),
          "pixels", name="CLIP vision model", config="CLIPVisionConfig"),
    other("Wav2Vec2", "Wav2Vec2ForCTC", {**TEXT, "vocab_size": 12, "conv_dim": [8, 8], "conv_kernel": [10, 3],
          "conv_stride": [5, 2], "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4,
          "num_feat_extract_layers": 2, "mask_time_length": 2, "mask_time_prob": 0.05, "ctc_zero_infinity": True},
          ("wav2vec2.encoder.layers.*",), "wave"),
    causal("GptOss", {**HEADS8, "num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": ["full_attention",
        "sliding_attention"], "sliding_window": 8}),
    causal("Qwen3Next", {**HEADS8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16, "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}),
    causal("Olmoe", {**MOE, "num_experts": 4}),
    causal("Glm4Moe", {**HEADS8, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "first_k_dense_replace": 1}),
    causal("Llama4", {**HEADS8, "num_local_experts": 2, "intermediate_size_mlp": 48, "no_rope_layers": [1, 0]},
           config="Llama4TextConfig"),
    causal("Exaone4", {**GQA, "layer_types": ["full_attention"] * 2, "sliding_window": None}),
    causal("Nemotron"),
    causal("FalconMamba", _gpt(hidden_size=32, num_hidden_layers=2, state_size=4, time_step_rank=4,
           use_falcon_mambapy=False), layers=("backbone.layers.*",)),
    causal("XGLM", _gpt(d_model=32, ffn_dim=48, num_layers=2, attention_heads=4, max_position_embeddings=64)),
    causal("BioGpt", TEXT, layers=("biogpt.layers.*",)),
    causal("OpenAIGPT", _gpt(n_embd=32, n_layer=2, n_head=4, n_positions=64), model="OpenAIGPTLMHeadModel",
           layers=("transformer.h.*",)),
    other("RoFormer", "RoFormerForMaskedLM", {**ENCODER, "embedding_size": 32}, ("roformer.encoder.layer.*",), "text"),
    other("BigBird", "BigBirdForMaskedLM", {**ENCODER, "attention_type": "original_full"},
          ("bert.encoder.layer.*",), "text"),
    other("XLNet", "XLNetLMHeadModel", _gpt(d_model=32, n_layer=2, n_head=4, d_inner=48),
          ("transformer.layer.*",), "text"),
    other("FNet", "FNetForMaskedLM", ENCODER, ("fnet.encoder.layer.*",), "text"),
    other("M2M100", "M2M100ForConditionalGeneration", SEQ2SEQ, BOTH, "text"),
    other("Blenderbot", "BlenderbotForConditionalGeneration", SEQ2SEQ, BOTH, "text"),
    other("Swinv2", "Swinv2ForImageClassification", {"image_size": 32, "patch_size": 2, "embed_dim": 16,
          "depths": [1, 1], "num_heads": [2, 4], "window_size": 4, "num_labels": 5},
          ("swinv2.encoder.layers.*",), "image"),
    other("EfficientNet", "EfficientNetForImageClassification", {"image_size": 32, "width_coefficient": 0.25,
          "depth_coefficient": 0.25, "hidden_dim": 320, "num_labels": 5}, ("efficientnet.encoder.blocks.*",), "image"),
    other("RegNet", "RegNetForImageClassification", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1],
          "groups_width": 8, "num_labels": 5}, ("regnet.encoder.stages.*",), "image"),
    other("MobileViT", "MobileViTForImageClassification", {"image_size": 32, "hidden_sizes": [16, 24, 32],
          "neck_hidden_sizes": [8, 8, 16, 16, 24, 32, 64], "num_attention_heads": 2, "num_labels": 5},
          ("mobilevit.encoder.layer.*",), "image"),
    other("Hubert", "HubertForCTC", {**TEXT, "vocab_size": 12, "conv_dim": [8, 8], "conv_kernel": [10, 3],
          "conv_stride": [5, 2], "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4,
          "num_feat_extract_layers": 2, "mask_time_length": 2, "mask_time_prob": 0.05, "ctc_zero_infinity": True},
          ("hubert.encoder.layers.*",), "wave"),
)  # fmt: skip

LLAVA = other("Llava", "LlavaForConditionalGeneration", {"image_token_index": 95, "vision_feature_layer": -1},
              ("model.vision_tower.encoder.layers.*", "model.language_model.layers.*"), "image and text")  # fmt: skip
"""A model whose inputs are images and text."""
