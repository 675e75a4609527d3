"""Qwen3, its dense models: Qwen2 with norms of query and key heads in place of the biases.

Yang et al. (2025), "Qwen3 technical report".
"""

from __future__ import annotations

from dataclasses import replace

from headrace.engine.model.families.family import Family
from headrace.engine.model.families.gguf import GgufHeader
from headrace.engine.model.families.hf import HfConfig
from headrace.engine.model.families.qwen2 import qwen_windows
from headrace.engine.model.spec import DecoderSpec, LayerSpec

__all__ = ["QWEN3"]


def _from_config(config: HfConfig) -> DecoderSpec:
    biased = config.flag("attention_bias", False)
    attention = replace(config.attention(head_dim=128), qkv_bias=biased, o_bias=biased, qk_norm=True)
    feed, norms = config.dense(), config.norms()
    windows = qwen_windows(config)
    layers = (LayerSpec(replace(attention, window=window), feed, norms) for window in windows)
    return config.decoder(layers, [config.rope(attention)])


def _from_header(header: GgufHeader) -> DecoderSpec:
    attention = replace(header.attention(), qk_norm=True)
    return header.decoder(LayerSpec(attention, header.dense(), header.norms()), [header.rope(attention)])


QWEN3 = Family(
    "Qwen3ForCausalLM",
    "qwen3",
    _from_config,
    unread=frozenset(("sliding_window",)),
    gguf="qwen3",
    from_header=_from_header,
)
