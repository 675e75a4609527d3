"""ERNIE 4.5, its dense model: Llama with pairs of rotated elements side by side, and perhaps a bias of every product.

Baidu ERNIE Team (2025), "ERNIE 4.5 technical report".
"""

from __future__ import annotations

from dataclasses import replace

from headrace.engine.model.families.family import Family
from headrace.engine.model.families.gguf import GgufHeader
from headrace.engine.model.families.hf import HfConfig
from headrace.engine.model.spec import DecoderSpec, LayerSpec

__all__ = ["ERNIE4_5"]

_THETA = 500000.0


def _from_config(config: HfConfig) -> DecoderSpec:
    config.expect("compression_ratio", 1)
    biased = config.flag("use_bias", False)
    attention = config.attention(kv_heads=2, head_dim=128)
    attention = replace(attention, qkv_bias=biased, o_bias=biased, interleaved=True)
    feed = replace(config.dense(), bias=biased)
    config.windows()  # has none, and refuses layer_types that say otherwise
    layers = [LayerSpec(attention, feed, config.norms(1e-5))] * config.num_layers
    return config.decoder(layers, [config.rope(attention, _THETA)], is_tied=True)


def _from_header(header: GgufHeader) -> DecoderSpec:
    attention = replace(header.attention(), interleaved=True)
    return header.decoder(LayerSpec(attention, header.dense(), header.norms()), [header.rope(attention)])


ERNIE4_5 = Family(
    "Ernie4_5ForCausalLM",
    "ernie4_5",
    _from_config,
    unread=frozenset(("use_rmsnorm", "weight_share_add_bias")),
    former_names=("Ernie4_5_ForCausalLM",),
    gguf="ernie4_5",
    from_header=_from_header,
)
