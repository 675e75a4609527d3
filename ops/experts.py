"""`Routing`, how a layer's router chooses experts for a token, and `Experts`, what the layer has of them; no device.

An expert is a gated feed of its own. A router scores all experts for each token, and the token's result is the sum of
those of the few experts that are chosen, each times its weight (Shazeer et al., 2017, "Outrageously large neural
networks"). `route` is the specification: whatever a device makes of the scores, its choices and weights are compared
with these. Shape letters: N tokens, X experts, K chosen experts of a token, E width of the stream, F width of an
expert's gate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias

import torch

from headrace.ops.stream import Activation

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.formats import Stored

__all__ = ["CLAMP", "SLOPE", "Choice", "ExpertActivation", "Experts", "GroupScore", "Routing", "Score", "route"]

Score: TypeAlias = Literal["softmax", "softmax_of_chosen", "sigmoid"]
"""What a router's logits become: their softmax over all experts (Shazeer et al., 2017), the softmax over the chosen ones
alone (Jiang et al., 2024, "Mixtral of experts"), or the sigmoid of each (DeepSeek-AI, 2024, "DeepSeek-V3")."""
GroupScore: TypeAlias = Literal["max", "top2"]
"""How groups of experts are ranked: by their best expert (DeepSeek-AI, 2024, "DeepSeek-V2"), or by the sum of their two
best (DeepSeek-V3)."""
ExpertActivation: TypeAlias = Activation | Literal["clamped_swiglu"]
"""Activation of an expert: one of a gated feed's, or that of gpt-oss (OpenAI, 2025), with c = `CLAMP` and s = `SLOPE`:
(clip(up, -c, c) + 1) * g * sigmoid(s * g) where g = min(gate, c)."""

CLAMP: Final = 7.0
SLOPE: Final = 1.702
_LEAST_SUM: Final = 1e-20  # nothing beside any sum of weights but one of zeros


@dataclass(frozen=True, slots=True)
class Routing:
    """How a router chooses experts and weighs them."""

    experts: int
    top_k: int
    """Number of experts that each token is computed by."""
    score: Score = "softmax"
    renormalise: bool = False
    """Whether the weights of the chosen experts are divided by their sum."""
    scale: float = 1.0
    """Factor of the weights."""
    groups: int = 1
    """Number of groups of consecutive experts, all of one size."""
    top_groups: int = 1
    """Number of groups among whose experts a token may choose."""
    group_score: GroupScore = "max"

    def __post_init__(self) -> None:
        """Raise `ValueError` unless every token has `top_k` experts to choose."""
        if not 1 <= self.groups <= self.experts or self.experts % self.groups:
            raise ValueError(f"{self.experts} experts do not make {self.groups} groups of one size")
        if not 1 <= self.top_groups <= self.groups:
            raise ValueError(f"top_groups is {self.top_groups}, of {self.groups} groups")
        if not 1 <= self.top_k <= self.experts // self.groups * self.top_groups:
            raise ValueError(f"top_k is {self.top_k}, of {self.experts // self.groups * self.top_groups} experts")
        if self.group_score == "top2" and self.groups > 1 and self.experts // self.groups < 2:
            raise ValueError(f"{self.groups} groups of {self.experts} experts have no two best experts each")


class Choice(NamedTuple):
    """The experts of each token, the best first."""

    ids_NK: Tensor
    """Numbers of the experts, int32."""
    weights_NK: Tensor
    """Weights of their results, float32."""


@dataclass(frozen=True, slots=True, eq=False)
class Experts:
    """What one layer has: a router, and all experts. Results of shared experts are added elsewhere."""

    routing: Routing
    router_XE: Tensor
    """Weight of the router, float32: its logits are the product of the normed input, in float32."""
    gate_up: tuple[Stored, ...]
    """By expert, the weight [2F, E] of the gates, then of the ups."""
    down: tuple[Stored, ...]
    """By expert, the weight [E, F]."""
    activation: ExpertActivation = "silu"
    router_bias_X: Tensor | None = None
    """Bias of the logits, float32."""
    correction_X: Tensor | None = None
    """Added to the scores for the choice alone, not in the weights, float32 (Wang et al., 2024, "Auxiliary-loss-free
    load balancing strategy for mixture-of-experts")."""
    gate_up_bias_XF: Tensor | None = None
    """Biases of gates and ups, float32 [X, 2F]."""
    down_bias_XE: Tensor | None = None
    """Biases of the results, float32, which are weighed with them."""

    @property
    def size(self) -> int:
        """Width of an expert's gate."""
        return self.down[0].shape[1]


def route(logits_NX: Tensor, routing: Routing, correction_X: Tensor | None = None) -> Choice:
    """Return the experts of each token; of experts that score the same, the one of the lower number comes first.

    Args:
        logits_NX: Logits of the router, float32, its bias included.
        routing: How experts are chosen.
        correction_X: Added to the scores for the choice alone.
    """
    scores_NX = _scores(logits_NX, routing.score)
    ranked_NX = scores_NX if correction_X is None else scores_NX + correction_X
    if routing.groups > routing.top_groups:
        ranked_NX = _within_groups(ranked_NX, routing)
    ids_NK = _best(ranked_NX, routing.top_k)
    weights_NK = scores_NX.gather(1, ids_NK)
    if routing.score == "softmax_of_chosen":
        weights_NK = torch.softmax(weights_NK, 1)
    if routing.renormalise:
        weights_NK = weights_NK / (weights_NK.sum(1, keepdim=True) + _LEAST_SUM)
    return Choice(ids_NK.to(torch.int32), weights_NK * routing.scale)


def _scores(logits_NX: Tensor, score: Score) -> Tensor:
    match score:
        case "softmax":
            return torch.softmax(logits_NX, 1)
        case "softmax_of_chosen":
            return logits_NX
        case "sigmoid":
            return torch.sigmoid(logits_NX)


def _best(ranked_NX: Tensor, count: int) -> Tensor:
    """Return the indices of the largest, int64 [N, count]; unlike those of topk, equal ones are in order."""
    return ranked_NX.sort(dim=1, descending=True, stable=True).indices[:, :count]


def _within_groups(ranked_NX: Tensor, routing: Routing) -> Tensor:
    """Return the ranked scores with -inf for experts outside the best groups."""
    ranked_NGx = ranked_NX.unflatten(1, (routing.groups, -1))
    best = ranked_NGx.topk(2 if routing.group_score == "top2" else 1, dim=2).values.sum(2)
    allowed_NG = torch.zeros_like(best, dtype=torch.bool).scatter_(1, _best(best, routing.top_groups), value=True)
    return ranked_NGx.masked_fill(~allowed_NG.unsqueeze(2), -torch.inf).flatten(1)
