"""Tiny random models that see or hear, of each architecture whose text part is read; holds no tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers

__all__ = ["TEXT_PARTS", "draw", "text_part_model"]

_TEXT: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_IMAGES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
_SIGLIP = _IMAGES | {"model_type": "siglip_vision_model"}
_CLIP = _IMAGES | {"model_type": "clip_vision_model"}
_PIXTRAL = _IMAGES | {"model_type": "pixtral", "head_dim": 16}
_WINDOW = 13


def _qwen_images(**changes: Any) -> dict[str, Any]:
    sizes = {"depth": 1, "hidden_size": 32, "out_hidden_size": 64, "num_heads": 2, "intermediate_size": 32}
    return sizes | {"patch_size": 4} | changes


def _mrope(*sections: int, **changes: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 500.0, "mrope_section": list(sections)} | changes


_GROWING = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 8,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.4,
}


def _audio(width: str, layers: str, heads: str, ffn: str) -> dict[str, Any]:
    return {width: 32, layers: 1, heads: 2, ffn: 64, "num_mel_bins": 8, "max_source_positions": 16}


def _made(architecture: str, **parts: Any) -> Callable[[], Any]:
    kind = getattr(transformers, architecture)
    return lambda: kind(kind.config_class(**parts))


def _text(model_type: str | None = None, **changes: Any) -> dict[str, Any]:
    return _TEXT | ({} if model_type is None else {"model_type": model_type}) | changes


_LATENTS = {
    "hidden_size": 64,
    "resampler_n_latents": 4,
    "resampler_depth": 1,
    "resampler_n_heads": 2,
    "resampler_head_dim": 16,
    "num_key_value_heads": 1,
}
TEXT_PARTS: dict[str, Callable[[], Any]] = {
    "gemma3": _made(
        "Gemma3ForConditionalGeneration",
        text_config=_text(
            "gemma3_text",
            head_dim=24,
            sliding_window=_WINDOW,
            layer_types=["sliding_attention", "full_attention"],
            query_pre_attn_scalar=40,
        ),
        vision_config=_SIGLIP,
        mm_tokens_per_image=4,
    ),
    "gemma4": _made(
        "Gemma4ForConditionalGeneration",
        text_config=_text(
            "gemma4_text",
            num_hidden_layers=4,
            head_dim=16,
            global_head_dim=24,
            sliding_window=_WINDOW,
            layer_types=["sliding_attention", "full_attention"] * 2,
            num_kv_shared_layers=2,
            hidden_size_per_layer_input=10,
            vocab_size_per_layer_input=96,
            pad_token_id=0,
        ),
        vision_config=_IMAGES | {"model_type": "gemma4_vision", "num_key_value_heads": 2, "head_dim": 16},
        audio_config={"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
    ),
    "gemma4_unified": _made(
        "Gemma4UnifiedForConditionalGeneration",
        text_config=_text(
            "gemma4_unified_text",
            head_dim=16,
            global_head_dim=24,
            num_global_key_value_heads=1,
            attention_k_eq_v=True,
            sliding_window=_WINDOW,
            layer_types=["sliding_attention", "full_attention"],
            pad_token_id=0,
        ),
        vision_config={"mm_embed_dim": 32},
        audio_config={},
    ),
    "mistral3": _made(
        "Mistral3ForConditionalGeneration",
        text_config=_text("mistral", head_dim=24, sliding_window=None),
        vision_config=_PIXTRAL,
        tie_word_embeddings=False,
    ),
    "mistral3 with ministral3": _made(
        "Mistral3ForConditionalGeneration",
        text_config=_text("ministral3", head_dim=24, rope_parameters=dict(_GROWING)),
        vision_config=_PIXTRAL,
        tie_word_embeddings=True,
    ),
    "qwen2_vl": _made(
        "Qwen2VLForConditionalGeneration",
        text_config=_text(rope_parameters=_mrope(2, 3, 3)),
        vision_config={
            "depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4,
        },
    ),
    "qwen2_5_vl, tied, later layers windowed": _made(
        "Qwen2_5_VLForConditionalGeneration",
        text_config=_text(
            rope_parameters=_mrope(2, 3, 3), use_sliding_window=True, sliding_window=_WINDOW, max_window_layers=1
        ),
        vision_config=_qwen_images(),
        tie_word_embeddings=True,
    ),
    "qwen3_vl": _made(
        "Qwen3VLForConditionalGeneration",
        text_config=_text(head_dim=24, rope_parameters=_mrope(4, 4, 4)),
        vision_config=_qwen_images(deepstack_visual_indexes=[0]),
    ),
    "qwen3_vl_moe": _made(
        "Qwen3VLMoeForConditionalGeneration",
        text_config=_text(
            head_dim=24, rope_parameters=_mrope(4, 4, 4), num_experts=6, num_experts_per_tok=3,
            moe_intermediate_size=40, mlp_only_layers=[0],
        ),
        vision_config=_qwen_images(deepstack_visual_indexes=[0]),
        tie_word_embeddings=False,
    ),
    "glm4v_moe": _made(
        "Glm4vMoeForConditionalGeneration",
        text_config=_text(
            rope_parameters=_mrope(1, 1, 2, partial_rotary_factor=0.5), n_routed_experts=6, num_experts_per_tok=3,
            moe_intermediate_size=40, n_shared_experts=2, routed_scaling_factor=1.8,
        ),
        vision_config=_qwen_images(),
    ),
    "glm4v": _made(
        "Glm4vForConditionalGeneration",
        text_config=_text(rope_parameters=_mrope(1, 1, 2, partial_rotary_factor=0.5)),
        vision_config=_qwen_images(),
    ),
    "llava": _made("LlavaForConditionalGeneration", text_config=_text("llama"), vision_config=_CLIP),
    "llava with mistral, as pixtral": _made(
        "LlavaForConditionalGeneration",
        text_config=_text("mistral", head_dim=24, sliding_window=None),
        vision_config=_PIXTRAL,
    ),
    "llava_next": _made(
        "LlavaNextForConditionalGeneration",
        text_config=_text("mistral", sliding_window=_WINDOW),
        vision_config=_CLIP,
    ),
    "llava_next_video": _made(
        "LlavaNextVideoForConditionalGeneration", text_config=_text("llama"), vision_config=_CLIP
    ),
    "llava_onevision": _made(
        "LlavaOnevisionForConditionalGeneration",
        text_config=_text("qwen2"),
        vision_config=_SIGLIP,
        tie_word_embeddings=True,
    ),
    "internvl": _made(
        "InternVLForConditionalGeneration",
        text_config=_text("qwen3", head_dim=24),
        vision_config=_IMAGES | {"image_size": [16, 16], "patch_size": [8, 8]},
        tie_word_embeddings=False,
    ),
    "aya_vision": _made(
        "AyaVisionForConditionalGeneration",
        text_config=_text("cohere2", sliding_window=_WINDOW, logit_scale=0.25),
        vision_config=_SIGLIP,
    ),
    "cohere2_vision": _made(
        "Cohere2VisionForConditionalGeneration",
        text_config=_text("cohere2", sliding_window=_WINDOW, logit_scale=0.25),
        vision_config=_SIGLIP,
    ),
    "idefics2": _made(
        "Idefics2ForConditionalGeneration",
        text_config=_text("mistral", sliding_window=_WINDOW),
        vision_config=_IMAGES,
        perceiver_config=_LATENTS,
    ),
    "idefics3": _made("Idefics3ForConditionalGeneration", text_config=_text("llama"), vision_config=_IMAGES),
    "smolvlm": _made(
        "SmolVLMForConditionalGeneration",
        text_config=_text("llama"),
        vision_config=_IMAGES,
        tie_word_embeddings=True,
    ),
    "qwen2_audio": _made(
        "Qwen2AudioForConditionalGeneration",
        text_config=_text("qwen2"),
        audio_config=_audio("d_model", "encoder_layers", "encoder_attention_heads", "encoder_ffn_dim"),
    ),
    "hunyuan_vl": _made(
        "HunYuanVLForConditionalGeneration",
        text_config=_text(
            head_dim=24,
            rope_parameters=_mrope(3, 3, 3, 3, rope_type="dynamic", factor=1.0, alpha=50.0),
        ),
        vision_config=_IMAGES | {"out_hidden_size": 64, "text_hidden_size": 64, "max_image_size": 32},
        tie_word_embeddings=False,
    ),
    "qwen2_5_omni_thinker": _made(
        "Qwen2_5OmniThinkerForConditionalGeneration",
        text_config=_text(rope_parameters=_mrope(2, 3, 3)),
        vision_config=_qwen_images(),
        audio_config=_audio("d_model", "encoder_layers", "encoder_attention_heads", "encoder_ffn_dim"),
    ),
    "qwen3_omni_moe_thinker": _made(
        "Qwen3OmniMoeThinkerForConditionalGeneration",
        text_config=_text(
            rope_parameters=_mrope(2, 3, 3), num_experts=6, num_experts_per_tok=3, moe_intermediate_size=40,
        ),
        vision_config=_qwen_images(deepstack_visual_indexes=[0]),
        audio_config=_audio("d_model", "encoder_layers", "encoder_attention_heads", "encoder_ffn_dim"),
    ),
    "granite_speech": _made(
        "GraniteSpeechForConditionalGeneration",
        text_config=_text(
            "granite", embedding_multiplier=6.0, residual_multiplier=0.4, attention_multiplier=0.15, logits_scaling=3.0
        ),
        encoder_config={
            "input_dim": 16, "num_layers": 2, "hidden_dim": 32, "num_heads": 2, "output_dim": 8, "context_size": 4,
            "max_pos_emb": 8, "conv_kernel_size": 3,
        },
        projector_config={
            "model_type": "blip_2_qformer", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
            "intermediate_size": 32, "encoder_hidden_size": 32, "vocab_size": 8, "max_position_embeddings": 8,
        },
        has_lora_adapter=False,
        tie_word_embeddings=False,
    ),
    "voxtral": _made(
        "VoxtralForConditionalGeneration",
        text_config=_text("llama"),
        audio_config=_audio("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
    ),
}  # fmt: skip
"""What makes each model, by its `model_type` and what sets it apart."""


def draw(model: Any, seed: int = 7) -> Any:
    """Return a model whose every parameter matters."""
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        is_norm = "norm" in name and "bias" not in name
        mean, spread = (1.0, 0.2) if is_norm else (0.0, 0.3 if "bias" in name else 0.12)
        torch.nn.init.normal_(parameter, mean, spread)
    for name, buffer in model.named_buffers():
        if "correction" in name:
            torch.nn.init.normal_(buffer, 0.0, 0.3)
    return model.eval()


def text_part_model(name: str) -> Any:
    """Return a drawn model of `TEXT_PARTS`."""
    return draw(TEXT_PARTS[name]())
