"""Gemma 3, its text models: Gemma 2 with norms of heads in place of bounds, and a rope of their own in windowed layers.

Gemma Team (2025), "Gemma 3 technical report". Five of six layers have a window.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from headrace.engine.model.families.family import Family
from headrace.engine.model.families.gemma2 import (
    GEMMA_NAMES,
    embedding_scale,
    gemma_attention,
    gemma_feed,
    in_gguf,
    scale_in_gguf,
)
from headrace.engine.model.families.gguf import GgufHeader
from headrace.engine.model.families.hf import HfConfig
from headrace.engine.model.rope import Rope
from headrace.engine.model.spec import LIMITS, DecoderSpec, LayerSpec

__all__ = ["GEMMA3"]

_THETA, _LOCAL_THETA = 1e6, 1e4
_LARGEST = 62  # layers of Gemma 3 27B
_FULL: Final = "full_attention"
_SLIDING: Final = "sliding_attention"


def _from_config(config: HfConfig) -> DecoderSpec:
    feed, norms = gemma_feed(config), config.norms(placement="both")
    period = config.size("sliding_window_pattern", LIMITS["num_layers"], 6)
    usual = [(layer + 1) % period != 0 for layer in range(config.num_layers)]
    attention = replace(gemma_attention(config), qk_norm=True)
    layers = (
        LayerSpec(replace(attention, window=window, rope=int(window is not None)), feed, norms)
        for window in config.windows(config.window(default=4096), usual, types_decide=True)
    )
    local = Rope(config.real("rope_local_base_freq", 1.0, 1e12, _LOCAL_THETA))
    sliding = config.rope(attention, _LOCAL_THETA, _SLIDING) if config.has_rope_of(_SLIDING) else local
    ropes = [config.rope(attention, _THETA, _FULL), sliding]
    spec = config.decoder(layers, ropes, GEMMA_NAMES, is_tied=True)
    return replace(spec, embedding_scale=embedding_scale(config), scales_virtual_tokens=False)


def _from_header(header: GgufHeader) -> DecoderSpec:
    feed, norms = replace(header.dense(), activation="gelu_tanh"), header.norms("both")
    attention = replace(header.attention(), qk_norm=True, scale=scale_in_gguf(header, _LARGEST))
    layers = (
        LayerSpec(replace(attention, window=window, rope=int(window is not None)), feed, norms)
        for window in header.windows(header.window(), 6)
    )
    local = Rope(header.real(header.key("rope.freq_base_swa"), 1.0, 1e12, _LOCAL_THETA))
    return in_gguf(header, layers, [header.rope(attention), local])


GEMMA3 = Family(
    "Gemma3ForCausalLM",
    "gemma3_text",
    _from_config,
    heeds=frozenset(("query_pre_attn_scalar",)),
    unread=frozenset(("hidden_act",)),
    headless="Gemma3TextModel",
    gguf="gemma3",
    from_header=_from_header,
    gguf_heeds=frozenset(("attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa")),
)
