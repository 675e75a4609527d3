"""DeepSeek-V2, V2-Lite and Coder-V2: latent attention, and experts that are chosen by softmax.

DeepSeek-AI (2024), "DeepSeek-V2: A strong, economical, and efficient mixture-of-experts language model". V2 chooses
among the experts of a few groups (section 2.2.2), V2-Lite among all. Weights are not renormalised, but scaled.
"""

from __future__ import annotations

from headrace.engine.model.families.experts.latents import HEEDED, UNREAD, latent_attention, latent_decoder
from headrace.engine.model.families.experts.reading import dense_at_first, grouped, read_routing
from headrace.engine.model.families.family import Family
from headrace.engine.model.families.hf import HfConfig
from headrace.engine.model.spec import DecoderSpec
from headrace.ops.routing import Routing

__all__ = ["DEEPSEEK_V2"]

_GROUPED = "group_limited_greedy"


def _routing(config: HfConfig) -> Routing:
    config.expect("scoring_func", "softmax")
    if config.flag("norm_topk_prob", False):
        config.refuse("norm_topk_prob", "false: the authors' code and transformers disagree about true")
    routing = read_routing(config, experts=64, top_k=None, names=("n_routed_experts",))
    routing = grouped(config, routing, routing)
    if config.expect("topk_method", "greedy", _GROUPED) == _GROUPED:
        return routing
    return Routing(routing.experts, routing.top_k, scale=routing.scale)


def _from_config(config: HfConfig) -> DecoderSpec:
    attention = latent_attention(config, query_latent=1536, plain=128, value=128, interleaved=True)
    return latent_decoder(
        config, attention, _routing(config), expert=1407, shared=2, is_dense=dense_at_first(config, 0)
    )


DEEPSEEK_V2 = Family("DeepseekV2ForCausalLM", "deepseek_v2", _from_config, heeds=HEEDED, unread=UNREAD)
"""The family; checkpoints come with the authors' code, which is not run."""
