"""Granite 3, its dense models: Llama with factors of embeddings, scores, residuals and logits.

Granite Team, IBM (2024), "Granite 3.0 language models"; the factors come from Yang et al. (2022), "Tensor programs V".

The factor r of what a layer adds to the residual stream h is folded away: with h' = h / r, layers add their results as
they are, since an RMS norm takes h' for h if its epsilon is divided by r^2. Embeddings are multiplied by 1 / r, too.
"""

from __future__ import annotations

from dataclasses import replace

from headrace.engine.model.families.family import Family
from headrace.engine.model.families.gguf import GgufHeader
from headrace.engine.model.families.hf import HF_NAMES, HfConfig
from headrace.engine.model.roles import Names
from headrace.engine.model.spec import LIMITS, DecoderSpec, FeedSpec, LayerSpec, Norms

__all__ = ["GRANITE", "granite_decoder", "granite_in_gguf"]

_LEAST, _MOST = 1e-4, 1e4
_ROTATES = "rope.scaling.finetuned"
_KV_HEADS = "attention.head_count_kv"
_OF_HYBRIDS = frozenset(
    """
    expert_shared_feed_forward_length
    ssm.conv_kernel ssm.group_count ssm.inner_size ssm.state_size ssm.time_step_rank
    """.split()
)
"""Keys that files of Granite 4 have, too, where all layers attend, and that say nothing then."""


def granite_decoder(config: HfConfig, feed: FeedSpec, names: Names = HF_NAMES) -> DecoderSpec:
    """Return the spec of a model with Granite's attention and factors."""
    embedding, residual, scores, logits = (
        config.real(field, _LEAST, _MOST, 1.0)
        for field in ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
    )
    biased = config.flag("attention_bias", False)
    attention = replace(config.attention(), qkv_bias=biased, o_bias=biased, scale=scores)
    norms = Norms(config.norms().epsilon / residual**2)
    config.windows()  # has none, and refuses layer_types that say otherwise
    spec = config.decoder([LayerSpec(attention, feed, norms)] * config.num_layers, [config.rope(attention)], names)
    return replace(spec, embedding_scale=embedding / residual, logits_scale=1.0 / logits)


def _from_config(config: HfConfig) -> DecoderSpec:
    return granite_decoder(config, replace(config.dense(), bias=config.flag("mlp_bias", False)))


def granite_in_gguf(header: GgufHeader, feed: FeedSpec, names: Names) -> DecoderSpec:
    """Return the spec of a model in a GGUF file, with Granite's attention and factors."""
    embedding, residual, logits = (
        header.real(header.key(short), _LEAST, _MOST, 1.0)
        for short in ("embedding_scale", "residual_scale", "logit_scale")
    )
    if not header.flag(header.key(_ROTATES), True):
        header.refuse(header.key(_ROTATES), "true: of this architecture it says whether heads are rotated")
    attention = header.attention(kv_heads=_kv_heads(header))
    scores = header.real(header.key("attention.scale"), _LEAST, _MOST, attention.head_dim**-0.5)
    attention = replace(attention, scale=scores)
    layer = LayerSpec(attention, feed, Norms(header.norms().epsilon / residual**2))
    spec = header.decoder(layer, [header.rope(attention)], replace(names, interleaved=True))
    return replace(spec, embedding_scale=embedding / residual, logits_scale=1.0 / logits)


def _kv_heads(header: GgufHeader) -> int | None:
    """Return the number of key heads, which files of Granite 4 give for each layer; None where a file gives none."""
    field = header.key(_KV_HEADS)
    if field not in header.data:
        return None
    counts = header.sizes(_KV_HEADS, LIMITS["num_kv_heads"])
    if len(set(counts)) > 1:
        header.refuse(field, "the same number in all layers")
    return counts[0]


def _from_header(header: GgufHeader) -> DecoderSpec:
    return granite_in_gguf(header, header.dense(), header.names)


GRANITE = Family(
    "GraniteForCausalLM",
    "granite",
    _from_config,
    heeds=frozenset(("attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier")),
    gguf="granite",
    from_header=_from_header,
    gguf_heeds=_OF_HYBRIDS | {"attention.scale", "embedding_scale", "logit_scale", "residual_scale"},
)
