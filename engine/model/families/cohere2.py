"""Command R7B and Command A: Command R with windows in three of four layers, and no rotation in the others.

Cohere (2025), "Command A: An enterprise-ready large language model".
"""

from __future__ import annotations

from dataclasses import replace

from headrace.engine.model.families.cohere import (
    check_cohere,
    cohere_attention,
    cohere_layer,
    logit_scale,
)
from headrace.engine.model.families.family import Family
from headrace.engine.model.families.hf import HfConfig
from headrace.engine.model.rope import UNROTATED
from headrace.engine.model.spec import LIMITS, DecoderSpec

__all__ = ["COHERE2"]


def _from_config(config: HfConfig) -> DecoderSpec:
    check_cohere(config)
    config.expect("order_of_interleaved_layers", "local_attn_first")
    attention = cohere_attention(config)
    period = config.size("sliding_window_pattern", LIMITS["num_layers"], 4)
    usual = [(layer + 1) % period != 0 for layer in range(config.num_layers)]
    layers = (
        cohere_layer(config, replace(attention, window=window, rope=int(window is None)))
        for window in config.windows(config.window(default=4096), usual, types_decide=True)
    )
    spec = config.decoder(layers, [config.rope(attention), UNROTATED], is_tied=True)
    return replace(spec, logits_scale=logit_scale(config))


COHERE2 = Family(
    "Cohere2ForCausalLM",
    "cohere2",
    _from_config,
    heeds=frozenset(("logit_scale",)),
    unread=frozenset(("layer_switch", "use_parallel_embedding")),
)
