"""GLM-4.7-Flash: DeepSeek-V3's attention and experts in the sizes of a small model.

GLM-4.5 Team (2025), "GLM-4.5: Agentic, reasoning, and coding (ARC) foundation models", of whose line it is. The layer
that predicts a further token is left unread.
"""

from __future__ import annotations

from headrace.engine.model.families.experts.latents import HEEDED, UNREAD, latent_attention, latent_decoder
from headrace.engine.model.families.experts.reading import corrected_routing, dense_at_first
from headrace.engine.model.families.family import Family
from headrace.engine.model.families.hf import HfConfig
from headrace.engine.model.spec import DecoderSpec
from headrace.ops.routing import Routing

__all__ = ["GLM4_MOE_LITE"]


def _is_dense(config: HfConfig) -> list[bool]:
    """Return for each layer whether it is dense, by `mlp_layer_types` or else by `first_k_dense_replace`."""
    types = config.data.get("mlp_layer_types")
    if types is None:
        return dense_at_first(config, 1)
    count = config.num_layers
    if not isinstance(types, list) or len(types) != count or any(each not in ("dense", "sparse") for each in types):
        config.refuse("mlp_layer_types", f"{count} entries, each one of dense, sparse")
    found = [each == "dense" for each in types]
    if config.data.get("first_k_dense_replace") is not None and found != dense_at_first(config, 1):
        config.refuse("mlp_layer_types", "what first_k_dense_replace says")
    return found


def _from_config(config: HfConfig) -> DecoderSpec:
    config.expect("scoring_func", "sigmoid")
    config.expect("topk_method", "noaux_tc")
    interleaved = config.flag("rope_interleave", True)
    attention = latent_attention(config, query_latent=768, plain=192, value=256, interleaved=interleaved)
    routing = corrected_routing(config, Routing(64, 4, scale=1.8))
    return latent_decoder(
        config, attention, routing, expert=1536, shared=1, is_dense=_is_dense(config), epsilon=1e-5, corrected=True
    )


GLM4_MOE_LITE = Family("Glm4MoeLiteForCausalLM", "glm4_moe_lite", _from_config, heeds=HEEDED, unread=UNREAD)
