"""Llama 2 and 3, and other models of their shape, such as SmolLM2.

Touvron et al. (2023), "Llama 2: Open foundation and fine-tuned chat models"; Grattafiori et al. (2024), "The Llama 3
herd of models". Pre-norm layers of grouped attention with rotated heads and a gated feed.
"""

from __future__ import annotations

from dataclasses import replace

from headrace.engine.model.families.family import Family
from headrace.engine.model.families.gguf import GgufHeader
from headrace.engine.model.families.hf import HfConfig
from headrace.engine.model.spec import DecoderSpec, LayerSpec

__all__ = ["LLAMA"]


def _from_config(config: HfConfig) -> DecoderSpec:
    biased = config.flag("attention_bias", False)
    attention = replace(config.attention(), qkv_bias=biased, o_bias=biased)
    feed = replace(config.dense(), bias=config.flag("mlp_bias", False))
    config.windows()  # has none, and refuses layer_types that say otherwise
    return config.decoder([LayerSpec(attention, feed, config.norms())] * config.num_layers, [config.rope(attention)])


def _from_header(header: GgufHeader) -> DecoderSpec:
    attention = replace(header.attention(), window=header.window())
    layer = LayerSpec(attention, header.dense(), header.norms())
    return header.decoder(layer, [header.rope(attention)], replace(header.names, interleaved=True))


LLAMA = Family(
    "LlamaForCausalLM",
    "llama",
    _from_config,
    gguf="llama",
    from_header=_from_header,
    gguf_heeds=frozenset(("attention.sliding_window",)),
)
