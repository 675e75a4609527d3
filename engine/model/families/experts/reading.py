"""Shared reading of what configurations say of experts and routers; families call it, and it knows none of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from headrace.engine.model.experts import ExpertsFeed
from headrace.engine.model.families.hf import HF_NAMES, HfConfig
from headrace.engine.model.roles import Names
from headrace.engine.model.spec import LIMITS, FeedSpec
from headrace.ops.routing import Routing

__all__ = [
    "COUNTS",
    "EXPERT_NAMES",
    "MOST_EXPERTS",
    "MOST_SHARED",
    "SHARED_EXPERTS",
    "by_step",
    "corrected_routing",
    "dense_at_first",
    "expert_size",
    "grouped",
    "names_of_layers",
    "read_routing",
]

COUNTS: Final = frozenset(("num_experts", "num_local_experts"))
"""Fields that give the number of experts, by either name."""
MOST_SHARED: Final = 64
"""Most shared experts of a layer, which are one that is so many times as wide."""
MOST_EXPERTS: Final = 1 << 16
"""Most experts of all layers together."""
_MOST_SCALE = 1e3

EXPERT_NAMES: Final = replace(
    HF_NAMES,
    roles={
        **HF_NAMES.roles,
        "router": "mlp.gate",
        "correction": "mlp.gate",
        "expert_gate": "mlp.experts.{}.gate_proj",
        "expert_up": "mlp.experts.{}.up_proj",
        "expert_down": "mlp.experts.{}.down_proj",
        "shared_gate": "mlp.shared_expert.gate_proj",
        "shared_up": "mlp.shared_expert.up_proj",
        "shared_down": "mlp.shared_expert.down_proj",
        "shared_switch": "mlp.shared_expert_gate",
    },
)
"""Names that Qwen's classes in transformers give to the roles, and those of most families with experts after it."""
SHARED_EXPERTS: Final = {
    "shared_gate": "mlp.shared_experts.gate_proj",
    "shared_up": "mlp.shared_experts.up_proj",
    "shared_down": "mlp.shared_experts.down_proj",
}
"""Names of the shared expert in families that may have several."""


def read_routing(
    config: HfConfig,
    *,
    experts: int,
    top_k: int | None,
    names: Sequence[str] = ("num_experts", "num_local_experts"),
    top_k_name: str = "num_experts_per_tok",
) -> Routing:
    """Return a routing by softmax without renormalisation, with the numbers that the config gives.

    Args:
        config: The config.
        experts: Number of experts where the config gives none.
        top_k: Number of experts of a token where the config gives none; None if it must.
        names: The fields that may give the number of experts; the first that is there does.
        top_k_name: The field that gives the number of experts of a token.
    """
    given = [name for name in names if config.data.get(name) is not None]
    field = given[0] if given else names[0]
    for other in given[1:]:
        if config.data[other] != config.data[field]:
            config.refuse(other, f"{config.data[field]!r}, as {field} says")
    count = config.size(field, MOST_EXPERTS // config.num_layers, experts)
    return Routing(count, config.size(top_k_name, count, top_k))


def grouped(config: HfConfig, routing: Routing, defaults: Routing) -> Routing:
    """Return a routing with the groups and the factor of weights that the config gives, or else those of `defaults`."""
    groups = config.size("n_group", routing.experts, min(defaults.groups, routing.experts))
    top_groups = config.size("topk_group", groups, min(defaults.top_groups, groups))
    scale = config.real("routed_scaling_factor", 0, _MOST_SCALE, defaults.scale)
    try:
        return replace(routing, scale=scale, groups=groups, top_groups=top_groups)
    except ValueError as error:
        config.refuse("n_group", f"what n_routed_experts and num_experts_per_tok allow: {error}")


def corrected_routing(config: HfConfig, defaults: Routing) -> Routing:
    """Return a routing by sigmoids, with groups ranked by their two best corrected scores, as DeepSeek-V3's.

    Args:
        config: The config.
        defaults: Numbers of experts and groups, and the factor of weights, where the config gives none.
    """
    routing = read_routing(config, experts=defaults.experts, top_k=defaults.top_k, names=("n_routed_experts",))
    routing = replace(routing, score="sigmoid", renormalise=config.flag("norm_topk_prob", True), group_score="top2")
    return grouped(config, routing, defaults)


def dense_at_first(config: HfConfig, first: int) -> list[bool]:
    """Return for each layer whether it is dense: one before `first_k_dense_replace`, by default before `first`."""
    most = LIMITS["num_layers"]
    value = config.data.get("first_k_dense_replace", first)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        config.refuse("first_k_dense_replace", f"an integer from 0 to {most}")
    return [layer < value for layer in range(config.num_layers)]


def names_of_layers(config: HfConfig, names: Names) -> Names:
    """Return names that leave layers behind the last unread: those that predict further tokens."""
    names_of_count = ("num_nextn_predict_layers", "num_mtp_layers")
    field = next((name for name in names_of_count if config.data.get(name) is not None), names_of_count[0])
    count = 1 if config.data.get(field) == 0 else config.size(field, LIMITS["num_layers"], 1)
    further = "|".join(str(config.num_layers + layer) for layer in range(count))
    unread = re.compile(rf"{names.harmless.pattern}|(model\.)?layers\.({further})\..*")
    return replace(names, harmless=unread)


def expert_size(config: HfConfig, field: str, default: int) -> int:
    """Return the width of an expert's gate; refuse an activation other than SiLU."""
    if config.data.get("hidden_act", "silu") not in ("silu", "swish"):
        config.refuse("hidden_act", "silu")
    return config.size(field, LIMITS["ffn_size"], default)


def by_step(config: HfConfig, feed: ExpertsFeed) -> list[FeedSpec]:
    """Return the feed of each layer: dense in `mlp_only_layers` and but for every `decoder_sparse_step`-th."""
    step = config.size("decoder_sparse_step", LIMITS["num_layers"], 1)
    dense = config.data.get("mlp_only_layers") or []
    numbers = range(config.num_layers)
    if not isinstance(dense, list) or any(isinstance(each, bool) or each not in numbers for each in dense):
        config.refuse("mlp_only_layers", f"a list of numbers of layers, from 0 to {len(numbers) - 1}")
    is_dense = [number in dense or bool((number + 1) % step) for number in numbers]
    return [config.dense() if each else feed for each in is_dense]
