"""Falcon, the models with rotated heads: mixer and feed side by side, layer norms, a feed without a gate, GELU.

Almazrouei et al. (2023), "The Falcon series of open language models". One tensor holds, for each key, its queries, the
key and its value; the first models have one key for all queries. Those that know positions by alibi are refused.
"""

from __future__ import annotations

import re
from dataclasses import replace

from headrace.engine.model.families.family import Family
from headrace.engine.model.families.hf import HfConfig
from headrace.engine.model.families.layer_normed import layer_norms, plain_feed
from headrace.engine.model.roles import Names
from headrace.engine.model.spec import Attention, DecoderSpec, LayerSpec, Norms

__all__ = ["FALCON"]

_SPELLING = {
    "num_key_value_heads": "num_kv_heads",
    "intermediate_size": "ffn_hidden_size",
    "hidden_act": "activation",
}
_NAMES = Names(
    layer_prefix="transformer.h.{}.",
    roles={
        "embedding": "transformer.word_embeddings",
        "final_norm": "transformer.ln_f",
        "head": "lm_head",
        "mixer_norm": "input_layernorm",
        "qkv": "self_attention.query_key_value",
        "o": "self_attention.dense",
        "feed_norm": "post_attention_layernorm",
        "up": "mlp.dense_h_to_4h",
        "down": "mlp.dense_4h_to_h",
    },
    harmless=re.compile(r"(transformer\.)?h\.\d+\.self_attention\.(rotary|rotary_emb|maybe_rotary)\.inv_freq"),
    joined={"qkv": ("q", "k", "v")},
    grouped=True,
    prefix="transformer.",
)
_TWO_NORMS = replace(_NAMES, roles={**_NAMES.roles, "mixer_norm": "ln_attn", "feed_norm": "ln_mlp"})


def _from_config(config: HfConfig) -> DecoderSpec:
    config = config.spelled(_SPELLING, {"max_position_embeddings": 2048})
    biased, norms = config.flag("bias", False), _norms(config)
    attention = replace(_attention(config), qkv_bias=biased, o_bias=biased)
    layer = LayerSpec(attention, plain_feed(config, "gelu", bias=biased), norms)
    names = _TWO_NORMS if norms.placement == "parallel" else _NAMES
    return config.decoder([layer] * config.num_layers, [config.rope(attention)], names, is_tied=True)


def _attention(config: HfConfig) -> Attention:
    """Return attention with keys of as many heads as the kind of model has."""
    attention = config.attention()
    if config.flag("new_decoder_architecture", False):
        return attention
    return replace(attention, kv_heads=1 if config.flag("multi_query", True) else attention.heads)


def _norms(config: HfConfig) -> Norms:
    """Return the norms: with the new architecture of both halves, unless the config says 1, else one or in series."""
    is_parallel = config.flag("parallel_attn", True)
    if not config.flag("new_decoder_architecture", False):
        return layer_norms(config, "layer_norm_epsilon", placement="shared" if is_parallel else "pre")
    if not is_parallel:
        config.refuse("parallel_attn", "true with new_decoder_architecture")
    count = config.size("num_ln_in_parallel_attn", 2, 2)
    return layer_norms(config, "layer_norm_epsilon", placement="parallel" if count == 2 else "shared")


FALCON = Family(
    "FalconForCausalLM",
    "falcon",
    _from_config,
    heeds=frozenset(("new_decoder_architecture", "parallel_attn")),
    unread=frozenset(("ff_factor", "multi_query", "num_ln_in_parallel_attn")),
)
