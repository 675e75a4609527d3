"""Gemma, its first models: Llama with GELU, embeddings that are scaled up, and weights of norms that lack 1.

Gemma Team (2024), "Gemma: Open models based on Gemini research and technology".
"""

from __future__ import annotations

from dataclasses import replace

from headrace.engine.model.families.family import Family
from headrace.engine.model.families.gemma2 import embedding_scale, in_gguf
from headrace.engine.model.families.gguf import GgufHeader
from headrace.engine.model.families.hf import HF_NAMES, HfConfig
from headrace.engine.model.spec import LIMITS, DecoderSpec, DenseFeed, LayerSpec

__all__ = ["GEMMA"]


def _from_config(config: HfConfig) -> DecoderSpec:
    if config.data.get("hidden_act", "gelu") not in ("gelu", "gelu_pytorch_tanh"):  # both stand for the latter
        config.refuse("hidden_act", "gelu_pytorch_tanh")
    biased = config.flag("attention_bias", False)
    attention = replace(config.attention(kv_heads=16, head_dim=256), qkv_bias=biased, o_bias=biased)
    feed = DenseFeed(config.size("intermediate_size", LIMITS["ffn_size"]), activation="gelu_tanh")
    config.windows()  # has none, and refuses layer_types that say otherwise
    layers = [LayerSpec(attention, feed, config.norms())] * config.num_layers
    names = replace(HF_NAMES, norm_offset=1.0)
    spec = config.decoder(layers, [config.rope(attention)], names, is_tied=True)
    return replace(spec, embedding_scale=embedding_scale(config), scales_virtual_tokens=False)


def _from_header(header: GgufHeader) -> DecoderSpec:
    attention, feed = header.attention(), replace(header.dense(), activation="gelu_tanh")
    return in_gguf(header, [LayerSpec(attention, feed, header.norms())] * header.num_layers, [header.rope(attention)])


GEMMA = Family(
    "GemmaForCausalLM",
    "gemma",
    _from_config,
    unread=frozenset(("hidden_activation",)),
    gguf="gemma",
    from_header=_from_header,
)
