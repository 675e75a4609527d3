"""DeepSeek-V3, V3.1 and R1: latent attention, and experts that are chosen by corrected sigmoids in a few groups.

DeepSeek-AI (2024), "DeepSeek-V3 technical report". The layer that predicts a further token is left unread.
"""

from __future__ import annotations

from headrace.engine.model.families.experts.latents import HEEDED, UNREAD, latent_attention, latent_decoder
from headrace.engine.model.families.experts.reading import corrected_routing, dense_at_first
from headrace.engine.model.families.family import Family
from headrace.engine.model.families.hf import HfConfig
from headrace.engine.model.spec import DecoderSpec
from headrace.ops.routing import Routing

__all__ = ["DEEPSEEK_V3"]


def _from_config(config: HfConfig) -> DecoderSpec:
    config.expect("scoring_func", "sigmoid")
    config.expect("topk_method", "noaux_tc")
    interleaved = config.flag("rope_interleave", True)
    attention = latent_attention(config, query_latent=1536, plain=128, value=128, interleaved=interleaved)
    routing = corrected_routing(config, Routing(256, 8, groups=8, top_groups=4, scale=2.5))
    is_dense = dense_at_first(config, 3)
    return latent_decoder(config, attention, routing, expert=2048, shared=1, is_dense=is_dense, corrected=True)


DEEPSEEK_V3 = Family("DeepseekV3ForCausalLM", "deepseek_v3", _from_config, heeds=HEEDED, unread=UNREAD)
"""The family; checkpoints come with the authors' code, which is not run."""
