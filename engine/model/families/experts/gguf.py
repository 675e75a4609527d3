"""Shared reading of what GGUF files say of experts; families call it, and it knows none of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from headrace.engine.model.experts import ExpertsFeed
from headrace.engine.model.families.experts.reading import MOST_EXPERTS
from headrace.engine.model.families.gguf import GgufHeader
from headrace.engine.model.roles import Names
from headrace.engine.model.spec import LIMITS
from headrace.ops.routing import Routing

__all__ = ["EXPERT_KEYS", "expert_names", "experts_in_gguf"]

EXPERT_KEYS: Final = frozenset(("expert_count", "expert_used_count", "expert_feed_forward_length"))
"""Keys that `experts_in_gguf` reads."""
_ROLES: Final = {
    "router": "ffn_gate_inp",
    "expert_gate": "ffn_gate_exps.{}",
    "expert_up": "ffn_up_exps.{}",
    "expert_down": "ffn_down_exps.{}",
}


def expert_names(header: GgufHeader) -> Names:
    """Return the names of the tensors of a file with experts."""
    return replace(header.names, roles={**header.names.roles, **_ROLES})


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
