"""Gemma 4, its text models: dense ones (12B, 31B), those with experts (26B-A4B) and small ones (E2B, E4B).

Gemma Team (2026), as transformers computes it (`models/gemma4`). Layers without a window have heads of their own number
and size, in which a part of the pairs rotates. In small models the last layers read the keys and values of earlier
ones, and every layer has embeddings of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Final

from headrace.adapters.untrusted import Fields
from headrace.engine.model.experts import ExpertsBesideDense
from headrace.engine.model.families.experts.reading import read_routing
from headrace.engine.model.families.family import Family
from headrace.engine.model.families.gemma2 import GEMMA_NAMES, cap_of, embedding_scale, gemma_feed, rounded_root
from headrace.engine.model.families.gemma4_gguf import GEMMA4_KEYS, from_header
from headrace.engine.model.families.hf import HfConfig
from headrace.engine.model.families.sizes import check_heads
from headrace.engine.model.roles import Names
from headrace.engine.model.rope import Proportional, Rope
from headrace.engine.model.spec import LIMITS, DecoderSpec, DenseFeed, LayerSpec
from headrace.engine.model.tail import LayerTail, PerLayerEmbedding
from headrace.engine.model.value_normed import ValueNormedAttention, with_sources

__all__ = ["GEMMA4", "GEMMA4_NAMES", "GEMMA4_UNIFIED"]

_FULL: Final = "full_attention"
_SLIDING: Final = "sliding_attention"
_FULL_ROPE, _SLIDING_ROPE = Rope(1e6, Proportional(0.25)), Rope(1e4)
_VOCABULARY = 262144
_HEADS = frozenset(("head_dim", "num_key_value_heads"))

GEMMA4_NAMES: Final = replace(
    GEMMA_NAMES,
    roles={
        **GEMMA_NAMES.roles,
        "layer": "",
        "own_gate": "per_layer_input_gate",
        "own_result": "per_layer_projection",
        "own_norm": "post_per_layer_input_norm",
        "per_layer_table": "model.embed_tokens_per_layer",
        "per_layer_product": "model.per_layer_model_projection",
        "per_layer_norm": "model.per_layer_projection_norm",
        "router": "router.proj",
        "router_input": "router",
        "expert_gate": "experts.{}.gate_proj",
        "expert_up": "experts.{}.up_proj",
        "expert_down": "experts.{}.down_proj",
        "dense_result_norm": "post_feedforward_layernorm_1",
        "experts_norm": "pre_feedforward_layernorm_2",
        "experts_result_norm": "post_feedforward_layernorm_2",
    },
    norm_offset=0.0,
)
"""Names of Gemma 4's tensors."""


def _from_config(config: HfConfig) -> DecoderSpec:
    if config.data.get("use_bidirectional_attention") not in (None, "vision"):  # which is about images alone
        config.refuse("use_bidirectional_attention", 'null or "vision"')
    windows, shared = _windows(config), _shared(config)
    own = config.num_layers - shared
    attentions = _attentions(config)
    norms, tail = config.norms(placement="both"), LayerTail(_own_size(config))
    mixers = with_sources([replace(attentions[window is not None], window=window) for window in windows], own)
    if mixers is None:
        config.refuse("num_kv_shared_layers", "a layer of each type before those that share keys and values")
    layers = [LayerSpec(mixer, _feed(config, shares=layer >= own), norms, tail) for layer, mixer in enumerate(mixers)]
    ropes = [
        _rope(config, attentions[False], _FULL, _FULL_ROPE),
        _rope(config, attentions[True], _SLIDING, _SLIDING_ROPE),
    ]
    spec = config.decoder(layers, ropes, _names(config, own), is_tied=True)
    return replace(
        spec,
        embedding_scale=embedding_scale(config),
        scales_virtual_tokens=False,
        logits_cap=cap_of(config, "final_logit_softcapping", None),
        per_layer=_per_layer(config),
    )


def _windows(config: HfConfig) -> tuple[int | None, ...]:
    """Return the windows of the layers, of which the last one never has any."""
    usual = [(layer + 1) % 6 != 0 for layer in range(config.num_layers)]
    return (*config.windows(config.window(default=512), usual, types_decide=True)[:-1], None)


def _shared(config: HfConfig) -> int:
    """Return the number of last layers that have no keys and values of their own."""
    if config.data.get("num_kv_shared_layers") in (None, 0):
        return 0
    return config.size("num_kv_shared_layers", config.num_layers - 1)


def _attentions(config: HfConfig) -> dict[bool, ValueNormedAttention]:
    """Return the attention of layers without a window and with one, which have heads of their own each."""
    biased = config.flag("attention_bias", False)
    plain = replace(config.attention(kv_heads=4, head_dim=256), qk_norm=True, qkv_bias=biased, o_bias=biased, scale=1.0)
    windowed = ValueNormedAttention(**asdict(replace(plain, rope=1)))
    found = replace(windowed, rope=0, keys_are_values=config.flag("attention_k_eq_v", False))
    sizes, origin = _heads_without_window(config)
    found = replace(
        found,
        head_dim=sizes.size("head_dim", LIMITS["head_dim"], plain.head_dim),
        kv_heads=sizes.size("num_key_value_heads", LIMITS["num_kv_heads"], plain.kv_heads),
    )
    check_heads(found, origin, "num_key_value_heads", "head_dim")
    return {False: found, True: windowed}


def _heads_without_window(config: HfConfig) -> tuple[Fields, str]:
    """Return the fields about heads of layers without a window that differ from the others', and where they stand.

    transformers 5 lists them layer by layer (`per_layer_config`). Before, they had fields of their own.
    """
    given = config.data.get("per_layer_config")
    if given is None:
        heads = {"head_dim": config.size("global_head_dim", LIMITS["head_dim"], 512)}
        if config.flag("attention_k_eq_v", False) and config.data.get("num_global_key_value_heads") is not None:
            heads["num_key_value_heads"] = config.size("num_global_key_value_heads", LIMITS["num_kv_heads"])
        return Fields(heads, config.origin), config.origin
    if given == {}:  # all heads are alike
        return Fields({}, config.origin), config.origin
    full = [layer for layer, window in enumerate(_windows(config)) if window is None]
    numbers = sorted(map(_number, given)) if isinstance(given, Mapping) else []
    if not isinstance(given, Mapping) or numbers != full:
        listed = ", ".join(map(str, full))
        config.refuse("per_layer_config", f"an object with an entry for each layer without a window: {listed}")
    first = next(iter(given.values()))
    if not isinstance(first, Mapping) or not set(first) <= _HEADS or any(each != first for each in given.values()):
        config.refuse("per_layer_config", f"the same of {' and '.join(sorted(_HEADS))} in each of these layers")
    origin = f"{config.origin}: per_layer_config"
    return Fields(first, origin), origin


def _number(key: object) -> int:
    """Return the layer that a key of `per_layer_config` stands for, which may begin with zeros; -1 for none."""
    return int(key) if isinstance(key, str) and re.fullmatch("[0-9]{1,4}", key) else -1


def _feed(config: HfConfig, *, shares: bool) -> DenseFeed | ExpertsBesideDense:
    dense = gemma_feed(config)
    if shares and config.flag("use_double_wide_mlp", False):
        dense = replace(dense, size=2 * dense.size)
    if not config.flag("enable_moe_block", False):
        return dense
    routing = read_routing(config, experts=128, top_k=None, names=("num_experts",), top_k_name="top_k_experts")
    size = config.size("moe_intermediate_size", LIMITS["ffn_size"])
    return ExpertsBesideDense(replace(routing, renormalise=True), size, "gelu_tanh", dense=dense)


def _own_size(config: HfConfig) -> int | None:
    """Return the size of the embeddings that each layer has for itself; None for models without."""
    field = "hidden_size_per_layer_input"
    return None if config.data.get(field, 256) in (None, 0) else config.size(field, LIMITS["hidden_size"], 256)


def _per_layer(config: HfConfig) -> PerLayerEmbedding | None:
    size = _own_size(config)
    if size is None:
        return None
    rows = config.size("vocab_size_per_layer_input", LIMITS["vocab_size"], _VOCABULARY)
    if rows < config.size("vocab_size", LIMITS["vocab_size"]):
        config.refuse("vocab_size_per_layer_input", "at least vocab_size")
    return PerLayerEmbedding(rows, size, rounded_root(config, size))


def _rope(config: HfConfig, attention: ValueNormedAttention, layer_type: str, default: Rope) -> Rope:
    if config.has_rope_of(layer_type):
        return config.rope(attention, default.theta, layer_type)
    if config.data.get("rope_parameters") is not None:
        config.refuse("rope_parameters", f"an object with {_FULL} and {_SLIDING}")
    return default


def _names(config: HfConfig, own: int) -> Names:
    """Return names that leave the keys and values unread that layers from `own` on have no use for."""
    if own == config.num_layers:
        return GEMMA4_NAMES
    sharing = "|".join(map(str, range(own, config.num_layers)))
    unread = rf"(model\.)?layers\.({sharing})\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\..*"
    return replace(GEMMA4_NAMES, harmless=re.compile(rf"{GEMMA4_NAMES.harmless.pattern}|{unread}"))


def _from_unified(config: HfConfig) -> DecoderSpec:
    return _from_config(config.spelled({}, _UNIFIED))


_UNIFIED: Final = {"hidden_size_per_layer_input": 0, "max_position_embeddings": 262144, "sliding_window": 1024}
_HEEDED: Final = frozenset(
    (
        "attention_k_eq_v",
        "final_logit_softcapping",
        "num_kv_shared_layers",
        "per_layer_config",
        "use_bidirectional_attention",
    )
)

_UNREAD: Final = frozenset(
    (
        "global_head_dim",
        "hidden_act",
        "moe_intermediate_size",
        "num_global_key_value_heads",
        "top_k_experts",
        "use_double_wide_mlp",
        "vocab_size_per_layer_input",
    )
)
"""Fields of experts, of layers without a window and of embeddings of layers: models that have these read them."""

GEMMA4 = Family(
    "Gemma4ForCausalLM",
    "gemma4_text",
    _from_config,
    heeds=_HEEDED | {"enable_moe_block", "hidden_size_per_layer_input", "num_experts"},
    unread=_UNREAD,
    headless="Gemma4TextModel",
    gguf="gemma4",
    from_header=from_header,
    gguf_heeds=GEMMA4_KEYS,
)

GEMMA4_UNIFIED = Family(
    "Gemma4UnifiedForCausalLM",
    "gemma4_unified_text",
    _from_unified,
    heeds=_HEEDED,
    unread=_UNREAD,
    headless="Gemma4UnifiedTextModel",
)
"""The same without experts and embeddings of layers, of which images and sound need no encoder: 12B."""
