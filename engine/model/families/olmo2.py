"""OLMo 2 and 3: Llama with norms behind mixer and feed, and norms over all query heads and all key heads.

Team OLMo (2025), "2 OLMo 2 Furious" and "OLMo 3". OLMo 3 has windows in three of four layers, and stretches the rope of
the others alone.
"""

from __future__ import annotations

from dataclasses import replace

from headrace.engine.model.families.family import Family
from headrace.engine.model.families.hf import HF_NAMES, HfConfig
from headrace.engine.model.rope import Rope
from headrace.engine.model.spec import Attention, DecoderSpec, LayerSpec

__all__ = ["OLMO2", "OLMO3", "POST_NAMES"]

POST_NAMES = replace(
    HF_NAMES,
    roles={
        **HF_NAMES.roles,
        "mixer_result_norm": "post_attention_layernorm",
        "feed_result_norm": "post_feedforward_layernorm",
    },
)
"""Names of models whose norms are behind mixer and feed."""
_EPSILON, _THETA = 1e-5, 500000.0


def _attention(config: HfConfig) -> Attention:
    biased = config.flag("attention_bias", False)
    return replace(config.attention(), qkv_bias=biased, o_bias=biased, qk_norm_across_heads=True)


def _from_config(config: HfConfig) -> DecoderSpec:
    attention, norms = _attention(config), config.norms(_EPSILON, placement="post")
    config.windows()  # has none, and refuses layer_types that say otherwise
    layers = [LayerSpec(attention, config.dense(), norms)] * config.num_layers
    return config.decoder(layers, [config.rope(attention)], POST_NAMES)


def _from_config_3(config: HfConfig) -> DecoderSpec:
    attention, feed, norms = _attention(config), config.dense(), config.norms(_EPSILON, placement="post")
    usual = [(layer + 1) % 4 != 0 for layer in range(config.num_layers)]
    windowed = config.windowed(config.window(default=4096), usual, types_decide=True)
    layers = (
        LayerSpec(replace(attention, window=window, rope=int(has_window)), feed, norms)
        for has_window, window in windowed
    )
    full = config.rope(attention, _THETA, "full_attention")
    by_type = config.has_rope_of("sliding_attention")
    sliding = config.rope(attention, _THETA, "sliding_attention") if by_type else Rope(full.theta)
    return config.decoder(layers, [full, sliding], POST_NAMES)


OLMO2 = Family("Olmo2ForCausalLM", "olmo2", _from_config)
OLMO3 = Family("Olmo3ForCausalLM", "olmo3", _from_config_3)
