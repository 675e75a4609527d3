"""Arcee: Llama with a feed without a gate, whose activation is a squared ReLU.

Arcee AI (2025), model card of AFM-4.5B.
"""

from __future__ import annotations

from dataclasses import replace

from headrace.engine.model.families.family import Family
from headrace.engine.model.families.gguf import GgufHeader
from headrace.engine.model.families.hf import HfConfig
from headrace.engine.model.families.layer_normed import plain_feed
from headrace.engine.model.spec import DecoderSpec, LayerSpec

__all__ = ["ARCEE"]


def _from_config(config: HfConfig) -> DecoderSpec:
    biased = config.flag("attention_bias", False)
    attention = replace(config.attention(), qkv_bias=biased, o_bias=biased)
    feed = plain_feed(config, "relu2", bias=config.flag("mlp_bias", False), size=18432)
    config.windows()  # has none, and refuses layer_types that say otherwise
    layer = LayerSpec(attention, feed, config.norms(1e-5))
    return config.decoder([layer] * config.num_layers, [config.rope(attention)])


def _from_header(header: GgufHeader) -> DecoderSpec:
    attention = header.attention()
    layer = LayerSpec(attention, header.ungated("relu2"), header.norms())
    return header.decoder(layer, [header.rope(attention)], replace(header.names, interleaved=True))


ARCEE = Family("ArceeForCausalLM", "arcee", _from_config, gguf="arcee", from_header=_from_header)
