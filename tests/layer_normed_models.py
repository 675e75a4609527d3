"""Tiny models of transformers' classes with layer norms, feeds without a gate and parallel blocks; no tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers

__all__ = [
    "LAYER_NORMED", "arcee", "cohere", "cohere2", "falcon", "gpt2", "gpt_neox", "jais2", "opt", "phi", "stablelm",
    "starcoder2",
]  # fmt: skip

WINDOW = 13
TOKENS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    **TOKENS,
}
GPT2_SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "n_embd": 64,
    "n_inner": 112,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 128,
    **TOKENS,
}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32}
EVERY_OTHER = ["full_attention", "sliding_attention", "full_attention"]


def starcoder2(**changes: Any) -> Any:
    sizes = SIZES | {"num_key_value_heads": 2}
    return transformers.Starcoder2ForCausalLM(transformers.Starcoder2Config(**(sizes | changes)))


def gpt2(**changes: Any) -> Any:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**(GPT2_SIZES | changes)))


def opt(**changes: Any) -> Any:
    return transformers.OPTForCausalLM(transformers.OPTConfig(**(SIZES | {"ffn_dim": 112} | changes)))


def falcon(**changes: Any) -> Any:
    sizes = SIZES | {"ffn_hidden_size": 112}
    return transformers.FalconForCausalLM(transformers.FalconConfig(**(sizes | changes)))


def cohere(**changes: Any) -> Any:
    sizes = SIZES | {"num_key_value_heads": 2}
    return transformers.CohereForCausalLM(transformers.CohereConfig(**(sizes | changes)))


def cohere2(**changes: Any) -> Any:
    sizes = SIZES | {"num_key_value_heads": 2}
    return transformers.Cohere2ForCausalLM(transformers.Cohere2Config(**(sizes | changes)))


def gpt_neox(**changes: Any) -> Any:
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**(SIZES | changes)))


def phi(**changes: Any) -> Any:
    return transformers.PhiForCausalLM(transformers.PhiConfig(**(SIZES | {"num_key_value_heads": 2} | changes)))


def jais2(**changes: Any) -> Any:
    sizes = SIZES | {"num_key_value_heads": 2, "head_dim": 24}
    return transformers.Jais2ForCausalLM(transformers.Jais2Config(**(sizes | changes)))


def arcee(**changes: Any) -> Any:
    sizes = SIZES | {"num_key_value_heads": 2, "head_dim": 24}
    return transformers.ArceeForCausalLM(transformers.ArceeConfig(**(sizes | changes)))


def stablelm(**changes: Any) -> Any:
    sizes = SIZES | {"num_key_value_heads": 2}
    return transformers.StableLmForCausalLM(transformers.StableLmConfig(**(sizes | changes)))


LAYER_NORMED: dict[str, Callable[[], Any]] = {
    "starcoder2, window": lambda: starcoder2(sliding_window=WINDOW, norm_epsilon=1e-3),
    "starcoder2 without biases": lambda: starcoder2(use_bias=False, tie_word_embeddings=False),
    "gpt2": lambda: gpt2(layer_norm_epsilon=1e-3),
    "gpt2 with other options": lambda: gpt2(
        n_inner=None, activation_function="gelu", scale_attn_weights=False, tie_word_embeddings=False
    ),
    "opt": lambda: opt(),
    "opt without biases": lambda: opt(enable_bias=False, activation_function="gelu", tie_word_embeddings=False),
    "falcon, one key for all queries": lambda: falcon(layer_norm_epsilon=1e-3),
    "falcon, a key a query, in series": lambda: falcon(multi_query=False, parallel_attn=False, bias=True),
    "falcon, new architecture": lambda: falcon(
        new_decoder_architecture=True, num_kv_heads=2, bias=True, tie_word_embeddings=False
    ),
    "falcon, new architecture, one norm": lambda: falcon(
        new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1
    ),
    "cohere": lambda: cohere(logit_scale=0.7, layer_norm_eps=1e-3),
    "cohere, normed heads": lambda: cohere(use_qk_norm=True, logit_scale=0.7, layer_norm_eps=1e-3),
    "cohere with every bias": lambda: cohere(attention_bias=True, tie_word_embeddings=False, logit_scale=2.0),
    "cohere2, window in the middle layer": lambda: cohere2(
        sliding_window=WINDOW, layer_types=EVERY_OTHER, logit_scale=0.25
    ),
    "cohere2 with every bias, no window": lambda: cohere2(sliding_window=200, attention_bias=True, logit_scale=1.5),
    "gpt-neox": lambda: gpt_neox(layer_norm_eps=1e-3),
    "gpt-neox in series, with other options": lambda: gpt_neox(
        use_parallel_residual=False,
        attention_bias=False,
        hidden_act="gelu_fast",
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0, "partial_rotary_factor": 0.5},
    ),
    "phi": lambda: phi(layer_norm_eps=1e-3),
    "phi, a key a query": lambda: phi(num_key_value_heads=4, rope_parameters={"partial_rotary_factor": 0.25}),
    "jais 2": lambda: jais2(layer_norm_eps=1e-3),
    "jais 2 without biases": lambda: jais2(attention_bias=False, mlp_bias=False, tie_word_embeddings=True),
    "arcee, RMS norms, yarn": lambda: arcee(rms_norm_eps=1e-3, rope_parameters=dict(YARN)),
    "arcee with every bias": lambda: arcee(attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "stablelm": lambda: stablelm(layer_norm_eps=1e-3),
    "stablelm with norms of heads": lambda: stablelm(qk_layernorm=True, use_qkv_bias=True),
    "stablelm, parallel": lambda: stablelm(qk_layernorm=True, use_parallel_residual=True, tie_word_embeddings=True),
}
"""By what they are, functions that make them; as in test_families.py, the names say which layers have a window."""
