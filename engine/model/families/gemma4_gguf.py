"""`from_header`: the spec of a Gemma 4 that a GGUF file describes; never reads a config.json.

Facts about the files are those of llama.cpp's converter (`conversion/gemma.py`) and of what reads them there
(`src/models/gemma4.cpp`), as of 2026. Weights of norms are as in checkpoints, without an added 1. Layers with a window
and those without have keys of their own for the sizes of their heads.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Final

from headrace.adapters.untrusted import refuse
from headrace.engine.model.experts import ExpertsBesideDense
from headrace.engine.model.families.experts.gguf import EXPERT_KEYS, expert_names, experts_in_gguf
from headrace.engine.model.families.gguf import GgufHeader
from headrace.engine.model.roles import Names
from headrace.engine.model.rope import Rope
from headrace.engine.model.spec import LIMITS, DecoderSpec, DenseFeed, LayerSpec
from headrace.engine.model.tail import LayerTail, PerLayerEmbedding
from headrace.engine.model.value_normed import ValueNormedAttention, with_sources

__all__ = ["GEMMA4_KEYS", "from_header"]

_OF_WINDOWS: Final = "_swa"  # behind the keys of layers with a window
_LOCAL_THETA = 1e4
_CAP: Final = "final_logit_softcapping"
_KV_HEADS: Final = "attention.head_count_kv"
_OWN_SIZE: Final = "embedding_length_per_layer_input"
_PATTERN: Final = "attention.sliding_window_pattern"
_SHARED: Final = "attention.shared_kv_layers"
_WINDOW: Final = "attention.sliding_window"

GEMMA4_KEYS: Final = EXPERT_KEYS | {
    _CAP,
    _OWN_SIZE,
    _PATTERN,
    _SHARED,
    _WINDOW,
    "attention.key_length_swa",
    "attention.value_length_swa",
    "rope.dimension_count_swa",
    "rope.freq_base_swa",
}
"""Keys that `from_header` reads beside those of every architecture."""

_ROLES: Final = {
    "own_gate": "inp_gate",
    "own_result": "proj",
    "own_norm": "post_norm",
    "per_layer_table": "per_layer_token_embd",
    "per_layer_product": "per_layer_model_proj",
    "per_layer_norm": "per_layer_proj_norm",
    "dense_result_norm": "post_ffw_norm_1",
    "experts_norm": "pre_ffw_norm_2",
    "experts_result_norm": "post_ffw_norm_2",
}
_WHOLE: Final = {
    "layer.layer_scalar": "layer_output_scale.weight",
    "router_input.scale": "ffn_gate_inp.scale",
    "router_input.per_expert_scale": "ffn_down_exps.scale",
}


def from_header(header: GgufHeader) -> DecoderSpec:
    """Return the spec that a header describes."""
    windows, own = _windows(header), header.num_layers - _shared(header)
    attentions = _attentions(header, windows)
    mixers = with_sources([replace(attentions[window is not None], window=window) for window in windows], own)
    if mixers is None:
        header.refuse(header.key(_SHARED), "a layer of each kind before those that share keys and values")
    norms, own_size = header.norms("both"), _own_size(header)
    sizes = header.sizes("feed_forward_length", LIMITS["ffn_size"])
    layers = [
        LayerSpec(mixer, _feed(header, size), norms, LayerTail(own_size))
        for mixer, size in zip(mixers, sizes, strict=True)
    ]
    spec = header.decoder(layers, _ropes(header, attentions[False]), _names(header, own))
    table = None if own_size is None else PerLayerEmbedding(spec.vocab_size, own_size, math.sqrt(own_size))
    return replace(
        spec,
        embedding_scale=math.sqrt(header.hidden_size),
        scales_virtual_tokens=False,
        logits_cap=_cap(header),
        per_layer=table,
    )


def _cap(header: GgufHeader) -> float | None:
    """Return the bound of the logits; None for none."""
    field = header.key(_CAP)
    return None if header.lacks(field) else header.real(field, 1e-3, 1e6)


def _windows(header: GgufHeader) -> tuple[int | None, ...]:
    """Return the windows of the layers, of which the last one never has any."""
    given = header.data.get(header.key(_PATTERN))
    if not isinstance(given, list) or given[-1:] != [False]:
        header.refuse(header.key(_PATTERN), "a bool for each layer, false for the last")
    return header.windows(header.size(header.key(_WINDOW), LIMITS["max_context"]), header.num_layers)


def _shared(header: GgufHeader) -> int:
    """Return the number of last layers that have no keys and values of their own."""
    field = header.key(_SHARED)
    return 0 if header.lacks(field) else header.size(field, header.num_layers - 1)


def _own_size(header: GgufHeader) -> int | None:
    """Return the size of the embeddings that each layer has for itself; None for models without."""
    field = header.key(_OWN_SIZE)
    return None if header.lacks(field) else header.size(field, LIMITS["hidden_size"])


def _attentions(header: GgufHeader, windows: Sequence[int | None]) -> dict[bool, ValueNormedAttention]:
    """Return the attention of layers without a window and, where there are any, of those with one."""
    kv_heads: dict[bool, int] = {}
    for window, count in zip(windows, header.sizes(_KV_HEADS, LIMITS["num_kv_heads"]), strict=True):
        if kv_heads.setdefault(window is not None, count) != count:
            header.refuse(header.key(_KV_HEADS), "one number in all layers with a window, and one in all others")
    found = {}
    for has_window, count in kv_heads.items():
        suffix = _OF_WINDOWS if has_window else ""
        header.size(header.key(f"attention.key_length{suffix}"), LIMITS["head_dim"])  # which has no default here
        plain = replace(header.attention(kv_heads=count, suffix=suffix), qk_norm=True, scale=1.0)
        found[has_window] = ValueNormedAttention(**asdict(replace(plain, rope=int(has_window))))
    first = windows.index(None)
    is_key = f"blk.{first}.attn_v.weight" not in header.shapes
    return found | {False: replace(found[False], keys_are_values=is_key)}


def _feed(header: GgufHeader, size: int) -> DenseFeed | ExpertsBesideDense:
    dense = DenseFeed(size, bias="blk.0.ffn_down.bias" in header.shapes, activation="gelu_tanh")
    if header.lacks(header.key("expert_count")):
        return dense
    experts = experts_in_gguf(header, renormalise=True)
    return ExpertsBesideDense(experts.routing, experts.size, "gelu_tanh", dense=dense)


def _ropes(header: GgufHeader, attention: ValueNormedAttention) -> list[Rope]:
    """Return the rotary embedding of layers without a window, whose divisors still most pairs, and of the others."""
    if "rope_freqs.weight" not in header.rope_tensors:
        refuse(header.origin, "rope_freqs.weight", "missing", "divisors of the frequencies of layers without a window")
    field = header.key("rope.scaling.type")
    if header.data.get(field, "none") != "none":
        header.refuse(field, "none")
    rope = header.rope(attention)
    theta = header.real(header.key("rope.freq_base_swa"), 1.0, 1e12, _LOCAL_THETA)
    return [rope, replace(rope, theta=theta, scaling=None)]


def _names(header: GgufHeader, own: int) -> Names:
    """Return names that leave the keys and values unread that layers from `own` on have no use for."""
    names = expert_names(header)
    names = replace(names, roles={**names.roles, **_ROLES}, whole={**names.whole, **_WHOLE})
    if own == header.num_layers:
        return names
    sharing = "|".join(map(str, range(own, header.num_layers)))
    unread = rf"blk\.({sharing})\.(attn_k|attn_v|attn_k_norm)\..*"
    return replace(names, harmless=re.compile(rf"{names.harmless.pattern}|{unread}"))
