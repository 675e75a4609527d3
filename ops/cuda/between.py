"""`BetweenOps`: what some models do to queries and keys between their product and attention on CUDA, step by step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from headrace.ops.cuda import fused
from headrace.ops.cuda.attention.steps import PrefillStep
from headrace.ops.cuda.hazards import Launch
from headrace.ops.cuda.layer_norm import layer_norm
from headrace.ops.cuda.rotation import rotate

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from headrace.ops.cuda.attention.shape import HeadShape
    from headrace.ops.cuda.attention.steps import CudaStep
    from headrace.ops.stream import HeadNorms

__all__ = ["BetweenOps"]

_EARLY_ROTATION: Final = Launch("the rotation before norms", overlaps=False, writes=frozenset(("activations",)))
_GROWTH: Final = Launch("the growth of queries", overlaps=False, writes=frozenset(("activations",)))


class BetweenOps:
    """Base of a GPU's operations: all but `norm_values` change queries, keys and values side by side in place."""

    shape: HeadShape
    eps: float
    pdl: bool
    note: Callable[[Launch], None]
    _norm: Launch
    _early_cos_sin_PD: Tensor | None
    _growth_P: Tensor | None

    def positions(self, step: CudaStep) -> Tensor:
        """Return the positions of a step's tokens, which a captured graph reads when it runs."""
        return step.positions_N if isinstance(step, PrefillStep) else step.inputs.positions_B

    def norm_across_heads(self, qkv_NX: Tensor, norms: HeadNorms) -> Tensor:
        """Norm all queries together, and all keys together, in place."""
        queries, keys = self.shape.heads * self.shape.head_dim, self.shape.kv_heads * self.shape.head_dim
        for first, size, norm_X in ((0, queries, norms.q_D), (queries, keys, norms.k_D)):
            part_NX = qkv_NX[:, first : first + size]
            self.note(self._norm)
            fused.rms_norm(part_NX, norm_X, self.eps, part_NX, pdl=self.pdl)
        return qkv_NX

    def layer_norm_heads(self, qkv_NX: Tensor, weight_X: Tensor) -> Tensor:
        """Norm each query and key head in place."""
        heads = self.shape.heads + self.shape.kv_heads
        qk_NX = qkv_NX[:, : heads * self.shape.head_dim]
        self.note(self._norm)
        layer_norm(qk_NX, weight_X, None, self.eps, qk_NX, parts=heads, pdl=self.pdl)
        return qkv_NX

    def norm_values(self, qkv_NX: Tensor) -> Tensor:
        """Return what was given: values are normed as they are stored, where the shape of the heads says so."""
        return qkv_NX

    def rotate(self, qkv_NX: Tensor, step: CudaStep) -> Tensor:
        """Rotate queries and keys in place by the second table; return queries, keys and values side by side."""
        assert self._early_cos_sin_PD is not None
        heads = self.shape.heads + self.shape.kv_heads
        self.note(_EARLY_ROTATION)
        qkv_NAD = qkv_NX.view(len(qkv_NX), -1, self.shape.head_dim)
        rotate(qkv_NAD[:, :heads], self._early_cos_sin_PD, self.positions(step))
        return qkv_NX

    def grow(self, qkv_NX: Tensor, step: CudaStep) -> Tensor:
        """Multiply queries in place by the factors of their positions; return queries, keys and values side by side."""
        assert self._growth_P is not None
        self.note(_GROWTH)
        factors_N1 = self._growth_P.index_select(0, self.positions(step)).unsqueeze(1)
        qkv_NX[:, : self.shape.heads * self.shape.head_dim].mul_(factors_N1)
        return qkv_NX
