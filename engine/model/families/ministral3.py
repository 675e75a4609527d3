"""Ministral 3: Mistral stretched by yarn, with queries that grow with their position.

Mistral AI (2025), model card of Ministral-3-8B-Base-2512. Published files have these models as the text part of
`Mistral3ForConditionalGeneration`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from headrace.adapters.untrusted import Fields
from headrace.engine.model.families.family import Family
from headrace.engine.model.families.hf import HfConfig
from headrace.engine.model.families.hf_rope import rope_fields
from headrace.engine.model.rope import QueryGrowth
from headrace.engine.model.spec import LIMITS, DecoderSpec, LayerSpec

__all__ = ["MINISTRAL3"]

_BETA: Final = "llama_4_scaling_beta"
_ROPE: Final = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    _BETA: 0.1,
}
"""What a config means that has no rope."""


def _from_config(config: HfConfig) -> DecoderSpec:
    if not rope_fields(config)[1]:
        config = config.spelled({}, {"rope_parameters": _ROPE})
    attention = replace(config.attention(kv_heads=8, head_dim=128), growth=_growth(config))
    feed, norms = config.dense(), config.norms(1e-5)
    windows = config.windows(config.window(default=None))
    layers = (LayerSpec(replace(attention, window=window), feed, norms) for window in windows)
    return config.decoder(layers, [config.rope(attention, own=(_BETA,))])


def _growth(config: HfConfig) -> QueryGrowth | None:
    """Return the growth of queries, which the rope's object has beside yarn's numbers."""
    name, given = rope_fields(config)
    rope = Fields(given, f"{config.origin}: {name}")
    rate = rope.real(_BETA, 0.0, 1e3, 0.0)
    return QueryGrowth(rate, rope.size("original_max_position_embeddings", LIMITS["max_context"])) if rate else None


MINISTRAL3 = Family("Ministral3ForCausalLM", "ministral3", _from_config)
