"""`ExpertsFeed`: the spec of a feed that is a mixture of experts; never imports torch, reads a file or computes.

Each token is computed by the few experts that a router chooses for it, and perhaps by a shared expert that every token
has (Shazeer et al., 2017; Dai et al., 2024, "DeepSeekMoE"). Next to read: network/feeds/experts.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Final, Literal

from headrace.engine.model.roles import Fused, Part, matrix, norm
from headrace.engine.model.spec import DecoderSpec, DenseFeed, FeedSpec
from headrace.ops.routing import ExpertActivation, Routing
from headrace.ops.stream import Activation

__all__ = [
    "ROUTER",
    "ExpertsBesideDense",
    "ExpertsFeed",
    "SharedExpert",
    "down_of",
    "gate_up_of",
    "is_of_expert",
    "routing_of",
]

ROUTER: Final = "router_XE"
"""Name of a router's weight in `SublayerWeights`."""
_OF_EXPERT: Final = re.compile(r"(gate_up|down)_\d+")


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """A gated feed that computes every token, beside the experts that are chosen."""

    size: int
    """Width of the gate."""
    gated: bool = False
    """Whether its result is multiplied by the sigmoid of one more product of its input."""
    activation: Activation = "silu"
    gate_dims: Literal[1, 2] = 2
    """Dimensions of the checkpoint's tensor of that product, [E] or [1, E]."""


@dataclass(frozen=True, slots=True)
class ExpertsFeed(FeedSpec):
    """Gated feeds of one size, of which a router chooses some for each token, and perhaps a shared one."""

    routing: Routing
    size: int
    """Width of an expert's gate."""
    activation: ExpertActivation = "silu"
    shared: SharedExpert | None = None
    biased: bool = False
    """Whether router, gates, ups and results have biases, stored as in gpt-oss: each gate's beside its up's."""
    has_biases_apart: bool = False
    """Whether those of gates and of ups are stored in tensors of their own, as in GGUF files."""
    correction_dims: Literal[0, 1, 2] = 0
    """Dimensions of the checkpoint's tensor of corrections, [X] or [1, X], which are added to scores for the choice
    alone; 0 for a model without."""

    def parameters(self, hidden_size: int) -> Mapping[str, Fused]:
        """Return the router's product, those of each expert, and those of the shared one."""
        return _parameters(self, hidden_size)


@dataclass(frozen=True, slots=True)
class ExpertsBesideDense(ExpertsFeed):
    """Experts beside a dense feed, whose results are normed and added; what the router reads has a norm of its own.

    Gemma Team (2026), Gemma 4, as transformers computes it (`models/gemma4`).
    """

    dense: DenseFeed = field(kw_only=True)

    def parameters(self, hidden_size: int) -> Mapping[str, Fused]:
        """Return the parameters of the experts, those of the dense feed, and the norms between them.

        The router has the weight of its norm, and a factor of each expert's weight.
        """
        found = {**_parameters(self, hidden_size), **self.dense.parameters(hidden_size)}
        for name in ("dense_result_norm", "experts_norm", "experts_result_norm"):
            found[f"{name}_E"] = norm(**{name: hidden_size})
        for name, part, size in (
            ("router_norm_E", "scale", hidden_size),
            ("expert_scales_X", "per_expert_scale", self.routing.experts),
        ):
            found[name] = Fused((Part(f"router_input.{part}", size),), None, is_norm=True, in_float32=True)
        return found


@lru_cache(maxsize=8)
def _parameters(feed: ExpertsFeed, hidden_size: int) -> Mapping[str, Fused]:
    """Return the parameters of a feed: hundreds, which the layers of a model have alike."""
    count, shared = feed.routing.experts, feed.shared
    found = {ROUTER: replace(matrix(hidden_size, router=count), in_float32=True)}
    if feed.correction_dims:
        rows, columns = (count, None) if feed.correction_dims == 1 else (1, count)
        found["correction"] = Fused((Part("correction.e_score_correction_bias", rows),), columns, in_float32=True)
    if feed.biased:
        found["router_bias_X"] = Fused((Part("router.bias", count),), None, in_float32=True)
        widths = {"gate_up_proj_bias": 2 * feed.size, "down_proj_bias": hidden_size}
        if feed.has_biases_apart:
            widths = {"gate_proj_bias": feed.size, "up_proj_bias": feed.size, "down_proj_bias": hidden_size}
        for name, columns in widths.items():
            found[name] = Fused((Part(f"experts.{name}", count),), columns, in_float32=True)
    gate_up = matrix(hidden_size, expert_gate=feed.size, expert_up=feed.size)
    down = matrix(feed.size, expert_down=hidden_size)
    found.update((gate_up_of(expert), gate_up.of_expert(expert)) for expert in range(count))
    found.update((down_of(expert), down.of_expert(expert)) for expert in range(count))
    if shared is not None:
        found["shared_gate_up"] = matrix(hidden_size, shared_gate=shared.size, shared_up=shared.size)
        found["shared_down"] = matrix(shared.size, shared_down=hidden_size)
        if shared.gated:
            switch = matrix(hidden_size, shared_switch=1)
            if shared.gate_dims == 1:
                switch = Fused((Part("shared_switch.weight", hidden_size),), None)
            found["shared_switch_1E"] = replace(switch, in_float32=True)
    return MappingProxyType(found)


def gate_up_of(expert: int) -> str:
    """Return the name of an expert's gate and up, one above the other, in `SublayerWeights`."""
    return f"gate_up_{expert}"


def down_of(expert: int) -> str:
    """Return the name of an expert's last matrix in `SublayerWeights`."""
    return f"down_{expert}"


def is_of_expert(name: str) -> bool:
    """Return whether a name in `SublayerWeights` is that of an expert's matrix."""
    return _OF_EXPERT.fullmatch(name) is not None


def routing_of(spec: DecoderSpec) -> Routing | None:
    """Return the routing of the first layer that has experts; None for a model without."""
    return next((layer.feed.routing for layer in spec.layers if isinstance(layer.feed, ExpertsFeed)), None)
