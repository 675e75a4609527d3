"""config.json files as published, of each family that has native code, and of models whose text part is read.

Every field is kept but for long lists; sizes are those of one model of the family. Granite 4.0 Micro, AFM-4.5B,
Solar-Open-100B, Qwen3-VL-30B-A3B and GLM-4.5V are written from memory, with no copy of the file at hand.
"""

from __future__ import annotations

from typing import Any

__all__ = ["GIVEN", "PUBLISHED", "PUBLISHED_OTHERS"]

GIVEN: dict[str, dict[str, Any]] = {
    "glm4_moe": {"head_dim": 128},
    "glm4v_moe_text": {"head_dim": 128},
    "qwen3_omni_moe_text": {"head_dim": 128},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "granitemoehybrid": {"layer_types": ["attention"] * 32},
}
"""What transformers' default configurations leave out that a published one has, by `model_type`."""


def _config(
    architecture: str, model_type: str, sizes: tuple[int, int, int, int, int, int, int], **more: Any
) -> dict[str, Any]:
    """A config of hidden and feed size, layers, heads, key heads, context and vocabulary, and what else it has."""
    names = (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "max_position_embeddings", "vocab_size",
    )  # fmt: skip
    return {
        "architectures": [architecture],
        "model_type": model_type,
        **dict(zip(names, sizes, strict=True)),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
        "use_cache": True,
        **more,
    }


_RMS: dict[str, Any] = {"rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000.0, "attention_dropout": 0.0}
_NO_BIAS: dict[str, Any] = {"attention_bias": False, "mlp_bias": False, "pretraining_tp": 1}
_LLAMA3 = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
_OLD: dict[str, Any] = {
    "_name_or_path": "", "add_cross_attention": False, "bad_words_ids": None, "begin_suppress_tokens": None,
    "chunk_size_feed_forward": 0, "cross_attention_hidden_size": None, "decoder_start_token_id": None,
    "diversity_penalty": 0.0, "do_sample": False, "early_stopping": False, "encoder_no_repeat_ngram_size": 0,
    "exponential_decay_length_penalty": None, "finetuning_task": None, "forced_bos_token_id": None,
    "forced_eos_token_id": None, "id2label": {"0": "LABEL_0", "1": "LABEL_1"}, "is_decoder": False,
    "is_encoder_decoder": False, "label2id": {"LABEL_0": 0, "LABEL_1": 1}, "length_penalty": 1.0, "max_length": 20,
    "min_length": 0, "no_repeat_ngram_size": 0, "num_beam_groups": 1, "num_beams": 1, "num_return_sequences": 1,
    "output_attentions": False, "output_hidden_states": False, "output_scores": False, "pad_token_id": None,
    "prefix": None, "problem_type": None, "pruned_heads": {}, "remove_invalid_values": False,
    "repetition_penalty": 1.0, "return_dict": True, "return_dict_in_generate": False, "sep_token_id": None,
    "suppress_tokens": None, "task_specific_params": None, "temperature": 1.0, "tf_legacy_loss": False,
    "tie_encoder_decoder": False, "tokenizer_class": None, "top_k": 50, "top_p": 1.0, "torchscript": False,
    "typical_p": 1.0, "use_bfloat16": False,
}  # fmt: skip
"""What older versions of transformers wrote of every model, within text parts above all."""

_QWEN2: dict[str, Any] = {
    "attention_dropout": 0.0, "max_window_layers": 28, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "sliding_window": 131072, "tie_word_embeddings": False, "use_sliding_window": False,
}  # fmt: skip
_QWEN3: dict[str, Any] = {
    **_QWEN2,
    "attention_bias": False,
    "head_dim": 128,
    "rope_scaling": None,
    "sliding_window": None,
}
_QWEN3_MOE: dict[str, Any] = {
    **_QWEN3, "decoder_sparse_step": 1, "max_window_layers": 48, "mlp_only_layers": [], "moe_intermediate_size": 768,
    "norm_topk_prob": True, "num_experts": 128, "num_experts_per_tok": 8, "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}  # fmt: skip
_GEMMA: dict[str, Any] = {
    "attention_bias": False, "attention_dropout": 0.0, "head_dim": 256, "rms_norm_eps": 1e-06, "rope_theta": 10000.0,
    "pad_token_id": 0,
}  # fmt: skip
_LAYERS_OF_SIX = (["sliding_attention"] * 5 + ["full_attention"]) * 10
_DEEPSEEK: dict[str, Any] = {
    "attention_bias": False, "attention_dropout": 0.0, "ep_size": 1, "kv_lora_rank": 512, "moe_layer_freq": 1,
    "num_nextn_predict_layers": 1, "pretraining_tp": 1, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06, "rope_theta": 10000, "seq_aux": True, "tie_word_embeddings": False, "v_head_dim": 128,
    "aux_loss_alpha": 0.001,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekConfig"},
}  # fmt: skip
_DEEPSEEK_ROPE = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}
_COHERE2: dict[str, Any] = {
    "_attn_implementation_autoset": True, "attention_bias": False, "attention_dropout": 0.0,
    "cache_implementation": "hybrid", "head_dim": 128, "layer_norm_eps": 1e-05, "layer_switch": 4,
    "logit_scale": 0.25, "order_of_interleaved_layers": "local_attn_first", "pad_token_id": 0,
    "position_embedding_type": "rope_gptj", "rope_scaling": None, "rope_theta": 50000, "rotary_pct": 1.0,
    "sliding_window": 4096, "sliding_window_pattern": 4, "use_embedding_sharing": True, "use_gated_activation": True,
    "use_parallel_block": True, "use_parallel_embedding": True,
}  # fmt: skip
_GPT2: dict[str, Any] = {
    "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1, "bos_token_id": 50256,
    "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024,
    "resid_pdrop": 0.1, "summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True,
    "summary_type": "cls_index", "summary_use_proj": True, "vocab_size": 50257,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
}  # fmt: skip

PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": _config(
        "LlamaForCausalLM", "llama", (4096, 14336, 32, 32, 8, 131072, 128256), **_RMS, **_NO_BIAS,
    ) | {"rope_scaling": _LLAMA3, "rope_theta": 500000.0, "tie_word_embeddings": False},
    "Llama-2-7b": _config("LlamaForCausalLM", "llama", (4096, 11008, 32, 32, 32, 4096, 32000), **_RMS)
    | {"_name_or_path": "meta-llama/Llama-2-7b-hf", "pretraining_tp": 1, "tie_word_embeddings": False},
    "vicuna-7b-v1.5": _config("LlamaForCausalLM", "llama", (4096, 11008, 32, 32, 32, 4096, 32000), **_RMS)
    | {"max_sequence_length": 2048, "pad_token_id": 0, "use_cache": False},
    "SmolLM2-1.7B-Instruct": _config(
        "LlamaForCausalLM", "llama", (2048, 8192, 24, 32, 32, 8192, 49152), **_RMS, **_NO_BIAS, head_dim=64,
        pad_token_id=2, tie_word_embeddings=True, is_llama_config=True, rope_interleaved=False,
        **{"transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}}},
    ),
    "Llama-3.2-1B of unsloth": _config(
        "LlamaForCausalLM", "llama", (2048, 8192, 16, 32, 8, 131072, 128256), **_RMS, **_NO_BIAS, head_dim=64,
        unsloth_fixed=True, unsloth_version="2025.3.1", pad_token_id=128004, tie_word_embeddings=True,
    ),
    "Llama-3.1-8B of compressed-tensors": _config(
        "LlamaForCausalLM", "llama", (4096, 14336, 32, 32, 8, 131072, 128256), **_RMS, **_NO_BIAS,
        quantization_config={"quant_method": "compressed-tensors", "format": "float-quantized"},
    ),
    "Mistral-7B-v0.1": _config("MistralForCausalLM", "mistral", (4096, 14336, 32, 32, 8, 32768, 32000), **_RMS)
    | {"sliding_window": 4096, "tie_word_embeddings": False},
    "Mistral-Nemo-2407": _config("MistralForCausalLM", "mistral", (5120, 14336, 40, 32, 8, 131072, 131072), **_RMS)
    | {"head_dim": 128, "sliding_window": None, "rope_theta": 1000000.0},
    "Qwen2.5-7B-Instruct": _config(
        "Qwen2ForCausalLM", "qwen2", (3584, 18944, 28, 28, 4, 32768, 152064), **_QWEN2
    ),
    "Qwen2.5-7B": _config(
        "Qwen2ForCausalLM", "qwen2", (3584, 18944, 28, 28, 4, 131072, 152064), **_QWEN2, use_mrope=False
    ),
    "Qwen2.5-7B-Instruct-1M": _config(
        "Qwen2ForCausalLM", "qwen2", (3584, 18944, 28, 28, 4, 1010000, 152064), **_QWEN2,
        dual_chunk_attention_config={
            "chunk_size": 262144, "local_size": 8192, "original_max_position_embeddings": 262144,
        },
    ),
    "Qwen3-8B": _config("Qwen3ForCausalLM", "qwen3", (4096, 12288, 36, 32, 8, 40960, 151936), **_QWEN3),
    "Qwen3-30B-A3B": _config(
        "Qwen3MoeForCausalLM", "qwen3_moe", (2048, 6144, 48, 32, 4, 40960, 151936), **_QWEN3_MOE
    ),
    "Qwen3-Coder-30B-A3B-Instruct": _config(
        "Qwen3MoeForCausalLM", "qwen3_moe", (2048, 5472, 48, 32, 4, 262144, 151936), **_QWEN3_MOE,
        qkv_bias=False, shared_expert_intermediate_size=0, use_qk_norm=True,
    ),
    "Qwen1.5-MoE-A2.7B": _config(
        "Qwen2MoeForCausalLM", "qwen2_moe", (2048, 5632, 24, 16, 16, 8192, 151936),
        **(_QWEN2 | {"max_window_layers": 21, "sliding_window": 32768}),
        decoder_sparse_step=1, moe_intermediate_size=1408, norm_topk_prob=False, num_experts=60,
        num_experts_per_tok=4, output_router_logits=False, router_aux_loss_coef=0.001,
        shared_expert_intermediate_size=5632,
    ),
    "gemma-2b": _config("GemmaForCausalLM", "gemma", (2048, 16384, 18, 8, 1, 8192, 256000), **_GEMMA)
    | {"hidden_act": "gelu", "rope_scaling": None},
    "gemma-1.1-7b-it": _config("GemmaForCausalLM", "gemma", (3072, 24576, 28, 16, 16, 8192, 256000), **_GEMMA)
    | {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"},
    "gemma-2-9b": _config(
        "Gemma2ForCausalLM", "gemma2", (3584, 14336, 42, 16, 8, 8192, 256000), **_GEMMA,
        attn_logit_softcapping=50.0, cache_implementation="hybrid", final_logit_softcapping=30.0,
        hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=256, sliding_window=4096,
        sliding_window_size=4096,
    ) | {"hidden_act": "gelu_pytorch_tanh"},
    "gemma-3-1b-it": _config(
        "Gemma3ForCausalLM", "gemma3_text", (1152, 6912, 26, 4, 1, 32768, 262144), **_GEMMA,
        attn_logit_softcapping=None, cache_implementation="hybrid", final_logit_softcapping=None,
        hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=256, rope_local_base_freq=10000,
        rope_scaling=None, sliding_window=512, sliding_window_pattern=6,
    ),
    "gemma-3-270m": _config(
        "Gemma3ForCausalLM", "gemma3_text", (640, 2048, 18, 4, 1, 32768, 262144), **_GEMMA,
        _sliding_window_pattern=6, attn_logit_softcapping=None, final_logit_softcapping=None,
        hidden_activation="gelu_pytorch_tanh", layer_types=_LAYERS_OF_SIX[:18], query_pre_attn_scalar=256,
        rope_local_base_freq=10000.0, rope_scaling=None, sliding_window=512, use_bidirectional_attention=False,
    ),
    "gemma-3-4b-it": {
        "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999, "eoi_token_index": 256000,
        "eos_token_id": [1, 106], "image_token_index": 262144, "initializer_range": 0.02, "mm_tokens_per_image": 256,
        "model_type": "gemma3", "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0",
        "text_config": {
            "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
        },
        "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model", "vision_use_head": False},
    },
    "Phi-3-mini-4k-instruct": _config("Phi3ForCausalLM", "phi3", (3072, 8192, 32, 32, 32, 4096, 32064), **_RMS)
    | {
        "attention_bias": False, "embd_pdrop": 0.0, "original_max_position_embeddings": 4096, "resid_pdrop": 0.0,
        "sliding_window": 2047, "tie_word_embeddings": False, "pad_token_id": 32000,
        "auto_map": {
            "AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
        },
    },
    "Phi-4-mini-instruct": _config("Phi3ForCausalLM", "phi3", (3072, 8192, 32, 24, 8, 131072, 200064), **_RMS)
    | {
        "attention_bias": False, "embd_pdrop": 0.0, "full_attn_mod": 1, "interpolate_factor": 1,
        "lm_head_bias": False, "mlp_bias": False, "original_max_position_embeddings": 4096, "resid_pdrop": 0.0,
        "partial_rotary_factor": 0.75, "sliding_window": 262144, "tie_word_embeddings": True, "pad_token_id": 199999,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.5] * 48},
    },
    "phi-4": _config("Phi3ForCausalLM", "phi3", (5120, 17920, 40, 40, 10, 16384, 100352), **_RMS)
    | {
        "attention_bias": False, "embd_pdrop": 0.0, "original_max_position_embeddings": 16384, "resid_pdrop": 0.0,
        "rope_theta": 250000, "sliding_window": None, "tie_word_embeddings": False,
    },
    "phi-2": _config("PhiForCausalLM", "phi", (2560, 10240, 32, 32, 32, 2048, 51200))
    | {
        "attention_dropout": 0.0, "embd_pdrop": 0.0, "hidden_act": "gelu_new", "layer_norm_eps": 1e-05,
        "partial_rotary_factor": 0.4, "qk_layernorm": False, "resid_pdrop": 0.1, "rope_scaling": None,
        "rope_theta": 10000.0, "tie_word_embeddings": False,
    },
    "Phi-3.5-MoE-instruct": _config("PhimoeForCausalLM", "phimoe", (4096, 6400, 32, 32, 8, 131072, 32064), **_RMS)
    | {
        "attention_bias": True, "hidden_dropout": 0.0, "input_jitter_noise": 0.01, "lm_head_bias": True,
        "num_experts_per_tok": 2, "num_local_experts": 16, "original_max_position_embeddings": 4096,
        "output_router_logits": False, "router_aux_loss_coef": 0.0, "router_jitter_noise": 0.01,
        "sliding_window": 131072, "tie_word_embeddings": False,
        "rope_scaling": {
            "type": "longrope", "short_factor": [1.0] * 64, "long_factor": [1.5] * 64, "short_mscale": 1.25,
            "long_mscale": 1.25, "original_max_position_embeddings": 4096,
        },
    },
    "glm-4-9b-chat-hf": _config("GlmForCausalLM", "glm", (4096, 13696, 40, 32, 2, 131072, 151552), **_RMS)
    | {
        "attention_bias": True, "eos_token_id": [151329, 151336, 151338], "head_dim": 128,
        "partial_rotary_factor": 0.5, "rms_norm_eps": 1.5625e-07, "pad_token_id": 151329,
        "tie_word_embeddings": False,
    },
    "GLM-4-9B-0414": _config("Glm4ForCausalLM", "glm4", (4096, 13696, 40, 32, 2, 32768, 151552), **_RMS)
    | {"attention_bias": True, "head_dim": 128, "partial_rotary_factor": 0.5, "tie_word_embeddings": False},
    "GLM-4.5-Air": _config("Glm4MoeForCausalLM", "glm4_moe", (4096, 10944, 46, 96, 8, 131072, 151552), **_RMS)
    | {
        "attention_bias": True, "first_k_dense_replace": 1, "head_dim": 128, "moe_intermediate_size": 1408,
        "n_group": 1, "n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": True,
        "num_experts_per_tok": 8, "num_nextn_predict_layers": 1, "partial_rotary_factor": 0.5,
        "routed_scaling_factor": 1.0, "tie_word_embeddings": False, "topk_group": 1, "use_qk_norm": False,
    },
    "Solar-Open-100B": _config("SolarOpenForCausalLM", "solar_open", (4096, 10240, 48, 64, 8, 131072, 196608), **_RMS)
    | {
        "attention_bias": False, "first_k_dense_replace": 0, "head_dim": 128, "moe_intermediate_size": 1280,
        "n_group": 1, "n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": True,
        "num_experts_per_tok": 8, "partial_rotary_factor": 1.0, "rope_theta": 1000000, "routed_scaling_factor": 1.0,
        "rope_scaling": {"factor": 2.0, "original_max_position_embeddings": 65536, "type": "yarn"},
        "tie_word_embeddings": False, "topk_group": 1, "use_qk_norm": False,
    },
    "OLMo-2-1124-7B": _config("Olmo2ForCausalLM", "olmo2", (4096, 11008, 32, 32, 32, 4096, 100352), **_RMS)
    | {"attention_bias": False, "rope_theta": 500000, "tie_word_embeddings": False, "pad_token_id": 100277},
    "Olmo-3-7B": _config("Olmo3ForCausalLM", "olmo3", (4096, 11008, 32, 32, 32, 65536, 100278), **_RMS)
    | {
        "attention_bias": False, "rope_theta": 500000, "sliding_window": 4096,
        "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8,
        "rope_scaling": {
            "attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0,
            "original_max_position_embeddings": 8192, "rope_type": "yarn",
        },
    },
    "OLMoE-1B-7B-0924": _config("OlmoeForCausalLM", "olmoe", (2048, 1024, 16, 16, 16, 4096, 50304), **_RMS)
    | {
        "attention_bias": False, "clip_qkv": None, "norm_topk_prob": False, "num_experts": 64,
        "num_experts_per_tok": 8, "output_router_logits": False, "router_aux_loss_coef": 0.01,
    },
    "granite-3.3-8b-instruct": _config(
        "GraniteForCausalLM", "granite", (4096, 12800, 40, 32, 8, 131072, 49159), **_RMS,
        attention_bias=False, attention_multiplier=0.0078125, embedding_multiplier=12.0, logits_scaling=16.0,
        mlp_bias=False, residual_multiplier=0.22, tie_word_embeddings=True, pad_token_id=0,
    ),
    "granite-3.0-1b-a400m": _config(
        "GraniteMoeForCausalLM", "granitemoe", (1024, 512, 24, 16, 8, 4096, 49155), **_RMS,
        attention_bias=False, attention_multiplier=0.015625, embedding_multiplier=12.0, logits_scaling=6.0,
        num_experts_per_tok=8, num_local_experts=32, output_router_logits=False, residual_multiplier=0.22,
        router_aux_loss_coef=0.0, tie_word_embeddings=True,
    ),
    "granite-4.0-micro": _config(
        "GraniteMoeHybridForCausalLM", "granitemoehybrid", (2560, 8192, 40, 40, 8, 131072, 100352),
        **{**_RMS, "rope_theta": 10000000}, attention_bias=False, attention_multiplier=0.015625,
        embedding_multiplier=12, init_method="mup", layer_types=["attention"] * 40, logits_scaling=10,
        normalization_function="rmsnorm", num_experts_per_tok=0, num_local_experts=0, output_router_logits=False,
        pad_token_id=100256, position_embedding_type="rope", residual_multiplier=0.22, router_aux_loss_coef=0.01,
        shared_intermediate_size=8192, tie_word_embeddings=True,  # and sizes of Mamba, which no layer has
    ),
    "DeepSeek-V3": _config(
        "DeepseekV3ForCausalLM", "deepseek_v3", (7168, 18432, 61, 128, 128, 163840, 129280), **_DEEPSEEK,
        first_k_dense_replace=3, moe_intermediate_size=2048, n_group=8, n_routed_experts=256, n_shared_experts=1,
        norm_topk_prob=True, num_experts_per_tok=8, q_lora_rank=1536, routed_scaling_factor=2.5,
        rope_scaling=_DEEPSEEK_ROPE, scoring_func="sigmoid", topk_group=4, topk_method="noaux_tc",
        quantization_config={
            "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
        },
    ),
    "DeepSeek-V2-Lite": _config(
        "DeepseekV2ForCausalLM", "deepseek_v2", (2048, 10944, 27, 16, 16, 163840, 102400),
        **{name: value for name, value in _DEEPSEEK.items() if name != "num_nextn_predict_layers"},
        first_k_dense_replace=1, moe_intermediate_size=1408, n_group=1, n_routed_experts=64, n_shared_experts=2,
        norm_topk_prob=False, num_experts_per_tok=6, q_lora_rank=None, routed_scaling_factor=1.0,
        rope_scaling={**_DEEPSEEK_ROPE, "mscale": 0.707, "mscale_all_dim": 0.707}, scoring_func="softmax",
        topk_group=1, topk_method="greedy",
    ),
    "GLM-4.7-Flash": _config(
        "Glm4MoeLiteForCausalLM", "glm4_moe_lite", (2048, 10240, 47, 20, 20, 202752, 154880),
        attention_bias=False, attention_dropout=0.0, first_k_dense_replace=1, head_dim=64, kv_lora_rank=512,
        moe_intermediate_size=1536, n_group=1, n_routed_experts=64, n_shared_experts=1, norm_topk_prob=True,
        num_experts_per_tok=4, num_nextn_predict_layers=1, partial_rotary_factor=1.0, q_lora_rank=768,
        qk_nope_head_dim=192, qk_rope_head_dim=64, rms_norm_eps=1e-05, rope_scaling=None, rope_theta=1000000,
        routed_scaling_factor=1.8, tie_word_embeddings=False, topk_group=1, topk_method="noaux_tc", v_head_dim=256,
    ),
    "gpt-oss-20b": _config("GptOssForCausalLM", "gpt_oss", (2880, 2880, 24, 64, 8, 131072, 201088), **_RMS)
    | {
        "attention_bias": True, "experts_per_token": 4, "head_dim": 64, "initial_context_length": 4096,
        "layer_types": ["sliding_attention", "full_attention"] * 12, "num_experts_per_tok": 4,
        "num_local_experts": 32, "output_router_logits": False, "rope_theta": 150000, "router_aux_loss_coef": 0.9,
        "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False, "pad_token_id": 199999,
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
            "rope_type": "yarn", "truncate": False,
        },
        "quantization_config": {"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"},
    },
    "Mixtral-8x7B-v0.1": _config("MixtralForCausalLM", "mixtral", (4096, 14336, 32, 32, 8, 32768, 32000), **_RMS)
    | {
        "num_experts_per_tok": 2, "num_local_experts": 8, "output_router_logits": False,
        "router_aux_loss_coef": 0.02, "router_jitter_noise": 0.0, "sliding_window": None,
        "tie_word_embeddings": False,
    },
    "SmolLM3-3B": _config("SmolLM3ForCausalLM", "smollm3", (2048, 11008, 36, 16, 4, 65536, 128256), **_RMS)
    | {
        "attention_bias": False, "layer_types": ["full_attention"] * 36, "max_window_layers": 28, "mlp_bias": False,
        "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9, "pad_token_id": 128004,
        "pretraining_tp": 2, "rope_theta": 5000000.0, "sliding_window": None, "use_sliding_window": False,
    },
    "EXAONE-4.0-32B": _config("Exaone4ForCausalLM", "exaone4", (5120, 27392, 64, 40, 8, 131072, 102400), **_RMS)
    | {
        "head_dim": 128, "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 16,
        "rope_scaling": _LLAMA3, "sliding_window": 4096, "sliding_window_pattern": "LLLG",
        "tie_word_embeddings": False, "pad_token_id": 0,
    },
    "c4ai-command-r-v01": _config("CohereForCausalLM", "cohere", (8192, 22528, 40, 64, 64, 8192, 256000))
    | {
        "attention_bias": False, "attention_dropout": 0.0, "layer_norm_eps": 1e-05, "logit_scale": 0.0625,
        "model_max_length": 131072, "pad_token_id": 0, "rope_theta": 8000000.0, "use_qk_norm": False,
    },
    "c4ai-command-r7b-12-2024": _config(
        "Cohere2ForCausalLM", "cohere2", (4096, 14336, 32, 32, 8, 8192, 256000), **_COHERE2
    ),
    "starcoder2-7b": _config("Starcoder2ForCausalLM", "starcoder2", (4608, 18432, 32, 36, 4, 16384, 49152))
    | {
        "activation_function": "gelu", "attention_dropout": 0.1, "attention_softmax_in_fp32": True,
        "embedding_dropout": 0.1, "hidden_act": "gelu_pytorch_tanh", "layer_norm_epsilon": 1e-05,
        "mlp_type": "default", "norm_epsilon": 1e-05, "norm_type": "layer_norm", "residual_dropout": 0.1,
        "rope_theta": 1000000, "scale_attention_softmax_in_fp32": True, "scale_attn_weights": True,
        "sliding_window": 4096, "use_bias": True,
    },
    "falcon-7b": {
        "alibi": False, "apply_residual_connection_post_layernorm": False, "architectures": ["FalconForCausalLM"],
        "attention_dropout": 0.0, "bias": False, "bos_token_id": 11, "eos_token_id": 11, "hidden_dropout": 0.0,
        "hidden_size": 4544, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "model_type": "falcon",
        "multi_query": True, "new_decoder_architecture": False, "num_attention_heads": 71, "num_hidden_layers": 32,
        "parallel_attn": True, "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 65024,
        "auto_map": {
            "AutoConfig": "configuration_falcon.FalconConfig", "AutoModel": "modeling_falcon.FalconModel",
            "AutoModelForCausalLM": "modeling_falcon.FalconForCausalLM",
        },
    },
    "falcon-11B": {
        "activation": "gelu", "alibi": False, "architectures": ["FalconForCausalLM"], "attention_dropout": 0.0,
        "bias": False, "bos_token_id": 11, "eos_token_id": 11, "ff_factor": 4, "ffn_hidden_size": 16384,
        "hidden_dropout": 0.0, "hidden_size": 4096, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05,
        "max_position_embeddings": 8192, "model_type": "falcon", "multi_query": True,
        "new_decoder_architecture": True, "num_attention_heads": 32, "num_hidden_layers": 60, "num_kv_heads": 8,
        "num_ln_in_parallel_attn": 1, "parallel_attn": True, "rope_scaling": None, "rope_theta": 5000000.0,
        "torch_dtype": "bfloat16", "transformers_version": "4.39.2", "use_cache": True, "vocab_size": 65024,
    },
    "pythia-1.4b": _config("GPTNeoXForCausalLM", "gpt_neox", (2048, 8192, 24, 16, 16, 2048, 50304))
    | {
        "attention_probs_dropout_prob": 0.0, "hidden_act": "gelu", "hidden_dropout_prob": 0.0, "layer_norm_eps": 1e-05,
        "rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": False, "use_parallel_residual": True,
    },
    "gpt2": _GPT2,
    "gpt2-medium": {**_GPT2, "n_special": 0, "predict_special_tokens": True, "output_past": True},
    "opt-1.3b": {
        "_remove_final_layer_norm": False, "activation_dropout": 0.0, "activation_function": "relu",
        "architectures": ["OPTForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 2, "do_layer_norm_before": True,
        "dropout": 0.1, "eos_token_id": 2, "ffn_dim": 8192, "hidden_size": 2048, "init_std": 0.02, "layerdrop": 0.0,
        "max_position_embeddings": 2048, "model_type": "opt", "num_attention_heads": 32, "num_hidden_layers": 24,
        "pad_token_id": 1, "prefix": "</s>", "torch_dtype": "float16", "transformers_version": "4.21.0.dev0",
        "use_cache": True, "vocab_size": 50272, "word_embed_proj_dim": 2048,
    },
    "stablelm-2-1_6b": _config("StableLmForCausalLM", "stablelm", (2048, 5632, 24, 32, 32, 4096, 100352))
    | {
        "layer_norm_eps": 1e-05, "partial_rotary_factor": 0.25, "rope_theta": 10000, "tie_word_embeddings": False,
        "use_qkv_bias": True,
    },
    "stablelm-zephyr-3b": _config("StableLmForCausalLM", "stablelm", (2560, 6912, 32, 32, 32, 4096, 50304))
    | {"norm_eps": 1e-05, "rope_pct": 0.25, "rotary_scaling_factor": 1.0, "rope_theta": 10000},
    "Hunyuan-7B-Instruct": _config(
        "HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", (4096, 14336, 32, 32, 8, 32768, 128167), **_NO_BIAS,
        add_classification_head=False, anyres_pooling_size=2, anyres_vit_max_image_size=None,
        anyres_vit_two_views=False, attention_dropout=0.1, attention_head_dim=128, cla_share_factor=2, class_num=0,
        dense_list=[4096, 0], enable_lm_head_fp32=True, eod_token_id=127967, head_dim=128, im_end_id=5,
        im_newline_id=11, im_start_id=4, mask_init_id=12, max_image_size=2048, norm_type="rms", num_experts=1,
        num_media_embeds=257, num_shared_expert=1, org_vocab_size=128167, pad_token_id=127961, pool_type="last",
        position_embedding_xdrope=False, rms_norm_eps=1e-05, rope_theta=10000.0, sep_token_id=127962, text_end_id=7,
        text_start_id=6, tie_word_embeddings=True, use_cla=False, use_mixed_mlp_moe=False, use_qk_norm=True,
        use_rotary_pos_emb=True, video_end_id=9, video_start_id=8, vit_add_patchemb_bias=False,
        vit_input_resolution=224, vit_mapping_type="simple_conv_mlp", vit_norm_type="fused", vit_patch=1,
        vit_path=None, vit_remove_prenorm=False, vit_token=64, vit_type=None, vit_used_rms_norm=False,
        xdrope_section=None,
        rope_scaling={
            "alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
            "type": "dynamic",
        },
    ),
    "ERNIE-4.5-0.3B-PT": _config("Ernie4_5ForCausalLM", "ernie4_5", (1024, 3072, 18, 16, 2, 131072, 103424), **_RMS)
    | {"compression_ratio": 1.0, "head_dim": 128, "rope_theta": 500000, "tie_word_embeddings": True, "use_bias": False},
    "ERNIE-4.5-21B-A3B-PT": _config(
        "Ernie4_5_MoeForCausalLM", "ernie4_5_moe", (2560, 12288, 28, 20, 4, 131072, 103424), **_RMS,
        moe_capacity=[64, 64, 64], moe_gate="topk", moe_intermediate_size=1536, moe_k=6, moe_layer_interval=1,
        moe_layer_start_index=1, moe_num_experts=64, moe_num_shared_experts=2, moe_use_aux_free=True,
        num_nextn_predict_layers=1, pad_token_id=0, tie_word_embeddings=True, use_bias=False,
    ),
    "Seed-OSS-36B-Instruct": _config(
        "SeedOssForCausalLM", "seed_oss", (5120, 27648, 64, 80, 8, 524288, 155136),
        attention_bias=True, attention_dropout=0.1, attention_out_bias=False, head_dim=128, mlp_bias=False,
        pad_token_id=1, pretraining_tp=1, residual_dropout=0.1, rms_norm_eps=1e-06,
        rope_scaling={"rope_type": "default"}, rope_theta=10000000.0, tie_word_embeddings=False,
    ),
    "helium-1-2b": _config("HeliumForCausalLM", "helium", (2048, 8192, 28, 16, 8, 4096, 64000), **_RMS)
    | {"attention_bias": False, "head_dim": 128, "mlp_bias": False, "rms_norm_eps": 1e-08, "pad_token_id": 3},
    "AFM-4.5B": _config("ArceeForCausalLM", "arcee", (2560, 18432, 36, 20, 4, 65536, 128005), **_RMS, **_NO_BIAS)
    | {
        "head_dim": 128, "hidden_act": "relu2", "tie_word_embeddings": False,
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 20.0, "mscale": 1.0,
            "original_max_position_embeddings": 4096, "rope_type": "yarn", "type": "yarn",
        },
    },
    "Ministral-3-8B": {
        "architectures": ["Mistral3ForConditionalGeneration"], "dtype": "bfloat16", "image_token_index": 10,
        "model_type": "mistral3", "multimodal_projector_bias": False, "projector_hidden_act": "gelu",
        "spatial_merge_size": 2, "tie_word_embeddings": False, "transformers_version": "5.0.0.dev0",
        "vision_feature_layer": -1, "vision_config": {"hidden_size": 1024, "model_type": "pixtral"},
        "text_config": _config("x", "ministral3", (4096, 14336, 34, 32, 8, 262144, 131072))
        | {
            "attention_dropout": 0.0, "head_dim": 128, "rms_norm_eps": 1e-05, "sliding_window": None,
            "rope_parameters": {
                "beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1, "mscale": 1.0,
                "mscale_all_dim": 1.0, "original_max_position_embeddings": 16384, "rope_theta": 1000000.0,
                "rope_type": "yarn", "type": "yarn",
            },
        },
    },
    "Qwen2.5-VL-7B-Instruct": _config(
        "Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl", (3584, 18944, 28, 28, 4, 128000, 152064), **_QWEN2,
        image_token_id=151655, rope_scaling={"mrope_section": [16, 24, 24], "type": "mrope"},
        video_token_id=151656, vision_config={"depth": 32, "model_type": "qwen2_5_vl"}, vision_end_token_id=151653,
        vision_start_token_id=151652, vision_token_id=151654,
    ),
    "Qwen3-VL-30B-A3B-Instruct": {
        "architectures": ["Qwen3VLMoeForConditionalGeneration"], "image_token_id": 151655, "model_type": "qwen3_vl_moe",
        "tie_word_embeddings": False, "transformers_version": "4.57.0.dev0", "video_token_id": 151656,
        "vision_config": {"depth": 27, "hidden_size": 1152, "model_type": "qwen3_vl_moe"},
        "text_config": _config("x", "qwen3_vl_moe_text", (2048, 6144, 48, 32, 4, 262144, 151936))
        | {
            "attention_bias": False, "attention_dropout": 0.0, "decoder_sparse_step": 1, "head_dim": 128,
            "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": True, "num_experts": 128,
            "num_experts_per_tok": 8, "rms_norm_eps": 1e-06, "rope_theta": 5000000,
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        },
    },
    "GLM-4.5V": {
        "architectures": ["Glm4vMoeForConditionalGeneration"], "image_token_id": 151363, "model_type": "glm4v_moe",
        "transformers_version": "4.56.0.dev0", "video_token_id": 151364,
        "vision_config": {"depth": 24, "hidden_size": 1536, "model_type": "glm4v_moe"},
        "text_config": _config("x", "glm4v_moe_text", (4096, 10944, 46, 96, 8, 65536, 151552))
        | {
            "attention_bias": True, "attention_dropout": 0.0, "first_k_dense_replace": 1, "head_dim": 128,
            "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 128, "n_shared_experts": 1,
            "norm_topk_prob": True, "num_experts_per_tok": 8, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05,
            "rope_scaling": {"mrope_section": [8, 12, 12], "rope_type": "default"}, "rope_theta": 10000.0,
            "routed_scaling_factor": 1.0, "topk_group": 1, "use_qk_norm": False,
        },
    },
    "llava-1.5-7b-hf": {
        "architectures": ["LlavaForConditionalGeneration"], "ignore_index": -100, "image_token_index": 32000,
        "model_type": "llava", "pad_token_id": 32001, "projector_hidden_act": "gelu", "torch_dtype": "float16",
        "vision_config": {"hidden_size": 1024}, "vision_feature_layer": -2, "vision_feature_select_strategy": "default",
        "text_config": _OLD | _config("LlamaForCausalLM", "llama", (4096, 11008, 32, 32, 32, 4096, 32064), **_RMS),
    },
    "SmolVLM-Instruct": {
        "architectures": ["Idefics3ForConditionalGeneration"], "image_seq_len": 81, "image_token_id": 49153,
        "model_type": "idefics3", "scale_factor": 3, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "vision_config": {"hidden_size": 1152, "model_type": "idefics3"},
        "text_config": _OLD
        | _config("VLlama3ForCausalLM", "llama", (2048, 8192, 24, 32, 32, 16384, 49155), **_RMS)
        | {
            "_flash_attn_2_enabled": True, "head_dim": 64, "is_llama_config": True, "mlp_bias": False,
            "neftune_noise_alpha": 0.0, "perceiver_config": {"hidden_act": "silu"}, "pixel_shuffle_factor": 3,
            "qk_layer_norms": False, "rope_interleaved": False, "use_resampler": False,
        },
    },
    "aya-vision-8b": {
        "adapter_layer_norm_eps": 1e-06, "alignment_activation_fn": "swiglu", "architectures":
        ["AyaVisionForConditionalGeneration"], "downsample_factor": 2, "image_token_index": 255036,
        "model_type": "aya_vision", "torch_dtype": "float16", "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full", "vision_config": {"hidden_size": 1152},
        "text_config": _OLD | _config("x", "cohere2", (4096, 14336, 32, 32, 8, 8192, 256000), **_COHERE2),
    },
}  # fmt: skip
"""By the name of the model."""

_GPTJ: dict[str, Any] = {
    "activation_function": "gelu_new", "attn_pdrop": 0.0, "bos_token_id": 50256, "embd_pdrop": 0.0,
    "eos_token_id": 50256, "gradient_checkpointing": False, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05,
    "n_embd": 4096, "n_head": 16, "n_inner": None, "n_layer": 28, "n_positions": 2048, "resid_pdrop": 0.0,
    "rotary_dim": 64, "scale_attn_weights": True, "summary_activation": None, "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True, "summary_type": "cls_index", "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50, "temperature": 1.0}},
    "tie_word_embeddings": False, "tokenizer_class": "GPT2Tokenizer", "transformers_version": "4.18.0.dev0",
    "use_cache": True, "vocab_size": 50400,
}  # fmt: skip
_MINICPM3 = [
    1.0591234137867171, 1.1241891283591912, 1.2596935748670968, 1.5380380402321725, 2.093982484148734,
    3.1446935121267696, 4.937952647693647, 7.524541999994549, 10.475458000005451, 13.062047352306353,
    14.85530648787323, 15.906017515851266, 16.461961959767827, 16.740306425132907, 16.87581087164081,
    16.940876586213285,
]  # fmt: skip
PUBLISHED_OTHERS: dict[str, dict[str, Any]] = {
    "gpt-j-6b": {**_GPTJ, "architectures": ["GPTJForCausalLM"], "model_type": "gptj", "rotary": True},
    "codegen-6B-mono": {**_GPTJ, "architectures": ["CodeGenForCausalLM"], "model_type": "codegen", "n_ctx": 2048},
    "gpt_bigcode-santacoder": {
        "activation_function": "gelu_pytorch_tanh", "architectures": ["GPTBigCodeForCausalLM"],
        "attention_softmax_in_fp32": True, "attn_pdrop": 0.1, "bos_token_id": 49152, "embd_pdrop": 0.1,
        "eos_token_id": 49152, "inference_runner": 0, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05,
        "max_batch_size": None, "max_sequence_length": None, "model_type": "gpt_bigcode", "multi_query": True,
        "n_embd": 2048, "n_head": 16, "n_inner": 8192, "n_layer": 24, "n_positions": 2048, "pad_key_length": True,
        "pre_allocate_kv_cache": False, "resid_pdrop": 0.1, "scale_attention_softmax_in_fp32": True,
        "scale_attn_weights": True, "summary_first_dropout": 0.1, "summary_proj_to_labels": True,
        "validate_runner_input": True, "vocab_size": 49280,
    },
    "Apertus-8B": _config(
        "ApertusForCausalLM", "apertus", (4096, 21504, 32, 32, 8, 65536, 131072), **_RMS, attention_bias=False,
        hidden_dropout=0.0, mlp_bias=False, pad_token_id=3, post_norm=False, qk_norm=True, tie_word_embeddings=False,
    ) | {"hidden_act": "xielu", "rope_scaling": {**_LLAMA3, "type": "llama3"}, "rope_theta": 12000000},
    "MiniMax-M2": _config(
        "MiniMaxM2ForCausalLM", "minimax_m2", (3072, 1536, 62, 48, 8, 196608, 200064), attention_dropout=0.0,
        attn_type_list=[1] * 62, head_dim=128, layernorm_full_attention_beta=1.0, layernorm_linear_attention_beta=1.0,
        layernorm_mlp_beta=1.0, mtp_transformer_layers=1, num_experts_per_tok=8, num_local_experts=256,
        num_mtp_modules=3, output_router_logits=False, qk_norm_type="per_layer", rms_norm_eps=1e-06,
        rope_theta=5000000, rotary_dim=64, router_aux_loss_coef=0.001, router_jitter_noise=0.0, scoring_func="sigmoid",
        shared_intermediate_size=0, sliding_window=None, tie_word_embeddings=False, use_mtp=True, use_qk_norm=True,
        use_routing_bias=True,
    ),
    "MiniCPM3-4B": _config("MiniCPM3ForCausalLM", "minicpm3", (2560, 6400, 62, 40, 40, 32768, 73448))
    | {
        "attention_bias": False, "attention_dropout": 0.0, "dim_model_base": 256, "eos_token_id": [2, 73440],
        "kv_lora_rank": 256, "q_lora_rank": 768, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "rms_norm_eps": 1e-05,
        "scale_depth": 1.4, "scale_emb": 12,
        "auto_map": {
            "AutoConfig": "configuration_minicpm.MiniCPM3Config", "AutoModel": "modeling_minicpm.MiniCPM3Model",
            "AutoModelForCausalLM": "modeling_minicpm.MiniCPM3ForCausalLM",
        },
        "rope_scaling": {
            "type": "longrope", "long_factor": _MINICPM3, "short_factor": _MINICPM3,
            "original_max_position_embeddings": 32768,
        },
    },
    "OLMo-1B-hf": _config("OlmoForCausalLM", "olmo", (2048, 8192, 16, 16, 16, 2048, 50304))
    | {"attention_bias": False, "attention_dropout": 0.0, "clip_qkv": None, "pretraining_tp": 1, "rope_theta": 10000.0},
    "Nemotron-Mini-4B": _config("NemotronForCausalLM", "nemotron", (3072, 9216, 32, 24, 8, 4096, 256000))
    | {
        "attention_bias": False, "hidden_act": "relu2", "hidden_dropout": 0.0, "head_dim": 128, "mlp_bias": False,
        "norm_eps": 1e-05, "partial_rotary_factor": 0.5, "rope_theta": 10000, "tie_word_embeddings": False,
    },
}  # fmt: skip
"""The same of models that transformers' own module computes, in 16 bits where they are published quantised."""
