"""Hunyuan, its dense models: Llama with norms of query and key heads behind their rotation.

Tencent Hunyuan Team (2025), model card of Hunyuan-7B-Instruct. Long contexts have a rope whose base is multiplied by a
power of `alpha`, so that its slowest pair turns `alpha` times slower (bloc97, 2023, "NTK-aware scaled RoPE").
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from headrace.adapters.untrusted import Fields
from headrace.engine.model.families.family import Family
from headrace.engine.model.families.gguf import GgufHeader
from headrace.engine.model.families.hf import HF_NAMES, HfConfig
from headrace.engine.model.families.hf_rope import rope_fields
from headrace.engine.model.rope import UNROTATED, Rope
from headrace.engine.model.spec import Attention, DecoderSpec, LayerSpec

__all__ = ["HUNYUAN"]

_NAMES = replace(
    HF_NAMES,
    roles={**HF_NAMES.roles, "q_norm": "self_attn.query_layernorm", "k_norm": "self_attn.key_layernorm"},
)
_THETA = 10000.0
_UNREAD: Final = frozenset(
    """
    attention_head_dim cla_share_factor dense_list moe_intermediate_size moe_topk norm_topk_prob norm_type
    num_shared_expert org_vocab_size pool_type use_mixed_mlp_moe use_rotary_pos_emb
    im_start_id im_end_id im_newline_id text_start_id text_end_id video_start_id video_end_id mask_init_id
    anyres_pooling_size max_image_size num_media_embeds vit_input_resolution vit_mapping_type vit_norm_type vit_patch
    vit_token
    """.split()
)
"""Fields about experts, images and classes, which configs of dense models have beside their own."""


def _from_config(config: HfConfig) -> DecoderSpec:
    for field, neutral in (("use_qk_norm", True), ("use_cla", False)):
        if config.flag(field, neutral) is not neutral:
            config.refuse(field, neutral)
    if config.data.get("num_experts") not in (None, 0, 1):
        config.refuse("num_experts", 1)
    biased = config.flag("attention_bias", False)
    attention = replace(config.attention(), qkv_bias=biased, o_bias=biased, qk_norm=True, rope=1, early_rope=0)
    config.windows()  # has none, and refuses layer_types that say otherwise
    layers = [LayerSpec(attention, config.dense(), config.norms(1e-5))] * config.num_layers
    return config.decoder(layers, [_rope(config, attention), UNROTATED], _NAMES)


def _rope(config: HfConfig, attention: Attention) -> Rope:
    """Return the rope, which is stretched by `alpha` where its type is `dynamic`."""
    name, given = rope_fields(config)
    if given.get("rope_type", given.get("type")) != "dynamic" or given.get("alpha") is None:
        return config.rope(attention, own=("alpha",))
    fields = Fields({"rope_theta": config.data.get("rope_theta"), **given}, f"{config.origin}: {name}")
    theta, alpha = fields.real("rope_theta", 1.0, 1e12, _THETA), fields.real("alpha", 1.0, 1e6)
    if attention.head_dim <= 2:
        config.refuse("head_dim", "more than 2 for alpha")
    return Rope(theta * alpha ** (attention.head_dim / (attention.head_dim - 2)))


def _from_header(header: GgufHeader) -> DecoderSpec:
    attention = replace(header.attention(), qk_norm=True, rope=1, early_rope=0)
    layer = LayerSpec(attention, header.dense(), header.norms())
    return header.decoder(layer, [header.rope(attention), UNROTATED])  # whose base the power of alpha is in


HUNYUAN = Family(
    "HunYuanDenseV1ForCausalLM",
    "hunyuan_v1_dense",
    _from_config,
    heeds=frozenset(("use_qk_norm", "num_experts")),
    unread=_UNREAD,
    gguf="hunyuan-dense",
    from_header=_from_header,
)
