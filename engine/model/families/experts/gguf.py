"""Shared reading of what GGUF files say of experts; families call it, and it knows none of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Final, Literal

from headrace.engine.model.experts import ExpertsFeed, SharedExpert
from headrace.engine.model.families.experts.reading import MOST_EXPERTS, MOST_SHARED
from headrace.engine.model.families.gguf import GgufHeader
from headrace.engine.model.roles import Names
from headrace.engine.model.spec import LIMITS
from headrace.ops.routing import Routing

__all__ = [
    "EXPERT_KEYS",
    "SHARED_KEYS",
    "corrected_in_gguf",
    "expert_names",
    "experts_in_gguf",
    "leading_dense",
    "shared_in_gguf",
]

EXPERT_KEYS: Final = frozenset(("expert_count", "expert_used_count", "expert_feed_forward_length"))
"""Keys that `experts_in_gguf` reads."""
SHARED_KEYS: Final = frozenset(("expert_shared_count", "expert_shared_feed_forward_length"))
"""Keys that tell how wide a shared expert is."""
_ROLES: Final = {
    "router": "ffn_gate_inp",
    "expert_gate": "ffn_gate_exps.{}",
    "expert_up": "ffn_up_exps.{}",
    "expert_down": "ffn_down_exps.{}",
    "shared_gate": "ffn_gate_shexp",
    "shared_up": "ffn_up_shexp",
    "shared_down": "ffn_down_shexp",
    "shared_switch": "ffn_gate_inp_shexp",
}

_JOINED: Final = {"expert_gate": "ffn_gate_up_exps.{}.gate", "expert_up": "ffn_gate_up_exps.{}.up"}
"""Names of an expert's gate and up where one tensor holds those of all experts."""
_WHOLE: Final = {
    "attention.sinks": "attn_sinks.weight",
    "correction.e_score_correction_bias": "exp_probs_b.bias",
    "experts.gate_proj_bias": "ffn_gate_exps.bias",
    "experts.up_proj_bias": "ffn_up_exps.bias",
    "experts.down_proj_bias": "ffn_down_exps.bias",
}


def expert_names(header: GgufHeader) -> Names:
    """Return the names of the tensors of a file with experts."""
    is_joined = any(name.endswith(".ffn_gate_up_exps.weight") for name in header.shapes)
    roles = {**header.names.roles, **_ROLES, **(_JOINED if is_joined else {})}
    return replace(header.names, roles=roles, whole=_WHOLE)


def experts_in_gguf(header: GgufHeader, *, renormalise: bool, size: str = "expert_feed_forward_length") -> ExpertsFeed:
    """Return a feed whose experts are chosen by softmax.

    Args:
        header: The file's header.
        renormalise: Whether the weights of the chosen experts are divided by their sum, which files do not say.
        size: The key that gives the width of an expert's gate.
    """
    experts = header.size(header.key("expert_count"), MOST_EXPERTS // header.num_layers)
    routing = Routing(experts, header.size(header.key("expert_used_count"), experts), renormalise=renormalise)
    return ExpertsFeed(routing, header.size(header.key(size), LIMITS["ffn_size"]))


def shared_in_gguf(header: GgufHeader, feed: ExpertsFeed, *, by_count: bool = False) -> SharedExpert | None:
    """Return the shared expert of a file, gated if the file has a tensor for that; None where there is none.

    Args:
        header: The file's header.
        feed: The experts beside it.
        by_count: Whether the file gives the number of shared experts, each as wide as the others, and not a width.
    """
    key = header.key("expert_shared_count" if by_count else "expert_shared_feed_forward_length")
    if header.lacks(key):
        return None
    size = feed.size * header.size(key, MOST_SHARED) if by_count else header.size(key, LIMITS["ffn_size"])
    dims = _dims(header, "ffn_gate_inp_shexp.weight")
    return SharedExpert(size) if dims is None else SharedExpert(size, gated=True, gate_dims=dims)


def corrected_in_gguf(header: GgufHeader, feed: ExpertsFeed) -> ExpertsFeed:
    """Return a feed with the corrections of scores for which the file has a tensor."""
    dims = _dims(header, "exp_probs_b.bias")
    return feed if dims is None else replace(feed, correction_dims=dims)


def leading_dense(header: GgufHeader) -> int:
    """Return the number of first layers without experts, which is 0 where the file gives none."""
    key = header.key("leading_dense_block_count")
    return header.size(key, LIMITS["num_layers"]) if header.data.get(key, 0) != 0 else 0


def _dims(header: GgufHeader, tensor: str) -> Literal[1, 2] | None:
    """Return how many dimensions a tensor of the layers has, of which converters may have left out those of size 1."""
    shape = next((shape for name, shape in header.shapes.items() if name.endswith(f".{tensor}")), None)
    return None if shape is None else 1 if len(shape) == 1 else 2
