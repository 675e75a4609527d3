"""Seed-OSS: Llama with biases of queries, keys and values, and perhaps of the attention's output.

ByteDance Seed Team (2025), "Seed-OSS open-source models".
"""

from __future__ import annotations

from dataclasses import replace

from headrace.engine.model.families.family import Family
from headrace.engine.model.families.gguf import GgufHeader
from headrace.engine.model.families.hf import HfConfig
from headrace.engine.model.spec import DecoderSpec, LayerSpec

__all__ = ["SEED_OSS"]


def _from_config(config: HfConfig) -> DecoderSpec:
    attention = replace(
        config.attention(kv_heads=8, head_dim=128),
        qkv_bias=config.flag("attention_bias", True),
        o_bias=config.flag("attention_out_bias", False),
    )
    feed = replace(config.dense(), bias=config.flag("mlp_bias", False))
    config.windows()  # has none, and refuses layer_types that say otherwise
    return config.decoder([LayerSpec(attention, feed, config.norms())] * config.num_layers, [config.rope(attention)])


def _from_header(header: GgufHeader) -> DecoderSpec:
    attention = header.attention()
    names = replace(header.names, roles={**header.names.roles, "feed_norm": "post_attention_norm"})
    return header.decoder(LayerSpec(attention, header.dense(), header.norms()), [header.rope(attention)], names)


SEED_OSS = Family("SeedOssForCausalLM", "seed_oss", _from_config, gguf="seed_oss", from_header=_from_header)
