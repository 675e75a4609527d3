"""Shared reading of what configurations say of latent attention and the feeds beside it; knows none of the families."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from headrace.adapters.untrusted import Fields
from headrace.engine.model.experts import ExpertsFeed, SharedExpert
from headrace.engine.model.families.experts.reading import (
    EXPERT_NAMES,
    MOST_SHARED,
    SHARED_EXPERTS,
    expert_size,
    names_of_layers,
)
from headrace.engine.model.families.hf import HfConfig
from headrace.engine.model.families.hf_rope import rope_fields
from headrace.engine.model.latent import LatentAttention
from headrace.engine.model.rope import Rope, Yarn
from headrace.engine.model.spec import LIMITS, DecoderSpec, LayerSpec
from headrace.ops.routing import Routing

__all__ = ["HEEDED", "UNREAD", "latent_attention", "latent_decoder"]

HEEDED: Final = frozenset(("kv_lora_rank", "n_routed_experts", "partial_rotary_factor"))
"""Fields of these families that others refuse."""
UNREAD: Final = frozenset(("head_dim", "qk_head_dim"))
"""Fields that repeat sizes of other fields."""
_NAMES = replace(
    EXPERT_NAMES,
    roles={
        **EXPERT_NAMES.roles,
        **SHARED_EXPERTS,
        "q_a": "self_attn.q_a_proj",
        "q_a_norm": "self_attn.q_a_layernorm",
        "q_b": "self_attn.q_b_proj",
        "kv_a": "self_attn.kv_a_proj_with_mqa",
        "kv_a_norm": "self_attn.kv_a_layernorm",
        "kv_b": "self_attn.kv_b_proj",
    },
)
_ALL_DIMS = "mscale_all_dim"


def latent_attention(
    config: HfConfig, *, query_latent: int, plain: int, value: int, interleaved: bool
) -> tuple[LatentAttention, Rope]:
    """Return the latent attention of a config, and its rope.

    Args:
        config: The config.
        query_latent: `q_lora_rank` where it is absent; null stands for queries without latent vectors.
        plain: `qk_nope_head_dim` where the config gives none.
        value: `v_head_dim` where the config gives none.
        interleaved: Whether pairs of rotated elements come side by side.
    """
    heads = config.size("num_attention_heads", LIMITS["num_heads"])
    if config.size("num_key_value_heads", LIMITS["num_kv_heads"], heads) != heads:
        config.refuse("num_key_value_heads", f"{heads}, as num_attention_heads: latent vectors serve all heads")
    rotated_dim = config.size("qk_rope_head_dim", LIMITS["head_dim"], 64)
    if rotated_dim % 2:
        config.refuse("qk_rope_head_dim", "an even number")
    rank = None
    if config.data.get("q_lora_rank", query_latent) is not None:
        rank = config.size("q_lora_rank", LIMITS["hidden_size"], query_latent)
    plain_dim = config.size("qk_nope_head_dim", LIMITS["head_dim"], plain)
    attention = LatentAttention(
        heads=heads,
        latent_dim=config.size("kv_lora_rank", LIMITS["hidden_size"], 512),
        plain_dim=plain_dim,
        rotated_dim=rotated_dim,
        value_dim=config.size("v_head_dim", LIMITS["head_dim"], value),
        scale=(plain_dim + rotated_dim) ** -0.5,
        query_latent_dim=rank,
        interleaved=interleaved,
        biased=config.flag("attention_bias", False),
    )
    rope = config.rope(attention.rotated)
    return replace(attention, scale=attention.scale * _sharpening(config, rope) ** 2), rope


def _sharpening(config: HfConfig, rope: Rope) -> float:
    """Return the factor 0.1 m ln(s) + 1 of queries and of keys alike, where yarn stretches by s and m is given.

    DeepSeek's models apply it to all elements of a head, and the scores have its square.
    """
    name, given = rope_fields(config)
    fields = Fields(given, f"{config.origin}: {name}")
    all_dims = fields.real(_ALL_DIMS, 0.0, 1e3, 0.0)
    if not all_dims or rope.scaling is None:
        return 1.0
    if not isinstance(rope.scaling, Yarn):
        fields.refuse(_ALL_DIMS, "none, but with yarn")
    return 0.1 * all_dims * math.log(rope.scaling.factor) + 1.0


def latent_decoder(
    config: HfConfig,
    attention: tuple[LatentAttention, Rope],
    routing: Routing,
    *,
    expert: int,
    shared: int,
    is_dense: Sequence[bool],
    epsilon: float = 1e-6,
    corrected: bool = False,
) -> DecoderSpec:
    """Return the spec of a model of latent attention and experts, with some dense layers.

    Args:
        config: The config.
        attention: What `latent_attention` returns.
        routing: How experts are chosen.
        expert: `moe_intermediate_size` where the config gives none.
        shared: `n_shared_experts` where it is absent; null stands for none.
        is_dense: For each layer, whether its feed is dense.
        epsilon: `rms_norm_eps` where the config gives none.
        corrected: Whether a correction of each expert is added to its score for the choice.
    """
    config.expect("moe_layer_freq", 1)
    if config.flag("mlp_bias", False):
        config.refuse("mlp_bias", "false")
    config.windows()  # has none, and refuses layer_types that say otherwise
    size, both = expert_size(config, "moe_intermediate_size", expert), None
    if config.data.get("n_shared_experts", shared) is not None:
        both = SharedExpert(size * config.size("n_shared_experts", MOST_SHARED, shared))
    feed = ExpertsFeed(routing, size, shared=both, correction_dims=1 if corrected else 0)
    mixer, rope = attention
    norms, dense = config.norms(epsilon), config.dense()
    layers = (LayerSpec(mixer, dense if each else feed, norms) for each in is_dense)
    return config.decoder(layers, [rope], names_of_layers(config, _NAMES))
