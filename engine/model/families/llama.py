"""Llama 2 and 3, and other models of their shape, such as SmolLM2.

Touvron et al. (2023), "Llama 2: Open foundation and fine-tuned chat models"; Grattafiori et al. (2024), "The Llama 3
herd of models". Pre-norm layers of grouped attention with rotated heads and a gated feed.
"""

from __future__ import annotations

from dataclasses import replace

from headrace.engine.model.families.experts.gguf import expert_names, experts_in_gguf
from headrace.engine.model.families.family import Family
from headrace.engine.model.families.gguf import GgufHeader
from headrace.engine.model.families.hf import HfConfig
from headrace.engine.model.spec import Attention, DecoderSpec, LayerSpec

__all__ = ["LLAMA"]


def _from_config(config: HfConfig) -> DecoderSpec:
    biased = config.flag("attention_bias", False)
    attention = replace(config.attention(), qkv_bias=biased, o_bias=biased)
    feed = replace(config.dense(), bias=config.flag("mlp_bias", False))
    config.windows()  # has none, and refuses layer_types that say otherwise
    return config.decoder([LayerSpec(attention, feed, config.norms())] * config.num_layers, [config.rope(attention)])


def _from_header(header: GgufHeader) -> DecoderSpec:
    attention = replace(header.attention(), window=header.window())
    if header.data.get(header.key("expert_count"), 0) != 0:
        return _mixtral(header, attention)
    layer = LayerSpec(attention, header.dense(), header.norms())
    return header.decoder(layer, [header.rope(attention)], replace(header.names, interleaved=True))


def _mixtral(header: GgufHeader, attention: Attention) -> DecoderSpec:
    """Return the spec of a Mixtral: GGUF files of it call themselves `llama`, and have experts."""
    feed = experts_in_gguf(header, renormalise=True, size="feed_forward_length")
    feed = replace(feed, routing=replace(feed.routing, score="softmax_of_chosen", renormalise=False))
    layer, names = LayerSpec(attention, feed, header.norms()), replace(expert_names(header), interleaved=True)
    return replace(header.decoder(layer, [header.rope(attention)], names), architecture="MixtralForCausalLM")


LLAMA = Family(
    "LlamaForCausalLM",
    "llama",
    _from_config,
    gguf="llama",
    from_header=_from_header,
    gguf_heeds=frozenset(("attention.sliding_window", "expert_count", "expert_used_count")),
)
