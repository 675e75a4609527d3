"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: Llama with queries, keys and values in one tensor, and gates and ups in one.

Abdin et al. (2024), "Phi-3 technical report". Models for long contexts have the rope of Ding et al. (2024). Phi-4-mini
rotates a part of each head (Microsoft, 2025, "Phi-4-mini technical report").
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from headrace.engine.model.families.family import Family
from headrace.engine.model.families.gguf import GgufHeader
from headrace.engine.model.families.hf import HF_NAMES, HfConfig
from headrace.engine.model.spec import DecoderSpec, LayerSpec

__all__ = ["PHI3"]

_NAMES = replace(
    HF_NAMES,
    roles={**HF_NAMES.roles, "qkv": "self_attn.qkv_proj", "gate_up": "mlp.gate_up_proj"},
    joined={"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")},
)

_ONES: Final = ("full_attn_mod", "interpolate_factor")
"""Fields of Phi-4-mini's configs, and what alone is computed: 1."""


def _from_config(config: HfConfig) -> DecoderSpec:
    for field in _ONES:
        config.expect(field, 1)
    attention = config.partly_rotated(config.attention())
    feed, norms = config.dense(), config.norms(default_epsilon=1e-5)
    windows = config.windows(config.window(default=None))
    layers = (LayerSpec(replace(attention, window=window), feed, norms) for window in windows)
    return config.decoder(layers, [config.rope(attention)], _NAMES)


def _from_header(header: GgufHeader) -> DecoderSpec:
    attention = replace(header.attention(partly_rotated=True), window=header.window())
    layer = LayerSpec(attention, header.dense(), header.norms())
    return header.decoder(layer, [header.rope(attention)], header.joined_feed_names)


PHI3 = Family(
    "Phi3ForCausalLM",
    "phi3",
    _from_config,
    heeds=frozenset(("partial_rotary_factor",)),
    gguf="phi3",
    from_header=_from_header,
    gguf_heeds=frozenset(("attention.sliding_window",)),
)
