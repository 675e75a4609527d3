"""OLMo 3: OLMo 2 with windows in three of four layers; the rope of the others alone is stretched.

Team OLMo (2025), "OLMo 3". GGUF files of these models call themselves `olmo2`.
"""

from __future__ import annotations

from dataclasses import replace

from headrace.engine.model.families.family import Family
from headrace.engine.model.families.hf import HfConfig
from headrace.engine.model.families.olmo2 import EPSILON, POST_NAMES, olmo_attention
from headrace.engine.model.rope import Rope
from headrace.engine.model.spec import DecoderSpec, LayerSpec

__all__ = ["OLMO3"]

_THETA = 500000.0


def _from_config(config: HfConfig) -> DecoderSpec:
    attention, feed, norms = olmo_attention(config), config.dense(), config.norms(EPSILON, placement="post")
    usual = [(layer + 1) % 4 != 0 for layer in range(config.num_layers)]
    layers = (
        LayerSpec(replace(attention, window=window, rope=int(window is not None)), feed, norms)
        for window in config.windows(config.window(default=4096), usual, types_decide=True)
    )
    full = config.rope(attention, _THETA, "full_attention")
    by_type = config.has_rope_of("sliding_attention")
    sliding = config.rope(attention, _THETA, "sliding_attention") if by_type else Rope(full.theta)
    return config.decoder(layers, [full, sliding], POST_NAMES)


OLMO3 = Family("Olmo3ForCausalLM", "olmo3", _from_config)
