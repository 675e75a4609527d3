"""Helium: Llama with pairs of rotated elements side by side.

Kyutai (2025), model card of Helium 1.
"""

from __future__ import annotations

from dataclasses import replace

from headrace.engine.model.families.family import Family
from headrace.engine.model.families.hf import HfConfig
from headrace.engine.model.spec import DecoderSpec, LayerSpec

__all__ = ["HELIUM"]

_THETA = 100000.0


def _from_config(config: HfConfig) -> DecoderSpec:
    attention = config.attention(kv_heads=20, head_dim=128)
    attention = replace(attention, qkv_bias=config.flag("attention_bias", False), interleaved=True)
    feed = replace(config.dense(), bias=config.flag("mlp_bias", False))
    config.windows()  # has none, and refuses layer_types that say otherwise
    layers = [LayerSpec(attention, feed, config.norms(1e-8))] * config.num_layers
    return config.decoder(layers, [config.rope(attention, _THETA)])


HELIUM = Family("HeliumForCausalLM", "helium", _from_config)
