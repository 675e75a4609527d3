"""Gemma 3, its text models: Gemma 2 with norms of heads in place of bounds, and a rope of their own in windowed layers.

Gemma Team (2025), "Gemma 3 technical report". Five of six layers have a window.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from headrace.engine.model.families.family import Family
from headrace.engine.model.families.gemma2 import GEMMA_NAMES, embedding_scale, gemma_attention, gemma_feed
from headrace.engine.model.families.hf import HfConfig
from headrace.engine.model.rope import Rope
from headrace.engine.model.spec import LIMITS, DecoderSpec, LayerSpec

__all__ = ["GEMMA3"]

_THETA, _LOCAL_THETA = 1e6, 1e4
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


GEMMA3 = Family(
    "Gemma3ForCausalLM",
    "gemma3_text",
    _from_config,
    heeds=frozenset(("query_pre_attn_scalar",)),
    headless="Gemma3TextModel",
)
