"""`Routing`: how a layer's router chooses experts for a token and weighs them; without torch.

An expert is a gated feed of its own. A router scores all experts for each token, and the token's result is the sum of
those of the few experts that are chosen, each times its weight (Shazeer et al., 2017, "Outrageously large neural
networks"). experts.py computes the choice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from headrace.ops.stream import Activation

__all__ = ["CLAMP", "SLOPE", "ExpertActivation", "GroupScore", "Routing", "Score"]

Score: TypeAlias = Literal["softmax", "softmax_of_chosen", "sigmoid", "sparsemixer"]
"""What a router's logits become: their softmax over all experts (Fedus et al., 2021, "Switch transformers"), that over
the chosen ones alone (Shazeer et al., 2017), the sigmoid of each (DeepSeek-AI, 2024, "DeepSeek-V3"), or for each choice
the softmax over the experts that are left and come close to the best of them (Liu et al., 2024, "GRIN"). A logit x
comes close to the best one m if (m - x) / max(abs(x), m) is at most `Routing.margin`."""
GroupScore: TypeAlias = Literal["max", "top2"]
"""How groups of experts are ranked: by their best expert (DeepSeek-AI, 2024, "DeepSeek-V2"), or by the sum of their two
best (DeepSeek-V3)."""
ExpertActivation: TypeAlias = Activation | Literal["clamped_swiglu"]
"""Activation of an expert: one of a gated feed's, or that of gpt-oss (OpenAI, 2025), with c = `CLAMP` and s = `SLOPE`:
(clip(up, -c, c) + 1) * g * sigmoid(s * g) where g = min(gate, c)."""

CLAMP: Final = 7.0
SLOPE: Final = 1.702


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
    margin: float = 0.0
    """How far from the best expert others count, where the score is `sparsemixer`."""

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
        if self.score == "sparsemixer" and (self.groups > 1 or self.renormalise):
            raise ValueError("weights of sparsemixer are of single choices, without groups and renormalisation")
