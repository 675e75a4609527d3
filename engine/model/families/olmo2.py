"""OLMo 2: Llama with norms behind mixer and feed, and norms over all query heads and all key heads.

Team OLMo (2025), "2 OLMo 2 Furious". GGUF files of OLMo 3 call themselves `olmo2`, too, and have windows.
"""

from __future__ import annotations

from dataclasses import replace

from headrace.engine.model.families.family import Family
from headrace.engine.model.families.gguf import GgufHeader
from headrace.engine.model.families.hf import HF_NAMES, HfConfig
from headrace.engine.model.rope import Rope
from headrace.engine.model.spec import Attention, DecoderSpec, LayerSpec

__all__ = ["EPSILON", "OLMO2", "POST_NAMES", "olmo_attention"]

POST_NAMES = replace(
    HF_NAMES,
    roles={
        **HF_NAMES.roles,
        "mixer_result_norm": "post_attention_layernorm",
        "feed_result_norm": "post_feedforward_layernorm",
    },
)
"""Names of models whose norms are behind mixer and feed."""
EPSILON = 1e-5
"""Epsilon of norms where a config gives none."""


def olmo_attention(config: HfConfig) -> Attention:
    """Return attention with norms over all heads."""
    biased = config.flag("attention_bias", False)
    return replace(config.attention(), qkv_bias=biased, o_bias=biased, qk_norm_across_heads=True)


def _from_config(config: HfConfig) -> DecoderSpec:
    attention, norms = olmo_attention(config), config.norms(EPSILON, placement="post")
    config.windows()  # has none, and refuses layer_types that say otherwise
    layers = [LayerSpec(attention, config.dense(), norms)] * config.num_layers
    return config.decoder(layers, [config.rope(attention)], POST_NAMES)


def _from_header(header: GgufHeader) -> DecoderSpec:
    attention = replace(header.attention(), qk_norm_across_heads=True)
    feed, norms, full = header.dense(), header.norms("post"), header.rope(attention)
    layers = (
        LayerSpec(replace(attention, window=window, rope=int(window is not None)), feed, norms)
        for window in header.windows(header.window(), 4)
    )
    sliding = Rope(header.real(header.key("rope.freq_base_swa"), 1.0, 1e12, full.theta))
    return header.decoder(layers, [full, sliding])


OLMO2 = Family(
    "Olmo2ForCausalLM",
    "olmo2",
    _from_config,
    gguf="olmo2",
    from_header=_from_header,
    gguf_heeds=frozenset(("attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa")),
)
