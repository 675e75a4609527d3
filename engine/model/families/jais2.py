"""Jais 2: Llama with layer norms, biases everywhere, and a feed without a gate whose activation is a squared ReLU.

MBZUAI, Inception and Cerebras (2025), model card of Jais 2.
"""

from __future__ import annotations

from dataclasses import replace

from headrace.engine.model.families.family import Family
from headrace.engine.model.families.hf import HfConfig
from headrace.engine.model.families.layer_normed import layer_norms, plain_feed
from headrace.engine.model.spec import DecoderSpec, LayerSpec

__all__ = ["JAIS2"]


def _from_config(config: HfConfig) -> DecoderSpec:
    biased = config.flag("attention_bias", True)
    attention = replace(config.attention(), qkv_bias=biased, o_bias=biased)
    feed = plain_feed(config, "relu2", bias=config.flag("mlp_bias", True), size=26624)
    config.windows()  # has none, and refuses layer_types that say otherwise
    layer = LayerSpec(attention, feed, layer_norms(config))
    return config.decoder([layer] * config.num_layers, [config.rope(attention)])


JAIS2 = Family("Jais2ForCausalLM", "jais2", _from_config)
