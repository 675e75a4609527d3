"""`Experts`, a layer's router and experts as they are stored, and `route`, which chooses experts; knows no device.

`route` is the specification: whatever a device makes of a router's logits, its choices and weights are compared with
these. Shape letters: N tokens, X experts, K chosen experts of a token, E width of the stream, F width of an expert's
gate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch.nn import functional

from headrace.ops.routing import CLAMP, SLOPE, ExpertActivation, GroupScore, Routing, Score

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.formats import Stored

__all__ = [
    "CLAMP",
    "SLOPE",
    "Choice",
    "ExpertActivation",
    "Experts",
    "GroupScore",
    "Routing",
    "Score",
    "route",
    "sigmoid",
]

_LEAST_SUM: Final = 1e-20  # nothing beside any sum of weights but one of zeros


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
    scales_X: Tensor | None = None
    """Factors of the weights of each expert's results, float32."""

    @property
    def size(self) -> int:
        """Width of an expert's gate."""
        return self.down[0].shape[1]


def route(
    logits_NX: Tensor, routing: Routing, correction_X: Tensor | None = None, scales_X: Tensor | None = None
) -> Choice:
    """Return the experts of each token; of experts that score the same, the one of the lower number comes first.

    Args:
        logits_NX: Logits of the router, float32, its bias included.
        routing: How experts are chosen.
        correction_X: Added to the scores for the choice alone.
        scales_X: Factor of each expert's weight, which counts after weights are made to sum to 1.
    """
    scores_NX = _scores(logits_NX, routing.score)
    ranked_NX = scores_NX if correction_X is None else scores_NX + correction_X
    if routing.groups > routing.top_groups:
        ranked_NX = _within_groups(ranked_NX, routing)
    ids_NK = _best(ranked_NX, routing.top_k)
    weights_NK = scores_NX.gather(1, ids_NK)
    if routing.score == "sparsemixer":
        weights_NK = _mixed_sparsely(logits_NX, ids_NK, routing.margin)
    if routing.score == "softmax_of_chosen":
        weights_NK = torch.softmax(weights_NK, 1)
    if routing.renormalise:
        weights_NK = weights_NK / (weights_NK.sum(1, keepdim=True) + _LEAST_SUM)
    if scales_X is not None:
        weights_NK = weights_NK * scales_X[ids_NK]
    return Choice(ids_NK.to(torch.int32), weights_NK * routing.scale)


def _scores(logits_NX: Tensor, score: Score) -> Tensor:
    match score:
        case "softmax":
            return torch.softmax(logits_NX, 1)
        case "softmax_of_chosen" | "sparsemixer":
            return logits_NX
        case "sigmoid":
            return sigmoid(logits_NX)


def _mixed_sparsely(logits_NX: Tensor, ids_NK: Tensor, margin: float) -> Tensor:
    """Return for each choice its share of the softmax over experts that are left and close to it, float32 [N, K]."""
    left_NX, weights = logits_NX, []
    for id_N1 in ids_NK.split(1, dim=1):
        best_N1 = logits_NX.gather(1, id_N1)
        far_NX = (best_N1 - logits_NX) / torch.maximum(logits_NX.abs(), best_N1) > margin
        weights.append(torch.softmax(left_NX.masked_fill(far_NX, -torch.inf), 1).gather(1, id_N1))
        left_NX = left_NX.scatter(1, id_N1, -torch.inf)
    return torch.cat(weights, 1)


def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + exp(-x)) of each element, with bits that do not depend on the number of elements.

    It is the softmax of x and 0, which torch computes pair by pair; the last few of all sigmoids it computes by other
    code than those before.
    """
    return torch.softmax(functional.pad(x.unsqueeze(-1), (0, 1)), -1)[..., 0]


def _best(ranked_NX: Tensor, count: int) -> Tensor:
    """Return the indices of the largest, int64 [N, count]; unlike those of topk, equal ones are in order."""
    return ranked_NX.sort(dim=1, descending=True, stable=True).indices[:, :count]


def _within_groups(ranked_NX: Tensor, routing: Routing) -> Tensor:
    """Return the ranked scores with -inf for experts outside the best groups."""
    ranked_NGx = ranked_NX.unflatten(1, (routing.groups, -1))
    best = ranked_NGx.topk(2 if routing.group_score == "top2" else 1, dim=2).values.sum(2)
    allowed_NG = torch.zeros_like(best, dtype=torch.bool).scatter_(1, _best(best, routing.top_groups), value=True)
    return torch.where(allowed_NG.unsqueeze(2), ranked_NGx, -torch.inf).flatten(1)
